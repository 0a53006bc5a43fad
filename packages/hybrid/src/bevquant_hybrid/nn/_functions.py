"""Modules in place of functions, since modules are quantized."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.nn import quantized as torch_quantized
from torch.jit._trace import TracerWarning

from bevquant_hybrid._sampling import sampling_places
from bevquant_hybrid.qtensor import as_float


def showing(*names: str) -> Callable[[Any], str]:
    """An `extra_repr` that prints settings of a module."""

    def extra_repr(self: nn.Module) -> str:
        """Print the settings."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    return extra_repr


class ElementwiseFunction(nn.Module):
    """Base of elementwise functions; their quantized form is a look-up table.

    Attributes:
        function: The applied function.
        jumps: Whether it is discontinuous, so that the table's inputs must equal training's bit for
            bit.

    Example:
        >>> Exp()(torch.zeros(2))
        tensor([1., 1.])
    """

    function: ClassVar[Callable[..., Tensor]]
    jumps: ClassVar[bool] = False

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return type(self).function(x)


def _elementwise(name: str, function: Callable[..., Tensor], jumps: bool = False) -> Any:
    """The class of a function."""
    doc = f"`torch.{function.__name__}` of every element."
    about = {"function": staticmethod(function), "jumps": jumps, "__module__": __name__}
    return type(name, (ElementwiseFunction,), {**about, "__doc__": doc})


Acos, Acosh, Asin, Asinh, Atan, Atanh, Cos, Cosh, Erf, Exp, Reciprocal, Sin, Sinh, Sqrt, Tan = (
    _elementwise(function.__name__.title(), function)
    for function in (
        *(torch.acos, torch.acosh, torch.asin, torch.asinh, torch.atan, torch.atanh, torch.cos),
        *(torch.cosh, torch.erf, torch.exp, torch.reciprocal, torch.sin, torch.sinh, torch.sqrt),
        torch.tan,
    )
)
Ceil, Floor = _elementwise("Ceil", torch.ceil, True), _elementwise("Floor", torch.floor, True)
HardLog, Selu = _elementwise("HardLog", torch.log), _elementwise("Selu", F.selu)


class Pow(nn.Module):
    """x to a constant exponent.

    Args:
        exponent: The exponent; None if each call passes it.

    Raises:
        ValueError: In a call, neither has one.
    """

    def __init__(self, exponent: float | None = None) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, x: Tensor, exponent: float | None = None) -> Tensor:
        """Raise every element to the exponent."""
        power = self.exponent if exponent is None else exponent
        if power is None:
            raise ValueError("Pow: no exponent; give it to Pow(exponent) or to the call")
        return torch.pow(x, power)


