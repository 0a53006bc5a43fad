"""From a float model to a fake-quantized one, in one call."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from torch import fx, nn
from torch.export import ExportedProgram
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_fusion import norms_to_convolutions
from bevquant_graph import (
    CaptureError,
    Graph,
    alone,
    as_module,
    capture,
    check_kind,
    copied,
    refuse_unusable,
    replace_modules,
)
from bevquant_qnn._config import QuantConfig
from bevquant_qnn._float_parts import float_layers
from bevquant_qnn._flow import Flow, follow
from bevquant_qnn._functional_ops import Followed, quantize_functional_ops
from bevquant_qnn._held_weight import held_layers
from bevquant_qnn._holders import activation_quantizers
from bevquant_qnn._matmul import QuantAttention
from bevquant_qnn._observe import observe
from bevquant_qnn._output_layers import widen_outputs
from bevquant_qnn._replace import replace_layers
from bevquant_qnn._result import QuantizedModule, QuantizeResult, SkippedModule
from bevquant_qnn._share import share_quantizers
from bevquant_qnn._signs import choose_unsigned
from bevquant_qnn._steps import is_quantized
from bevquant_qnn._takeover import unchanged_on_error
from bevquant_qnn._trace import trace
from bevquant_quantizers import TensorQuantizer, adopt_quantizers


def quantize_model(
    model: nn.Module | ExportedProgram,
    config: QuantConfig | None = None,
    example_inputs: Any = None,
    inplace: bool = False,
    *,
    graph: Graph | None = None,
) -> QuantizeResult:
    """Replace the layers of a copy by quantized ones and give every tensor one range.

    1. Layers that already have pytorch-quantization's quantizers are adopted, ranges included.
    2. Convolutions, linear layers, pooling and sparse convolutions are replaced. With
       ``inplace=True`` the parameters stay the same objects, so an existing optimizer keeps
       working. A batch norm in evaluation mode that cannot be folded into a layer (in front of an
       activation, for example) becomes a quantized depthwise 1×1 convolution first, where example
       inputs show it.
    3. A forward that applies a parameter through a function (a convolution that pads by itself,
       attention over ``qkv.weight``) uses a quantized child with that parameter instead, where
       example inputs show it.
    4. Residual additions and concatenations are quantized in the forward of the module that
       computes them. The forward's code is not changed: the additions that were seen run through
       new children of the module.
    5. All consumers of one tensor, both operands of a `QuantAdd` and all operands of a
       `QuantConcat` (and its output, which holds the same values) get one quantizer object. The
       tensors follow from the model's graph (`bevquant_graph.capture`), or without example inputs
       from the code as far as `torch.fx` traces it. Attribute names have no influence.

    Quantizing again changes nothing. Fold batch norms first (`bevquant_fusion.fuse_model`), unless
    training with them is intended.

    Args:
        model: The float model; it is not changed. Of an exported program, the module
            (`bevquant_graph.module_of`) is quantized: paths and parameter names are the program's.
            Fold batch norms with ``fuse_model(program)`` and pass its model.
        config: Settings; `QuantConfig()` by default.
        example_inputs: A tuple of positional inputs, a dict of named inputs, or one input. The
            model is captured on them, in evaluation mode without gradients; modules that cannot be
            captured are followed child by child. Recommended. A program has its own.
        inplace: Change ``model`` itself instead of a copy: no second set of weights in memory, and
            parameters are the same objects. On error the model is unchanged.
        graph: ``capture(model, example_inputs)``, where it was captured already.

    Returns:
        The model and a record: quantized modules, shared quantizers with reason, modules left in
        float with reason.

    Raises:
        ValueError: An exclude pattern matches no module of the model, `graph` belongs to another
            model or has no `example_inputs`, or the model cannot be copied; pass ``inplace=True``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        >>> result = quantize_model(net, example_inputs=torch.ones(1, 3, 8, 8))
        >>> [item.path for item in result.quantized]
        ['0', '2']
        >>> result.model[0]
        QuantConv2d(
          3, 8, kernel_size=(3, 3), stride=(1, 1)
          (_input_quantizer): TensorQuantizer(8bit fake per-tensor amax=dynamic \
calibrator=HistogramCalibrator scale=1.0 quant)
          (_weight_quantizer): TensorQuantizer(8bit fake axis=0 amax=dynamic \
calibrator=MaxCalibrator scale=1.0 quant)
        )
    """
    module, example_inputs = as_module(model, example_inputs)
    config = QuantConfig() if config is None else config
    check_kind(config, QuantConfig, "a QuantConfig (inputs go into example_inputs=)")
    if graph is not None and (graph.model is not module or example_inputs is None):
        raise ValueError(
            f"quantize_model: expected graph=capture(model, example_inputs) of this "
            f"{type(model).__name__}, together with these example_inputs; got a graph of "
            f"{'another' if graph.model is not module else 'this'} {type(graph.model).__name__}"
        )
    refuse_unusable(module, "quantize_model")
    _check_patterns(module, config)
    for option, shows in (
        (config.unsigned, "unsigned=True) needs example_inputs, whose graph shows which tensors "
         "are never negative"),
        (config.quantize_matmul, "quantize_matmul=True) needs example_inputs, whose graph shows "
         "which products are of two activations"),
        (config.output_weight_bits, "output_weight_bits=…) needs example_inputs, whose graph shows "
         "which layers compute the outputs"),
    ):  # fmt: skip
        if option and example_inputs is None:
            raise ValueError(f"quantize_model: QuantConfig({shows}; got none")
    with alone(module):
        if not inplace:
            remedy = "; or pass inplace=True, which copies nothing"
            module = copied(module, "quantize_model", remedy=remedy)
            graph = None if graph is None else graph.of_copy(module)
        return _in_place(module, config, example_inputs, graph)


def _in_place(
    module: nn.Module, config: QuantConfig, example_inputs: Any, graph: Graph | None
) -> QuantizeResult:
    with unchanged_on_error(module):
        norms, graph = _norm_layers(module, config, example_inputs, graph)
        result, _ = _quantized(module, config, example_inputs, graph)
    was = [replace(item, was=norms.get(item.path, item.was)) for item in result.quantized]
    return replace(result, quantized=tuple(was))


def _norm_layers(
    model: nn.Module, config: QuantConfig, example_inputs: Any, graph: Graph | None
) -> tuple[dict[str, str], Graph | None]:
    """Paths of batch norms that no layer takes, now depthwise convolutions, and their class.

    And the graph, where it serves the model of quantized layers, of which more may be followed.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and not m.training]
    if not norms or example_inputs is None or any(map(is_quantized, model.modules())):
        return {}, graph  # quantized before, calibrated perhaps: nothing is added to that
    try:
        whole = graph or capture(model, example_inputs, check=False, open_sizes=False)
    except CaptureError:  # observe says so, part by part
        return {}, None
    made = norms_to_convolutions(model, whole, lambda path: bool(config.excluded_by(path)))
    if made:
        return made, None
    return {}, graph or (None if whole.opaque else whole)


