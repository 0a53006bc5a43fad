"""Differences between QAT, converted and compiled model, operator by operator.

`compare_stages` shows the differences by conversion and compilation; `script_profile` lists the
results of a converted model and compares its file; `compare_script_models` compares the models of
two versions.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import FloatFunctional
from torch.fx import Node

from bevquant_graph import Followed, map_leaves
from bevquant_hybrid.compilation import forward_arguments, record_results
from bevquant_hybrid.nn.quantized import Arithmetic
from bevquant_hybrid.qtensor import QTensor, along, as_float
from bevquant_hybrid.quantization.fx.graph_module import ObservedGraphModule, QuantizedGraphModule
from bevquant_hybrid.runtime import CompiledModel, Program, Step, load, write_program
from bevquant_hybrid.undisturbed import positional, undisturbed
from bevquant_hybrid.utils.fx_helper import called_path
from bevquant_hybrid_tools.quant_profiler._tables import simple_table
from bevquant_qnn import gap
from bevquant_quantizers.documents import write_whole

_FILE = "horizon_script_result.pt"


@dataclass(frozen=True)
class Stage:
    """One operator in the stages of a model."""

    name: str  # its module, or its node
    operator: str  # the QAT module's class, or the function
    place: str  # "BPU" where it gives integers, else "CPU"
    elements: int  # of its result
    free: int  # elements that the converted model has otherwise, each stage on its own inputs
    free_steps: float  # the largest difference of those, in steps of the scale; of floats, as it is
    forced: int  # elements otherwise where the converted operator is given the QAT model's inputs
    forced_steps: float  # the largest difference of those
    # Elements that the compiled program has otherwise than the converted model; None where
    # there is no program, or it has no step of that name
    compiled: int | None


def compare_stages(
    qat_model: nn.Module,
    converted: nn.Module,
    example_inputs: Any,
    compiled: CompiledModel | None = None,
) -> list[Stage]:
    """Compare a QAT model with its converted and its compiled form, operator by operator.

    *free* shows an operator's difference including those of its upstream operators; *forced* shows
    its own difference alone.

    Args:
        qat_model: Result of `prepare_qat_fx`, hybrid or not.
        converted: Result of `convert_fx` for it.
        example_inputs: A tuple or list of the forward's arguments, or one tensor.
        compiled: The loaded program that `compile_model` wrote of `converted`; not for hybrid
            models.

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
    arguments = positional(qat_model, example_inputs)
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


class _Run(Followed):
    """Keeps the arguments and the result of every node."""

    def __init__(self, model: Any) -> None:
        self.given: dict[str, Any] = {}
        self.made: dict[str, Any] = {}
        super().__init__(model, self._keep)

    def _keep(self, node: Node, given: Any, result: Any) -> None:
        self.given[node.name], self.made[node.name] = given, result


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
    args, kwargs = map_leaves(_quantized, trained.given[node.name])
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
    path = called_path(node)
    if not path or node.op == "call_module":
        return path
    return path if isinstance(run.fetch_attr(path), Arithmetic | FloatFunctional) else ""


def _quantized(value: Any) -> Any:
    """A value of a QAT model as the converted one has it: integers."""
    if isinstance(value, QTensor):
        axis = value.q_per_channel_axis()
        return QTensor(value.int_repr(), value.scale, value.dtype, axis)
    return value


def _difference(mine: Any, theirs: Any) -> tuple[int, float]:
    """How many elements differ, and by how many steps at most; infinite for a NaN in one alone."""
    if not isinstance(theirs, QTensor):
        return gap(as_float(theirs), as_float(mine))[:2]
    if isinstance(mine, QTensor):
        made = mine.int_repr().double()
    else:  # 32 bits, which a QAT model has as floats
        scale = along(theirs.scale, theirs.dim(), theirs.q_per_channel_axis())
        made = (as_float(mine).double() / scale.double()).round()
    return gap(theirs.int_repr().double(), made)[:2]


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


