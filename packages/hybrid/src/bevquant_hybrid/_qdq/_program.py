"""A prepared model as it will be deployed, as a program in integers that exporters write."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._pytree import tree_leaves

from bevquant_hybrid._convert import refuse_converted
from bevquant_hybrid._fake_quant._fake_quantize import CalibFakeQuantize, FakeQuantize
from bevquant_hybrid._fx._tracer import trace
from bevquant_hybrid._observers._range import FixedScaleObserver
from bevquant_hybrid._qdq._call import SUM, held
from bevquant_hybrid._qdq._read_node import NodeReader
from bevquant_hybrid.nn import qat
from bevquant_hybrid.nn.qat._parts import Composed
from bevquant_hybrid.nn.qat._weighted import Weighted, WithBatchNorm
from bevquant_hybrid.nn.quantized._base import FixedPoint
from bevquant_hybrid.qtensor import QTensor, as_float
from bevquant_hybrid.quantization.qconfig import get_default_qat_qconfig
from bevquant_int8sim.program import PROGRAM_READERS, Program, Step, arguments

Observe = Callable[[Step, tuple[Any, ...], tuple[Any, ...]], None]
_CALLER = "export_qdq_onnx"


def _deployed(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode, in which every fake quantizer rounds and none observes.

    What only calibrates becomes a fake quantizer of the scale that it found, and weights get the
    scale of the largest value of each output channel.
    """
    made = copy.deepcopy(model).eval()
    for owner in list(made.modules()):
        for name, part in list(owner._modules.items()):
            if isinstance(part, CalibFakeQuantize) and name == "weight_fake_quant":
                _quantize_weight(owner)
            elif isinstance(part, CalibFakeQuantize):
                owner._modules[name] = _of_its_scale(part)
    for module in made.modules():
        if isinstance(module, FakeQuantize):
            module.enable_fake_quant(True)
            module.enable_observer(False)
    return made


def _of_its_scale(part: CalibFakeQuantize) -> FakeQuantize:
    if not part.observed:
        return FakeQuantize(dtype=part.dtype)
    scale = part.calculate_qparams()[0]
    return FakeQuantize(observer=FixedScaleObserver, scale=scale, dtype=part.dtype)


def _quantize_weight(owner: Any) -> None:
    qconfig = get_default_qat_qconfig()
    if not isinstance(owner, Weighted):
        owner.weight_fake_quant = qconfig.weight()
        if isinstance(owner, qat.BatchNorm2d | qat.BatchNorm3d | qat.SyncBatchNorm):
            owner._factor_and_offset()
        return
    owner.weight_fake_quant = owner._weight_fake_quant(qconfig)
    if isinstance(owner, WithBatchNorm):
        owner.quantized_weight()
    else:
        owner.weight_fake_quant.observe(owner.weight)


def _is_refused(module: nn.Module) -> bool:
    """Whether no file holds a module of several steps, some of which may never run."""
    return isinstance(module, Composed) and not isinstance(module, qat.Softmax)


def _refuse_uncalibrated(model: nn.Module, graph: Graph) -> None:
    """Refuse a model whose forward rounds to a scale that was never found.

    Raises:
        ValueError: It does; all of its fake quantizers without a scale are listed.
    """
    called = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")}
    found = {
        f"{path}.{name}".strip("."): None
        for path, module in model.named_modules()
        if path in called and not _is_refused(module)
        for name, part in module.named_modules()
        if isinstance(part, FakeQuantize) and not part.observed
    }
    if found:
        raise ValueError(
            f"export_qdq_onnx: {', '.join(found)}: no values seen, so that there is no scale; run "
            "calibration or training batches through the model before it is exported"
        )


def read(model: nn.Module, args: Any) -> PreparedProgram:
    """The program of a model that was prepared for calibration or training.

    Args:
        model: Result of `prepare_qat_fx`, `prepare_calibration_fx`, or of `prepare_qat` where its
            forward can be traced; calibrated. It stays as it is.
        args: A tuple of positional inputs, a dict of named ones, or one input.

    Raises:
        TypeError: Inputs that the forward does not take.
        ValueError: Converted already, not calibrated, not traceable, or quantized to 16 bits.
    """
    refuse_converted(model, _CALLER)
    made = _deployed(model)
    graph = made.graph if isinstance(made, GraphModule) else trace(made, _CALLER)
    _refuse_uncalibrated(made, graph)
    return PreparedProgram(made, graph, args)