class Interpolate(nn.Module):
    """`torch.nn.functional.interpolate` as a module.

    Args:
        size: Height and width of the output.
        scale_factor: Output size / input size, instead of `size`.
        mode: ``"nearest"`` or ``"bilinear"``.
        align_corners: As in torch.
        recompute_scale_factor: As in torch; a BPU needs True with a scale factor.

    Example:
        >>> Interpolate(scale_factor=2, recompute_scale_factor=True)(torch.ones(1, 1, 2, 2)).shape
        torch.Size([1, 1, 4, 4])
    """

    def __init__(
        self,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.scale_factor = scale_factor
        self.mode = mode
        self.align_corners = align_corners
        self.recompute_scale_factor = recompute_scale_factor

    def forward(self, x: Tensor) -> Tensor:
        """Resize."""
        return F.interpolate(
            x,
            self.size,
            self.scale_factor,
            self.mode,
            self.align_corners,
            self.recompute_scale_factor,
        )

    def extra_repr(self) -> str:
        given = f"size={self.size}" if self.size else f"scale_factor={self.scale_factor}"
        return f"{given}, mode={self.mode!r}"


class GridSample(nn.Module):
    r"""Read a map at places beside each point: :math:`y_{c,h,w} = x_{c,\,h + d_y,\,w + d_x}`.

    The grid holds displacements (d_x, d_y) in pixels from each output point, not positions in [−1,
    1] as in `torch.nn.functional.grid_sample`. Public documents do not define this. Public client
    code subtracts each point's coordinates and quantizes the difference to 16 bits.

    Args:
        mode: ``"bilinear"`` or ``"nearest"``.
        padding_mode: ``"zeros"`` or ``"border"``.

    Example:
        >>> x = torch.arange(4.0).reshape(1, 1, 1, 4)
        >>> to_the_right = torch.tensor([1.0, 0.0]).expand(1, 1, 4, 2)
        >>> GridSample()(x, to_the_right)
        tensor([[[[1., 2., 3., 0.]]]])
    """

    bpu_operator = "torch.nn.functional.grid_sample"

    def __init__(self, mode: str = "bilinear", padding_mode: str = "zeros") -> None:
        super().__init__()
        if mode not in ("bilinear", "nearest") or padding_mode not in ("zeros", "border"):
            raise ValueError(
                f"GridSample(mode={mode!r}, padding_mode={padding_mode!r}): expected 'bilinear' or "
                "'nearest', and 'zeros' or 'border'"
            )
        self.mode, self.padding_mode = mode, padding_mode

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        """Sample ``[N, C, H, W]`` by displacements ``[N, H', W', 2]``."""
        places = sampling_places(as_float(grid), x.shape[2], x.shape[3])
        return F.grid_sample(x, places, self.mode, self.padding_mode, align_corners=False)

    extra_repr = showing("mode", "padding_mode")


def normalized(
    x: Tensor, axes: list[int], eps: float, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """(x − mean)/√(variance + ε)·weight + bias, both statistics over `axes`."""
    deviation = x - x.mean(axes, keepdim=True)
    variance = deviation.square().mean(axes, keepdim=True)
    result = deviation * torch.rsqrt(variance + eps)
    if weight is not None:
        result = result * weight
    return result if bias is None else result + bias


def last_axes(norm: Any) -> list[int]:
    """Axes of the statistics of torch's norms."""
    return [-1 - i for i in range(len(norm.normalized_shape))]


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` that can normalize other axes than the last ones.

    Args:
        normalized_shape: Shape of weight and bias, which broadcast against the input from the
            right: ``[channels, 1, 1]`` for ``dim=1`` of ``[N, channels, height, width]``.
        eps: Added to the variance.
        elementwise_affine: Whether the module has weight and bias.
        device: As in torch, like `dtype`.
        dtype: As in torch.
        dim: Axis or axes of the statistics; None for the last ones, as many as
            `normalized_shape` has, which is torch's layer norm.

    Example:
        >>> x = torch.arange(6.0).reshape(1, 3, 1, 2)
        >>> LayerNorm([3, 1, 1], dim=1)(x)[0, :, 0, 0].sum().abs().item() < 1e-5
        True
    """

    dim: int | tuple[int, ...] | None = None  # of torch's own, which has no such attribute

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        dim: int | Sequence[int] | None = None,
    ) -> None:
        shape = normalized_shape if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device=device, dtype=dtype)
        self.dim = dim if dim is None or isinstance(dim, int) else tuple(dim)

    @property
    def axes(self) -> list[int]:
        """Axes of the statistics."""
        if self.dim is None:
            return last_axes(self)
        return [self.dim] if isinstance(self.dim, int) else list(self.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        if self.dim is None:
            return super().forward(x)
        return normalized(x, self.axes, self.eps, self.weight, self.bias)

    def extra_repr(self) -> str:
        given = super().extra_repr()
        return given if self.dim is None else f"{given}, dim={self.dim}"


class InverseNorm(nn.Module):
    r"""The function :math:`1 / \max(\sqrt{x}, \epsilon)` of a sum of squares."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Apply it to every element."""
        return x.clamp(min=0.0).sqrt().clamp(min=self.eps).reciprocal()


class Normalize(nn.Module):
    r"""`torch.nn.functional.normalize` with p = 2: :math:`x / \max(\lVert x \rVert_2, \epsilon)`.

    Args:
        dim: Axis or axes of the norm.
        eps: Smallest norm that is divided by.

    Example:
        >>> Normalize()(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """

    def __init__(self, dim: int | Sequence[int] = 1, eps: float = 1e-12) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize."""
        dim: Any = self.dim
        return nn.functional.normalize(x, 2.0, dim, self.eps)

    extra_repr = showing("dim", "eps")


class RMSNorm(nn.RMSNorm):
    r"""`torch.nn.RMSNorm`: :math:`x / \sqrt{\overline{x^2} + \epsilon}\,w`.

    Example:
        >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 4.0]])).square().mean().round().item()
        1.0
    """


def _add_relu(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


def _matmul(x: Tensor, y: Tensor, x_trans: bool, y_trans: bool) -> Tensor:
    left, right = (v.transpose(-1, -2) if t else v for v, t in ((x, x_trans), (y, y_trans)))
    return torch.matmul(left, right)


# `Arithmetic` adds the operations that take two tensors, or one and its axes.
FLOAT_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "matmul": _matmul,
    "cat": lambda *tensors, dim: torch.cat(tensors, dim),
    "add_scalar": lambda x, number: x + number,
    "mul_scalar": lambda x, number: x * number,
}


def _number(value: Any) -> float:
    """A plain number: under torch.jit.trace, sizes are tensors."""
    if not isinstance(value, Tensor):
        return float(value) if isinstance(value, int | float) else value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracerWarning)
        return float(value)


def _method(function: Callable[..., Any], doc: str, *, reduces: bool = False) -> Any:
    """The method that computes a function of two tensors, or of one along axes."""
    name = function.__name__.lstrip("_")
    FLOAT_OPERATIONS[name] = function

    def of_two(self: Arithmetic, x: Tensor, y: Tensor) -> Tensor:
        return self.operate(name, [x, y])

    def along(self: Arithmetic, x: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
        return self.operate(name, [x], dim=dim, keepdim=keepdim)

    made = along if reduces else of_two
    made.__name__, made.__qualname__, made.__doc__ = name, f"Arithmetic.{name}", doc
    return made


class Arithmetic:
    """Methods of `FloatFunctional`; each object is one place in a model."""

    def operate(self, name: str, tensors: list[Tensor], **settings: Any) -> Tensor:
        """Compute one of `FLOAT_OPERATIONS`."""
        return FLOAT_OPERATIONS[name](*tensors, **settings)

    def forward(self, *args: Any) -> Any:
        """Refuse a call without a method.

        Raises:
            TypeError: Always.
        """
        kind = type(self).__name__
        raise TypeError(f"{kind}: call a method of it (add, mul, cat, …), not itself")

    add, add_relu = _method(operator.add, "X + y."), _method(_add_relu, "max(x + y, 0).")
    sub, mul = _method(operator.sub, "X − y."), _method(operator.mul, "x·y, element by element.")
    maximum = _method(torch.maximum, "Elementwise maximum.")
    minimum = _method(torch.minimum, "Elementwise minimum.")
    mean = _method(torch.mean, "Mean over `dim`.", reduces=True)
    sum = _method(torch.sum, "Sum over `dim`.", reduces=True)

    def matmul(self, x: Tensor, y: Tensor, x_trans: bool = False, y_trans: bool = False) -> Tensor:
        """Matrix product; `x_trans`, `y_trans` transpose the last two axes first."""
        return self.operate("matmul", [x, y], x_trans=x_trans, y_trans=y_trans)

    def cat(self, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Join along `dim`.

        Raises:
            TypeError: One tensor instead of a list, as in torch.
        """
        if isinstance(tensors, Tensor):
            name = getattr(self, "qualified_name", "") or type(self).__name__
            raise TypeError(
                f"{name}: cat: expected a list or tuple of tensors, got one tensor of "
                f"{tensors.dim()} axes; hand over all that are joined"
            )
        return self.operate("cat", list(tensors), dim=dim)

    def add_scalar(self, x: Tensor, y: float) -> Tensor:
        """X plus a number."""
        return self.operate("add_scalar", [x], number=_number(y))

    def mul_scalar(self, x: Tensor, y: float) -> Tensor:
        """X times a number."""
        return self.operate("mul_scalar", [x], number=_number(y))


class FloatFunctional(Arithmetic, torch_quantized.FloatFunctional):
    """`torch.nn.quantized.FloatFunctional` with sub, mean, sum, maximum, minimum and matmul.

    Use one object per place in a model: its QAT form has one output scale.

    Example:
        >>> import torch
        >>> FloatFunctional().sub(torch.tensor(3.0), torch.tensor(1.0))
        tensor(2.)
    """

    __module__ = "bevquant_hybrid.nn.quantized.functional_modules"  # its documented home


class Div(nn.Module):
    """x / y, element by element; shapes broadcast.

    Quantized, x/0 is the largest integer of x's sign and 0/0 is 0. BAYES divides 16 bits.

    Example:
        >>> Div()(torch.tensor([3.0]), torch.tensor([2.0]))
        tensor([1.5000])
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Divide."""
        return torch.div(x, y)


class Where(nn.Module):
    """X where a condition holds, else y; x or y may be a number, and shapes broadcast.

    Quantized, both are rescaled to the result's scale, each rounded once.

    Example:
        >>> x = torch.tensor([-1.0, 2.0])
        >>> Where()(x > 0, x, 0.5)
        tensor([0.5000, 2.0000])
    """

    def forward(self, condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
        """Select."""
        return torch.where(condition, x, y)
