"""What every operator of a converted model computes: of two models, or of a model and its file."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_hybrid import runtime
from bevquant_hybrid.compilation import forward_arguments, record_results
from bevquant_hybrid.runtime import Program, Step, write_program
from bevquant_hybrid_tools.quant_profiler._tables import simple_table
from bevquant_quantizers.documents import write_whole

_FILE = "horizon_script_result.pt"


def script_profile(
    model: nn.Module,
    example_inputs: Any,
    out_dir: str | os.PathLike[str] | None = None,
    march: str | None = None,
    mark_node_func: None = None,
    compare_with_hbdk_parser: bool = True,
) -> dict[str, Tensor]:
    """Run a converted model and list the result of every operator.

    The results are saved by `torch.save` in ``horizon_script_result.pt``. In place of the vendor's
    parser, which is not public, they are compared with what the integer program of `compile_model`
    computes after it was written to a file and read again.

    Args:
        model: Result of `convert` or `convert_fx`, not hybrid, or a `torch.jit.trace` of one.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        out_dir: Folder of the file; None for the current one.
        march: March that it is for; the one of `set_march` by default.
        mark_node_func: None alone: the documents do not say what such a function is given.
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
    arguments = forward_arguments(example_inputs, caller)
    program, recorded = record_results(model, arguments, caller, march)
    results = _named(program, recorded)
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
    arguments = forward_arguments(example_inputs, caller)
    (one, first), (other, second) = (
        record_results(model, arguments, caller, march) for model in (model1, model2)
    )
    same = [s.operator for s in one.steps] == [s.operator for s in other.steps]
    # A traced model does not say of which module an operator is: the other one may.
    names = max(one, other, key=lambda p: sum(bool(s.path) for s in p.steps)) if same else None
    equal = _compared(_named(one, first, names), _named(other, second, names))
    _print(equal, "All ops in two ScriptModules are same.")
    return equal


def _read_again(program: Program) -> runtime.CompiledModel:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program"
        write_program(program, path, __name__)
        return runtime.load(path)


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
