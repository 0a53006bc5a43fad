"""Matching and similarity of calls in two forms of a model, operator by operator."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import layer_class
from bevquant_hybrid.nn.intrinsic import ANCHORS, Fused, anchor_of
from bevquant_hybrid.operators import tensors_in
from bevquant_hybrid.undisturbed import undisturbed
from bevquant_hybrid_tools.quant_profiler._calls import (
    Call,
    is_operator,
    named_operators,
    on_device,
    record_calls,
)
from bevquant_hybrid_tools.quant_profiler._compared import Match, compare, measure_of
from bevquant_hybrid_tools.quant_profiler._tables import curves_page, grid_table, write_text

_HEADER = (
    *("Index", "Module Name", "Module Type", "Similarity", "qscale", "Acc Error\n(float atol)"),
    *("Acc Error\n(N out_qscale)", "Op Error with Same\nInput (N out_qscale)"),
)
_RULE = "-" * 63
_NOTE = (
    f"{_RULE}\nNote:\n"
    "* Suffix '(I)' means this layer is Identity in one model\n"
    "* Suffix '(I vs I)' means this layer is Identity in both models\n"
    f"* Suffix '(i)'(i >= 1) means this op is shared i times\n{_RULE}\n"
)
_RELUS = (F.relu, F.relu_, F.relu6, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
Devices = torch.device | str | tuple[torch.device | str, torch.device | str] | None


def featuremap_similarity(
    model1: nn.Module,
    model2: nn.Module,
    inputs: Any,
    similarity_func: str | Callable[..., Any] = "Cosine",
    threshold: float | None = None,
    devices: Devices = None,
    out_dir: str | os.PathLike[str] | None = None,
) -> list[list[Any]]:
    """Compare the results of two forms of a model, operator by operator.

    Operators are matched by name; a fused one matches all its members. ``similarity.txt`` lists
    them in the order of execution, ``ordered_op_error_similarity.txt`` by the error of each alone,
    and ``similarity.html`` shows the curve of the similarities. Unmatched names follow the tables.
    Values beyond the threshold are printed.

    Args:
        model1: Float, fused, calibration, QAT or converted model.
        model2: Another form of it, best the next one. Both run in evaluation mode and observe
            nothing.
        inputs: A tensor, or a tuple or list of the forward's arguments.
        similarity_func: ``"Cosine"``, ``"MSE"``, ``"L1"``, ``"KL"``, ``"SQNR"``, or a function of
            two flat float64 tensors to one number, larger for more similar ones.
        threshold: Cosine (0.99) and SQNR (20 dB) below it are printed, MSE, L1 and KL (1.0) above
            it, and values of a function below it; None for the numbers given here (a function has
            none).
        devices: Where copies of both models run, or a pair; None for the models as they are.
        out_dir: Folder of the files; None for the current one.

    Returns:
        One list per operator: index, name, class in the first model, similarity, scale of the
        result or None, largest difference, the same in steps of the scale, and in such steps the
        largest difference where both operators are given the same; None where there is no scale,
        or the two cannot be given the same.

    Raises:
        ValueError: An unknown measure, or no operator in common.
    """
    measure = measure_of(similarity_func, "featuremap_similarity")
    first, second = devices if isinstance(devices, tuple | list) else (devices, devices)
    model1, inputs1 = on_device(model1, inputs, first)
    model2, inputs2 = on_device(model2, inputs, second)
    silent = _silenced(model2, model1), _silenced(model1, model2)
    first_is_fused_more = len(silent[1]) > len(silent[0])
    calls = (
        record_calls(model1, inputs1, check_leaf_module=_as_in(model1, model2)),
        record_calls(model2, inputs2, check_leaf_module=_as_in(model2, model1)),
    )
    fused = model1 if first_is_fused_more else model2
    with undisturbed(fused):
        matches, alone = _match_calls(
            calls[not first_is_fused_more],
            calls[first_is_fused_more],
            silent[first_is_fused_more],
        )
        found = [compare(match, measure, first_is_fused_more) for match in matches]
    # Matched by name, but results of other shapes were not compared.
    alone += [match.one.path for match, row in zip(matches, found, strict=True) if row is None]
    rows = [[index, *row] for index, row in enumerate(row for row in found if row is not None)]
    if not rows:
        raise ValueError(
            "featuremap_similarity: the models have no operator of the same name; pass two forms "
            "of one model"
        )
    rest = ", ".join(dict.fromkeys(alone))
    left = f"Not compared, for the other model has no such result: {rest}\n" if rest else ""
    table = _NOTE + _table(rows) + "\n" + left
    write_text(out_dir, "similarity.txt", table)
    ordered = sorted(rows, key=lambda row: -1 if row[7] is None else row[7], reverse=True)
    ordered_table = _NOTE + _table(ordered) + "\n" + left
    write_text(out_dir, "ordered_op_error_similarity.txt", ordered_table)
    names = [f"{row[0]} {row[1]}" for row in rows]
    page = curves_page("Similarity", names, {measure.name: [row[3] for row in rows]})
    write_text(out_dir, "similarity.html", page)
    suspicious = [row for row in rows if measure.is_suspicious(row[3], threshold)]
    if suspicious:
        print(_NOTE + _table(suspicious))
    return rows


def _as_in(model: nn.Module, other: nn.Module) -> Callable[[nn.Module], bool]:
    """Whether a module counts as one operator; also if it is one in the other model alone."""
    names = named_operators(other)[0]
    whole = {id(m) for path, m in model.named_modules(remove_duplicate=False) if path in names}
    return lambda module: id(module) in whole or is_operator(module)


def _table(rows: list[list[Any]]) -> str:
    cells = []
    for index, name, kind, similarity, scale, error, steps, alone in rows:
        numbers = [f"{similarity:.7f}", "" if scale is None else f"{scale:.7f}", f"{error:.7f}"]
        counts = ["" if count is None else str(count) for count in (steps, alone)]
        cells.append([str(index), name, str(kind), *numbers, *counts])
    return grid_table(_HEADER, cells)


def _silenced(model: nn.Module, other: nn.Module) -> set[str]:
    """Names that hold an Identity in one model and something else in the other."""
    modules = dict(other.named_modules(remove_duplicate=False))
    return {
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if layer_class(module, nn.Identity)
        and not layer_class(modules.get(path, module), nn.Identity)
    }


def _match_calls(
    ones: list[Call], others: list[Call], silent: set[str]
) -> tuple[list[Match], list[str]]:
    """Match the calls of a model with those of one that is fused less, or as much.

    By name and by the number of earlier calls. A fused module stands for all its members: calls in
    the other model's data flow around the call of its name, under names that are silent in its own
    model, or functions. Returns the matches in the order of `ones`, and the names without one.
    """
    places = {(call.path, call.repeat): i for i, call in enumerate(others) if call.path}
    matches, alone = [], []
    for one in ones:
        if one.module is None:
            continue
        names = (one.path, getattr(anchor_of(one.module), "anchor_path", ""))
        found = (places[n, one.repeat] for n in names if (n, one.repeat) in places)
        place = next(found, None)
        if place is None:
            alone.append(one.path)
            continue
        members: list[int] | None = [place]
        # What was fused elsewhere left an Identity here, which stands for nothing else.
        if layer_class(one.module, nn.Identity) is None:
            members = _Group(one, others, silent).around(place)
        if members is None:
            alone.append(one.path)
            continue
        given = _given(others, members)
        matches.append(Match(one, others[place], others[members[-1]], given))
    return matches, alone


class _Group:
    """The calls that a fused module stands for."""

    def __init__(self, one: Call, others: list[Call], silent: set[str]) -> None:
        self.others, self.silent = others, silent
        module: Any = one.module
        self.name = (one.path, one.repeat)
        self.adds = bool(getattr(module, "adds", False))
        relu = module.part("relu") if isinstance(module, Fused) else None
        self.activates = bool(getattr(module, "activation", None)) or relu is not None

    def around(self, place: int) -> list[int] | None:
        """Calls in order; None where something that was fused is not to be found."""
        members = [place]
        while (before := self._before(members[0])) is not None:
            members.insert(0, before)
        if any(layer_class(self.others[i].module) in ANCHORS for i in members):
            while (behind := self._behind(members)) is not None:
                members.append(behind)
        calls = [self.others[i] for i in members]
        if self.adds and not any(self._is_sum(call) for call in calls):
            return None
        if self.activates and not any(self._is_relu(call) for call in calls):
            return None
        return members

    def _before(self, place: int) -> int | None:
        """Of a sum: the layer, or its batch norm, that went into it."""
        if not self.adds or layer_class(self.others[place].module) in ANCHORS:
            return None
        found = (s for s in self.others[place].sources if s is not None and self._is_layer(s))
        return next(found, None)

    def _is_layer(self, place: int) -> bool:
        call = self.others[place]
        if call.path not in self.silent:
            return False
        if layer_class(call.module, _BatchNorm):
            return any(s is not None and self._is_layer(s) for s in call.sources)
        return layer_class(call.module) in ANCHORS

    def _behind(self, members: list[int]) -> int | None:
        calls = [self.others[i] for i in members]
        for reader in calls[-1].readers:
            if reader < 0:
                continue
            call = self.others[reader]
            if layer_class(call.module) in ANCHORS:
                continue  # the beginning of another group
            if call.path:
                if call.path in self.silent or (call.path, call.repeat) == self.name:
                    return reader
            elif self.adds and self._is_sum(call) and not any(map(self._is_sum, calls)):
                return reader
            elif self.activates and self._is_relu(call) and not any(map(self._is_relu, calls)):
                return reader
        return None

    def _is_sum(self, call: Call) -> bool:
        if call.module is not None:
            return call.method in ("add", "add_relu") or bool(getattr(call.module, "adds", False))
        return getattr(call.function, "__name__", "").strip("_") in ("add", "iadd")

    def _is_relu(self, call: Call) -> bool:
        if call.module is None:
            return call.function in _RELUS
        fused = isinstance(call.module, Fused) and call.module.part("relu") is not None
        learned = bool(getattr(call.module, "activation", None))
        return fused or learned or layer_class(call.module, nn.ReLU, nn.ReLU6) is not None


def _given(calls: list[Call], members: list[int]) -> tuple[Tensor, ...]:
    """Tensors that come from outside of a group."""
    given = []
    for place in members:
        call = calls[place]
        tensors = tensors_in((call.args, call.kwargs))
        for tensor, source in zip(tensors, call.sources, strict=True):
            if source not in members or source == place:
                given.append(tensor)
    return tuple(given)
