"""Selected operators, their tensors, and statistics of these."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional

from bevquant_graph import layer_class
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn.qat import Weighted, WithBatchNorm
from bevquant_hybrid.nn.quantized import FixedPoint
from bevquant_hybrid.operators import tensors_in
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization.fake_quantize import FakeQuantize
from bevquant_hybrid_tools.quant_profiler._calls import Call, on_device, record_calls
from bevquant_hybrid_tools.quant_profiler._tables import (
    curves_page,
    grid_table,
    write_histograms,
    write_text,
)


class Selection:
    """Modules selected by prefixes of their names and by class; all where neither is given.

    A prefix that is a module's name selects it and its children (``conv1`` does not select
    ``conv10``); any other is the start of names.
    """

    def __init__(
        self,
        model: nn.Module,
        prefixes: str | Iterable[str],
        types: type | Iterable[type],
        caller: str,
    ) -> None:
        self.prefixes = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
        self.types: tuple[type, ...] = (types,) if isinstance(types, type) else tuple(types)
        for prefix in self.prefixes:
            if not isinstance(prefix, str):
                raise TypeError(f"{caller}: prefixes: expected strings, got {prefix!r}")
        for kind in self.types:
            if not isinstance(kind, type):
                raise TypeError(f"{caller}: types: expected classes, got {kind!r}")
        paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
        self._whole = {prefix for prefix in self.prefixes if prefix in paths}
        for prefix in self.prefixes:
            if not any(path.startswith(prefix) for path in paths):
                warnings.warn(
                    f"{caller}: no module's name starts with {prefix!r}", UserWarning, stacklevel=4
                )

    def names(self, path: str) -> bool:
        """Whether a prefix names a path."""
        return any(
            path == prefix or path.startswith(f"{prefix}." if prefix in self._whole else prefix)
            for prefix in self.prefixes
        )

    def takes(self, path: str, module: Any) -> bool:
        """Whether a module is asked for, by either; any is where neither was given."""
        if not self.prefixes and not self.types:
            return True
        return self.names(path) or (bool(self.types) and isinstance(module, self.types))


def set_preserve_qat_mode(
    model: nn.Module,
    prefixes: str | Iterable[str] = (),
    types: type | Iterable[type] = (),
    value: bool = True,
) -> list[str]:
    """Mark modules that convert shall leave in QAT form.

    This locates conversions that cost accuracy. For fused modules, the mark of the convolution or
    linear layer applies; for functions, that of the generated module in the QAT model.
    ``module.preserve_qat_mode = True`` has the same effect. A module without a mark inherits its
    parent's.

    Args:
        model: Float or QAT model.
        prefixes: Starts of names; the name of a module selects it and its children.
        types: Classes. In a QAT model a float class means the QAT modules that stand for it.
        value: The mark.

    Returns:
        The marked names.

    Raises:
        TypeError: Prefixes that are no strings, types that are no classes.

    Warns:
        UserWarning: A prefix that no name starts with.

    Example:
        >>> set_preserve_qat_mode(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()), types=(nn.Conv2d,))
        ['0']
    """
    wanted = Selection(model, prefixes, types, "set_preserve_qat_mode")
    marked = []
    for path, module in model.named_modules():
        if wanted.names(path) or any(_stands_for(module, kind) for kind in wanted.types):
            module.preserve_qat_mode = value
            marked.append(path)
    return marked


def _stands_for(module: Any, kind: type) -> bool:
    """Whether a module is of a class, or the QAT form of one that is."""
    if isinstance(module, qat.FloatFunctional) and issubclass(kind, FloatFunctional):
        return True
    if isinstance(module, qat.SegmentLUT) and isinstance(module.function, kind):
        return True
    made_of = module.__dict__.get("_float_class")
    return isinstance(module, kind) or (made_of is not None and issubclass(made_of, kind))


_FIXED = ("weight", "bias", "factor", "offset")


def parameters_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values: of QAT layers the quantized weight, of fixed-point ones the integers."""
    if isinstance(module, FixedPoint):
        for name in _FIXED:
            value = getattr(module, name, None)
            if isinstance(value, Tensor):
                yield name, _fixed(module, name)
        return
    for name, value in module.named_parameters():
        if "fake_quant" in name or "activation_post_process" in name:
            continue
        made = value.detach()
        if name == "weight" and isinstance(module, Weighted) and _is_quantized(module):
            made = module.as_quantized(made)
        yield name, made


def _is_quantized(module: Weighted) -> bool:
    """Whether the scale is of the weight itself, not of the weight with a folded batch norm."""
    fake_quant = module.weight_fake_quant
    return isinstance(fake_quant, FakeQuantize) and not isinstance(module, WithBatchNorm)


