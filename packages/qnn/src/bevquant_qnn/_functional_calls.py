"""Additions, concatenations, samples and products of a forward, sent to children while it runs.

A module whose functional operations are quantized keeps its author's forward. Its class becomes a
subclass of the same name, whose forward runs the author's under a `TorchFunctionMode`. The mode
sees every call of a torch function; of those that the forward itself makes (no child module's
forward lies between), it knows an addition (a product) by its place: functions, lines and columns
from the call up to the forward, and how often that place was passed before in this call of the
module. Places that the example did not show stay float. A place that is passed more or fewer times
than then is an error, since nobody could say which of its quantizers is meant.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import _symbolic_trace
from torch.overrides import TorchFunctionMode

from bevquant_qnn._held_weight import PRODUCT_CALLS, HeldWeight, Product, product_of
from bevquant_qnn._matmul import ATTENTIONS, MATMULS, QuantAttention, QuantMatmul, factors_of

_ADDS = frozenset({torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__})
_CATS = frozenset({torch.cat, torch.concat, torch.concatenate})
_ATTENTION = torch.ops.bevquant_graph.deformable_attention
_SAMPLES: dict[Any, str] = {
    **dict.fromkeys((F.grid_sample, torch.grid_sampler), "input"),
    **dict.fromkeys((torch.grid_sampler_2d, torch.grid_sampler_3d), "input"),
    **dict.fromkeys((_ATTENTION, _ATTENTION.default), "value"),
}
"""Functions that sample their first operand, to its name."""
_JOINS = _ADDS | _CATS | _SAMPLES.keys()
_PRODUCTS = PRODUCT_CALLS.keys() | MATMULS | ATTENTIONS
_BASE, _PLAN = "_bevquant_float_class", "_bevquant_joins"
_CHILDREN = "_bevquant_join_children"


class Place(NamedTuple):
    """Where a call is: its function, line, column, and the line and column behind its end.

    The end tells `F.linear(x, w)` from `F.linear(x, w) + y`, which begins at the same column.
    """

    function: str
    line: int
    column: int
    end: tuple[int, int]


Site = tuple[Place, ...]
"""The places from a call, innermost first, up to the forward that makes it."""


class Target(NamedTuple):
    """The child that a functional operation is sent to."""

    # Its name in the module.
    name: str
    # 0 or 1 where the child is the quantizer of that operand of an addition, 0 of a sampling; None
    # where it computes the functional operation.
    operand: int | None = None
    # Whether an in-place addition writes to its operand 0, which is read under another name.
    writes: bool = False


@dataclass(frozen=True)
class CallSite:
    """One place of a forward that adds or concatenates."""

    site: Site
    # What is done, pass by pass within one call of the module; None leaves it float.
    targets: tuple[Target | None, ...]
    # How many passes the calls that were seen had.
    counts: frozenset[int]


Plan = tuple[CallSite, ...]


class FunctionalCall(NamedTuple):
    """A recorded operation: its module, the number of the module's call, its place and pass.

    `again` is site and occurrence of an earlier addition of the same two tensors in this call.
    """

    module: nn.Module
    call: int
    kind: str
    site: Site
    occurrence: int
    lines: tuple[tuple[str, int], ...]
    inplace: bool
    planned: bool
    product: Product | None = None
    # Whether an operand has infinite values, as a mask of an attention.
    masks: bool = False
    again: tuple[Site, int] | None = None


@dataclass(eq=False)
class Recorder:
    """Notes the functional operations of the modules whose class was made with it."""

    seen: list[FunctionalCall] = field(default_factory=list)
    # How often each module was called.
    calls: Counter[nn.Module] = field(default_factory=Counter)
    # Places of in-place additions that make a new tensor instead, to see who minds.
    apart: set[tuple[nn.Module, Site]] = field(default_factory=set)


class _FunctionalMode(TorchFunctionMode):
    """Entered for one call of `module`."""

    def __init__(
        self,
        module: nn.Module,
        plan: dict[Site, CallSite],
        children: dict[str, nn.Module],
        note: Recorder | None,
    ) -> None:
        super().__init__()
        self.module, self.plan, self.note = module, plan, note
        self.frame: FrameType | None = None
        self.passes: Counter[Site] = Counter()
        self.children = children
        kinds = HeldWeight | QuantMatmul | QuantAttention
        products = any(isinstance(child, kinds) for child in children.values())
        self.functions = _JOINS | _PRODUCTS if products or note is not None else _JOINS
        self.sums: dict[Any, tuple[Any, Site, int]] = {}  # with the operands, whose ids are keys
        if note is not None:
            self.call = note.calls[module]
            note.calls[module] += 1

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in self.functions:  # every function of torch comes here, so this is quick
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        kind = _kind(func, args, kwargs)
        if kind is None:
            return func(*args, **kwargs)
        frames = _frames_between(sys._getframe(1), self.frame)
        if not frames:
            return func(*args, **kwargs)
        site = site_of(frames)
        occurrence = self.passes[site]
        self.passes[site] += 1
        planned = self.plan.get(site)
        target = None
        if planned is not None:
            if occurrence >= len(planned.targets):
                raise ValueError(self.other_form(planned, occurrence + 1))
            target = planned.targets[occurrence]
        inplace = func is Tensor.add_ or func is Tensor.__iadd__
        product = product_of(func, args, kwargs) if kind == "product" else None
        if self.note is not None and (target is None or target.operand is not None):
            lines = tuple((f.f_code.co_filename, f.f_lineno) for f in reversed(frames))
            self.note.seen.append(
                FunctionalCall(
                    self.module, self.call, kind, site, occurrence, lines, inplace,
                    target is not None, product and product._replace(x=None),
                    _masks(_operands(args, kwargs) if kind == "cat" else args),
                    None if inplace or kind != "add" else self.added_before(args, site, occurrence),
                )
            )  # fmt: skip
            if inplace and (self.module, site) in self.note.apart:
                return torch.add(*args)
        if target is None:
            return func(*args, **kwargs)
        self.refuse_checkpoint(frames)
        child: Any = self.children[target.name]
        if product is not None:
            return self.product(child, product, planned)
        if kind == "cat":
            return child(*_operands(args, kwargs))
        if kind == "attention":
            return child(*args, **kwargs)
        if kind == "matmul" and (factors := factors_of(args, kwargs)) is not None:
            return child(*factors)
        if target.operand is None:
            return child(*args)
        if not args:  # `grid_sample(input=x, grid=grid)`
            first = _SAMPLES[func]
            return func(**{**kwargs, first: child(kwargs[first])})
        if target.writes:  # a gradient of the quantizer needs its input as it was
            return args[0].copy_(torch.add(child(args[0].clone()), *args[1:]))
        operands = [child(a) if i == target.operand else a for i, a in enumerate(args)]
        return func(*operands, **kwargs)

    def added_before(
        self, args: tuple[Any, ...], site: Site, occurrence: int
    ) -> tuple[Site, int] | None:
        """Where the same two tensors were added before; None where they were not."""
        states = [(id(a), 0 if a.is_inference() else a._version) for a in args]
        first = self.sums.setdefault(tuple(states), (args, site, occurrence))
        return None if first[1:] == (site, occurrence) else first[1:]

    def product(self, child: HeldWeight, product: Product, planned: CallSite | None) -> Any:
        """Output of a product's layer, if the product is still that layer's."""
        if not child.is_layer_of(product):
            place = "" if planned is None else f" in {planned.site[0].function}"
            raise ValueError(
                f"{type(self.module).__name__}: the product{place} has other parameters or "
                "settings in this call than in the example, so it is not the quantized "
                "product; quantize the model with example_inputs of the form it is called with"
            )
        return child(product.x)

    def refuse_checkpoint(self, frames: list[FrameType]) -> None:
        """Refuse checkpoints: their recomputation in the backward pass would not be quantized."""
        again = self.module.training or torch.is_grad_enabled()
        if again and any(f.f_globals.get("__name__") == "torch.utils.checkpoint" for f in frames):
            raise ValueError(
                f"{type(self.module).__name__} computes a quantized addition or concatenation "
                f"({_where(frames)}) inside torch.utils.checkpoint, which computes it again "
                "without the quantizer; switch checkpointing off in this module, or leave the "
                "join float by an exclude pattern"
            )

    def finish(self) -> None:
        """Refuse a call in which a place was passed another number of times than was seen."""
        for site, count in self.passes.items():
            planned = self.plan.get(site)
            if planned is not None and count not in planned.counts and self.note is None:
                raise ValueError(self.other_form(planned, count))

    def other_form(self, planned: CallSite, count: int) -> str:
        place = planned.site[0]
        seen = " or ".join(map(str, sorted(planned.counts)))
        return (
            f"{type(self.module).__name__}: the addition or concatenation in {place.function}, "
            f"line {place.line}, runs {count} times in this call and ran {seen} times in the "
            "example, so its quantizers cannot be assigned; quantize the model with "
            "example_inputs of the form it is called with"
        )


def functional_class(base: type[Any], plan: Plan, recorder: Recorder | None = None) -> type[Any]:
    """The class of a module of class `base` whose functional operations go where `plan` says.

    It keeps the name of `base`, and modules of it are copied and pickled by `base` and `plan`. An
    empty plan without a recorder gives the author's class.
    """
    author: Any = getattr(base, _BASE, base)
    if recorder is not None:
        return _made(author, plan, recorder)
    made: type[Any] = _kept(author, plan) if plan else author
    return made


def plan_of(module: nn.Module) -> Plan:
    """The functional operations that a module's class sends to children already."""
    plan: Plan = getattr(type(module), _PLAN, ())
    return plan


