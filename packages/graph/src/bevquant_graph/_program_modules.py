"""The modules of an exported program: torch's own layers, and parts that run calls in its order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch.fx import traceback

from ._conditions import bound_guards, conditions_of
from ._operators import op_spec
from ._size_guards import check_guards

_LAYERS = ("layer", "norm", "max_pool", "avg_pool", "relu", "identity")


@dataclass(frozen=True)
class Value:
    """A value of a call, by its position: inputs first, then the steps' results."""

    place: int


@dataclass(frozen=True)
class Step:
    """An operator, a child (its path and which of its plans) or, without both, an attribute."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    child: str | None = None
    plan: int = 0
    origin: str = ""
    place: str = field(default="", compare=False)
    dead: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Plan:
    """One call of a module: its steps and its result."""

    steps: tuple[Step, ...]
    result: Any

    def __deepcopy__(self, _: Any) -> Plan:
        return self  # nothing in it changes, and operators are no values


class Part(nn.Module):
    """One module of an exported program, with the program's calls in order."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[Plan] = []

    def forward(self, *values: Any, plan: int = 0) -> Any:
        """Run the steps of one plan."""
        made = list(values)
        for step in self.plans[plan].steps:
            args = _with(step.args, made)
            kwargs = {name: _with(value, made) for name, value in step.kwargs}
            with _noted(step):  # one line for all: watchers identify steps by their order
                made.append(self._run(step, args, kwargs))
            # Freed as in an eager run.
            for index in step.dead:
                made[index] = None
        return _with(self.plans[plan].result, made)

    def _run(self, step: Step, args: Any, kwargs: Any) -> Any:
        if step.child is None:
            return step.operator(*args, **kwargs)
        if step.operator is getattr:
            owner, _, name = step.child.rpartition(".")
            return getattr(self.get_submodule(owner), name)
        child = self.get_submodule(step.child)
        return child(*args, plan=step.plan) if step.plan else child(*args)


def root_class(info: Any, inputs: list[fx.Node]) -> type[Part]:
    """The class of a whole program, by how its inputs and outputs are nested and their sizes."""
    names = list(info.orig_args)
    sizes = {
        index: (node.name, _fixed(node.meta.get("val")), node.meta.get("val"))
        for index, node in enumerate(inputs)
        if isinstance(node.meta.get("val"), Tensor | bool | int | float | str | None)
    }

    tensors = [node for node in inputs if isinstance(node.meta.get("val"), Tensor)]
    bound = bound_guards(conditions_of(tensors), [node.name for node in tensors], tensors)
    guards = [guard for guard in bound if guard.fixes is None]

    class Root(Part):
        """A whole program, with the exported model's inputs and outputs."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Check the inputs, run the program."""
            given = dict(zip(names, args, strict=False)) | kwargs
            if len(args) > len(names) or set(given) != set(names):
                raise TypeError(
                    f"{type(self).__name__}: expected the inputs {names} that the program was "
                    f"exported with, got {len(args)} positional ones and {sorted(kwargs)}"
                )
            count = info.in_spec.children()[0].num_children
            ordered = tuple(given[name] for name in names[:count])
            leaves, spec = pytree.tree_flatten((ordered, {n: given[n] for n in names[count:]}))
            if spec != info.in_spec:
                raise TypeError(
                    f"{type(self).__name__}: expected inputs nested as the program's, "
                    f"{info.in_spec}, got {spec}"
                )
            for index, (name, fixed, number) in sizes.items():
                if fixed is None and leaves[index] != number:
                    raise ValueError(
                        f"{type(self).__name__}: input {name} must be {number!r}, as which the "
                        f"program was exported, got {leaves[index]!r}; export again with it"
                    )
                shape = () if fixed is None else tuple(leaves[index].shape)
                for axis, size in (fixed or {}).items():
                    if axis >= len(shape) or shape[axis] != size:
                        raise ValueError(
                            f"{type(self).__name__}: input {name} must have size {size} in axis "
                            f"{axis}, to which the program was exported, got shape {shape}; "
                            "export again with dynamic_shapes"
                        )
            shapes = {
                name: leaves[i].shape for i, (name, fixed, _) in sizes.items() if fixed is not None
            }
            check_guards(guards, shapes, "export again with such inputs")
            return pytree.tree_unflatten(super().forward(*leaves), info.out_spec)

    # Loaders' batches are matched with these names (`batch_arguments`).
    parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    Root.forward.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    return Root


def _fixed(value: Any) -> dict[int, int] | None:
    """Sizes that the program fixes; None where the value itself is."""
    if not isinstance(value, Tensor):
        return None
    return {axis: size for axis, size in enumerate(value.shape) if isinstance(size, int)}


@contextmanager
def _noted(step: Step) -> Iterator[None]:
    """Where a step comes from, in the graphs that are captured of this module."""
    # Notes are read in traces alone.
    if not torch.compiler.is_compiling():
        yield
        return
    note = {"bevquant_origin": step.origin, "bevquant_place": step.place}
    with traceback.preserve_node_meta(), traceback.annotate(note):
        yield


def named(kind: str, base: Any) -> type[Part]:
    """A class of the author's class's name, which notes and messages show."""
    name = kind.rpartition(".")[2]
    return type(name if name.isidentifier() else "Program", (base,), {"__doc__": base.__doc__})


def item(values: Any, index: int) -> Any:
    return values[index]


def freed(steps: list[Step], inputs: int, result: list[Any]) -> tuple[Step, ...]:
    """Steps with the values that have no further consumer."""
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        last[inputs + number] = number
        for item in pytree.tree_leaves((step.args, dict(step.kwargs)), is_leaf=_is_value):
            if _is_value(item):
                last[item.place] = number
    # The results outlive the call.
    for item in result:
        if _is_value(item):
            last.pop(item.place, None)
    dead: dict[int, list[int]] = {}
    for index, number in last.items():
        dead.setdefault(number, []).append(index)
    return tuple(replace(s, dead=tuple(dead.get(i, ()))) for i, s in enumerate(steps))


def _is_value(item: object) -> bool:
    return isinstance(item, Value)


def _with(value: Any, made: list[Any]) -> Any:
    """An argument with its values replaced."""
    if isinstance(value, Value):
        return made[value.place]
    if isinstance(value, list | tuple):
        found = [_with(item, made) for item in value]
        return found if isinstance(value, list) else tuple(found)
    if isinstance(value, dict):
        return {key: _with(item, made) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_with(v, made) for v in (value.start, value.stop, value.step)))
    return value


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
    """The layer of torch's class `kind` that computes these nodes; None if none does."""
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
        # With a padding mode, torch pads in a call of its own and the convolution pads nothing.
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
        # Without memory: the program's own parameters are registered below.
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
    """A convolution's padding for that of `torch.nn.functional.pad`; None if uneven."""
    # `torch.nn.functional.pad` begins with the last axis.
    pairs = list(zip(pads[::2], pads[1::2], strict=True))
    even = all(isinstance(a, int) and a == b for a, b in pairs)
    return tuple(a for a, _ in reversed(pairs)) if even else None


def _sizes(cls: Any, weight: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    if cls is nn.Linear:
        return {"in_features": weight.shape[1], "out_features": weight.shape[0]}
    # Transposed convolutions store the input channels first.
    inner, outer = weight.shape[1] * settings["groups"], weight.shape[0]
    if cls.__name__.startswith("ConvTranspose"):
        inner, outer = outer, inner
    return {
        "in_channels": inner, "out_channels": outer, "kernel_size": tuple(weight.shape[2:]),
    }  # fmt: skip
