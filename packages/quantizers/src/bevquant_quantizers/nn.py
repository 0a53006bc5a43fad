"""The module that quantizes a tensor, calibrates its range, or learns it.

It and `Clip` are found here as in ``pytorch_quantization.nn``.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from ._clip import Clip
from ._descriptor import kept_axes
from ._quantizer_state import QuantizerState
from .tensor_quant import fake_tensor_quant, tensor_quant

__all__ = ["Clip", "TensorQuantizer"]

_log = logging.getLogger(__name__)


class TensorQuantizer(QuantizerState):
    """Quantizes a tensor as its descriptor says; names and behaviour of pytorch-quantization.

    A call goes through up to three stages: calibration watches the tensor, clipping cuts it to a
    learned range, quantization rounds it. Without a range (no amax in the descriptor, none
    calibrated) every tensor is quantized to its own largest value: the range is dynamic.

    The state dict holds `_amax` where there is a range, and ``clip.clip_value_min`` and
    ``clip.clip_value_max`` where it is learned. `load_state_dict` creates `_amax` where the
    quantizer had none.

    Args:
        quant_desc: What to do.
        disabled: Return the input untouched.
        if_quant: Quantize.
        if_clip: Clip to the learned range; needs ``learn_amax``.
        if_calib: Collect statistics.

    Raises:
        ValueError: `if_clip` without ``learn_amax``, or an unknown calibration method.

    Examples:
        >>> import torch
        >>> from bevquant_quantizers import QuantDescriptor
        >>> quantizer = TensorQuantizer(QuantDescriptor(amax=1.27))
        >>> quantizer(torch.tensor([0.304, 9.0]))
        tensor([0.3000, 1.2700])
        >>> quantizer
        TensorQuantizer(8bit fake per-tensor amax=1.2700 calibrator=MaxCalibrator scale=1.0 quant)
    """

    use_fb_fake_quant = False
    """Quantize with torch's own fake-quantization ops, which ONNX exporters know.

    Set on the class it holds for every quantizer, as upstream; set on one quantizer, for that one.
    These ops use the full range, −128…127, and multiply by a reciprocal: results may differ from
    the default in the last bit, and by one step at ties.
    """

    def load_calib_amax(self, *args: Any, **kwargs: Any) -> None:
        """Take the range from the calibrator.

        Args:
            *args: Passed on to the calibrator's `compute_amax`.
            **kwargs: Likewise, but for ``strict``: True (the default) raises where the calibrator
                has seen nothing, or nothing but zeros; False stores NaN, or the zero, and logs it.

        Raises:
            RuntimeError: No calibrator, or under ``strict`` no usable range.
        """
        strict = kwargs.pop("strict", True)
        if self._calibrator is None:
            raise RuntimeError(f"{self._who()}: Calibrator not created.")
        amax = self._calibrator.compute_amax(*args, **kwargs)
        problem = ""
        if amax is None:
            amax = torch.tensor(torch.nan)
            problem = "Calibrator returned None: it has seen no tensor (or only empty ones)"
        elif bool(amax.isnan().any()):
            problem = "the calibrated amax is NaN"
        elif not bool(amax.any()):
            problem = "the calibrated amax is 0: every value seen was zero"
        if problem:
            message = (
                f"{self._who()}: {problem}. Run batches that reach it, disable it, or pass "
                "'strict=False' to load_calib_amax() to ignore the error."
            )
            if strict:
                raise RuntimeError(message)
            _log.warning("%s amax is set to %s.", message, amax.flatten()[0].item())
        old = self.amax
        if old is None:
            self.register_buffer("_amax", amax.detach().float().clone())
        else:
            old.data.copy_(amax)

    def init_learn_amax(self) -> None:
        """Start the learned range from the fixed one, the largest where there are several.

        Raises:
            RuntimeError: The range is not learned, or there is no fixed one.
        """
        if not self._learn_amax:
            raise RuntimeError(f"{self._who()}: Called init_learn_amax with learn_amax=False.")
        if self.amax is None:
            raise RuntimeError(
                f"{self._who()}: there is no amax to start from: call load_calib_amax() first"
            )
        start = self.amax.max().to(self.clip.clip_value_max)
        self.clip.clip_value_min.data.copy_(-start)
        self.clip.clip_value_max.data.copy_(start)

    def forward(self, inputs: Tensor) -> Tensor:
        """Calibrate, clip and quantize, as far as these stages are on.

        Args:
            inputs: Any shape; float where it is quantized.

        Returns:
            A tensor of the same shape and dtype: `inputs` itself where nothing is on.
        """
        if self._disabled:
            return inputs
        if self._if_calib:
            if self._calibrator is None:
                raise RuntimeError(f"{self._who()}: Calibrator was not created.")
            self._calibrator.collect(inputs)
        outputs = inputs
        if self._if_clip or (self._if_quant and self._learn_amax):
            outputs = self.clip(inputs)
        return self._quant_forward(outputs) if self._if_quant else outputs

    def _quant_forward(self, inputs: Tensor) -> Tensor:
        if self._learn_amax:
            low, high = self.clip.clip_value_min, self.clip.clip_value_max
            amax = torch.maximum(-low, high).detach()
        else:
            amax = self._get_amax(inputs)
        if not self._fake_quant:
            outputs, self._scale = tensor_quant(inputs, amax, self._num_bits, self._unsigned)
            return outputs
        if self.use_fb_fake_quant:
            return self._fb_fake_quant(inputs, amax)
        return fake_tensor_quant(inputs, amax, self._num_bits, self._unsigned, self._narrow_range)

    def _get_amax(self, inputs: Tensor) -> Tensor:
        amax = self.amax
        if amax is None:
            amax = self._dynamic_amax(inputs)
        elif amax.device != inputs.device:
            self._amax = amax = amax.to(inputs.device)
        return amax if self._scale_amax is None else amax.detach() * self._scale_amax

    @torch.no_grad()
    def _dynamic_amax(self, inputs: Tensor) -> Tensor:
        if inputs.numel() == 0:
            return inputs.new_ones(())
        kept = kept_axes(self._axis, inputs.shape, self._who())
        reduced = [i for i in range(inputs.dim()) if i not in kept]
        size = inputs.abs()
        amax = size.amax(reduced, keepdim=True) if reduced else size
        return amax.reshape(()) if amax.numel() == 1 else amax

    def _fb_fake_quant(self, inputs: Tensor, amax: Tensor) -> Tensor:
        if inputs.dtype in (torch.half, torch.bfloat16) or amax.dtype == torch.half:
            raise TypeError(
                f"{self._who()}: torch's fake-quantization ops (use_fb_fake_quant) need float32, "
                f"got {inputs.dtype}: switch autocast off for export"
            )
        top = (1 << (self._num_bits - 1 + int(self._unsigned))) - 1
        low = 0 if self._unsigned else -top - 1
        if amax.numel() == 1:
            return torch.fake_quantize_per_tensor_affine(inputs, amax.item() / top, 0, low, top)
        wide = [i for i, n in enumerate(amax.shape) if n != 1]
        if len(wide) != 1:
            raise TypeError(
                f"{self._who()}: torch's fake-quantization ops (use_fb_fake_quant) allow one axis, "
                f"the amax has shape {tuple(amax.shape)}"
            )
        scale = amax.detach().flatten() / top
        zero = torch.zeros_like(scale, dtype=torch.int32)
        axis = wide[0] + inputs.dim() - amax.dim()
        return torch.fake_quantize_per_channel_affine(inputs, scale, zero, axis, low, top)
