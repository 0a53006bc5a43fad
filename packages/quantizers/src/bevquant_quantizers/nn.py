"""The module that quantizes a tensor, calibrates its range, or learns it.

It and `Clip` are found here as in ``pytorch_quantization.nn``.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from ._blocks import fake_quantize_blocks
from ._clip import Clip
from ._descriptor import Axis, QuantDescriptor, ScaledQuantDescriptor, kept_axes
from ._fake_quant import torch_fake_quantize
from ._format import NumBits, check_bits, format_of
from ._scale_range import scale_range
from .calib._calibrator import Calibrator
from .calib._histogram_calibrator import HistogramCalibrator
from .calib._max import MaxCalibrator
from .tensor_quant import fake_tensor_quant, tensor_quant

__all__ = ["Clip", "TensorQuantizer"]

_log = logging.getLogger(__name__)


class TensorQuantizer(nn.Module):
    """Quantizes a tensor as its descriptor says; names and behaviour of pytorch-quantization.

    A call has up to three stages: calibration reads the tensor, clipping limits it to a learned
    range, quantization rounds it. Without a range (no amax in the descriptor, no calibration) each
    tensor is quantized to its own largest value: the range is dynamic.

    The state dict holds `_amax` where there is a range, ``clip.clip_value_min`` and
    ``clip.clip_value_max`` where it is learned, and `_channel_factors` where the channels of a
    layer's input have ranges of their own. `load_state_dict` creates the first and the last where
    the quantizer had none.

    Args:
        quant_desc: Bits, range and granularity.
        disabled: Return the input unchanged.
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

    reads_float = False
    """Whether float operations or the model's inputs make every tensor that it quantizes.

    `bevquant_qnn.quantize_model` sets it. `calibrate` gives ranges by channel to these alone.
    """

    block_axis = -1
    """Axis of the blocks of a block format: 1 in front of convolutions, which sum over channels."""

    _amax: Tensor
    clip: Clip

    def __init__(
        self,
        quant_desc: ScaledQuantDescriptor | None = None,
        disabled: bool = False,
        if_quant: bool = True,
        if_clip: bool = False,
        if_calib: bool = False,
    ) -> None:
        super().__init__()
        desc = QuantDescriptor() if quant_desc is None else quant_desc
        self._name = desc.name
        self._num_bits = desc.num_bits
        self._fake_quant = desc.fake_quant
        self._axis: Axis = desc.axis
        self._scale_amax = desc.scale_amax
        self._learn_amax = desc.learn_amax
        self._unsigned = desc.unsigned
        self._narrow_range = desc.narrow_range
        self._scale: float | Tensor | None = 1.0 if desc.fake_quant else None
        self._disabled = disabled
        self._if_quant = if_quant
        self._if_clip = False
        self._if_calib = if_calib
        if desc.amax is not None:
            self.register_buffer("_amax", torch.tensor(desc.amax))
        if desc.learn_amax:
            start = torch.tensor(1.0 if desc.amax is None else desc.amax)
            self.clip = Clip(-start, start, learn_min=True, learn_max=True)
        if desc.learn_amax or if_clip:
            self.enable_clip()
        self._calibrator: Calibrator | None = self._make_calibrator(desc.calib_method)

    def _make_calibrator(self, method: str | None) -> Calibrator | None:
        if method is None:
            return None
        kinds: dict[str, Any] = {"max": MaxCalibrator, "histogram": HistogramCalibrator}
        if method not in kinds:
            raise ValueError(f"unknown calib_method {method!r}: use one of {sorted(kinds)} or None")
        calibrator: Calibrator = kinds[method](self._num_bits, self._axis, self._unsigned)
        calibrator.name = self._name
        return calibrator

    @property
    def name(self) -> str | None:
        """Name of this quantizer in messages: its path in the model, once known."""
        return self._name

    @name.setter
    def name(self, value: str | None) -> None:
        self._name = value
        if self._calibrator is not None:
            self._calibrator.name = value

    @property
    def num_bits(self) -> NumBits:
        """Bits of the integer, or exponent and mantissa bits of FP8."""
        return self._num_bits

    @num_bits.setter
    def num_bits(self, value: NumBits) -> None:
        self._num_bits = value = check_bits(value)
        if self._calibrator is not None:
            self._calibrator._num_bits = value

    @property
    def unsigned(self) -> bool:
        """Whether the integers start at 0."""
        return self._unsigned

    @unsigned.setter
    def unsigned(self, value: bool) -> None:
        self._unsigned = value
        if self._calibrator is not None:
            self._calibrator._unsigned = value

    @property
    def narrow_range(self) -> bool:
        """Whether the most negative integer is left out."""
        return self._narrow_range

    @narrow_range.setter
    def narrow_range(self, value: bool) -> None:
        self._narrow_range = value

    @property
    def axis(self) -> Axis:
        """Axes with a range of their own."""
        return self._axis

    @property
    def fake_quant(self) -> bool:
        """Whether the quantizer returns floats on the integer grid, or integers."""
        return self._fake_quant

    @property
    def scale(self) -> float | Tensor | None:
        """Scale of the last tensor quantized to integers: integers / scale is the value."""
        if self._fake_quant:
            _log.error("Fake quantize mode doesn't use scale explicitly!")
        if self._scale is None:
            _log.critical("Accessing scale before quantizing any tensor!")
        return self._scale

    @property
    def amax(self) -> Tensor | None:
        """The range, None while it is dynamic. Set it with a number, list or array."""
        return self._buffers.get("_amax")

    @amax.setter
    def amax(self, value: Any) -> None:
        if value is None:
            _log.error("Setting amax to None is meaningless.")
            return
        new = torch.as_tensor(value)
        if self.amax is not None and self.amax.shape != new.shape:
            raise TypeError(
                f"{self._who()}: Changing shape when setting amax is not allowed: it has shape "
                f"{tuple(self.amax.shape)}, the new one {tuple(new.shape)}"
            )
        self._store_range(new)

    @property
    def amax_in_use(self) -> Tensor | None:
        """The range to quantize with: `amax`, or the larger end of a clip that learns."""
        if not self._learn_amax:
            return self.amax
        low, high = self.clip.clip_value_min, self.clip.clip_value_max
        return torch.maximum(-low, high).detach()

    def _store_range(self, amax: Tensor) -> None:
        """Take a range of any shape, as an ordinary tensor under ``torch.inference_mode()`` too."""
        # An inference tensor could neither be written to nor be trained with afterwards.
        with torch.inference_mode(False), torch.no_grad():
            amax, old = amax.detach().to(torch.float32), self.amax
            if old is None:
                self.register_buffer("_amax", amax.clone())
            elif old.shape == amax.shape and not old.is_inference():
                old.data.copy_(amax)
            else:
                self._buffers["_amax"] = amax.to(old.device).clone()

    @property
    def channel_factors(self) -> Tensor | None:
        """Powers of two [channels] by which the layer multiplies its input; None without factors.

        The layer multiplies, not the quantizer: x·f is quantized with the single range `amax`, so
        channel c has the range amax / f_c, and the layer's weight is divided by f. Set by
        `calibrate`.
        """
        return self._buffers.get("_channel_factors")

    @channel_factors.setter
    def channel_factors(self, value: Tensor | None) -> None:
        self._buffers.pop("_channel_factors", None)
        if value is not None:
            self.register_buffer("_channel_factors", value.detach().float().clone())

    @property
    def step_size(self) -> Tensor | None:
        """The distance between two values on the grid, amax / 127 for eight signed bits.

        Of FP8, whose values lie in unequal steps, the scale: amax / 448 of E4M3.
        """
        if self.amax is None:
            _log.error("step_size is undefined under dynamic amax mode!")
            return None
        step: Tensor = self.amax / format_of(self._num_bits, self._unsigned).high
        return step

    def disable(self) -> None:
        """Return inputs unchanged from now on."""
        self._disabled = True

    def enable(self) -> None:
        """Run the enabled stages from now on."""
        self._disabled = False

    def disable_clip(self) -> None:
        """Stop clipping, and stop the range from learning."""
        self._if_clip = False
        if self._learn_amax:
            self.clip.clip_value_min.requires_grad_(False)
            self.clip.clip_value_max.requires_grad_(False)

    def enable_clip(self) -> None:
        """Clip to the learned range, and let it learn.

        Raises:
            ValueError: The descriptor does not learn its range.
        """
        if not self._learn_amax:
            raise ValueError(f"{self._who()}: learn_amax is False. Cannot enable clip.")
        _log.info("Enable `clip` stage for amax learning.")
        self.clip.clip_value_min.requires_grad_(True)
        self.clip.clip_value_max.requires_grad_(True)
        self._if_clip = True

    def disable_calib(self) -> None:
        """Stop collecting statistics."""
        self._if_calib = False

    def enable_calib(self) -> None:
        """Collect statistics from now on.

        Raises:
            ValueError: There is no calibrator.
        """
        if self._calibrator is None:
            raise ValueError(
                f"{self._who()}: Calibrator was not created, cannot enable calibration."
            )
        self._if_calib = True

    def disable_quant(self) -> None:
        """Stop quantizing."""
        self._if_quant = False

    def enable_quant(self) -> None:
        """Quantize from now on."""
        self._if_quant = True

    def load_calib_amax(self, *args: Any, **kwargs: Any) -> None:
        """Take the range from the calibrator.

        Args:
            *args: Arguments of the calibrator's `compute_amax`.
            **kwargs: Likewise, except ``strict``: True (the default) raises where the calibrator
                saw nothing, or only zeros; False stores NaN, or zero, and logs it.

        Raises:
            RuntimeError: No calibrator, or with ``strict`` no usable range.
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
        self._store_range(amax)

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

    def scale_range(self, factor: Tensor, inputs: Tensor) -> Tensor:
        """Multiply the range as the tensor is multiplied: integers stay equal, up to their sign.

        amax' = |f|·amax, and likewise for the ends of a learned clip. A dynamic range does not
        change. The calibrator's statistics are removed.

        Args:
            factor: f, with as many axes as `inputs`, to which it broadcasts.
            inputs: The tensor before the multiplication, as the quantizer reads it.

        Returns:
            The tensor to multiply: `inputs`, or where a factor is negative, `inputs` clipped to the
            range.

        Raises:
            ValueError: One range holds values with different factors, or an integer has no opposite
                (−128). Nothing is changed then.

        Example:
            >>> quantizer = TensorQuantizer(QuantDescriptor(axis=0))
            >>> quantizer.amax = [[1.0], [2.0]]
            >>> _ = quantizer.scale_range(torch.tensor([[3.0], [-0.5]]), torch.ones(2, 4))
            >>> quantizer.amax.flatten()
            tensor([3., 1.])
        """
        return scale_range(self, factor, inputs)

    def forward(self, inputs: Tensor) -> Tensor:
        """Calibrate, clip and quantize, where these stages are enabled.

        Args:
            inputs: Any shape; float where it is quantized.

        Returns:
            A tensor of the same shape and dtype: `inputs` itself where no stage is enabled.
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
        if isinstance(self._num_bits, str):
            blocks = self._block_amax(inputs)
            return fake_quantize_blocks(inputs, self._num_bits, blocks, self.block_axis)
        amax: Any = self.amax_in_use if self._learn_amax else self._get_amax(inputs)
        if not self._fake_quant:
            outputs, self._scale = tensor_quant(inputs, amax, self._num_bits, self._unsigned)
            return outputs
        if self.use_fb_fake_quant:
            return torch_fake_quantize(inputs, amax, self._num_bits, self._unsigned, self._who())
        return fake_tensor_quant(inputs, amax, self._num_bits, self._unsigned, self._narrow_range)

    def _block_amax(self, inputs: Tensor) -> Tensor | None:
        """Largest value of NVFP4: calibrated, or that of the tensor; MX formats need none."""
        if self._learn_amax or not self._fake_quant:
            raise ValueError(
                f"{self._who()}: {self._num_bits} has no learned range and no integers: leave "
                "learn_amax=True and fake_quant=False out"
            )
        return self._get_amax(inputs) if format_of(self._num_bits).scale == "e4m3" else None

    def _get_amax(self, inputs: Tensor) -> Tensor:
        amax = self.amax
        if amax is None:
            amax = self._dynamic_amax(inputs)
        elif amax.device != inputs.device:
            with torch.inference_mode(False):
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

    def _who(self) -> str:
        return self._name or "TensorQuantizer"

    def _short_amax(self, fmt: str = ".4f") -> str:
        amax = self.amax
        if amax is None:
            return "dynamic"
        if amax.numel() == 1:
            return f"{amax.item():{fmt}}"
        return f"[{amax.min().item():{fmt}}, {amax.max().item():{fmt}}]({amax.numel()})"

    def extra_repr(self) -> str:
        """Describe the quantizer in the words of pytorch-quantization."""
        if self._disabled:
            return "disabled"
        words = [
            f"{'unsigned ' if self._unsigned else ''}{self._num_bits}bit",
            "narrow" if self._narrow_range else "",
            "fake" if self._fake_quant else "",
            "per-tensor" if self._axis is None else f"axis={self._axis}",
            f"amax={self._short_amax()}",
            f"*{self._scale_amax}" if self._scale_amax else "",
            "" if self.channel_factors is None else f"factors=({self.channel_factors.numel()})",
            "learned" if self._learn_amax else "",
            "" if self._calibrator is None else f"calibrator={type(self._calibrator).__name__}",
            "" if self._scale is None else f"scale={self._scale}",
            "quant" if self._if_quant else "",
            "clip" if self._if_clip else "",
            "calib" if self._if_calib else "",
        ]
        return " ".join(word for word in words if word)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        saved = state_dict.get(prefix + "_amax")
        if isinstance(saved, Tensor) and not saved.is_meta and not saved.isfinite().all():
            raise ValueError(
                f"{prefix}_amax: expected finite numbers, got {saved.flatten()[:4].tolist()}; "
                "calibrate with values that are no NaN and not infinite, and save again"
            )
        if saved is not None and self.amax is None:
            where = self.clip.clip_value_max.device if self._learn_amax else saved.device
            with torch.inference_mode(False):
                self.register_buffer("_amax", torch.empty_like(saved, device=where))
        elif saved is None and self.amax is not None:
            _log.error("%s: No amax in state_dict.", prefix[:-1])
        factors = state_dict.get(prefix + "_channel_factors")
        if factors is not None and self.channel_factors is None:
            where = factors.device if self.amax is None else self.amax.device
            self.channel_factors = torch.ones_like(factors, device=where)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
