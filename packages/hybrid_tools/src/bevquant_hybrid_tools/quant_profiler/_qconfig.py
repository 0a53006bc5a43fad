"""Checks of a prepared model: qconfigs, devices, and layers that could be fused."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.ao.nn import quantized as torch_quantized
from torch.ao.quantization import FakeQuantizeBase
from torch.fx import GraphModule, Node
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import layer_class
from bevquant_hybrid.march import require_march
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn.intrinsic import ACTIVATIONS, ANCHORS, Fused
from bevquant_hybrid.nn.qat import Weighted
from bevquant_hybrid.nn.quantized.quantize import is_fixed_point
from bevquant_hybrid.operators import tensors_in
from bevquant_hybrid.partition import partition
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization.fake_quantize import _WrappedCalibFakeQuantize
from bevquant_hybrid.quantization.fx.graph_module import ObservedGraphModule, QuantizedGraphModule
from bevquant_hybrid.quantization.observer import FixedScaleObserver
from bevquant_hybrid_tools.quant_profiler._calls import Call, record_calls
from bevquant_hybrid_tools.quant_profiler._features import Selection
from bevquant_hybrid_tools.quant_profiler._tables import Cell, grid_table, simple_table, write_text

NO_QCONFIG = "qconfig = None"
_OUTPUTS = ("Module Name", "Module Type", "Input dtype", "out dtype", "ch_axis")
_WEIGHTS = ("Module Name", "Module Type", "weight dtype", "ch_axis")
_MESSAGES = ("Module Name", "Module Type", "Msg")
_WITH_WEIGHT = (*ANCHORS, Fused)
# What goes from float to quantized or back.
_CROSSINGS = (qat.QuantStub, qat.DeQuantStub, FakeQuantizeBase, _WrappedCalibFakeQuantize)
_QUESTION = "Please check if these OPs qconfigs are expected.."

_LISTED = ("operator", "quantize", "dequantize")  # kinds of the plan's nodes


@dataclass(frozen=True)
class QConfigReport:
    """Rows of the three tables, as they are printed."""

    # Name, class, dtype of the inputs, dtype of the output, axis of its scales or qconfig =
    # None
    outputs: tuple[tuple[Cell, ...], ...]
    # Name, class, dtype of the weight, axis of its scales or qconfig = None
    weights: tuple[tuple[Cell, ...], ...]
    messages: tuple[tuple[Cell, ...], ...]  # name, class, what to look at


def check_qconfig(
    model: nn.Module,
    example_inputs: Any,
    prefixes: str | Iterable[str] = (),
    types: type | Iterable[type] = (),
    custom_check_func: Callable[[nn.Module, Any, Any], None] | None = None,
    out_dir: str | os.PathLike[str] | None = None,
) -> QConfigReport:
    """Run a prepared model, list the quantization of each layer, and print suspicious settings.

    All is written to ``qconfig_info.txt``. Printed are outputs that are not quantized, fixed
    scales, weights of another type than qint8, layers with a weight and no qconfig, and layers
    whose inputs and output differ in type (stubs and boundaries apart).

    Args:
        model: Result of prepare_qat, prepare_calibration or their fx forms; it runs in evaluation
            mode and observes nothing.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        prefixes: Starts of names: only these; the name of a module selects it and its children.
        types: Classes: only these (and those of `prefixes`).
        custom_check_func: Called with each of these modules, its positional arguments and its
            result.
        out_dir: Folder of the file; None for the current one.

    Returns:
        The rows of the tables. ``(i)`` behind a name marks the i-th repeated call, ``[add]`` the
        method of a FloatFunctional.

    Raises:
        ValueError: The model is not prepared.
    """
    if not any(isinstance(module, FakeQuantizeBase) for module in model.modules()):
        raise ValueError(
            "check_qconfig: the model has no fake quantizer; pass a calibration or QAT model, "
            "before it is converted"
        )
    wanted = Selection(model, prefixes, types, "check_qconfig")

    def watch(path: str, module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        if custom_check_func is not None and wanted.takes(path, module):
            custom_check_func(module, args, result)

    outputs, weights, messages = [], [], []
    for call in record_calls(model, example_inputs, watch=watch):
        module = call.module
        if (
            module is None
            or layer_class(module, nn.Identity)
            or not wanted.takes(call.path, module)
        ):
            continue
        method = f"[{call.method}]" if call.method else ""
        name = f"{call.path}{method}" + (f"({call.repeat})" if call.repeat else "")
        start = (name, str(type(module)))
        given, made = _dtypes((call.args, call.kwargs)), _dtypes(call.output)
        outputs.append((*start, _dtype_text(given), _dtype_text(made), _axis_of_output(module)))
        weight = _weight(module)
        if weight is not None:
            weights.append((*start, *weight))
        messages += [(*start, text) for text in _remarks(call, given, made)]
    report = QConfigReport(tuple(outputs), tuple(weights), tuple(messages))
    question = f"{_QUESTION}\n{grid_table(_MESSAGES, report.messages)}" if messages else ""
    parts = [f"Each layer out qconfig:\n{grid_table(_OUTPUTS, report.outputs)}"]
    parts += [f"Weight qconfig:\n{grid_table(_WEIGHTS, report.weights)}"] * bool(weights)
    parts += [question] * bool(question)
    write_text(out_dir, "qconfig_info.txt", "\n\n".join(parts) + "\n")
    if question:
        print(question)
    return report


def _dtypes(value: Any) -> list[Any]:
    """Types of all tensors: names of quantized ones, torch's own of others."""
    return [str(t.dtype) if isinstance(t, QTensor) else t.dtype for t in tensors_in(value)]


