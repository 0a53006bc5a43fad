"""Fake quantization: quantize to integers or FP8 and back, in one differentiable step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ._descriptor import kept_axes
from ._format import NumBits, check_bits, format_of
from ._jit import use_numba
from ._steps import refuse_negative, scales

# Loading numba for less than this is not worth it.
_SMALLEST_KERNEL = 1 << 14

_Options = tuple[NumBits, bool, bool]
_Step = Callable[[Tensor, Tensor, _Options, bool], tuple[Tensor, Tensor | None]]


def fake_quantize(
    x: Tensor,
    amax: Tensor | float,
    num_bits: NumBits = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
    axis: int | Sequence[int] | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    r"""Round to the numbers of a format and return to floating point.

    .. math:: y = \operatorname{clamp}(\operatorname{round}(x s), q_\min, q_\max) / s,
              \quad s = q_\max / \text{amax}

    Bit for bit what ``pytorch_quantization.tensor_quant.fake_tensor_quant`` 2.1.3 computes.
    Rounding is half to even, after the multiplication and before the clamp. The clamp range is
    −127…127 for eight signed bits, −128…127 with ``narrow_range=False``, 0…255 when unsigned.
    With (4, 3) and (5, 2) the clamp comes first, then the cast to FP8 (E4M3 up to 448, E5M2 up to
    57344; half to even, subnormal numbers included), in float32. ModelOpt 0.47 multiplies by
    reciprocals: its values differ by two units in the last place, or near a tie by a step.
    Where amax is at most 2⁻²⁴ the output is zero, where it is infinite or NaN it is NaN. float16 is
    computed in float32.

    The gradient passes straight through where \|x\| ≤ amax and is zero elsewhere. Where amax asks
    for a gradient it gets what a clip to [−amax, amax] gives: the gradients above the range minus
    those below (PACT, arXiv 1805.06085).

    Args:
        x: Values, any shape, float.
        amax: Largest absolute value represented: a number, a tensor that broadcasts to `x`, or,
            with `axis`, one value for each index of these axes.
        num_bits: Bits of the integer, sign included; (4, 3) or (5, 2) for FP8.
        unsigned: Use 0…2^num_bits − 1. Negative inputs are then an error.
        narrow_range: Leave out the most negative integer, so that the range is symmetric.
        axis: Axis or axes of `x` that `amax` runs over, where its shape does not say so.
        backend: "torch", "numba" (one pass over float32 memory on the CPU; what it cannot take
            goes to torch) or "auto": numba where it is installed and `x` is large. The results are
            the same bit for bit, at any number of threads.

    Returns:
        A tensor shaped and typed as `x`.

    Raises:
        ValueError: A negative amax, one whose shape does not fit, or an unknown backend.
        TypeError: A negative input while unsigned, or an input that is not floating point.

    Examples:
        >>> import torch
        >>> fake_quantize(torch.tensor([0.3, -1.0, 9.0]), torch.tensor(1.27))
        tensor([ 0.3000, -1.0000,  1.2700])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        came = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"fake_quantize needs floating-point input, got {came}: convert it first")
    if isinstance(num_bits, str):
        check_bits(num_bits)
        raise TypeError(f"fake_quantize: {num_bits} has blocks: use fake_quantize_blocks")
    if not isinstance(amax, Tensor):
        try:
            amax = torch.tensor(amax, dtype=torch.float32, device=x.device)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"fake_quantize: amax {amax!r:.80} is no number of float32") from error
    elif amax.is_complex():
        raise TypeError(f"fake_quantize: amax must be real, got {amax.dtype}")
    if axis is not None:
        amax = _along(amax, x, axis)
    if torch.compiler.is_compiling():  # torch.export too: one operator, whatever computes it
        # Not `format_of`: torch.compile warns of functions with a cache.
        pair = num_bits if isinstance(num_bits, tuple) else None
        exponent, bits = (pair[0], 1 + sum(pair)) if pair else (0, num_bits)
        traced: Tensor = _operator(x, amax, bits, unsigned, narrow_range, exponent)
        return traced
    if any(
        a not in (1, n) and n != 1 for a, n in zip(amax.shape[::-1], x.shape[::-1], strict=False)
    ):
        raise ValueError(
            f"amax of shape {tuple(amax.shape)} does not fit an input of shape {tuple(x.shape)}"
        )
    return _computed(x, amax, (check_bits(num_bits), unsigned, narrow_range), backend)


def _computed(x: Tensor, amax: Tensor, options: _Options, backend: str) -> Tensor:
    step: _Step = _torch_step
    if use_numba(backend, _worth_a_kernel(x)):
        from ._fake_quant_numba import one_pass

        step = partial(one_pass, otherwise=_torch_step, packed=not amax.requires_grad)
    if torch.is_grad_enabled() and (x.requires_grad or amax.requires_grad):
        y: Tensor = _FakeQuantize.apply(x, amax, options, step)[0]
        return y
    return step(x, amax, options, False)[0]


@torch.library.custom_op("bevquant_quantizers::fake_quantize", mutates_args=())
def _operator(
    x: Tensor,
    amax: Tensor,
    num_bits: int,
    unsigned: bool,
    narrow_range: bool,
    exponent_bits: int = 0,
) -> Tensor:
    """`fake_quantize` as one operator of a traced graph; all bits and the exponent's of FP8."""
    bits: NumBits = num_bits
    if exponent_bits:
        bits = exponent_bits, num_bits - 1 - exponent_bits
    # A capture may run it, so it must not ask whether there is one.
    return _computed(x, amax, (bits, unsigned, narrow_range), "auto")