def fixed_weight(module: nn.Module) -> Tensor:
    """A fixed-point layer's weight, with its scale."""
    return _fixed(module, "weight")


def _fixed(module: nn.Module, name: str) -> Tensor:
    values: Tensor = getattr(module, name).detach()
    scale: Tensor | None = getattr(module, f"{name}_scale", None)
    if scale is None:
        return values
    if scale.numel() == 1:
        return QTensor(values, scale, "qint8")
    axis = 1 if getattr(module, "transposed", False) else 0
    # The groups of a transposed convolution share the scales of axis 1.
    return QTensor(values, scale[: values.shape[axis]], "qint8", axis)


def get_raw_features(
    model: nn.Module,
    example_inputs: Any,
    prefixes: str | Iterable[str] = (),
    types: type | Iterable[type] = (),
    device: torch.device | str | None = None,
    preserve_int: bool = False,
    use_class_name: bool = False,
    skip_identity: bool = False,
) -> list[dict[str, Any]]:
    """Run a model and list inputs, outputs and parameters of its operators.

    The model runs in evaluation mode and observes nothing. Functions that are called between
    operators are not listed.

    Args:
        model: Float, calibration, QAT or converted model.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        prefixes: Starts of names: only these; the name of a module selects it and its children.
        types: Classes: only these (and those of `prefixes`).
        device: Where a copy of the model runs; None for the model as it is.
        preserve_int: Give integers where a value has a scale.
        use_class_name: Give the class's bare name as the module's type.
        skip_identity: Leave `nn.Identity` out.

    Returns:
        One dictionary per tensor, in the order of execution: ``module_name``; ``attr``: ``input``,
        ``output``, with ``-0``, ``-1`` where there are several and again inside lists, or the name
        of a parameter; ``data``, dequantized; ``scale``, None without one; ``ch_axis``, −1 for one
        scale; ``ff_method``, of a FloatFunctional; and ``module_type``, ``dtype`` and ``repeat``:
        how often the module had been called before.

    Example:
        >>> features = get_raw_features(nn.Sequential(nn.ReLU()), torch.tensor([-1.0, 2.0]))
        >>> [(f["module_name"], f["attr"], f["data"].tolist()) for f in features]
        [('0', 'input', [-1.0, 2.0]), ('0', 'output', [0.0, 2.0])]
    """
    model, example_inputs = on_device(model, example_inputs, device)
    wanted = Selection(model, prefixes, types, "get_raw_features")
    features = []
    for call in record_calls(model, example_inputs):
        if call.module is None or not wanted.takes(call.path, call.module):
            continue
        if skip_identity and layer_class(call.module, nn.Identity):
            continue
        kind = type(call.module)
        common = {
            "module_name": call.path,
            "module_type": kind.__name__ if use_class_name else str(kind),
            "repeat": call.repeat,
            "ff_method": call.method,
        }
        for attr, tensor in _tensors_of(call):
            features.append({**common, "attr": attr, **_described(tensor, preserve_int)})
    return features


def _tensors_of(call: Call) -> Iterator[tuple[str, Tensor]]:
    given: list[Any] = list(call.args)
    given += [value for value in call.kwargs.values() if next(tensors_in(value), None) is not None]
    yield from named_tensors("input", given[0] if len(given) == 1 else given)
    yield from named_tensors("output", call.output)
    yield from parameters_of(call.operator)


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """A tensor under a name; those of a list under the name and their places, and so on."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from named_tensors(f"{name}-{key}", item)
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from named_tensors(f"{name}-{index}", item)


def scale_of(tensor: Any) -> Tensor | None:
    """A tensor's scale; None for a float tensor, and where values pass unrounded to be counted."""
    if not isinstance(tensor, QTensor) or not (tensor.on_grid or tensor.dtype == "qint32"):
        return None
    return tensor.scale.detach()


def _described(tensor: Tensor, preserve_int: bool) -> dict[str, Any]:
    if not isinstance(tensor, QTensor):
        return {"data": tensor, "scale": None, "ch_axis": -1, "dtype": str(tensor.dtype)}
    scale = scale_of(tensor)
    return {
        "data": tensor.int_repr() if preserve_int and scale is not None else tensor.dequantize(),
        "scale": scale,
        "ch_axis": tensor.q_per_channel_axis(),
        "dtype": str(tensor.dtype),
    }


_HEADER = (
    *("Module Index", "Module Name", "Module Type", "Input/Output/Attr"),
    *("Min", "Max", "Mean", "Var", "Scale", "Dtype"),
)