def _dtype_text(dtypes: list[Any]) -> str:
    return str(dtypes[0]) if len(dtypes) == 1 else str(dtypes)


def _fake_quant(module: nn.Module) -> Any:
    """The fake quantizer of a module's output: its own, or the module itself at a boundary."""
    found: Any = getattr(module, "activation_post_process", None)
    if isinstance(module, FakeQuantizeBase):
        return module
    return found if isinstance(found, FakeQuantizeBase) else None


def _axis_of_output(module: nn.Module) -> Cell:
    fake_quant = _fake_quant(module)
    return NO_QCONFIG if fake_quant is None else _axis(fake_quant)


def _axis(fake_quant: Any) -> int:
    """Axis of the scales; −1 for one scale, also where statistics are only counted."""
    observer = fake_quant.activation_post_process
    return int(getattr(fake_quant, "ch_axis", getattr(observer, "ch_axis", -1)))


def _weight(module: nn.Module) -> tuple[Cell, Cell] | None:
    if isinstance(module, Weighted):
        return str(module.weight_fake_quant.dtype), _axis(module.weight_fake_quant)
    if layer_class(module, *_WITH_WEIGHT):
        dtypes = [str(parameter.dtype) for parameter in module.parameters()]
        return dtypes[0], NO_QCONFIG
    return None


def _remarks(call: Call, given: list[Any], made: list[Any]) -> Iterable[str]:
    module, fake_quant = call.operator, _fake_quant(call.operator)
    if isinstance(module, Weighted):
        if module.weight_fake_quant.dtype != "qint8":
            yield f"{module.weight_fake_quant.dtype} weight!!!"
        if fake_quant is None:
            yield "output is not quantized"
    elif layer_class(module, *_WITH_WEIGHT):
        yield NO_QCONFIG
    if not isinstance(module, _CROSSINGS) and any(
        dtype != other for dtype in given for other in made
    ):
        yield f"input dtype {_dtype_text(given)} is not same with out dtype {_dtype_text(made)}"
    observer = getattr(fake_quant, "activation_post_process", None)
    if isinstance(observer, FixedScaleObserver):
        yield f"Fixed scale {observer.fixed_scale.item()}"


def check_deploy_device(
    model: GraphModule,
    print_tabulate: bool = True,
    out_dir: str | os.PathLike[str] | None = None,
) -> dict[str, tuple[str, str]]:
    """Return the device, BPU or CPU, of each operator of a hybrid model.

    It reads the prepared graph with `bevquant_hybrid.partition`. Stubs and the boundaries that
    prepare put in count as CPU; views and Identity are where their input is and are not listed.
    Operators without a BPU form are listed as CPU, also in a model that was not prepared as hybrid
    and has no boundary there. The table is also written to ``deploy_device.txt``.

    Args:
        model: Result of `prepare_qat_fx` or `prepare_calibration_fx`, or of `convert_fx`.
        print_tabulate: Print the table.
        out_dir: Folder of the file; None for the current one.

    Returns:
        By name, in the order of execution, ``("BPU" or "CPU", "module", "function" or "method")``.
        Modules go by their names (with ``(i)`` where they are called again), functions and methods
        by their nodes'.

    Raises:
        RuntimeError: No march is set.
        TypeError: Another model.
    """
    if not isinstance(model, ObservedGraphModule | QuantizedGraphModule):
        raise TypeError(
            "check_deploy_device: expected a model from prepare_qat_fx or convert_fx, got "
            f"{type(model).__name__}"
        )
    plan = partition(model, require_march("check_deploy_device"))
    nodes = {node.name: node for node in model.graph.nodes}
    modules = dict(model.named_modules(remove_duplicate=False))
    repeats: Counter[str] = Counter()
    devices: dict[str, tuple[str, str]] = {}
    for planned in plan.nodes:
        if planned.kind not in _LISTED or planned.inserted or not planned.place:
            continue
        name, form = _row(nodes[planned.name], modules)
        # A boundary module stands before each input of its node; it is one row.
        if name in devices and planned.kind != "dequantize":
            repeats[name] += 1
            name = f"{name}({repeats[name]})"
        devices[name] = (planned.place, form)
    rows = [[name, *device] for name, device in devices.items()]
    table = simple_table(["name", "deploy device", "type"], rows)
    write_text(out_dir, "deploy_device.txt", f"{table}\n")
    if print_tabulate:
        print(table)
    return devices


