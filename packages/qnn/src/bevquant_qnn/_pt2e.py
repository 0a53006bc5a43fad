"""A `torchao` PT2E quantizer that annotates a program as `quantize_model` would quantize it.

There is one placement: the program becomes a module again, `quantize_model` places quantizers in
it, and who reads which tensor is written onto the program's own nodes. Ranges come from this
project's calibrators, s = amax/127, zero point 0, so that equal data gives equal ranges.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from functools import cache
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

from bevquant_graph import module_of, op_spec
from bevquant_qnn._config import QuantConfig
from bevquant_qnn._conv import QuantWeighted
from bevquant_qnn._flow import Flow
from bevquant_qnn._quantize_model import quantized
from bevquant_qnn._result import QuantizeResult, SkippedModule
from bevquant_qnn._share import ranges_of
from bevquant_quantizers import QuantDescriptor, TensorQuantizer, format_of


def pt2e_quantizer(config: QuantConfig | None = None, *, method: str = "mse") -> Any:
    """A quantizer for `torchao`'s ``prepare_pt2e`` with `quantize_model`'s placement.

    Weights of convolutions and linear layers get one symmetric int8 range per output channel. Their
    inputs and those of pools get one symmetric range per tensor. Residual additions and
    concatenations are as in `quantize_model`. All consumers of one tensor, and all operands of a
    concatenation, share one observer. Biases and other operations stay float.

    Args:
        config: Settings; `QuantConfig()` by default. Patterns of `exclude` name modules as in the
            exported model.
        method: Search of ranges in the values of a ``"histogram"`` calibrator: ``"mse"``,
            ``"entropy"`` or ``"percentile"``.

    Returns:
        A ``torchao.quantization.pt2e.quantizer.Quantizer``. After ``prepare_pt2e`` its `result` is
        the record that `quantize_model` returns.

    Raises:
        ImportError: torchao is not installed.
        ValueError: FP8, `unsigned`, `quantize_matmul` or `output_weight_bits` in `config`; and from
            ``prepare_pt2e``, for a program that `bevquant_graph.module_of` refuses.
    """
    config = config or QuantConfig()
    if isinstance(config.num_bits, tuple) or isinstance(config.weight_bits, tuple):
        raise ValueError(
            "pt2e_quantizer: torchao's PT2E annotations are of integers; use num_bits=8 here, or "
            "quantize_model for FP8"
        )
    own = {
        "unsigned=True": (config.unsigned, "are of signed integers"),
        "quantize_matmul=True": (config.quantize_matmul, "are of layers and joins"),
        "output_weight_bits": (
            config.output_weight_bits is not None, "have one number of bits for all weights",
        ),
    }  # fmt: skip
    for option, (given, these) in own.items():
        if given:
            raise ValueError(
                f"pt2e_quantizer: these annotations {these}; leave {option} out, or use "
                "quantize_model"
            )
    quantizer, _, _ = _classes()
    return quantizer(config, method)


@cache
def _classes() -> tuple[Any, Any, Any]:
    """The quantizer and two observers, subclasses of what torchao has."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own code, which nobody here can mend
            from torchao.quantization.pt2e.observer import UniformQuantizationObserverBase
            from torchao.quantization.pt2e.quantizer import Quantizer
    except ImportError as error:
        raise ImportError(
            "bevquant_qnn.pt2e_quantizer needs torchao, which is not installed; "
            "run: pip install torchao"
        ) from error

    class RangeObserver(UniformQuantizationObserverBase):  # type: ignore[misc]
        """Collects with a calibrator; s = amax / (2^(bits - 1) - 1), zero point 0."""

        def __init__(self, descriptor: QuantDescriptor, method: str, **settings: Any) -> None:
            axis = settings.pop("ch_axis", None)
            super().__init__(**settings)
            self.ch_axis = -1 if axis is None else axis
            self.high, self.method = format_of(descriptor.num_bits).high, method
            self.calibrator: Any = TensorQuantizer(descriptor)._calibrator

        def forward(self, x: Tensor) -> Tensor:
            if x.numel():
                self.calibrator.collect(x.detach())
            return x

        def calculate_qparams(self, **_: Any) -> tuple[Tensor, Tensor]:
            histogram = type(self.calibrator).__name__ == "HistogramCalibrator"
            amax = self.calibrator.compute_amax(*([self.method] if histogram else []))
            if amax is None:
                raise ValueError(
                    "an observer has seen no values: run the prepared model on calibration data "
                    "before convert_pt2e"
                )
            scale = amax.detach().float().flatten() / self.high
            # Zeros alone have no range, and any scale holds them.
            scale = torch.where(scale > 0, scale, torch.ones_like(scale))
            return scale, torch.zeros(scale.shape, dtype=torch.int64, device=scale.device)

    class PerChannelRangeObserver(RangeObserver):
        """torchao hands an axis to observers with PerChannel in their name alone."""

    class BevquantQuantizer(Quantizer):  # type: ignore[misc]
        """Made by `pt2e_quantizer`."""

        def __init__(self, config: QuantConfig, method: str) -> None:
            super().__init__()
            self.config, self.method = config, method
            self.result: QuantizeResult | None = None

        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            self.result = _annotate(model, self.config, self.method)
            return model

        def validate(self, model: fx.GraphModule) -> None:
            """Nothing to do: the placed quantizers are those of `quantize_model`."""

    return BevquantQuantizer, RangeObserver, PerChannelRangeObserver