# Of a converted model `read` says that files are written before converting.
PROGRAM_READERS |= dict.fromkeys((FakeQuantize, CalibFakeQuantize, FixedPoint), read)


class PreparedProgram:
    """A prepared model, step by step.

    Attributes:
        program: Its steps.
        names: Input of the program to parameter of the model.
    """

    def __init__(self, model: nn.Module, graph: Graph, args: Any) -> None:
        self._model, self._graph = model, graph
        reader = NodeReader(model, graph)
        _Followed(model, graph, reader.read).follow(args)
        self._steps = reader.steps
        inputs = {str(n.target): reader.refs[n] for n in graph.nodes if n.op == "placeholder"}
        positional, named = arguments(args)
        order = list(inputs.values())
        self.names: Mapping[str, str] = dict(reader.inputs)
        self.program = Program(
            signature=(tuple(order[: len(positional)]), {name: inputs[name] for name in named}),
            sparse_inputs={},
            steps=tuple(step for steps in self._steps.values() for step in steps),
            values=reader.values,
            result=reader.result,
        )

    def run(self, inputs: Any, *, observe: Observe) -> Any:
        """Run, and show every step with what it makes, as integers where it has eight bits."""
        sums: dict[str, Tensor] = {}

        def see(node: Node, given: tuple[Any, ...], result: Any) -> None:
            parts = _dequantized(given, result)
            for step in self._steps.get(node, ()):
                name = step.outputs[0]
                if name == node.name:
                    value = held(result)
                elif name.endswith(SUM):
                    value = sums[name] = self._sum(node, given)
                elif step.op == "dequantize":
                    value = next(parts)
                else:
                    continue
                read = tuple(sums.get(getattr(ref, "name", "")) for ref in step.args)
                observe(step, read, (value,))

        return _Followed(self._model, self._graph, see).follow(inputs)

    def _sum(self, node: Node, given: tuple[Any, ...]) -> Tensor:
        """What a layer gives before the addition that is fused into it."""
        if node.op == "call_method":
            owner, given = given[0], given[1:]
        else:
            owner = self._model.get_submodule(str(node.target))
        assert isinstance(owner, Weighted)
        return owner.compute(as_float(given[0]))[0]


def _dequantized(given: tuple[Any, ...], result: Any) -> Iterator[Tensor]:
    """What a stub makes of a container's quantized tensors."""
    for value, made in zip(tree_leaves(given[:1]), tree_leaves(result), strict=False):
        if isinstance(value, QTensor):
            yield made


class _Followed(Interpreter):
    """Run a graph and show every node, what it reads and what it makes."""

    def __init__(self, model: nn.Module, graph: Graph, see: Callable[..., None]) -> None:
        super().__init__(model, graph=graph)
        self.extra_traceback = False
        self._see = see

    @torch.no_grad()
    def follow(self, inputs: Any) -> Any:
        """Run on a tuple of positional inputs, a dict of named ones, or one input."""
        given = list(_placed(self.graph, *arguments(inputs)))
        return self.run(*given, enable_io_processing=False)

    def run_node(self, n: Node) -> Any:
        """Run a node."""
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = getattr(self, n.op)(n.target, args, kwargs)
        self._see(n, args, result)
        return result


def _placed(graph: Graph, positional: Any, named: Mapping[str, Any]) -> Iterator[Any]:
    """What a call gives for each parameter of the forward.

    Raises:
        TypeError: Too many, too few, or unknown names.
    """
    wanted = [node for node in graph.nodes if node.op == "placeholder"]
    names = [str(node.target) for node in wanted]
    unknown = sorted(set(named) - set(names[len(positional) :]))
    missing = [
        name
        for name, node in list(zip(names, wanted, strict=True))[len(positional) :]
        if name not in named and not node.args
    ]
    if len(positional) > len(names) or unknown or missing:
        raise TypeError(
            f"{_CALLER}: the forward takes {', '.join(names)}, and the example has "
            f"{len(positional)} positional inputs and {', '.join(named) or 'no'} named ones; give "
            "a tuple or a dict with what it takes"
        )
    yield from positional
    for name, node in list(zip(names, wanted, strict=True))[len(positional) :]:
        yield named[name] if name in named else node.args[0]
