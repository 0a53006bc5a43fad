"""Tensors that know their scale: what quantized modules hand to each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid import _integer_ops as ops
from bevquant_hybrid._calling_module import calling_module
from bevquant_hybrid.dtype import QuantDType, as_quant_dtype, qinfo

__all__ = ["QTensor", "as_float", "payload"]


class QTensor(Tensor):
    """A quantized tensor.

    While a model is calibrated or trained it carries float values; in a converted model, the
    integers themselves. Functions that keep the scale (views, pooling by maximum, ReLU, resizing,
    comparisons and the like) take it; any other raises `NotImplementedError`, because its result
    would need a scale of its own.

    Args:
        data: Float values on the grid of the scale, or integers of `dtype`.
        scale_tensor: Value of one step: ``[1]``, or one per entry of `per_channel_axis`.
        dtype: ``qint8``, ``qint16`` or ``qint32``.
        per_channel_axis: Axis that a scale per channel runs along; −1 for one scale.
        rounding: How integer functions of it round, ``"half_up"`` or ``"half_even"``.
        lenient: Let other functions take the float values instead of raising, and give a plain
            tensor (eager models prepared with hybrid=True).
        on_grid: Whether float values lie on the grid of the scale; False while a model is
            calibrated, where they pass unrounded.

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
        self = payload(data).as_subclass(cls)
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
        """Whether the tensor carries integers (converted model) instead of floats (training)."""
        return not payload(self).is_floating_point()

    def dequantize(self) -> Tensor:
        """Return the float values as a plain tensor; gradients pass."""
        values = payload(self)
        if values.is_floating_point():
            return values
        return ops.dequantize(values, self._q_scale, self._q_axis)

    def int_repr(self) -> Tensor:
        """Return the integers as a plain tensor of the type that holds them."""
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
        """Return other data of another scale, with this tensor's type and settings."""
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
        """Return the scale of every element, shaped as the tensor."""
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
        from bevquant_hybrid._scale_keeping import on_floats, rule_of

        rule = rule_of(func)
        lenient = rule is None and any(q.lenient for q in args if isinstance(q, QTensor))
        if rule is None and lenient:
            rule = on_floats
        if rule is None:
            name = getattr(func, "__name__", str(func))
            if name == "__get__":  # of an attribute
                name = getattr(func.__self__, "__name__", name)  # type: ignore[attr-defined]
            where = calling_module()
            raise NotImplementedError(
                f"{where + ': ' if where else ''}{name} cannot take a QTensor: its result would "
                "need a scale of its own. Use the quantized form (FloatFunctional for arithmetic, "
                "a module for others), put a DeQuantStub before it, or prepare the model with "
                "hybrid=True"
            )
        return rule(func, args, kwargs or {})


def payload(x: Tensor) -> Tensor:
    """Return what a `QTensor` carries as a plain tensor; any other tensor as it is."""
    if not isinstance(x, QTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def as_float(x: Tensor) -> Tensor:
    """Return the float values of a `QTensor`; any other tensor as it is."""
    return x.dequantize() if isinstance(x, QTensor) else x


def along(scale: Tensor, dims: int, axis: int) -> Tensor:
    """Return the scale shaped to broadcast along `axis` of a tensor with `dims` axes."""
    if scale.dim() > 1:
        return scale
    if axis < 0:
        return scale.reshape(())
    shape = [1] * dims
    shape[axis] = -1
    return scale.reshape(shape)
