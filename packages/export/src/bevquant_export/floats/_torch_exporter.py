"""torch's exporter, made quiet: its nodes named after modules, its ports in torch's order."""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bevquant_export._errors import FloatFileError
from bevquant_export.floats._plain_forms import plain_forms
from bevquant_graph import (
    TENSOR_FORMS,
    arguments,
    as_example,
    flatten,
    leaf_names,
    quiet,
    registered_once,
    run_on,
)

OPSET = 18
"""What torch's exporter writes; it writes no earlier one."""
_LOGGERS = ("torch.onnx", "onnxscript", "onnx_ir")


def exported(
    module: nn.Module,
    args: Any,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int,
    dynamic_shapes: Any = None,
    lowered_to: int | None = None,
    scatter_sums: bool = True,
) -> Any:
    """The module, in evaluation mode, as a model of standard operators.

    The caller brings the model down to the operator set `lowered_to`, an earlier one than `opset`.
    `scatter_sums`: whether the engine has scatters that sum.
    """
    try:
        import onnxscript  # noqa: F401
        from onnxscript.rewriter import _matcher
    except ImportError as error:
        raise ImportError("export_float_onnx needs onnxscript: pip install onnxscript") from error
    positional, named = arguments(args)
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    read_once = partial(_forms, ONNXRegistry.from_torchlib)
    known = mock.patch.object(ONNXRegistry, "from_torchlib", read_once)
    # Its rewriter drops x + 1e-9 as x + 0 and x * 1.000001 as x * 1: guards would be lost.
    same = SimpleNamespace(isclose=lambda value, other, **_: value == other)
    exact = mock.patch.object(_matcher, "math", same)
    try:
        with (
            quiet(*_LOGGERS), contextlib.redirect_stdout(io.StringIO()), torch.no_grad(), known,
            exact, registered_once(), plain_forms(lowered_to or opset, scatter_sums),
        ):  # fmt: skip
            program = torch.onnx.export(
                module, positional, kwargs=dict(named) or None, dynamo=True, verbose=False,
                input_names=list(inputs), output_names=list(outputs), opset_version=opset,
                optimize=True, dynamic_shapes=dynamic_shapes,
            )  # fmt: skip
    except Exception as error:
        if isinstance(_origin(error), ImportError):
            raise ImportError(
                f"export_float_onnx: a package of torch's exporter is missing ({_origin(error)}): "
                "pip install onnxscript"
            ) from error
        remedy, origin = "replace what it names by operations that ONNX has", _origin(error)
        if type(origin).__name__ == "GuardOnDataDependentSymNode":
            remedy = (
                f"the forward decides by values of a tensor{_line(origin)}. Keep it a tensor "
                f"({TENSOR_FORMS})"
            )
        raise FloatFileError(
            f"torch's exporter cannot write {module._get_name()}: {_reason(error)}; {remedy}"
        ) from error
    assert program is not None
    proto = program.model_proto
    _name_nodes(proto.graph)
    return proto


@cache
def _read_forms(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return read(*args, **kwargs)


def _forms(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Torch's table of 500 functions' sources, read once for all exports."""
    held = _read_forms(read, *args, **kwargs)
    own = copy.copy(held)
    own.functions = {name: [*forms] for name, forms in held.functions.items()}
    return own


def _origin(error: BaseException) -> BaseException:
    """The error that all others came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _reason(error: BaseException) -> str:
    """The first line of the error that all others came from, or the operator without a form."""
    error = _origin(error)
    unknown = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", str(error))
    if unknown:
        return f"{unknown[1]} has no form there"
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def _line(error: BaseException) -> str:
    """`` (file:line)`` of the forward's call that torch.export names; "" where it names none."""
    call = str(error).partition("The following call raised this error:")[2]
    found = re.findall(r'File "(.+)", line (\d+)', call)
    return f" ({':'.join(found[-1])})" if found else ""


def _name_nodes(graph: Any) -> None:
    """``<module>.<operator>``; the exporter's own records, paths of this host too, are dropped."""
    taken: dict[str, int] = {}
    for node in graph.node:
        stem = ".".join(filter(None, (_module_of(node), node.op_type)))
        taken[stem] = taken.get(stem, 0) + 1
        node.name = stem if taken[stem] == 1 else f"{stem}_{taken[stem]}"
    for item in (*graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del item.metadata_props[:]
        item.ClearField("doc_string")
    del graph.metadata_props[:]


def _module_of(node: Any) -> str:
    """Path of the module that a node comes from; empty for the outermost."""
    for item in node.metadata_props:
        if item.key == "pkg.torch.onnx.name_scopes":
            scopes = ast.literal_eval(item.value)
            return str(scopes[-2]) if len(scopes) > 1 else ""
    return ""


def called(module: nn.Module, args: Any) -> list[tuple[str, Tensor]]:
    """Every result of a call and where in the result it lies."""
    positional, named = arguments(args)
    with torch.no_grad():
        result = run_on(module, positional, named)
    found = list(_members(result, ""))
    if not found:
        raise FloatFileError("the module returns no tensor")
    return found


def tensors_in(args: Any) -> list[Tensor]:
    """Tensors among the arguments, in order."""
    positional, named = arguments(args)
    values = [*positional, *named.values()]
    for place, value in enumerate(values):
        if not isinstance(value, Tensor):
            raise FloatFileError(
                f"argument {place} is {type(value).__name__}; expected tensors "
                "alone. Wrap the module in one that holds the rest"
            )
    return values


def by_parameter(module: nn.Module, args: Any) -> dict[str, Tensor]:
    """Parameters of the forward to the tensors that a call gives for them."""
    args = as_example(module, args)
    tensors = tensors_in(args)
    return dict(zip(leaf_names(module, flatten(arguments(args))[1]), tensors, strict=True))


def input_names(module: nn.Module, args: Any, wanted: Sequence[str] | None) -> list[str]:
    """As asked for, or the parameters' names."""
    positional, named = arguments(args)
    known = list(inspect.signature(module.forward).parameters)
    names = [*known[: len(positional)], *named]
    count = len(positional) + len(named)
    return checked("export_float_onnx: input_names", names, count, wanted)


def output_names(places: Sequence[str], wanted: Sequence[str] | None) -> list[str]:
    """As asked for, or the results' keys and places."""
    names = [f"output_{p}" if p[:1].isdigit() else p or "output" for p in places]
    return checked("export_float_onnx: output_names", names, len(names), wanted)


def checked(argument: str, names: list[str], count: int, wanted: Sequence[str] | None) -> list[str]:
    """The given names, or the defaults; messages begin with `argument`."""
    chosen = names if wanted is None else list(wanted)
    if len(chosen) != count or len(set(chosen)) != count or not all(chosen):
        raise ValueError(
            f"{argument}={chosen}: expected {count} different names"
            + (f", one for each of {names}" if len(names) == count else "")
        )
    return chosen


def _members(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _members(item, _below(where, re.sub(r"\W+", "_", str(key))))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _members(item, _below(where, str(place)))
    else:
        raise FloatFileError(
            f"the module returns {type(value).__name__} at "
            f"{where or 'its only place'}; expected tensors alone"
        )


def _below(where: str, key: str) -> str:
    return f"{where}_{key}" if where else key
