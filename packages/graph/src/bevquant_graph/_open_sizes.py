"""Meaning of code and operators during an export with open sizes.

``len(x)``, ``int(share * n)`` and ``x[range(n), ids]`` stay open (`open_lengths`). With open sizes
torch finds the shape of an activation or a batch norm by running its decomposition: a dozen
operations, each with checks of strides on symbols, half of a capture's time. The result has the
operand's own shape, type and memory order. torch has a table of such shortcuts (for `add` and
similar operators); during a capture these operators are entered there (`elementwise_shapes`).
"""

from __future__ import annotations

import builtins
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import compress
from threading import get_ident
from types import FrameType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, _refs, nn
from torch._prims_common import is_contiguous_for_memory_format_or_false
from torch._subclasses import fake_impls
from torch._subclasses.fake_impls import get_fast_op_impls
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ._constants import OpenRange, Truncations
from ._faults import is_authors
from ._operators import OPERATORS

_ATEN = torch.ops.aten
# Of one tensor, the rest numbers; of floating point each gives the type that it reads.
_NAMES = [name for name, spec in OPERATORS.items() if spec.unary]
_BATCH_NORM = _ATEN._native_batch_norm_legit_no_training.default
_ROLL = _ATEN.roll.default
_SAMPLE = _ATEN.grid_sampler_2d.default
_FORMATS = (torch.contiguous_format, torch.channels_last)


@contextmanager
def elementwise_shapes() -> Iterator[None]:
    """For the length of the block the shapes of elementwise operations are found at once."""
    table: dict[Any, Any] = get_fast_op_impls()
    like = _Like()
    found: dict[Any, Any] = {_BATCH_NORM: _short(_BATCH_NORM, like.normed)}
    for name in _NAMES:
        for own, form in ((name, like), (f"{name}_", _itself)):
            target = getattr(getattr(_ATEN, own, None), "default", None)
            if target is not None:
                found[target] = _short(target, form)
    if hasattr(torch.ops.bevquant_quantizers, "fake_quantize"):
        target = torch.ops.bevquant_quantizers.fake_quantize.default
        found[target] = _short(target, like)
    found[_SAMPLE] = like.sampled
    found[_ROLL] = _short(_ROLL, like, whole=True)  # torch asks first whether there are rows
    slice_end = _sized(fake_impls._compute_slice_index)
    ends = mock.patch.object(fake_impls, "_compute_slice_index", slice_end)
    with mock.patch.dict(table, found), _one_row_shapes(), ends:
        yield


@contextmanager
def _one_row_shapes() -> Iterator[None]:
    """For the length of the block ``x + chosen[:1]`` has the shape of ``x``.

    The slice has as many rows as chosen, at most one. torch takes such an open number for other
    than 1, so that it must equal the size of ``x``. Only one row has a sum, which is asserted.
    """
    with (
        mock.patch.object(fake_impls, "infer_size", _of_one_row(fake_impls.infer_size)),
        mock.patch.object(_refs, "_broadcast_shapes", _of_one_row(_refs._broadcast_shapes)),
    ):
        yield


def _of_one_row(common: Callable[..., Any]) -> Callable[..., Any]:
    """The function for the common shape of some tensors, with sizes of at most one row as 1."""

    def found(*shapes: Any) -> Any:
        given = [list(shape) if isinstance(shape, Sequence) else shape for shape in shapes]
        sized = [shape for shape in given if isinstance(shape, list)]
        for axis in range(1, 1 + max(map(len, sized), default=0)):
            met = [shape for shape in sized if len(shape) >= axis]
            few = [_at_most_one(shape[-axis]) for shape in met]
            if any(few) and not all(few):
                for shape in compress(met, few):
                    if isinstance(shape[-axis], torch.SymInt):
                        torch._check(shape[-axis] == 1)
                        shape[-axis] = 1
        return common(*given)

    return found


