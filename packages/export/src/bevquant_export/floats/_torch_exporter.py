"""torch's exporter, made quiet; its nodes named after modules, nothing of this host in them."""

from __future__ import annotations

import ast
import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from bevquant_export.floats._plain_forms import PlainForms
from bevquant_graph import arguments, quiet, registered_once

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
    """The module as a model of standard operators.

    Args:
        module: In evaluation mode.
        args: What it is called with.
        inputs: Names of its inputs.
        outputs: Names of its results.
        opset: Operator set to write.
        dynamic_shapes: As of `torch.export.export`.
        lowered_to: An earlier operator set, which the caller brings the model down to.
        scatter_sums: Whether the engine has scatters that sum.

    Raises:
        ImportError: onnxscript, or a package that it needs, is not installed.
        ValueError: torch's exporter cannot write the module; its reason is named.
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
    # Its rewriter takes x + 1e-9 for x + 0 and x * 1.000001 for x * 1: guards would be lost.
    exact = mock.patch.object(_matcher, "math", SimpleNamespace(isclose=_is_same))
    try:
        with (
            quiet(*_LOGGERS), contextlib.redirect_stdout(io.StringIO()), torch.no_grad(), known,
            exact, registered_once(), PlainForms(lowered_to or opset, scatter_sums),
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
        raise ValueError(
            f"export_float_onnx: torch's exporter cannot write {type(module).__name__}: "
            f"{_reason(error)}; replace what it names by operations that ONNX has"
        ) from error
    assert program is not None
    proto = program.model_proto
    _name_nodes(proto.graph)
    return proto


def _is_same(value: float, other: float, **_: float) -> bool:
    return value == other


@cache
def _read_forms(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return read(*args, **kwargs)


def _forms(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What torch reads from the sources of 500 functions again for every export, read once."""
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
    """The first line of the error that all others came from."""
    error = _origin(error)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


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
