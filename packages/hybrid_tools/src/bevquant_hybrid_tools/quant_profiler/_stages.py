"""Where the stages of one model part: trained, converted and compiled, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.ao.nn import quantized as torch_quantized
from torch.fx import Node

from bevquant_graph import refilled
from bevquant_hybrid.nn.quantized import Arithmetic
from bevquant_hybrid.qtensor import QTensor, along, as_float
from bevquant_hybrid.quantization.fx.graph_module import ObservedGraphModule, QuantizedGraphModule
from bevquant_hybrid.runtime import CompiledModel
from bevquant_hybrid.undisturbed import positional, undisturbed
from bevquant_hybrid_tools.quant_profiler._tables import simple_table


@dataclass(frozen=True)
class Stage:
    """One operator in the stages of a model.

    Attributes:
        name: Its module, or its node.
        operator: The QAT module's class, or the function.
        place: ``"BPU"`` where it gives integers, else ``"CPU"``.
        elements: Of its result.
        free: Elements that the converted model has otherwise, each stage on its own inputs.
        free_steps: The largest difference of those, in steps of the scale; of floats, as it is.
        forced: Elements otherwise where the converted operator is given the QAT model's inputs.
        forced_steps: The largest difference of those.
        compiled: Elements that the compiled program has otherwise than the converted model; None
            where there is no program, or it has no step of that name.
    """

    name: str
    operator: str
    place: str
    elements: int
    free: int
    free_steps: float
    forced: int
    forced_steps: float
    compiled: int | None


def compare_stages(
    qat_model: nn.Module,
    converted: nn.Module,
    example_inputs: Any,
    compiled: CompiledModel | None = None,
) -> list[Stage]:
    """Compare a QAT model with its converted and its compiled form, operator by operator.

    An operator that rounds within one step of its QAT form may stand behind many others: the sums
    of their differences are what *free* shows, and its own is what *forced* shows.

    Args:
        qat_model: Result of `prepare_qat_fx`, hybrid or not.
        converted: What `convert_fx` made of it.
        example_inputs: A tuple or list of the forward's arguments, or one tensor.
        compiled: The program that `compile_model` wrote of `converted`, loaded; not of hybrid ones.

    Returns:
        One entry for every operator that gives a tensor, in the order of execution.

    Raises:
        TypeError: Other models.
        ValueError: The two are not of one model.
    """
    if not isinstance(qat_model, ObservedGraphModule) or not isinstance(
        converted, QuantizedGraphModule
    ):
        raise TypeError(
            "compare_stages: expected models of prepare_qat_fx and convert_fx, got "
            f"{type(qat_model).__name__} and {type(converted).__name__}"
        )
    if [n.name for n in qat_model.graph.nodes] != [n.name for n in converted.graph.nodes]:
        raise ValueError("compare_stages: the graphs differ; convert the very QAT model")
    arguments = positional(example_inputs)
    with undisturbed(qat_model), undisturbed(converted):
        trained = _Run(qat_model)
        trained.run(*arguments)
        integers = _Run(converted)
        integers.run(*arguments)
        steps = _compiled_results(compiled, arguments)
        return [
            stage
            for node in qat_model.graph.nodes
            if (stage := _stage(node, trained, integers, steps)) is not None
        ]


class _Run(fx.Interpreter):
    """Runs a graph and keeps what every node is given and gives."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, garbage_collect_values=False)
        self.given: dict[str, tuple[Any, Any]] = {}
        self.made: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        if n.op not in ("placeholder", "output", "get_attr"):
            self.given[n.name] = self.fetch_args_kwargs_from_env(n)
        self.made[n.name] = super().run_node(n)
        return self.made[n.name]


def _stage(node: Node, trained: _Run, integers: _Run, steps: dict[str, Tensor]) -> Stage | None:
    if node.op in ("placeholder", "output", "get_attr"):
        return None
    mine, theirs = trained.made[node.name], integers.made[node.name]
    if not isinstance(theirs, Tensor) or not theirs.numel():
        return None
    owner = _owner(node, trained)
    name = owner if owner else node.name
    module = trained.module.get_submodule(owner) if owner else None
    operator = getattr(node.target, "__name__", str(node.target))
    if module is not None:
        method = f".{node.target}" if node.op == "call_method" else ""
        operator = f"{type(module).__name__}{method}"
    args, kwargs = _quantized(trained.given[node.name])
    if node.op == "call_method" and owner:
        args = (integers.module.get_submodule(owner), *args[1:])
    forced = getattr(integers, node.op)(node.target, args, kwargs)
    free = _difference(mine, theirs)
    own = _difference(mine, forced)
    result = steps.get(name)
    compiled = None
    if result is not None and isinstance(theirs, QTensor) and result.shape == theirs.shape:
        compiled = int(result.ne(theirs.int_repr()).sum())
    place = "BPU" if isinstance(theirs, QTensor) else "CPU"
    return Stage(name, operator, place, theirs.numel(), *free, *own, compiled)


def _owner(node: Node, run: _Run) -> str:
    """The module that a node calls, or whose method it calls."""
    if node.op == "call_module":
        return str(node.target)
    first = node.args[0] if node.op == "call_method" and node.args else None
    if isinstance(first, Node) and first.op == "get_attr":
        held = run.fetch_attr(str(first.target))
        if isinstance(held, Arithmetic | torch_quantized.FloatFunctional):
            return str(first.target)
    return ""


def _quantized(value: Any) -> Any:
    """Values of a QAT model as the converted one has them: integers."""
    if isinstance(value, QTensor):
        axis = value.q_per_channel_axis()
        return QTensor(value.int_repr(), value.scale, value.dtype, axis)
    if isinstance(value, list | tuple):
        return refilled(type(value), [_quantized(item) for item in value])
    if isinstance(value, dict):
        return {name: _quantized(item) for name, item in value.items()}
    return value


def _difference(mine: Any, theirs: Any) -> tuple[int, float]:
    """How many elements differ, and by how many steps at most."""
    if isinstance(mine, QTensor) and isinstance(theirs, QTensor):
        apart = (mine.int_repr().long() - theirs.int_repr().long()).abs().double()
    else:
        apart = (as_float(mine).double() - as_float(theirs).double()).abs()
        if isinstance(theirs, QTensor):  # 32 bits, which a QAT model has as floats
            scale = along(theirs.scale, theirs.dim(), theirs.q_per_channel_axis())
            apart = (apart / scale.double()).round()
    return int((apart > 0).sum()), float(apart.max())


def _compiled_results(compiled: CompiledModel | None, arguments: Any) -> dict[str, Tensor]:
    """The last result of each module of a program."""
    if compiled is None:
        return {}
    values = compiled.values(*arguments)
    return {
        step.path: values[step.outputs[0]]
        for step in compiled.program.steps
        if step.outputs[0] in values
    }


def render_stages(stages: Sequence[Stage]) -> str:
    """The table for a person."""
    head = ["operator", "class", "on", "elements", "free", "steps", "forced", "steps", "compiled"]
    rows: list[list[str | int]] = [
        [
            *(stage.name, stage.operator, stage.place, stage.elements),
            *(stage.free, f"{stage.free_steps:.3g}", stage.forced, f"{stage.forced_steps:.3g}"),
            "" if stage.compiled is None else str(stage.compiled),
        ]
        for stage in stages
    ]
    return simple_table(head, rows)