@_operator.register_fake
def _(
    x: Tensor,
    amax: Tensor,
    num_bits: int,
    unsigned: bool,
    narrow_range: bool,
    exponent_bits: int = 0,
) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _straight_through(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, amax = ctx.saved_tensors
    inside = x.abs() <= amax
    grad_x = torch.where(inside, grad, 0.0) if ctx.needs_input_grad[0] else None
    grad_amax = None
    if ctx.needs_input_grad[1]:
        grad_amax = torch.where(inside, 0.0, grad * x.sign()).sum_to_size(amax.shape)
    return grad_x, grad_amax, None, None, None, None


_operator.register_autograd(_straight_through, setup_context=_save)


def _worth_a_kernel(x: Tensor) -> bool:
    return (
        x.numel() >= _SMALLEST_KERNEL
        and x.device.type == "cpu"
        and type(x) in (Tensor, torch.nn.Parameter)
        and not torch._C._get_tracing_state()
        and not torch.compiler.is_compiling()
    )


def _along(amax: Tensor, x: Tensor, axis: int | Sequence[int]) -> Tensor:
    """Reshape amax so that it broadcasts to x along `axis`."""
    axes = kept_axes(axis, x.shape, "fake_quantize")
    shape = [size if i in axes else 1 for i, size in enumerate(x.shape)]
    if list(amax.shape) == shape or amax.numel() == 1:
        return amax
    if amax.numel() != torch.Size(shape).numel():
        raise ValueError(
            f"amax of shape {tuple(amax.shape)} does not fit axis {axis} of an input of shape "
            f"{tuple(x.shape)}: expected {tuple(shape)}"
        )
    return amax.reshape(shape)


def _torch_step(
    x: Tensor, amax: Tensor, options: _Options, masked: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the fake-quantized x and, where asked, the mask of what lies inside the range."""
    form = format_of(*options)
    if options[1] and bool((x < 0).any()):
        refuse_negative(x)
    up, down = scales(amax, form.high)
    if form.dtype is not None:  # E5M2's scales are beyond float16
        wide = x.float() if x.dtype in (torch.half, torch.bfloat16) else x
        return (form.rounded(wide * up) / down).to(x.dtype), x.abs() <= amax if masked else None
    if x.dtype == torch.half:
        q = form.rounded(x.float() * up).half()
    else:
        q = form.rounded(x * up)
    return q / down.to(x.dtype), x.abs() <= amax if masked else None


class _FakeQuantize(Function):
    @staticmethod
    def forward(
        x: Tensor, amax: Tensor, options: _Options, step: _Step
    ) -> tuple[Tensor, Tensor | None]:
        return step(x, amax, options, True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, amax = inputs[:2]
        inside = output[1]
        ctx.mark_non_differentiable(inside)
        ctx.set_materialize_grads(False)  # or the mask would get a gradient of zeros
        ctx.amax_shape = amax.shape
        # x itself is needed for its sign alone, and only where amax learns.
        ctx.save_for_backward(inside, *([x] if ctx.needs_input_grad[1] else []))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        inside, *rest = ctx.saved_tensors
        grad_x = grad_amax = None
        if ctx.needs_input_grad[0]:
            grad_x = _keep(grad, inside)
        if ctx.needs_input_grad[1]:
            outside = torch.where(inside, 0.0, grad * rest[0].sign())
            grad_amax = outside.sum_to_size(ctx.amax_shape)
        return grad_x, grad_amax, None, None


def _keep(grad: Tensor, inside: Tensor) -> Tensor:
    """Return the gradient where `inside`, zero elsewhere."""
    if inside.dtype == torch.int16:  # one bit a value
        from ._fake_quant_numba import keep_packed, unpack

        if not torch.is_grad_enabled():
            return keep_packed(grad, inside)
        inside = unpack(inside).reshape(grad.shape)
    fast = use_numba("auto", _worth_a_kernel(grad) and grad.dtype == torch.float32)
    if fast and not torch.is_grad_enabled():
        from ._fake_quant_numba import keep

        kept = keep(grad, inside)
        if kept is not None:
            return kept
    return torch.where(inside, grad, 0.0)


def torch_fake_quantize(
    inputs: Tensor, amax: Tensor, num_bits: NumBits, unsigned: bool, where: str
) -> Tensor:
    """Fake-quantize with torch's own ops, by the full range; `where` begins a message."""
    if not isinstance(num_bits, int):
        raise TypeError(
            f"{where}: torch's fake-quantization ops (use_fb_fake_quant) know integers alone, got "
            f"num_bits={num_bits}: leave use_fb_fake_quant off, or use num_bits=8"
        )
    if inputs.dtype in (torch.half, torch.bfloat16) or amax.dtype == torch.half:
        raise TypeError(
            f"{where}: torch's fake-quantization ops (use_fb_fake_quant) need float32, got "
            f"{inputs.dtype}: switch autocast off for export"
        )
    top = (1 << (num_bits - 1 + int(unsigned))) - 1
    low = 0 if unsigned else -top - 1
    if amax.numel() == 1:
        # Tensors, not numbers: torch.export follows no number out of a tensor.
        step = (amax.detach().double().reshape(()) / top).float()
        zero = torch.zeros((), dtype=torch.int32, device=amax.device)
        return torch.fake_quantize_per_tensor_affine(inputs, step, zero, low, top)
    wide = [i for i, n in enumerate(amax.shape) if n != 1]
    if len(wide) != 1:
        raise TypeError(
            f"{where}: torch's fake-quantization ops (use_fb_fake_quant) allow one axis, the amax "
            f"has shape {tuple(amax.shape)}"
        )
    scale = amax.detach().flatten() / top
    zero = torch.zeros_like(scale, dtype=torch.int32)
    axis = wide[0] + inputs.dim() - amax.dim()
    return torch.fake_quantize_per_channel_affine(inputs, scale, zero, axis, low, top)