def _made(base: type[Any], plan: Plan, recorder: Recorder | None) -> type[Any]:
    places = {item.site: item for item in plan}
    names = {target.name for item in plan for target in item.targets if target is not None}

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        outer = self.__dict__.get(_CHILDREN)  # of a call that is under way
        # In torch.export, `_modules` is a copy, and an attribute the child under its path.
        there = self.__dict__["_modules"]
        own = [name for name in there if name in names] if outer is None else []
        children = outer or {name: getattr(self, name) for name in own}
        # A forward may go through its own children, as DenseNet's blocks do, and must not meet
        # these.
        hidden = {name: there.pop(name) for name in own}
        self.__dict__[_CHILDREN] = children
        mode = _FunctionalMode(self, places, children, recorder)
        mode.frame = sys._getframe()
        try:
            with mode:
                result = super(made, self).forward(*args, **kwargs)
        finally:
            mode.frame = None  # or the frame and the mode would keep each other alive
            if outer is None:
                del self.__dict__[_CHILDREN]
                there.update(hidden)
        mode.finish()
        return result

    shown = inspect.signature(base.forward)
    if isinstance(inspect.getattr_static(base, "forward"), staticmethod | classmethod):
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        shown = shown.replace(parameters=[own, *shown.parameters.values()])
    forward.__signature__ = shown  # type: ignore[attr-defined]
    kept = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    # torch.compile cannot ask for frames; it runs these forwards as they are.
    eager = torch.compiler.disable(forward)
    members = {**kept, _BASE: base, _PLAN: plan, "forward": eager, "__reduce_ex__": _reduce}
    made: type[Any] = type(base.__name__, (base,), members)
    return made