def _sized(slice_end: Callable[..., Any]) -> Callable[..., Any]:
    """The function for the end of a slice, of sizes alone always a size.

    torch makes it a number that is only known at run time where it cannot tell its sign, as of
    ``math.ceil(0.7 * (n - 16))``. Questions by it would then count as decisions by values.
    """

    def found(size: Any, end: Any) -> Any:
        made = slice_end(size, end)
        if made is None and not free_unbacked_symbols([size, end]):
            made = torch.sym_min(end, size) if end >= 0 else torch.sym_max(end + size, 0)
        return made

    return found


def _at_most_one(size: Any) -> bool:
    """Whether a size is 1 or a number of chosen rows that is at most 1."""
    if not isinstance(size, torch.SymInt):
        return bool(size == 1)
    node = size.node
    if node.expr.is_Symbol or not free_unbacked_symbols(size):  # the common ones, found at once
        return False
    return bool(node.shape_env.bound_sympy(node.expr).upper <= 1)


_batch_norm = torch.batch_norm


def batch_norm_of_rows(x: Tensor, *args: Any) -> Tensor:
    """A batch norm without torch's question whether there are rows, which a mask leaves open."""
    weight, bias, mean, var, training, momentum, eps, _ = args
    if training or mean is None or not free_unbacked_symbols(x):
        return _batch_norm(x, *args)
    # `tidy` gives the operator its usual name.
    made: Tensor = _BATCH_NORM(x, weight, bias, mean, var, momentum, eps)[0]
    return made


def bit_length(number: torch.SymInt) -> int:
    """As Python's, for all numbers of as many bits; torch's own fixes the number."""
    bits, size = 0, number if number >= 0 else -number
    while size >= 1 << bits:
        bits += 1
    return bits


def _short(target: Any, form: Callable[..., Any], *, whole: bool = False) -> Callable[..., Any]:
    """The table's entry: the shape by `form` if it applies, else by torch.

    Of floating point, or of `whole` numbers too.
    """

    def entry(mode: Any, *args: Any, **kwargs: Any) -> Any:
        made = None
        if isinstance(args[0], Tensor) and (whole or args[0].is_floating_point()):
            made = form(mode, args[0])
        if made is None:
            # Without this entry torch computes the shape itself.
            with mock.patch.dict(get_fast_op_impls()), mode:
                del get_fast_op_impls()[target]
                return target(*args, **kwargs)
        return made

    return entry


class _Like:
    """Makes tensors of the shape, type and memory order of others."""

    def __init__(self) -> None:
        self._orders: dict[Any, torch.memory_format | None] = {}

    def __call__(self, mode: Any, x: Tensor) -> Tensor | None:
        """None where the memory of `x` has gaps."""
        order = self._order(x)
        if order is None:
            return None
        made = torch.empty(x.shape, dtype=x.dtype, device="meta", memory_format=order)
        return FakeTensor(mode, made, device=x.device)

    def normed(self, mode: Any, x: Tensor) -> tuple[Tensor, ...] | None:
        """Outputs of a batch norm: the map, and two statistics, empty in evaluation."""
        made = self(mode, x)
        if made is None:
            return None
        empty = [torch.empty(0, dtype=x.dtype, device="meta") for _ in range(2)]
        return made, *(FakeTensor(mode, statistic, device=x.device) for statistic in empty)

    def sampled(self, mode: Any, x: Tensor, grid: Tensor, *_: Any, **__: Any) -> Tensor:
        """A map sampled at a grid's positions; torch takes a hundred operations for the shape."""
        sizes = (*x.shape[:2], *grid.shape[1:3])
        return FakeTensor(mode, torch.empty(sizes, dtype=x.dtype, device="meta"), device=x.device)

    def _order(self, x: Tensor) -> torch.memory_format | None:
        """How the values of `x` lie in memory; asked once for the same symbols."""
        sizes, strides = _terms(x.shape), _terms(x.stride())
        if _in_rows(sizes, strides):
            return torch.contiguous_format
        key = sizes, strides
        if key not in self._orders:
            orders = _FORMATS if x.dim() == 4 else _FORMATS[:1]
            lies = is_contiguous_for_memory_format_or_false
            found = (order for order in orders if lies(x, memory_format=order))
            self._orders[key] = next(found, None)
        return self._orders[key]


