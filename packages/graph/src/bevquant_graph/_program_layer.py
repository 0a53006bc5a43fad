"""The layer of torch's own class that some calls of an exported program are."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, fx, nn

from ._operators import op_spec

__all__ = ["call_arguments", "full_name", "layer_of", "library_class"]

_LAYERS = ("layer", "norm", "max_pool", "avg_pool", "relu", "identity")


def full_name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def library_class(kind: str) -> str:
    """Name of torch's own class; "" of any other."""
    return kind.rpartition(".")[2] if kind.startswith("torch.nn.modules.") else ""


def call_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of an operator by their names in its schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return {}
    given = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    return given | dict(zip(positional, node.args, strict=False)) | dict(node.kwargs)


def layer_of(kind: str, nodes: list[fx.Node], program: fx.GraphModule) -> nn.Module | None:
    """The layer of torch's class `kind` that computes these nodes; None where there is none."""
    cls: Any = getattr(nn, library_class(kind), None)
    *before, node = nodes
    spec = op_spec(node.target)
    rebuilt = spec.kind in _LAYERS or spec.name == "flatten"
    if cls is None or full_name(cls) != kind or not rebuilt or cls.__name__ not in spec.modules:
        return None
    args = call_arguments(node)
    settings = {name: _plain(value) for name, value in args.items()}
    weight, bias = (_attribute(args.get(name), program) for name in ("weight", "bias"))
    if any(isinstance(value, fx.Node) for name, value in settings.items() if name not in _TENSORS):
        return None
    mode = "zeros"
    if before:
        if len(before) > 1 or spec.kind != "layer" or any(settings["padding"]) is not False:
            return None
        padded = call_arguments(before[0])
        mode, settings["padding"] = padded.get("mode", ""), _padding(padded.get("pad", ()))
        if mode not in ("reflect", "replicate", "circular") or settings["padding"] is None:
            return None
    known = inspect.signature(cls).parameters.keys() - {"bias"}
    chosen = {n: v for n, v in settings.items() if n in known and v != ()}
    if "inplace" in known:
        chosen["inplace"] = str(node.target._schema.name).endswith("_")  # type: ignore[union-attr]
    if spec.kind == "layer":
        if weight is None or (args.get("bias") is not None and bias is None):
            return None
        made: nn.Module = cls(**_sizes(cls, weight, settings), **chosen, bias=bias is not None,
                    device="meta", **({"padding_mode": mode} if before else {}))  # fmt: skip
    elif spec.kind == "norm":
        stats = [_attribute(args.get(n), program) for n in ("running_mean", "running_var")]
        if None in stats:
            return None
        features = int(stats[0].shape[0])  # type: ignore[union-attr]
        made = cls(features, **chosen, affine=weight is not None, device="meta")
        made.running_mean, made.running_var = stats  # type: ignore[assignment]
        made.num_batches_tracked = torch.tensor(0)
    else:
        made = cls(**chosen)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            made.register_parameter(name, value)  # type: ignore[arg-type]
    return made


_TENSORS = frozenset({"input", "self", "weight", "bias", "running_mean", "running_var"})


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _attribute(value: Any, program: fx.GraphModule) -> Tensor | None:
    """The parameter or buffer that an argument is."""
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    owner, _, name = str(value.target).rpartition(".")
    found = getattr(program.get_submodule(owner), name)
    return found if isinstance(found, Tensor) else None


def _padding(pads: Any) -> tuple[int, ...] | None:
    """What a convolution calls the padding of `torch.nn.functional.pad`; None where uneven."""
    pairs = list(zip(pads[::2], pads[1::2], strict=True))
    even = all(isinstance(a, int) and a == b for a, b in pairs)
    return tuple(a for a, _ in reversed(pairs)) if even else None


def _sizes(cls: Any, weight: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    if cls is nn.Linear:
        return {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    inner, outer = weight.shape[1] * settings["groups"], weight.shape[0]
    if cls.__name__.startswith("ConvTranspose"):
        inner, outer = outer, inner
    return {
        "in_channels": inner, "out_channels": outer, "kernel_size": tuple(weight.shape[2:]),
    }  # fmt: skip
