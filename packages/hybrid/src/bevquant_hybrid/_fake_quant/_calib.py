"""Fake quantizers of calibration: they count, and change nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization import FakeQuantizeBase

from bevquant_hybrid._calling_module import calling_module
from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid._fake_quant._function import is_written
from bevquant_hybrid._fake_quant._observer_of import made_observer
from bevquant_hybrid._observers._calib import CalibObserver
from bevquant_hybrid.dtype import QuantDType
from bevquant_hybrid.qtensor import QTensor, payload

__all__ = ["CalibFakeQuantize", "_WrappedCalibFakeQuantize"]


class CalibFakeQuantize(FakeQuantizeBase):
    """Show a tensor to an observer and pass it on as it is.

    Args:
        observer: Class of the observer; `NoopObserver` for weights.
        **observer_kwargs: Passed to it.

    Raises:
        TypeError: An argument that it does not take.

    Example:
        >>> calib = CalibFakeQuantize()
        >>> calib(torch.tensor([0.3, 0.7])).dequantize()
        tensor([0.3000, 0.7000])
    """

    def __init__(self, observer: type[Any] = CalibObserver, **observer_kwargs: Any) -> None:
        super().__init__()
        self.activation_post_process = made_observer(type(self).__name__, observer, observer_kwargs)

    @property
    def dtype(self) -> QuantDType:
        """The integer type that the model is calibrated for."""
        found: QuantDType = self.activation_post_process.dtype
        return found

    @property
    def observed(self) -> bool:
        """Whether the observer has seen anything that gives a scale."""
        return bool(getattr(self.activation_post_process, "observed", False))

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the scale and zero point found; 1 and 0 where nothing was seen."""
        if not self.observed:
            return torch.ones(1), torch.zeros(1, dtype=torch.long)
        found: tuple[Tensor, Tensor] = self.activation_post_process.calculate_qparams()
        return found

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Return the tensor."""
        return x

    def forward(self, x: Tensor) -> QTensor:
        """Count where that is enabled; return the values as they are."""
        x = payload(x)
        if not is_written() and bool(self.observer_enabled[0]):
            try:
                self.activation_post_process(x.detach())
            except ValueError as error:
                raise ValueError(f"{calling_module()}: {error}") from error
        return QTensor(x, torch.ones(1, device=x.device), self.dtype, on_grid=False)


class _WrappedCalibFakeQuantize(torch.nn.Module):
    """What a boundary's `CalibFakeQuantize` becomes in a QAT model: a `FakeQuantize` within."""

    def __init__(self, fake_quant: FakeQuantize) -> None:
        super().__init__()
        self.activation_post_process = fake_quant

    def forward(self, x: Tensor) -> QTensor:
        """Fake-quantize."""
        quantized: QTensor = self.activation_post_process(x)
        return quantized