@cache
def _kept(base: Any, plan: Plan) -> type[Any]:
    return _made(base, plan, None)


# One code object for the forwards of all classes made here.
_FORWARD = next(
    c for c in _made.__code__.co_consts if isinstance(c, CodeType) and c.co_name == "forward"
)
CALLS = frozenset({nn.Module._call_impl.__code__, _FORWARD})
"""Code between a module's own forward and whoever calls it."""


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """As the author's class is reduced, and the plan on top."""
    base, plan = getattr(type(self), _BASE), plan_of(self)
    make, args, *rest = base.__reduce_ex__(self, protocol)
    # By the author's class, as pickle finds no class that is made here.
    if make is copyreg.__newobj__:  # type: ignore[attr-defined]
        args = (base, *args[1:])
    return (_restored, (make, args, plan), *rest)


def _restored(make: Any, args: tuple[Any, ...], plan: Plan) -> nn.Module:
    module: nn.Module = make(*args)
    module.__class__ = functional_class(type(module), plan)
    return module


def _frames_between(frame: FrameType | None, forward: FrameType | None) -> list[FrameType]:
    """Frames from a call up to the forward; none where a child's forward is nearer."""
    found = []
    while frame is not None and frame.f_code not in CALLS:
        found.append(frame)
        name, frame = frame.f_code.co_name, frame.f_back
        # A function wrapped by ``torch.fx.wrap(name)`` counts as one step.
        if (
            frame is not None
            and (id(frame.f_globals), name) in _symbolic_trace._wrapped_fns_to_patch
        ):
            return []
    return found if frame is not None and frame is forward else []


def site_of(frames: list[FrameType]) -> Site:
    """The places of frames, innermost first."""
    places: list[Place] = []
    for frame in frames:
        place = Place(frame.f_code.co_qualname, *_position(frame.f_code, frame.f_lasti))
        places.append(place)
        # A function made in the forward is the last: called at once or through
        # torch.utils.checkpoint,
        # it computes the same.
        if "<locals>" in place.function and place.function.startswith(
            frames[-1].f_code.co_qualname
        ):
            break
    return tuple(places)


@cache
def _position(code: CodeType, instruction: int) -> tuple[int, int, tuple[int, int]]:
    """Begin and end of an instruction, which are the same in every version of Python."""
    line, last, column, end = list(code.co_positions())[instruction // 2]
    return line or 0, column or 0, (last or 0, end or 0)


def _kind(func: Any, args: tuple[Any, ...], kwargs: Any) -> str | None:
    if func in _ADDS:
        two = len(args) == 2 and not kwargs and all(isinstance(a, Tensor) for a in args)
        return "add" if two else None
    if func in PRODUCT_CALLS:
        return "product"
    if func in _SAMPLES:
        return "sample"
    if func in ATTENTIONS:
        return "attention"
    if func in MATMULS:
        return None if factors_of(args, kwargs) is None else "matmul"
    return "cat" if func in _CATS and "out" not in kwargs else None


def _operands(args: tuple[Any, ...], kwargs: Any) -> list[Tensor]:
    return list(args[0] if args else kwargs["tensors"])


def _masks(operands: Iterable[Any]) -> bool:
    return any(isinstance(x, Tensor) and bool(x.isinf().any()) for x in operands)


def _where(frames: list[FrameType]) -> str:
    return f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}"