def quantized(
    model: nn.Module, config: QuantConfig, example_inputs: Any, graph: Graph | None = None
) -> tuple[QuantizeResult, Flow]:
    """The quantized model with its account, and who reads which tensor in it."""
    refuse_unusable(model, "quantize_model")
    _check_patterns(model, config)
    with alone(model), unchanged_on_error(model):
        return _quantized(model, config, example_inputs, graph)


def _quantized(
    model: nn.Module, config: QuantConfig, example_inputs: Any, graph: Graph | None
) -> tuple[QuantizeResult, Flow]:
    adopted = [
        QuantizedModule(path, "TensorQuantizer", "pytorch_quantization's TensorQuantizer")
        for path in adopt_quantizers(model)
    ]
    model, originals, replaced, skipped, kept = replace_layers(model, config)
    observed = example_inputs is not None
    # Behind the replacement, as quantized layers decide which joins are quantized.
    found = observe(model, config, example_inputs, graph) if observed else trace(model)
    unused = _unused(found, originals) if observed else {}
    replace_modules(model, {layer: originals[layer] for layer in unused})
    left = [note.path for note in unused.values()]
    replaced = [r for r in replaced if not any(f"{r.path}.".startswith(f"{p}.") for p in left)]
    skipped = [*skipped, *unused.values()]
    joined, passed_over, placed = quantize_functional_ops(model, config, found, observed, kept)
    held = set(held_layers(model))
    skipped = [note for note in skipped if note.path not in held]
    flow = follow(found, placed)
    if config.unsigned:
        choose_unsigned(flow)
    if config.output_weight_bits is not None:
        skipped += widen_outputs(found, placed, config.output_weight_bits)
    shared, apart = share_quantizers(model, flow)
    for path, module in model.named_modules():
        if isinstance(module, TensorQuantizer):
            module.name = path
    notes = _notes(model, flow, not observed)
    floats = float_layers(model, config, {norm for norm, _ in flow.unfolded})
    skipped = [*skipped, *passed_over, *apart, *notes, *floats]
    result = QuantizeResult(
        model=model,
        quantized=tuple([*adopted, *replaced, *joined]),
        shared=tuple(shared),
        skipped=tuple(skipped),
    )
    return result, flow