def _terms(sizes: Iterable[Any]) -> tuple[Any, ...]:
    """Sizes as numbers and terms of symbols, which compare without a question to torch."""
    return tuple(size.node._expr if isinstance(size, torch.SymInt) else size for size in sizes)


def _in_rows(sizes: tuple[Any, ...], strides: tuple[Any, ...]) -> bool:
    """Whether the strides are, term by term, those of values one behind the other."""
    step: Any = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride != step:
            return False
        step = step * size
    return True


def _itself(_: Any, x: Tensor) -> Tensor:
    return x


_OTHERS = frozenset(("torch", "builtins"))
_FOUND: set[str] = set()  # modules that lie in a library
_MODULES: dict[str, list[str]] = defaultdict(list)  # these, by package
_Scope = dict[str, Any]


@contextmanager
def open_lengths(
    model: nn.Module, shares: Truncations, is_constant: Callable[[Any], bool]
) -> Iterator[None]:
    """Let the code around a model's forwards count rows as ``x.shape[0]`` does.

    Python requires a plain integer from ``len``. This fixes the number of voxels to the example's,
    and is impossible for the rows that ``torch.unique`` or a mask selects. So the name is replaced
    during a capture, in the packages of the model's classes and in files outside of libraries. The
    same holds for ``range``, whose numbers may be an index.
    ``int`` is a class with other uses, and is replaced only in the modules of `shares`. If another
    module takes a share of a number of rows, ``int(mask.sum() * share)`` or ``int(x.shape[0])``,
    its name is added to `shares`, and the run ends with an error: the caller repeats it. A tensor
    that `is_constant` holds a number of the model's own.
    """
    classes = {base for module in model.modules() for base in type(module).__mro__}
    packages = {cls.__module__.partition(".")[0] for cls in classes} - _OTHERS
    scopes = {id(scope): scope for scope in (*_scopes(packages), *_unlisted_scopes(classes))}
    # A module with a `len` of its own means that one, as with `int` below.
    own: dict[str, Any] = {"len": _length, "range": _Range}
    meant = [(s, name, own[name]) for s in scopes.values() for name in own if name not in s]
    integer_type = _FrameInteger if shares.frames else _Integer
    meant += [(scope, "int", integer_type) for scope in shares.scopes]

    thread = get_ident()  # others may run models meanwhile

    def noted(convert: Callable[[Any], int]) -> Callable[[Any], int]:
        def integer(number: Any) -> int:
            frame = sys._getframe(1)
            own = get_ident() == thread and _takes_integers(frame)
            frames = own and shares.frames and _counts_frames(number)
            if not (own and (frames or _is_share(number))):
                return convert(number)
            # Beside a decision by values torch knows the example's number, and would take it.
            if is_constant(number):
                return convert(number)
            shares.scopes.append(frame.f_globals)
            shares.met_frames |= frames
            raise ValueError("int(…) takes an open number, or a share of one")

        return integer

    for scope, name, meaning in meant:
        scope[name] = meaning
    try:
        with ExitStack() as stack:
            for kind in (torch.SymInt, torch.SymFloat, Tensor):
                integer = noted(kind.__int__)
                integer.__name__ = "__int__"  # by which `Constants` knows it
                stack.enter_context(mock.patch.object(kind, "__int__", integer, create=True))
            yield
    finally:
        for scope, name, _ in meant:
            scope.pop(name, None)  # a module may have two names


def _scopes(packages: set[str]) -> Iterator[_Scope]:
    """Globals of the packages' modules and of files of no library; thousands are in neither."""
    for name in sys.modules.keys() - _FOUND:
        module = sys.modules.get(name)
        if not isinstance(module, ModuleType):
            continue
        if is_authors(vars(module).get("__file__") or "<>"):
            yield vars(module)
        else:
            _FOUND.add(name)
            _MODULES[name.partition(".")[0]].append(name)
    for package in packages:
        modules = [sys.modules.get(name) for name in _MODULES[package]]
        yield from (vars(module) for module in modules if isinstance(module, ModuleType))


