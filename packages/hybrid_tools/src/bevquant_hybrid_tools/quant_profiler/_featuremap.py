"""Compare what two forms of a model compute, operator by operator."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bevquant_hybrid.undisturbed import undisturbed
from bevquant_hybrid_tools.quant_profiler._calls import (
    is_operator,
    moved,
    named_operators,
    record_calls,
)
from bevquant_hybrid_tools.quant_profiler._compared import compare, match_calls, silenced
from bevquant_hybrid_tools.quant_profiler._measures import measure_of
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

    Operators are matched by name; a fused one stands for all that it took in. ``similarity.txt``
    holds them in the order of execution, ``ordered_op_error_similarity.txt`` by the error that each
    makes alone, and ``similarity.html`` the curve of the similarities. Below the tables stand the
    names that the other model does not have. What lies beyond the threshold is printed.

    Args:
        model1: Float, fused, calibration, QAT or converted model.
        model2: Another form of it, best the next one. Both run in evaluation mode and observe
            nothing.
        inputs: A tensor, or a tuple or list of the forward's arguments.
        similarity_func: ``"Cosine"``, ``"MSE"``, ``"L1"``, ``"KL"``, ``"SQNR"``, or a function of
            two flat float64 tensors that gives one number, larger for what is more alike.
        threshold: Cosine (0.99) and SQNR (20 dB) below it are printed, MSE, L1 and KL (1.0) above
            it, and what a function gives below it; None for the numbers given here, and none for a
            function.
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
    (model1, inputs1), (model2, inputs2) = _placed(model1, model2, inputs, devices)
    silent = silenced(model2, model1), silenced(model1, model2)
    first_is_fused_more = len(silent[1]) > len(silent[0])
    calls = (
        record_calls(model1, inputs1, check_leaf_module=_as_in(model1, model2)),
        record_calls(model2, inputs2, check_leaf_module=_as_in(model2, model1)),
    )
    fused = model1 if first_is_fused_more else model2
    with undisturbed(fused):
        matches, alone = match_calls(
            calls[not first_is_fused_more],
            calls[first_is_fused_more],
            silent[first_is_fused_more],
        )
        found = [compare(match, measure, first_is_fused_more) for match in matches]
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
    """What counts as one operator: also what is one in the other model, and here has parts."""
    names = named_operators(other)[0]
    whole = {id(m) for path, m in model.named_modules(remove_duplicate=False) if path in names}
    return lambda module: id(module) in whole or is_operator(module)


def _placed(
    model1: nn.Module, model2: nn.Module, inputs: Any, devices: Devices
) -> list[tuple[nn.Module, Any]]:
    if devices is None:
        return [(model1, inputs), (model2, inputs)]
    pair = devices if isinstance(devices, tuple | list) else (devices, devices)
    return [
        (copy.deepcopy(model).to(device), moved(inputs, torch.device(device)))
        for model, device in zip((model1, model2), pair, strict=True)
    ]


def _table(rows: list[list[Any]]) -> str:
    cells = []
    for index, name, kind, similarity, scale, error, steps, alone in rows:
        numbers = [f"{similarity:.7f}", "" if scale is None else f"{scale:.7f}", f"{error:.7f}"]
        counts = ["" if count is None else str(count) for count in (steps, alone)]
        cells.append([str(index), name, str(kind), *numbers, *counts])
    return grid_table(_HEADER, cells)
