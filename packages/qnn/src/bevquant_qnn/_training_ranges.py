"""Ranges in training: learned together with the weights (LSQ), or followed for the first steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from bevquant_graph import ordinary_tensors
from bevquant_qnn._freeze import range_in_use, weights_read
from bevquant_qnn._holders import activation_quantizers
from bevquant_quantizers import NumBits, TensorQuantizer, fake_quantize, format_of

SMALLEST = 2.0**-20


class LearnedRange(TensorQuantizer):
    """A quantizer whose `_amax` is a parameter, trained by the gradient of `lsq`.

    Its output and its state-dict key are those of `TensorQuantizer`, so checkpoints are
    exchangeable with models of fixed ranges. Made by `learn_ranges`, ended by `freeze`.
    """

    @property
    def amax(self) -> Tensor | None:
        """The current range, without gradient; set it like a fixed one."""
        learned = self._parameters.get("_amax")
        return self._buffers.get("_amax") if learned is None else learned.detach()

    @amax.setter
    def amax(self, value: Any) -> None:
        TensorQuantizer.amax.fset(self, value)  # type: ignore[attr-defined]

    def _quant_forward(self, inputs: Tensor) -> Tensor:
        learned = self._parameters.get("_amax")
        if learned is None or not torch.is_grad_enabled():
            return super()._quant_forward(inputs)
        return lsq(inputs, learned, self.num_bits, self.unsigned, self.narrow_range)

    def _get_amax(self, inputs: Tensor) -> Tensor:
        # An optimizer's step may have gone beyond zero.
        return super()._get_amax(inputs).clamp(min=SMALLEST)

    def scale_range(self, factor: Tensor, inputs: Tensor) -> Tensor:
        """As `TensorQuantizer.scale_range`, for the range in use."""
        learned = self._parameters.get("_amax")
        if learned is not None:
            learned.data.clamp_(min=SMALLEST)
        return super().scale_range(factor, inputs)

    def extra_repr(self) -> str:
        """Print that the range is learned."""
        words = super().extra_repr()
        return words if self._parameters.get("_amax") is None else f"{words} lsq"


def lsq(
    x: Tensor, amax: Tensor, num_bits: NumBits, unsigned: bool = False, narrow_range: bool = False
) -> Tensor:
    r"""Fake-quantize with the gradients of learned step size quantization.

    .. math:: \frac{\partial y}{\partial s} = \begin{cases} \operatorname{round}(x/s) - x/s &
              q_\min \le x/s \le q_\max \\ q_\min \text{ or } q_\max & \text{beyond} \end{cases}

    with s = amax/q_max, times g = 1/√(N·q_max), N the values that share a step (Esser et al. 2020,
    arXiv 1902.08153, equations 3 to 5 and section 2.2). The gradient that amax gets is
    q_max·g·Σ ∂L/∂y·∂y/∂s: a plain gradient step on amax moves s as the paper's step on s does. x
    gets the gradient within the range, zero beyond.

    Args:
        x: Values, any shape.
        amax: Range, broadcasts to `x`; a value below 2⁻²⁰ counts as that.
        num_bits: Bits of the integer, or of FP8, whose rounding is y/s and q_max 448 (E4M3).
        unsigned: Integers from 0.
        narrow_range: Without the most negative integer.

    Returns:
        Exactly `bevquant_quantizers.fake_quantize`'s result.

    Example:
        >>> import torch
        >>> amax = torch.tensor(7.0, requires_grad=True)
        >>> lsq(torch.tensor([0.4, 20.0]), amax, 4).sum().backward()
        >>> round(float(amax.grad / (7 / (2 * 7) ** 0.5)), 2)  # (0 − 0.4) + 7
        6.6
    """
    y: Tensor = _Lsq.apply(x, amax, num_bits, unsigned, narrow_range)
    return y


class _Lsq(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, amax: Tensor, num_bits: NumBits, unsigned: bool, narrow_range: bool
    ) -> Tensor:
        amax = amax.detach().clamp(min=SMALLEST)
        y = fake_quantize(x, amax, num_bits, unsigned, narrow_range)
        ctx.save_for_backward(x, amax, y)
        ctx.form = format_of(num_bits, unsigned, narrow_range)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, amax, y = ctx.saved_tensors
        low, high = ctx.form.low, ctx.form.high
        step = amax / high
        grad_x = torch.where(x.clamp(low * step, amax) == x, grads[0], 0.0)
        # s·∂y/∂s is y − x within the range and y beyond.
        moment = torch.addcmul(grads[0] * y, grad_x, x, value=-1).sum_to_size(amax.shape)
        shared = max(1, x.numel() // max(1, amax.numel()))
        return grad_x, moment / step * (high / math.sqrt(shared * high)), None, None, None


@ordinary_tensors()
def learn_ranges(
    model: nn.Module, *, inputs: bool = True, weights: bool = True
) -> list[nn.Parameter]:
    """Make the ranges of active quantizers parameters that training learns, in place (LSQ).

    They start at the calibrated ranges (a weight without one at its maximum), and shared quantizers
    stay shared. Give the returned parameters to the optimizer in a group of their own, without
    weight decay. `freeze` fixes the learned ranges.

    Args:
        model: Calibrated, from `quantize_model`.
        inputs: Learn the ranges of activations.
        weights: Learn the ranges of weights.

    Returns:
        The new parameters, each once.

    Raises:
        ValueError: Activations without a usable range; they are listed.

    Example:
        >>> import torch
        >>> from bevquant_qnn import QuantLinear, freeze
        >>> layer = QuantLinear(2, 2)
        >>> layer.input_quantizer.amax = 4.0
        >>> [tuple(p.shape) for p in learn_ranges(layer)]
        [(), (2, 1)]
        >>> layer(torch.randn(3, 2)).sum().backward()
        >>> layer.input_quantizer._amax.grad is not None
        True
        >>> freeze(layer)
        ('_input_quantizer', '_weight_quantizer')
    """
    read = weights_read(model)
    chosen: dict[str, tuple[TensorQuantizer, Tensor | None]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, TensorQuantizer) or module._disabled or module._learn_amax:
            continue
        if isinstance(module.num_bits, str):
            continue  # scales of blocks follow the values
        if weights if module in read else inputs:
            chosen[path] = (module, range_in_use(module, read))
    bare = [
        path
        for path, (_, amax) in chosen.items()
        if amax is None or not bool((amax.isfinite() & (amax >= 0)).all())
    ]
    if bare:
        raise ValueError(
            f"learn_ranges: {', '.join(bare)} have no range to start from; calibrate the model "
            "first (bevquant_quantizers.calibrate)"
        )
    parameters = []
    for quantizer, amax in chosen.values():
        if not isinstance(quantizer, LearnedRange):
            quantizer.__class__ = LearnedRange
        if quantizer._parameters.get("_amax") is None:
            # A name is a parameter or a buffer, not both.
            quantizer._buffers.pop("_amax", None)
            start = amax.detach().clone()  # type: ignore[union-attr]
            quantizer._parameters["_amax"] = nn.Parameter(start.float())
        parameters.append(quantizer._parameters["_amax"])
    return parameters  # type: ignore[return-value]


class RangeTracker:
    """Result of `track_ranges`.

    Attributes:
        steps: Number of forward passes in training mode after which ranges are constant.
        done: Number of passes so far. Set it when a run is resumed; the ranges are in the model's
            state dict.
    """

    def __init__(self, model: nn.Module, steps: int, decay: float) -> None:
        self.steps = steps
        self.done = 0
        self._decay = decay
        self._training = model
        quantizers = dict.fromkeys(holder.quantizer for holder in activation_quantizers(model))
        self._handles = [q.register_forward_pre_hook(self._follow) for q in quantizers]
        self._handles.append(model.register_forward_hook(self._count))

    @property
    def frozen(self) -> bool:
        """Whether the ranges are constant."""
        return self.done >= self.steps

    def stop(self) -> None:
        """Keep the ranges constant from now on."""
        self.done = max(self.done, self.steps)
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _follow(self, quantizer: Any, args: tuple[Any, ...]) -> None:
        value = args[0]
        usable = isinstance(value, Tensor) and value.numel() > 0 and not quantizer._disabled
        if not self._training.training or self.frozen or not usable or quantizer.axis is not None:
            return
        largest = value.detach().abs().amax().float()
        now = quantizer.amax
        if now is None:
            quantizer.amax = largest
        else:
            now.mul_(self._decay).add_(largest.to(now) * (1 - self._decay))

    def _count(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training:
            self.done += 1
            if self.frozen:
                self.stop()


def track_ranges(model: nn.Module, steps: int, *, decay: float = 0.99) -> RangeTracker:
    """Let activation ranges follow their largest values for `steps` training passes.

    After each use in training mode amax ← decay·amax + (1 − decay)·max|x| (Jacob et al. 2018, arXiv
    1712.05877, section 3.1: moving averages, frozen when the network is stable). Evaluation changes
    nothing. A quantizer without a range starts with that of its first batch. Weight ranges are not
    affected: constant where calibrated, else max|w| of each step.

    Args:
        model: From `quantize_model`, called as a whole once per training step.
        steps: Forward passes in training mode after which the ranges are constant.
        decay: Share of the old range that each pass keeps, 0 to 1.

    Returns:
        The tracker, which removes its hooks by itself.

    Raises:
        ValueError: A negative number of steps, or a decay outside 0 to 1.

    Example:
        >>> import torch
        >>> from bevquant_qnn import QuantLinear
        >>> layer = QuantLinear(2, 2)
        >>> tracker = track_ranges(layer, steps=1)
        >>> for size in (1.0, 5.0):
        ...     output = layer(torch.full((1, 2), size))
        >>> tracker.frozen, layer.input_quantizer.amax
        (True, tensor(1.))
    """
    if steps < 0 or not 0 <= decay <= 1:
        raise ValueError(
            f"track_ranges: steps must not be negative and decay in 0…1, got {steps} and {decay}"
        )
    tracker = RangeTracker(model, steps, decay)
    if tracker.frozen:
        tracker.stop()
    return tracker