@dataclass(frozen=True)
class Statistic:
    """Numbers of one tensor."""

    index: int  # place of the operator's call in the run
    name: str  # the operator, with its method and how often it had been called: cat[cat](1)
    kind: str  # its class
    attr: str  # which of its tensors
    min: float  # smallest value
    max: float  # largest value
    mean: float
    var: float  # unbiased variance; NaN for a single value
    scale: tuple[float, ...] | None  # one scale, one per channel, or None
    dtype: str  # quantized or float type
    finite: bool  # whether there is neither NaN nor an infinite value

    @property
    def reach(self) -> float:
        """The largest size of a value; infinite where one is not finite."""
        return max(abs(self.min), abs(self.max)) if self.finite else math.inf


def profile_featuremap(
    featuremap: Iterable[Mapping[str, Any]],
    with_tensorboard: bool = False,
    tensorboard_dir: str | os.PathLike[str] | None = None,
    print_per_channel_scale: bool = False,
    show_per_channel: bool = False,
    out_dir: str | os.PathLike[str] | None = None,
    file_name: str | None = None,
) -> list[Statistic]:
    """Write the statistics of `get_raw_features` as text and as a picture.

    ``statistic.txt`` holds a table in the order of execution and one by falling size of the values,
    and, where there are any, one of the tensors with NaN or infinite values, which is printed too.
    ``statistic.html`` shows extremes and means of the outputs.

    Args:
        featuremap: Result of `get_raw_features`.
        with_tensorboard: Write histograms for TensorBoard too.
        tensorboard_dir: Where; None for its own choice.
        print_per_channel_scale: Print scales per channel, else the cell is empty.
        show_per_channel: One histogram per channel.
        out_dir: Folder of the files; None for the current one.
        file_name: Their name instead of ``statistic``.

    Returns:
        The numbers, in the order of `featuremap`.

    Raises:
        ImportError: `with_tensorboard` and TensorBoard is not installed.
    """
    features = list(featuremap)
    places: dict[tuple[str, int], int] = {}
    statistics = []
    for feature in features:
        key = (feature["module_name"], feature.get("repeat", 0))
        statistics.append(_statistic(places.setdefault(key, len(places)), feature))
    table = _table(statistics, print_per_channel_scale)
    ordered = sorted(statistics, key=lambda s: s.reach, reverse=True)
    text = f"{table}\n\nStatistics with quant range in descending order...\n"
    text += f"{_table(ordered, print_per_channel_scale)}\n"
    broken = [s for s in statistics if not s.finite]
    if broken:
        warning = "Please check these OPs: there are NaN or inf values..\n"
        warning += _table(broken, print_per_channel_scale)
        text += f"\n{warning}\n"
        print(warning)
    name = file_name or "statistic"
    write_text(out_dir, f"{name.removesuffix('.txt')}.txt", text)
    outputs = [s for s in statistics if s.attr.startswith("output")]
    curves = {what: [getattr(s, what) for s in outputs] for what in ("min", "max", "mean")}
    page = curves_page("Statistics of outputs", [f"{s.index} {s.name}" for s in outputs], curves)
    write_text(out_dir, f"{name.removesuffix('.txt')}.html", page)
    if with_tensorboard:
        titles = [f"{s.index}:{s.name}:{s.attr}" for s in statistics]
        tensors = [(f["data"], f["ch_axis"]) for f in features]
        write_histograms(titles, tensors, tensorboard_dir, show_per_channel)
    return statistics


def _statistic(index: int, feature: Mapping[str, Any]) -> Statistic:
    method, repeat = feature.get("ff_method"), feature.get("repeat", 0)
    name = feature["module_name"] + (f"[{method}]" if method else "")
    data: Tensor = feature["data"].detach().double()
    scale: Tensor | None = feature["scale"]
    count = data.numel()
    low, high = torch.aminmax(data) if count else (torch.tensor(math.nan),) * 2
    return Statistic(
        index,
        name + (f"({repeat})" if repeat else ""),
        str(feature.get("module_type", "")),
        feature["attr"],
        low.item(),
        high.item(),
        data.mean().item() if count else math.nan,
        data.var().item() if count > 1 else math.nan,
        None if scale is None else tuple(scale.reshape(-1).tolist()),
        feature.get("dtype", str(feature["data"].dtype)),
        bool(data.isfinite().all()),
    )


def _table(statistics: list[Statistic], per_channel: bool) -> str:
    rows = []
    for s in statistics:
        numbers = [f"{value:.7f}" for value in (s.min, s.max, s.mean, s.var)]
        scales = s.scale if s.scale is not None and (len(s.scale) == 1 or per_channel) else ()
        scale = ", ".join(f"{value:.7f}" for value in scales)
        rows.append([str(s.index), s.name, s.kind, s.attr, *numbers, scale, s.dtype])
    return grid_table(_HEADER, rows)
