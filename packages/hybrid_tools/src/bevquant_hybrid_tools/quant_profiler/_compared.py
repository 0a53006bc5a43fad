"""Similarity of two tensors, two calls' results and two models' weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import layer_class, map_leaves
from bevquant_hybrid.dtype import qinfo
from bevquant_hybrid.nn.intrinsic import anchor_of
from bevquant_hybrid.nn.qat import SegmentLUT
from bevquant_hybrid.nn.quantized import FixedPoint
from bevquant_hybrid.operators import tensors_in
from bevquant_hybrid.qtensor import QTensor, along, as_float
from bevquant_hybrid.quantization.fake_quantize import fake_quantize
from bevquant_hybrid_tools.quant_profiler._calls import Call, named_operators
from bevquant_hybrid_tools.quant_profiler._features import fixed_weight, scale_of
from bevquant_hybrid_tools.quant_profiler._tables import grid_table, write_histograms, write_text
from bevquant_qnn import gap


@dataclass(frozen=True)
class Measure:
    """A similarity measure and its threshold for reports."""

    name: str
    compute: Callable[[Tensor, Tensor], Any]  # function of two flat float64 tensors of one shape
    # Whether values below the threshold are reported, otherwise those above
    higher_is_better: bool = True
    threshold: float | None = None  # the default; None for no report

    def __call__(self, x: Tensor, y: Tensor) -> float:
        """Compare; NaN where there are no values."""
        if x.numel() == 0:
            return math.nan
        return float(self.compute(x.double().reshape(-1), y.double().reshape(-1)))

    def is_suspicious(self, value: float, threshold: float | None) -> bool:
        """Whether a value lies beyond the threshold, the default one for None."""
        limit = self.threshold if threshold is None else threshold
        if limit is None:
            return False
        if math.isnan(value):
            return True
        return value < limit if self.higher_is_better else value > limit


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    lengths = x.norm() * y.norm()
    return torch.dot(x, y) / lengths if lengths > 0 else torch.zeros(())


def _mse(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


def _l1(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs().mean()


def _kl(x: Tensor, y: Tensor) -> Tensor:
    p, q = x.log_softmax(0), y.log_softmax(0)
    # Rounding can make the divergence of equal distributions negative.
    return (p.exp() * (p - q)).sum().clamp(min=0)


def _sqnr(x: Tensor, y: Tensor) -> Tensor:
    noise = (x - y).square().sum()
    if noise == 0:
        return torch.tensor(math.inf)
    return 10 * torch.log10(x.square().sum() / noise)


_MEASURES = {
    measure.name: measure
    for measure in (
        Measure("Cosine", _cosine, True, 0.99),
        Measure("MSE", _mse, False, 1.0),
        Measure("L1", _l1, False, 1.0),
        Measure("KL", _kl, False, 1.0),
        Measure("SQNR", _sqnr, True, 20.0),
    )
}


def measure_of(similarity_func: str | Callable[..., Any], caller: str) -> Measure:
    r"""Return a measure by its name, or make one from a function.

    Cosine: ⟨x, y⟩/(‖x‖‖y‖), 0 where either is zero. MSE: mean of (x − y)². L1: mean of |x − y|.
    KL: Σ p·ln(p/q) with p and q the softmax of all values of x and y. SQNR:
    10·log₁₀(Σx²/Σ(x − y)²) decibels, infinite where the two are equal. x is of the first model.

    Raises:
        ValueError: An unknown name.
    """
    if callable(similarity_func):
        return Measure(getattr(similarity_func, "__name__", "similarity"), similarity_func)
    if similarity_func not in _MEASURES:
        raise ValueError(
            f"{caller}: similarity_func={similarity_func!r}: expected one of "
            f"{', '.join(_MEASURES)}, or a function of two tensors"
        )
    return _MEASURES[similarity_func]


@dataclass(frozen=True)
class Match:
    """A call of one model, and the calls of the other that compute the same."""

    one: Call  # the call, of a module that may be fused
    like: Call  # the call of the same name in the other model
    last: Call  # the call there whose result compares: behind what is fused into `one`
    # Tensors that those calls were given from outside, in the order of `one`'s
    inputs: tuple[Tensor, ...]


def compare(match: Match, measure: Measure, swapped: bool) -> list[Any] | None:
    """Compare the results of matched calls; None where the results have other shapes.

    Returns name, class in the first model, similarity, scale, largest difference, the same in
    steps, and in steps where both are given the same. `swapped`: `match.one` is of the first model.
    """
    one, like, last = match.one, match.like, match.last
    first, second = (one, last) if swapped else (last, one)
    pairs = _pairs(first.output, second.output)
    if pairs is None:
        return None
    x, y = (torch.cat([_values(pair[i]) for pair in pairs]) for i in (0, 1))
    scale = next((s for pair in pairs for t in pair[::-1] if (s := scale_of(t)) is not None), None)
    identities = [layer_class(call.module, nn.Identity) is not None for call in (one, like)]
    again = None
    if identities[0] == identities[1]:
        again = _pairs(last.output, _replay(one, match.inputs))
    name = one.path + ("(I vs I)" if all(identities) else "(I)" if any(identities) else "")
    return [
        name + (f"({one.repeat})" if one.repeat else ""),
        type(one.module if swapped else like.module),
        measure(x, y),
        scale.item() if scale is not None and scale.numel() == 1 else None,
        gap(x, y).largest,
        _steps(pairs, one),
        None if again is None else _steps(again, one),
    ]


def _pairs(first: Any, second: Any) -> list[tuple[Tensor, Tensor]] | None:
    """Tensors of two results side by side; None where they do not fit."""
    ones, others = list(tensors_in(first)), list(tensors_in(second))
    fits = [tuple(t.shape) for t in ones] == [tuple(t.shape) for t in others]
    return list(zip(ones, others, strict=True)) if ones and fits else None


def _values(tensor: Tensor) -> Tensor:
    return as_float(tensor).detach().cpu().double().reshape(-1)


def _steps(pairs: list[tuple[Tensor, Tensor]], call: Call) -> int | None:
    """The largest difference in steps of the result's scale, or of a dequantization's input.

    None without a scale of 8 or 16 bits (those of accumulators say nothing), unless there is no
    difference.
    """
    largest = 0.0
    for pair in pairs:
        difference = (_values(pair[0]) - _values(pair[1])).abs()
        if difference.numel() == 0 or not bool(difference.any()):
            continue
        candidates = (*pair[::-1], *tensors_in(call.args))
        steps = next((s for t in candidates if (s := _step(t, pair[0])) is not None), None)
        if steps is None or not bool(difference.isfinite().all()):
            return None
        largest = max(largest, float((difference / steps).max()))
    return round(largest)


def _step(tensor: Tensor, like: Tensor) -> Tensor | None:
    """One step of every value of a quantized tensor of the same shape as another."""
    if not isinstance(tensor, QTensor) or tensor.dtype == "qint32":
        return None
    if scale_of(tensor) is None or tensor.shape != like.shape:
        return None
    return tensor.scale_of_each().detach().cpu().double().reshape(-1)


def _replay(call: Call, inputs: tuple[Tensor, ...]) -> Any:
    """Call an operator again with other values; None where their number or shapes do not fit.

    Where it was given a quantized tensor it gets one: with the scale of the new value if that is
    quantized, else rounded to the scale that it was given before.
    """
    given = list(tensors_in((call.args, call.kwargs)))
    if [tuple(t.shape) for t in given] != [tuple(t.shape) for t in inputs]:
        return None
    formed = (_in_form_of(old, new) for old, new in zip(given, inputs, strict=True))
    args, kwargs = _with((call.args, call.kwargs), formed)
    module: Any = call.operator
    return (getattr(module, call.method) if call.method else module)(*args, **kwargs)


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """A structure with other tensors, in the order of `tensors_in`."""
    return map_leaves(lambda leaf: next(tensors) if isinstance(leaf, Tensor) else leaf, value)


def _in_form_of(old: Tensor, new: Tensor) -> Tensor:
    if isinstance(new, QTensor) and isinstance(old, QTensor) and new.on_grid:
        data = new.int_repr() if old.holds_integers else new.dequantize()
        return _with_settings(old, data.to(old.device), new)
    values = as_float(new).to(old.device)
    if not isinstance(old, QTensor):
        return values.clone()  # an operator may write into it
    if old.holds_integers:
        scale = along(old.scale, values.dim(), old.q_per_channel_axis())
        info = qinfo(old.dtype)
        steps = (values / scale).round().clamp(info.min, info.max)
        return old.like(steps.to(old.dtype.storage))
    if not old.on_grid:  # a calibration form, which does not round
        return old.like(values.clone())
    info = qinfo(old.dtype)
    axis = old.q_per_channel_axis()
    return old.like(fake_quantize(values, old.scale, axis, info.min, info.max))


def _with_settings(old: QTensor, data: Tensor, new: QTensor) -> QTensor:
    """Data with the scale of one tensor and the settings of another."""
    return QTensor(
        data,
        new.scale.to(data.device),
        new.dtype,
        new.q_per_channel_axis(),
        rounding=old.rounding,
        lenient=old.lenient,
        on_grid=new.on_grid,
    )


def compare_weights(
    float_model: nn.Module,
    qat_quantized_model: nn.Module,
    similarity_func: str | Callable[..., Any] = "Cosine",
    with_tensorboard: bool = False,
    tensorboard_dir: str | os.PathLike[str] | None = None,
    out_dir: str | os.PathLike[str] | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Compare weights layer by layer; print the table and write ``weight_comparison.txt``.

    Folding a batch norm changes a weight: pass the float model after `fuse_fx` or `fuse_modules`. A
    QAT model's weights are compared before rounding; a converted model's are integers times scale.
    Atol is the largest difference.

    Args:
        float_model: Float model, or an earlier form of the other.
        qat_quantized_model: Calibration, QAT or converted model.
        similarity_func: As in `featuremap_similarity`.
        with_tensorboard: Write histograms for TensorBoard.
        tensorboard_dir: Where; None for its own choice.
        out_dir: Folder of the file; None for the current one.

    Returns:
        By name, ``layer1.0.conv.weight``, the weights ``"float"`` and ``"quantized"``.

    Raises:
        ImportError: `with_tensorboard` and TensorBoard is not installed.
        ValueError: An unknown measure, or no weight in common.
    """
    measure = measure_of(similarity_func, "compare_weights")
    floats = dict(float_model.named_modules(remove_duplicate=False))
    found: dict[str, dict[str, Tensor]] = {}
    rows = []
    for path, module in named_operators(qat_quantized_model)[0].items():
        quantized = _weight(module)
        anchor = getattr(module, "anchor_path", "")
        reference = _weight(floats.get(path))
        if reference is None:
            reference = _weight(floats.get(anchor))
        if quantized is None or reference is None or quantized.shape != reference.shape:
            continue
        name = f"{path}.weight" if path else "weight"
        x, y = reference.cpu(), quantized.cpu()
        found[name] = {"float": x, "quantized": y}
        rows.append([name, f"{measure(x, y):.7f}", f"{gap(x, y).largest:.7f}"])
    if not rows:
        raise ValueError(
            "compare_weights: the models have no weight of the same name and shape; pass two forms "
            "of one model, the float one fused"
        )
    table = grid_table(["Weight Name", "Similarity", "Atol"], rows)
    print(table)
    write_text(out_dir, "weight_comparison.txt", f"{table}\n")
    if with_tensorboard:
        titles = [f"{name}/{form}" for name, forms in found.items() for form in forms]
        tensors = [(weight, 0) for forms in found.values() for weight in forms.values()]
        write_histograms(titles, tensors, tensorboard_dir)
    return found


def _weight(module: nn.Module | None) -> Tensor | None:
    """The float weight of a layer in any form."""
    module = module.function if isinstance(module, SegmentLUT) else anchor_of(module)
    weight: Any = getattr(module, "weight", None)
    if module is None or not isinstance(weight, Tensor):
        return None
    if isinstance(module, FixedPoint):
        return as_float(fixed_weight(module)).detach().clone()
    return weight.detach().clone()