def _unlisted_scopes(classes: Iterable[type]) -> Iterator[_Scope]:
    """Globals of the classes' functions, also of files that were run without an entry in `sys`."""
    for cls in classes:
        for function in vars(cls).values():
            if isinstance(function, FunctionType) and is_authors(function.__code__.co_filename):
                yield function.__globals__


def _takes_integers(frame: FrameType) -> bool:
    """Whether an author's code asks for Python's ``int``."""
    code = frame.f_code
    return is_authors(code.co_filename) and "int" in code.co_names and "int" not in frame.f_globals


def _is_share(number: Any) -> bool:
    """Whether a number is computed from counts, and not by dividing sizes by each other."""
    if isinstance(number, Tensor):
        return torch.compiler.is_compiling()
    if not isinstance(number, torch.SymFloat):
        return False
    from torch.utils._sympy.functions import FloatTrueDiv, IntTrueDiv  # and sympy
    from torch.utils._sympy.symbol import SymT, symbol_is_type

    # A float that is taken out of a tensor is the example's.
    of_floats = (SymT.FLOAT, SymT.UNBACKED_FLOAT)
    floats = any(symbol_is_type(symbol, of_floats) for symbol in number.node.expr.free_symbols)
    # A size divided by a size, as of maps of two strides, is a number of the model's; windows
    # divided by those of a map are frames.
    divisions = number.node.expr.atoms(FloatTrueDiv, IntTrueDiv)
    return not floats and all(
        not divisor.free_symbols or size.free_symbols > divisor.free_symbols
        for size, divisor in (division.args for division in divisions)
    )


def _counts_frames(number: Any) -> bool:
    """Whether a number is computed from sizes of inputs' first axes alone."""
    if not isinstance(number, torch.SymInt):
        return False
    known = number.node.shape_env.var_to_sources
    symbols = number.node.expr.free_symbols
    # torch's source of a size, as ``x.size()[0]``.
    return bool(symbols) and all(
        {getattr(source, "idx", None) for source in known.get(symbol, ())} == {0}
        for symbol in symbols
    )


def _whole_quotient(number: torch.SymFloat) -> Any:
    """The size that a quotient of sizes is, as the frames of ``int(windows.shape[0] / 16)``; None.

    A rounded quotient equals no size for torch, and every operation behind it makes it longer.
    """
    import sympy
    from torch.utils._sympy.functions import FloatTrueDiv, FloorDiv, IntTrueDiv, ToFloat

    node = number.node
    term = node.expr.replace(ToFloat, lambda size: size)
    for division in (FloatTrueDiv, IntTrueDiv, FloorDiv):
        term = term.replace(division, lambda size, divisor: size / sympy.nsimplify(divisor))
    term = sympy.cancel(term)
    hint = node.shape_env.size_hint(term, allow_none=True)
    if not term.is_integer or term.is_number or hint is None:
        return None
    made = node.shape_env.create_symintnode(term, hint=int(hint))
    # It is a condition of the graph where a division leaves a remainder.
    return made if torch.sym_int(number) == made else None


def _length(value: Any, /) -> Any:
    if isinstance(value, Tensor) and value.dim() and isinstance(value.shape[0], torch.SymInt):
        return value.shape[0]
    return builtins.len(value)  # this module's name may be one of those


class _Counting(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, builtins.range | OpenRange)

    def __call__(cls, *ends: Any) -> Any:
        is_open = any(isinstance(end, torch.SymInt) for end in ends)
        return OpenRange(*ends) if is_open else builtins.range(*ends)


class _Range(metaclass=_Counting):
    """``range``, of open numbers as well."""


class _Truncation(type):
    frames = False

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, builtins.int | torch.SymInt)

    def __call__(cls, *args: Any) -> Any:
        if args and cls.frames and _counts_frames(args[0]):
            return args[0]
        if not args or not _is_share(args[0]):
            return builtins.int(*args)
        if isinstance(args[0], Tensor):
            return args[0].long().item()
        whole = _whole_quotient(args[0])
        return whole if whole is not None else torch.sym_int(args[0])


class _Integer(metaclass=_Truncation):
    """``int``, of shares of open numbers as well."""


class _FrameInteger(_Integer):
    """``int``, of open numbers of frames as well."""

    frames = True