def _row(node: Node, modules: dict[str, nn.Module]) -> tuple[str, str]:
    """Name and form of a node; an operation fused into an addition is the call of a method."""
    if node.op == "call_function":
        return node.name, "function"
    if node.op == "call_method" or getattr(modules[str(node.target)], "adds", False):
        return node.name, "method"
    return str(node.target), "module"


def check_unfused_operations(
    model: nn.Module, example_inputs: Any, print_tabulate: bool = True
) -> list[list[str]]:
    """Find layers whose downstream batch norm, addition or ReLU could be fused into them.

    A layer is a Conv2d, Conv3d, ConvTranspose2d or Linear. Downstream of it may be a batch norm, an
    addition of a FloatFunctional, and ReLU or ReLU6, in this order, each the only consumer of the
    one before. The model is run, so that models that cannot be traced are checked too; functions
    count as consumers, but are not fused. `featuremap_similarity` of the models before and after
    fusing shows whether the result is right.

    Args:
        model: Float model, before or after fusing.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        print_tabulate: Print a table for each group.

    Returns:
        Groups of names: first those of layers that are called more than once, which are not fused
        as they are, then the others in the order of execution. The name of a module that is called
        more than once ends with ``(shared)``.

    Raises:
        ValueError: The model is prepared already.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid())
        >>> check_unfused_operations(model, torch.ones(1, 1, 1, 1))
        name    type
        ------  ------------------------------------------------
        0       <class 'torch.nn.modules.conv.Conv2d'>
        1       <class 'torch.nn.modules.batchnorm.BatchNorm2d'>
        [['0', '1']]
    """
    _refuse_prepared(model)
    calls = record_calls(model, example_inputs, keep=False)
    times = Counter(id(call.module) for call in calls)
    chains = [
        _chain(calls, i) for i, call in enumerate(calls) if layer_class(call.module) in ANCHORS
    ]
    chains = [chain for chain in chains if len(chain) > 1]
    # Layers that are called more than once come first: fusing them needs a change of the model.
    chains.sort(key=lambda chain: times[id(chain[0].module)] == 1)
    groups, tables = [], []
    for chain in chains:
        names = [c.path + "(shared)" * (times[id(c.module)] > 1) for c in chain]
        if names in groups:  # all of it is shared: once is enough
            continue
        rows = [[name, str(type(c.module))] for name, c in zip(names, chain, strict=True)]
        groups.append(names)
        tables.append(simple_table(["name", "type"], rows))
    if print_tabulate and tables:
        print("\n\n".join(tables))
    return groups


def _refuse_prepared(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if is_fixed_point(module) or isinstance(module, FakeQuantizeBase):
            raise ValueError(
                f"check_unfused_operations: {path} ({type(module).__name__}) is of a prepared or "
                "converted model; check the float model, where fusing happens"
            )


def _chain(calls: list[Call], start: int) -> list[Call]:
    """A layer's call, and those that could be fused into it."""
    chain = [calls[start]]
    last = start
    while True:
        reader = _only_reader(calls, last)
        if reader is None:
            return chain
        call = calls[reader]
        if layer_class(call.module, _BatchNorm):
            fits = len(chain) == 1
        elif isinstance(call.module, torch_quantized.FloatFunctional):
            fits = _can_add(calls, call, last) and not any(c.method for c in chain)
        else:
            fits = layer_class(call.module) in ACTIVATIONS
        if not fits:
            return chain
        chain.append(call)
        last = reader
        if layer_class(call.module) in ACTIVATIONS:
            return chain


def _only_reader(calls: list[Call], index: int) -> int | None:
    """The one call that reads a result, seen through Identity; None for several, or the end."""
    while len(calls[index].readers) == 1 and calls[index].readers[0] >= 0:
        index = calls[index].readers[0]
        if layer_class(calls[index].module, nn.Identity) is None:
            return index
    return None


def _can_add(calls: list[Call], add: Call, mine: int) -> bool:
    """Whether an addition may join: of two tensors, the first not of a layer that could take it."""
    if add.method not in ("add", "add_relu") or len(set(add.sources)) != 2:
        return False
    first = add.sources[0]
    while first is not None and layer_class(calls[first].module, nn.Identity):
        first = calls[first].sources[0]
    if first is None or first == mine or len(calls[first].readers) != 1:
        return True
    if layer_class(calls[first].module, _BatchNorm):
        first = calls[first].sources[0]
    return first is None or layer_class(calls[first].module) not in ANCHORS