def _unused(found: Followed, layers: Collection[nn.Module]) -> dict[nn.Module, SkippedModule]:
    """Layers whose weight goes to a function while the layer is not called, so it gets no range.

    An example is torchvision's Swin, whose attention is one function of ``qkv.weight``.
    """
    unused: dict[nn.Module, SkippedModule] = {}
    for steps in found.parts:
        called = {call.module for node in steps.nodes for call in steps.calls(node)}
        readers: dict[str, fx.Node] = {}
        for node in steps.nodes:
            for value in node.all_input_nodes:
                path = None if steps.source is None else steps.source.constant_path(value)
                readers.setdefault(path or "", node)
        for path, layer in steps.root.named_modules():
            if layer not in layers or called.intersection(layer.modules()):
                continue
            names = (f"{path}.{name}" for name, _ in layer.named_parameters())
            reader = next((readers[name] for name in names if name in readers), None)
            if reader is not None and steps.source:
                unused[layer] = SkippedModule(
                    steps.path(layer),
                    f"{steps.source.describe(reader)} reads its weight without calling it: it "
                    "stays float; call the layer to quantize it",
                )
    return unused


def _check_patterns(model: nn.Module, config: QuantConfig) -> None:
    """Refuse patterns that name nothing, before anything is changed."""
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    added = (
        "quant_add", "quant_concat", "quant_matmul", "quant_attention", "residual_quantizer",
        "sample_quantizer",
    )  # fmt: skip
    unmatched = [
        pattern
        for pattern in config.unmatched(paths)
        # Names of what is about to be added cannot be looked up yet.
        if not pattern.rpartition(".")[2].startswith(added)
    ]
    if unmatched:
        msg = (
            f"quantize_model: no module of {type(model).__name__} is named by exclude="
            f"{unmatched}. Patterns are exact paths as in named_modules(), or globs; the nearest "
            f"paths are {', '.join(_nearest(unmatched[0], paths))}"
        )
        raise ValueError(msg)


def _nearest(pattern: str, paths: Sequence[str]) -> list[str]:
    """Up to three paths that resemble the pattern, in full or by their last names."""

    def likeness(path: str) -> float:
        size = pattern.count(".") + 1
        tail = ".".join(path.split(".")[-size:])
        return max(SequenceMatcher(None, pattern, one).ratio() for one in (path, tail))

    return sorted(filter(None, paths), key=likeness, reverse=True)[:3]


def _notes(model: nn.Module, flow: Flow, static: bool) -> Iterator[SkippedModule]:
    for norm, convolution in flow.unfolded:
        yield SkippedModule(
            norm,
            f"batch norm directly behind the quantized {convolution} is not folded into it; fold "
            "first (bevquant_fusion.fuse_model) unless training with it is meant",
        )
    for path, product in flow.products:
        yield SkippedModule(
            path, f"computes {product} by a function call, not by a layer: it stays float"
        )
    for path, reason in flow.blind_spots if static else ():
        yield SkippedModule(
            path,
            f"not followed ({reason}): quantizers are shared only inside its children. Pass "
            "example_inputs to share by the executed data flow",
        )
    reached = {read.quantizer for read in flow.reads}
    # Of an attention that was a function call, nothing reads the softmax in the graph.
    reached |= {m.values.input_quantizer for m in model.modules() if isinstance(m, QuantAttention)}
    for holder in activation_quantizers(model):
        if holder.quantizer not in reached:
            where = "the code as followed" if static else "example_inputs"
            yield SkippedModule(holder.path, f"not reached by {where}: its quantizer is its own")