def script_profile(
    model: nn.Module,
    example_inputs: Any,
    out_dir: str | os.PathLike[str] | None = None,
    march: str | None = None,
    mark_node_func: None = None,
    compare_with_hbdk_parser: bool = True,
) -> dict[str, Tensor]:
    """Run a converted model and list the result of every operator.

    The results are saved by `torch.save` in ``horizon_script_result.pt``. The vendor's parser is
    not public. Instead, the results are compared with those of the integer program of
    `compile_model`, written to a file and read again.

    Args:
        model: Result of `convert` or `convert_fx`, not hybrid, or a `torch.jit.trace` of one.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        out_dir: Folder of the file; None for the current one.
        march: March that it is for; the one of `set_march` by default.
        mark_node_func: Only None: the documents do not define the arguments of such a function.
        compare_with_hbdk_parser: Compare, and print whether each result is equal.

    Returns:
        Results by name: ``arg0`` of inputs, ``_block_0_conv`` of the operator ``conv`` in the
        module ``block.0``, with ``_1``, ``_2`` behind a name that was there before.

    Raises:
        TypeError, ValueError: As for `compile_model`; or a `mark_node_func`.

    Example:
        >>> from bevquant_hybrid.march import March, set_march
        >>> set_march(March.BAYES)
        >>> import tempfile
        >>> from bevquant_hybrid.quantization import QuantStub, get_default_qat_qconfig
        >>> from bevquant_hybrid.quantization import convert, prepare_qat
        >>> model = nn.Sequential(QuantStub(scale=1 / 128), nn.ReLU())
        >>> model.qconfig, x = get_default_qat_qconfig(), torch.tensor([-0.5, 0.5])
        >>> converted = convert(prepare_qat(model))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     results = script_profile(converted, x, out_dir=folder)
        name           if equal
        -------------  ----------
        arg0           True
        _0_quantize    True
        _1_aten_clamp  True
        Torch run pt output is same with the program of compile_model.
        >>> results["_1_aten_clamp"]
        tensor([ 0, 64], dtype=torch.int8)
    """
    caller = "script_profile"
    if mark_node_func is not None:
        raise ValueError(
            f"{caller}: mark_node_func={mark_node_func!r}: expected None; choose among the results "
            "that are returned"
        )
    arguments = forward_arguments(model, example_inputs, caller)
    program, recorded = record_results(model, arguments, caller, march)
    results = _named(program, recorded)
    # Through memory, so that a failure leaves no part of a file.
    buffer = io.BytesIO()
    torch.save(results, buffer)
    folder = Path() if out_dir is None else Path(out_dir)
    write_whole(folder / _FILE, buffer.getvalue(), parents=True)
    if compare_with_hbdk_parser:
        equal = _compared(results, _named(program, _read_again(program).values(*arguments)))
        _print(equal, "Torch run pt output is same with the program of compile_model.")
    return results


def compare_script_models(
    model1: nn.Module, model2: nn.Module, example_inputs: Any, march: str | None = None
) -> dict[str, bool]:
    """Run two converted models and print which operators compute the same.

    For one model that two versions converted. Operators are compared in their order where both
    models call the same ones, and else by their names.

    Args:
        model1: Converted model, or a `torch.jit.trace` of one.
        model2: The same model from another version.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        march: March that they are for; the one of `set_march` by default.

    Returns:
        Whether both give the same, by name as in `script_profile`; False where one model has no
        such operator.

    Raises:
        TypeError, ValueError: As for `compile_model`.

    Example:
        >>> from bevquant_hybrid.march import March, set_march
        >>> set_march(March.BAYES)
        >>> from bevquant_hybrid.quantization import QuantStub, get_default_qat_qconfig
        >>> from bevquant_hybrid.quantization import convert, prepare_qat
        >>> model = nn.Sequential(QuantStub(scale=1 / 128), nn.ReLU())
        >>> model.qconfig, x = get_default_qat_qconfig(), torch.tensor([-0.5, 0.5])
        >>> qat = prepare_qat(model)
        >>> _ = compare_script_models(convert(qat), convert(qat), x)
        name           if equal
        -------------  ----------
        arg0           True
        _0_quantize    True
        _1_aten_clamp  True
        All ops in two ScriptModules are same.
    """
    caller = "compare_script_models"
    arguments = forward_arguments(model1, example_inputs, caller)
    (one, first), (other, second) = (
        record_results(model, arguments, caller, march) for model in (model1, model2)
    )
    same = [s.operator for s in one.steps] == [s.operator for s in other.steps]
    # A traced model does not record an operator's module; the other model may.
    names = max(one, other, key=lambda p: sum(bool(s.path) for s in p.steps)) if same else None
    equal = _compared(_named(one, first, names), _named(other, second, names))
    _print(equal, "All ops in two ScriptModules are same.")
    return equal


def _read_again(program: Program) -> CompiledModel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        write_program(program, path, __name__)
        return load(path)


def _named(
    program: Program, results: Mapping[str, Tensor], like: Program | None = None
) -> dict[str, Tensor]:
    """Results by the names that the tables print; those of `like`, a program of the same calls."""
    found = {f"arg{i}": results[p.operand.name] for i, p in enumerate(program.inputs)}
    for step, named in zip(program.steps, (like or program).steps, strict=True):
        for index, value in enumerate(step.outputs):
            base = name = _name(named) + (f".{index}" if len(step.outputs) > 1 else "")
            count = 0
            while name in found:
                count += 1
                name = f"{base}_{count}"
            found[name] = results[value]
    return found


def _name(step: Step) -> str:
    space, _, operator = step.operator.partition("::")
    operator = operator.partition(".")[0]
    parts = [step.path.replace(".", "_"), "" if space == "bevquant_hybrid" else space, operator]
    return "_" + "_".join(part for part in parts if part)


def _compared(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, bool]:
    names = [*first, *(name for name in second if name not in first)]
    return {
        name: name in first
        and name in second
        and first[name].dtype == second[name].dtype
        and torch.equal(first[name], second[name])
        for name in names
    }


def _print(equal: Mapping[str, bool], verdict: str) -> None:
    print(simple_table(["name", "if equal"], [[n, str(e)] for n, e in equal.items()]))
    different: Sequence[str] = [name for name, same in equal.items() if not same]
    if different:
        verdict = f"{len(different)} of {len(equal)} results differ, {different[0]} first."
    print(verdict)