def _annotate(program: fx.GraphModule, config: QuantConfig, method: str) -> QuantizeResult:
    from torchao.quantization.pt2e.quantizer import QuantizationAnnotation, SharedQuantizationSpec

    nodes = {node.name: node for node in program.graph.nodes}
    example = tuple(_example(node) for node in nodes.values() if node.op == "placeholder")
    model = module_of(program)
    info: Any = program.graph._codegen
    args, kwargs = pytree.tree_unflatten(list(example), info.pytree_info.in_spec)
    names = info.pytree_info.orig_args
    inputs = dict(zip(names, args, strict=False)) | kwargs if kwargs else tuple(args)
    result, flow = quantized(model, config, inputs)
    own = _origins(flow, nodes)
    notes = list(result.skipped)

    annotated: dict[fx.Node, Any] = defaultdict(lambda: QuantizationAnnotation(_annotated=True))
    weights: dict[str, TensorQuantizer] = {}
    left: set[str] = set()
    for path, module in result.model.named_modules():
        if isinstance(module, QuantWeighted) and isinstance(module._weight_quantizer.axis, tuple):
            reason = "PT2E has one axis for ranges, a grouped transposed weight needs two: float"
            notes.append(SkippedModule(path, reason))
            left.add(path)
        elif isinstance(module, QuantWeighted):
            weights[path] = module._weight_quantizer
    shared = _spec(config.input_descriptor(), method)
    groups, first = ranges_of(flow), dict[object, tuple[fx.Node, fx.Node]]()
    for read in flow.reads:
        node = own.get(read.node)
        value = node and _argument(read.node, read.value, node)
        if node is None or value is None:
            reason = f"{read.node.name} is not found in the program again: left float"
            path = _path(read.node).removeprefix("model").lstrip(".")
            notes.append(SkippedModule(path, reason))
            left.add(path)
            continue
        if _path(node) in left:
            continue
        # A group of readers has one range: its first edge holds it, the others share that.
        group = groups.find(read.quantizer)
        edges = annotated[node].input_qspec_map
        if value not in edges:
            edges[value] = SharedQuantizationSpec(first[group]) if group in first else shared
            first.setdefault(group, (value, node))
    for node in nodes.values():
        layer = op_spec(node.target).kind == "layer" and _path(node) not in left
        quantizer = weights.get(_path(node)) if layer else None
        if quantizer is not None and isinstance(node.args[1], fx.Node):
            edges = annotated[node].input_qspec_map
            axis = quantizer.axis if config.weight_per_channel else None
            edges[node.args[1]] = _spec(config.weight_descriptor(axis), method)
    joined = {own[out[1]] for out, _ in flow.joins if out[1] in own}  # type: ignore[index]
    for node, annotation in annotated.items():
        # Its output has the range of its operands.
        if node in joined:
            edge = next(iter(annotation.input_qspec_map))
            annotation.output_qspec = SharedQuantizationSpec((edge, node))
        node.meta["quantization_annotation"] = annotation
    return QuantizeResult(result.model, result.quantized, result.shared, tuple(notes))


def _spec(descriptor: QuantDescriptor, method: str) -> Any:
    """A descriptor in torchao's form."""
    from torchao.quantization.pt2e.quantizer import QuantizationSpec

    _, per_tensor, per_channel = _classes()
    axis = descriptor.axis
    form = format_of(descriptor.num_bits, narrow_range=descriptor.narrow_range)
    observer = per_tensor if axis is None else per_channel
    schemes = torch.per_tensor_symmetric, torch.per_channel_symmetric
    return QuantizationSpec(
        dtype=torch.int8 if form.bits <= 8 else torch.int16,
        observer_or_fake_quant_ctr=observer.with_args(descriptor=descriptor, method=method),
        quant_min=int(form.low),
        quant_max=int(form.high),
        qscheme=schemes[axis is not None],
        ch_axis=axis,
    )


def _example(node: fx.Node) -> Any:
    """A value as an input of the program was."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    sizes = [s if isinstance(s, int) else s.node.hint or 1 for s in value.shape]
    return torch.zeros(sizes, dtype=value.dtype, device=value.device)


def _origins(flow: Flow, nodes: dict[str, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Which node of the program each step of its module comes from."""
    steps: dict[str, dict[fx.Node, None]] = defaultdict(dict)
    for graph in dict.fromkeys(read.node.graph for read in flow.reads):
        for node in graph.nodes:
            noted = (node.meta.get("custom") or {}).get("bevquant_origin")
            if noted:
                steps[noted][node] = None
    found = {}
    for noted, made in steps.items():
        left = list(made)
        for node in (nodes[name] for name in noted.split()):
            same = (n for n in left if op_spec(n.target).name == op_spec(node.target).name)
            step = next(same, None)
            if step is not None:
                found[step] = node
                # In order: steps up to this one are of no later node.
                del left[: left.index(step) + 1]
    return found


def _argument(step: fx.Node, value: fx.Node, node: fx.Node) -> fx.Node | None:
    """The argument of `node` in the position of `value` in `step`."""
    ours, theirs = (pytree.tree_leaves(n.args) for n in (step, node))
    places = (b for a, b in zip(ours, theirs, strict=False) if a is value)
    found = next(places, None)
    return found if isinstance(found, fx.Node) else None


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]) if stack else ""
