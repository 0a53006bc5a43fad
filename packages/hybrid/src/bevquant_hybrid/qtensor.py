"""Tensors with a scale, the inputs and outputs of quantized modules."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid.dtype import QuantDType, as_quant_dtype, qinfo

__all__ = ["QTensor", "as_float", "calling_module", "payload"]

Rule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
# Rules of functions for quantized tensors; filled by `bevquant_hybrid._scale_keeping`.
RULES: dict[Any, Rule] = {}


class _AlsoTraced(type(Tensor)):  # type: ignore[misc]
    """Make isinstance accept `TracedQTensor` as a `QTensor`."""

    def __instancecheck__(cls, instance: Any) -> bool:
        found = super().__instancecheck__(instance)
        return bool(found) or (cls is QTensor and type(instance) is TracedQTensor)


class QTensor(Tensor, metaclass=_AlsoTraced):
    """A quantized tensor.

    It holds float values during calibration and training, and integers in a converted model.
    Functions that keep the scale accept it, such as views, max pooling, ReLU, resizing and
    comparisons. Any other function raises `NotImplementedError`, because its result would need
    another scale.

    Args:
        data: Float values on the grid of the scale, or integers of `dtype`.
        scale_tensor: Value of one step: ``[1]``, or one per entry of `per_channel_axis`.
        dtype: ``qint8``, ``qint16`` or ``qint32``.
        per_channel_axis: Axis that a scale per channel runs along; −1 for one scale.
        rounding: Rounding of integer functions, ``"half_up"`` or ``"half_even"``.
        lenient: Apply other functions to the float values and return a plain tensor instead of
            raising (eager models prepared with hybrid=True).
        on_grid: Whether float values lie on the grid of the scale; False during calibration, which
            does not round.

    Example:
        >>> q = QTensor(torch.tensor([[-0.5, 1.0]]), torch.tensor([0.5]), "qint8")
        >>> q.dtype, q.int_repr(), q.view(-1).relu().dequantize()
        (qint8, tensor([[-1,  2]], dtype=torch.int8), tensor([0., 1.]))
    """

    _q_scale: Tensor
    _q_dtype: QuantDType
    _q_axis: int
    rounding: str
    lenient: bool
    on_grid: bool

    def __new__(  # noqa: D102
        cls,
        data: Tensor,
        scale_tensor: Tensor,
        dtype: str,
        per_channel_axis: int = -1,
        *,
        rounding: str = "half_up",
        lenient: bool = False,
        on_grid: bool = True,
    ) -> QTensor:
        plain = payload(data)
        traced = torch.compiler.is_exporting()
        made: Any = TracedQTensor(plain) if traced else plain.as_subclass(cls)
        self: QTensor = made
        self._q_scale = scale_tensor
        self._q_dtype = as_quant_dtype(dtype)
        self._q_axis = per_channel_axis
        self.rounding = rounding
        self.lenient = lenient
        self.on_grid = on_grid
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def dtype(self) -> QuantDType:  # type: ignore[override]
        """The quantized type."""
        return self._q_dtype

    @property
    def scale(self) -> Tensor:
        """Value of one step."""
        return self._q_scale

    def q_scale(self) -> Tensor:  # type: ignore[override]
        """Value of one step."""
        return self._q_scale

    def q_per_channel_axis(self) -> int:
        """Axis that the scale runs along, −1 for one scale."""
        return self._q_axis

    @property
    def holds_integers(self) -> bool:
        """Whether the tensor holds integers (converted model) instead of floats (training)."""
        return not payload(self).is_floating_point()

    def dequantize(self) -> Tensor:
        """Return the float values as a plain tensor; gradients pass."""
        values = payload(self)
        if values.is_floating_point():
            return values
        return ops.dequantize(values, self._q_scale, self._q_axis)

    def int_repr(self) -> Tensor:
        """Return the integers as a plain tensor of the storage type."""
        values = payload(self)
        if not values.is_floating_point():
            return values
        scale = along(self._q_scale, values.dim(), self._q_axis)
        info = qinfo(self._q_dtype)
        return (values.detach() / scale).round().clamp(info.min, info.max).to(self._q_dtype.storage)

    def like(self, data: Tensor) -> QTensor:
        """Return other data with this tensor's scale and type."""
        return self.rescaled(data, self._q_scale, self._q_axis)

    def rescaled(self, data: Tensor, scale: Tensor, per_channel_axis: int = -1) -> QTensor:
        """Return other data and another scale, with this tensor's type and settings."""
        return QTensor(
            data,
            scale,
            self._q_dtype,
            per_channel_axis,
            rounding=self.rounding,
            lenient=self.lenient,
            on_grid=self.on_grid,
        )

    def scale_of_each(self) -> Tensor:
        """Return the scale of every element, in the tensor's shape."""
        return along(self._q_scale, self.dim(), self._q_axis).expand(self.shape)

    @property
    def has_one_scale(self) -> bool:
        """Whether every element has the same scale."""
        # By its form: while torch.jit traces, sizes are tensors.
        return self._q_axis < 0 and self._q_scale.dim() <= 1

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QTensor({payload(self)}, scale={self._q_scale}, dtype={self._q_dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> QTensor:
        return self.like(payload(self).detach().clone())

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rule = RULES.get(func)
        lenient = rule is None and any(q.lenient for q in args if isinstance(q, QTensor))
        if rule is None and lenient:
            rule = on_floats
        if rule is None:
            name = getattr(func, "__name__", str(func))
            if name == "__get__":  # of an attribute
                name = getattr(getattr(func, "__self__", None), "__name__", name)
            where = calling_module()
            raise NotImplementedError(
                f"{where + ': ' if where else ''}{name} cannot take a QTensor: its result would "
                "need a scale of its own. Use the quantized form (FloatFunctional for arithmetic, "
                "a module for others), put a DeQuantStub before it, or prepare the model with "
                "hybrid=True"
            )
        return rule(func, args, kwargs or {})


class TracedQTensor:
    """A quantized tensor under torch.export, which does not allow tensor subclasses.

    It has the attributes of `QTensor` and the same torch functions.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not name.startswith("__"):
            raise AttributeError(name)
        own = vars(QTensor).get(name)
        if isinstance(own, property):
            return own.__get__(self)
        if own is not None:
            return functools.partial(own, self)
        found = getattr(Tensor, name)
        if not callable(found):  # shape, device, T
            return QTensor.__torch_function__(found.__get__, (), (self,))
        return functools.partial(_called, found, self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return QTensor.__torch_function__(func, types, args, kwargs)


def _called(function: Any, x: TracedQTensor, *args: Any, **kwargs: Any) -> Any:
    return QTensor.__torch_function__(function, (), (x, *args), kwargs)


# Python looks these up in the class, past `__getattr__`.
_SPECIAL = (
    "__getitem__ __len__ __eq__ __ne__ __gt__ __ge__ __lt__ __le__ __add__ __sub__ __mul__ __abs__"
)
for _name in _SPECIAL.split():
    _method = functools.partialmethod(
        lambda self, *args, _function: _called(_function, self, *args),
        _function=getattr(Tensor, _name),
    )
    setattr(TracedQTensor, _name, _method)
TracedQTensor.__hash__ = object.__hash__  # type: ignore[method-assign]
pytree.register_pytree_node(
    TracedQTensor,
    lambda x: ([x.data], None),
    lambda values, _: next(iter(values)),
    serialized_type_name=f"{__name__}.TracedQTensor",
)


def payload(x: Tensor) -> Tensor:
    """Return a `QTensor`'s data as a plain tensor; other values unchanged."""
    if not isinstance(x, QTensor):
        return x
    if isinstance(x, TracedQTensor):
        return x.data
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def as_float(x: Tensor) -> Tensor:
    """Return the float values of a `QTensor`; other values unchanged."""
    return x.dequantize() if isinstance(x, QTensor) else x


def of_each(value: Any, part: Callable[[Tensor], Any]) -> Any:
    """Apply `part` to each tensor in lists, tuples and dictionaries.

    Example:
        >>> of_each(torch.ones(2, 1).max(0), Tensor.neg).values
        tensor([-1.])
    """
    if isinstance(value, Tensor | QTensor):
        return part(value)
    if isinstance(value, dict):
        return type(value)((name, of_each(item, part)) for name, item in value.items())
    if isinstance(value, list | tuple):
        items = [of_each(item, part) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def along(scale: Tensor, dims: int, axis: int) -> Tensor:
    """Return the scale shaped to broadcast along `axis` of a tensor with `dims` axes."""
    if scale.dim() > 1:
        return scale
    if axis < 0:
        return scale.reshape(())
    shape = [1] * dims
    shape[axis] = -1
    return scale.reshape(shape)


def call_on(
    func: Rule | Callable[..., Any], args: Any, kwargs: Any, part: Callable[..., Any]
) -> Any:
    """Call with `part` applied to every quantized tensor."""

    def of(value: Any) -> Any:
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(of(item) for item in value)
        return part(value) if isinstance(value, QTensor) else value

    return func(*of(args), **{name: of(value) for name, value in kwargs.items()})


def on_floats(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call with the float values; the result is a plain tensor."""
    return call_on(func, args, kwargs, QTensor.dequantize)


def calling_module() -> str:
    """Path and class of the innermost running module, or an empty string.

    The path is relative to the outermost running module, the model.
    """
    # Walking the stack is slow: this is for error messages.
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        wraps = type(owner).__module__.startswith("torch.jit")  # while a model is traced
        if isinstance(owner, nn.Module) and not wraps:
            inner = owner if inner is None else inner
            outer = owner
        frame = frame.f_back
    if inner is None or outer is None:
        return ""
    paths = (path for path, module in outer.named_modules() if module is inner and path)
    path = next(paths, "")
    kind = type(inner).__name__
    return f"{path} ({kind})" if path else kind
