"""Fake quantizers that learn their range: LSQ and PACT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid._observers import scale_of, smallest_scale
from bevquant_hybrid.qtensor import along


def _round_through(x: Tensor) -> Tensor:
    return x + (x.round() - x).detach()


class LearnedFakeQuantize(FakeQuantize):
    """Base: the first tensor observed, or a scale set, starts the parameter; training moves it."""

    def looks(self) -> bool:
        """Whether a call observes: until there is a first scale."""
        return super().looks() and not self.observed


class LSQFakeQuantize(LearnedFakeQuantize):
    r"""Learned step size (Esser et al., ICLR 2020): the scale is a parameter.

    :math:`\partial\hat{x}/\partial s` is round(v) − v inside the range and the bound outside, with
    v = x/s, times :math:`g = 1/\sqrt{n\,q_\max}` for n values (per channel: of one channel).

    Args:
        use_grad_scaling: Apply g.

    Example:
        >>> fake_quant = LSQFakeQuantize()
        >>> fake_quant(torch.tensor([0.31, 1.0])).dequantize().sum().backward()
        >>> fake_quant.scale.grad is not None
        True
    """

    def __init__(self, use_grad_scaling: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.use_grad_scaling = use_grad_scaling
        scale = self.scale
        del self._buffers["scale"]
        self.scale = torch.nn.Parameter(scale)

    def set_scale(self, scale: Tensor) -> None:
        """Start the parameter from a scale."""
        if not isinstance(self.scale, torch.nn.Parameter):  # it is being made
            return super().set_scale(scale)
        self.scale.data = scale
        self.zero_point = torch.zeros_like(scale, dtype=torch.long)

    def _positive(self) -> Tensor:
        return self.scale.abs().clamp(min=smallest_scale)

    def current_scale(self) -> Tensor:
        """The parameter's size: a step of training may have turned its sign."""
        return self._positive().detach()

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Round to the grid; the gradient reaches the scale."""
        if torch.onnx.is_in_onnx_export():
            return super().fake_quantize(x)
        scale = self._positive()
        if self.use_grad_scaling:
            count = x.numel() / scale.numel()
            share = (max(count, 1.0) * self.quant_max) ** -0.5
            scale = (scale - scale * share).detach() + scale * share
        scale = along(scale, x.dim(), self.ch_axis)
        steps = (x / scale).clamp(self.quant_min, self.quant_max)
        return _round_through(steps) * scale


class PACTFakeQuantize(LearnedFakeQuantize):
    r"""Learned clipping (Choi et al., 2018): the range ±α is a parameter.

    :math:`y = \operatorname{clamp}(x, -\alpha, \alpha)`, s = 2α/(q_max − q_min); clamped values
    send their gradient to α.

    Args:
        alpha: First α; None to take it from the first tensor observed, one per channel where the
            scheme is.

    Raises:
        ValueError: α is not positive.

    Example:
        >>> fake_quant = PACTFakeQuantize(alpha=2.0)
        >>> fake_quant(torch.tensor([5.0])).dequantize().sum().backward()
        >>> fake_quant.alpha.grad
        tensor([1.])
    """

    def __init__(self, alpha: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if alpha is not None and not alpha > 0:
            raise ValueError(f"PACTFakeQuantize: alpha={alpha}: expected a positive number")
        self.alpha = torch.nn.Parameter(torch.ones(1))
        if alpha is not None:
            self.set_qparams(2 * alpha / (self.quant_max - self.quant_min))

    def set_scale(self, scale: Tensor) -> None:
        """Start α from a scale."""
        super().set_scale(scale)
        if hasattr(self, "alpha"):
            self.alpha.data = scale * (self.quant_max - self.quant_min) / 2

    def current_scale(self) -> Tensor:
        """The scale that α has now."""
        if not self.observed:
            return super().current_scale()
        return scale_of(self.alpha.detach().abs(), self.quant_min, self.quant_max)

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Clamp at ±α and round; the gradient of clamped values reaches α."""
        if torch.onnx.is_in_onnx_export():
            return super().fake_quantize(x)
        alpha = along(self.alpha.abs(), x.dim(), self.ch_axis)
        clamped = torch.minimum(torch.maximum(x, -alpha), alpha)
        return clamped + (super().fake_quantize(clamped) - clamped).detach()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A state without α is a calibration's: α starts from its scale.
        alpha, scale = state_dict.get(prefix + "alpha"), state_dict.get(prefix + "scale")
        if alpha is None and scale is not None:
            alpha = scale.detach().abs() * ((self.quant_max - self.quant_min) / 2)
            state_dict = {**state_dict, prefix + "alpha": alpha}
        if alpha is not None and alpha.shape != self.alpha.shape:
            self.alpha.data = torch.empty_like(alpha, device=self.alpha.device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
