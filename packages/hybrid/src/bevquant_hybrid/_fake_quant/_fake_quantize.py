"""Fake quantizers: of training, of calibration, and those that learn their range (LSQ, PACT)."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization import FakeQuantizeBase

from bevquant_hybrid._fake_quant._function import fake_quantize, is_written
from bevquant_hybrid._observers import (
    CalibObserver,
    FixedScaleObserver,
    MovingAverageMinMaxObserver,
    RangeObserver,
    resize_to_loaded,
    scale_of,
    smallest_scale,
)
from bevquant_hybrid.dtype import QuantDType
from bevquant_hybrid.qtensor import QTensor, along, calling_module, of_each, payload


def _accepted(cls: type[Any]) -> set[str] | None:
    """Names of what a class is made with, through ``**kwargs`` of its bases; None: any name."""
    names: set[str] = set()
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        names |= {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        # Without `**kwargs` nothing is handed on to the bases behind it.
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return None


def unknown_settings(settings: Iterable[str], *classes: Any) -> str:
    """Say which settings none of some classes takes, and what they do take; ``""`` if all are.

    Example:
        >>> from bevquant_hybrid.quantization import MinMaxObserver
        >>> unknown_settings(["dtype"], MinMaxObserver)
        ''
        >>> unknown_settings(["dtipe"], MinMaxObserver).partition(";")[0]
        "MinMaxObserver takes no 'dtipe' (nearest: dtype)"
    """
    known: set[str] = set()
    for cls in classes:
        accepted = _accepted(cls) if isinstance(cls, type) else None
        if accepted is None:
            return ""
        known |= accepted
    unknown = sorted(set(settings) - known)
    if not unknown:
        return ""
    shown = []
    for name in unknown:
        near = difflib.get_close_matches(name, known, 1, 0.4)
        shown.append(f"{name!r}" + (f" (nearest: {near[0]})" if near else ""))
    owners = " and ".join(cls.__name__ for cls in classes)
    take = "takes" if len(classes) == 1 else "take"
    return f"{owners} {take} no {', '.join(shown)}; known are {', '.join(sorted(known))}"


def made_observer(owner: str, observer: Any, settings: Mapping[str, Any]) -> Any:
    """Make the observer of a fake quantizer."""
    try:
        return observer(**settings)
    except TypeError as error:
        unknown = unknown_settings(settings, observer)
        if not unknown:
            raise
        raise TypeError(f"{owner}: {unknown}") from error


def _observed(x: Any) -> Tensor:
    """The values that an observer sees: a tensor, or all tensors of a container, as one."""
    if isinstance(x, Tensor | QTensor):
        return payload(x).detach()
    parts: list[Tensor] = []
    _of_floats(x, lambda part: parts.append(part.detach().reshape(-1)))
    return torch.cat(parts) if parts else torch.empty(0)


def _of_floats(x: Any, part: Callable[[Tensor], Any]) -> Any:
    """A value with `part` taken of its tensors; of a container's, those of integers stay."""
    if isinstance(x, Tensor | QTensor):
        return part(payload(x))
    return of_each(x, lambda t: part(payload(t)) if payload(t).is_floating_point() else t)


class _Observing(FakeQuantizeBase):
    """Base: an observer, and the type and state that it has."""

    activation_post_process: Any

    @property
    def dtype(self) -> QuantDType:
        """The integer type."""
        found: QuantDType = self.activation_post_process.dtype
        return found

    @property
    def observed(self) -> bool:
        """Whether the observer has seen anything that gives a scale."""
        return bool(getattr(self.activation_post_process, "observed", False))

    def looks(self) -> bool:
        """Whether a call observes."""
        return not is_written() and bool(self.observer_enabled[0])

    def observe(self, x: Any) -> None:
        """Let the observer see a tensor, or all tensors of a container."""
        try:
            self.activation_post_process(_observed(x))
        except ValueError as error:
            raise ValueError(f"{calling_module()}: {error}") from error

    def forward(self, x: Any) -> Any:
        """Return the tensor with its scale, rounded where that is enabled.

        Tensors of a container, as `torch.chunk` makes it, have one scale; indices stay as they are.
        """
        if self.looks():
            self.observe(x)
        return _of_floats(x, self.marked)

    def marked(self, x: Tensor) -> QTensor:
        """Return the tensor with its scale."""
        raise NotImplementedError


def _of_observer(name: str, doc: str) -> Any:
    """A setting of a fake quantizer that its observer has."""
    return property(lambda self: getattr(self.activation_post_process, name), doc=doc)


class FakeQuantize(_Observing):
    r"""Observe a tensor, then round it to the grid of its scale.

    :math:`\operatorname{clamp}(\operatorname{round}(x/s), q_\min, q_\max) \cdot s`, half to even;
    the gradient passes straight through.

    Args:
        observer: Class of the observer that finds the range.
        saturate: Give values that were clamped no gradient.
        in_place: Accepted for old scripts; the input is never changed.
        compat_mask: Accepted for old scripts.
        channel_len: Channels, where ranges are per channel and known beforehand.
        **observer_kwargs: Passed to the observer: ``dtype``, ``qscheme``, ``ch_axis``, ….

    Raises:
        TypeError: An argument that neither takes.

    Attributes:
        scale: Value of one step, ``[1]`` or ``[channels]``.
        zero_point: Zeros.
        fake_quant_enabled: 1 where values are rounded, else they pass.
        observer_enabled: 1 where the observer sees them and sets the scale.

    Example:
        >>> fake_quant = FakeQuantize(averaging_constant=1.0)
        >>> fake_quant(torch.tensor([-1.0, 0.5])).scale
        tensor([0.0078])
    """

    scale: Tensor
    zero_point: Tensor
    lenient = False  # whether float functions take what it returns
    tied: tuple[FakeQuantize, ...] = ()  # all that share this one's scale, itself included

    def __init__(
        self,
        observer: type[Any] = MovingAverageMinMaxObserver,
        saturate: bool | None = None,
        in_place: bool = False,
        compat_mask: bool = True,
        channel_len: int = 1,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__()
        self.activation_post_process: RangeObserver = made_observer(
            type(self).__name__, observer, observer_kwargs
        )
        self.saturate = saturate
        self.channel_len = channel_len
        self.register_buffer("scale", torch.ones(channel_len))
        self.register_buffer("zero_point", torch.zeros(channel_len, dtype=torch.long))
        if self.activation_post_process.observed:  # a fixed scale
            self._take_scale()

    quant_min = _of_observer("quant_min", "Smallest integer.")
    quant_max = _of_observer("quant_max", "Largest integer.")
    ch_axis = _of_observer("ch_axis", "Channel axis, −1 for one scale.")
    qscheme = _of_observer("qscheme", "Per tensor or per channel, symmetric.")

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the observer's scale and zero point."""
        return self.activation_post_process.calculate_qparams()

    def set_qparams(self, scale: Tensor | float, zero_point: Tensor | int | None = None) -> None:
        """Set the scale, and the symmetric range that belongs to it.

        Raises:
            ValueError: A zero point other than 0.
        """
        if zero_point is not None and bool(torch.as_tensor(zero_point).any()):
            raise ValueError(f"set_qparams: zero_point={zero_point}: expected 0")
        value = torch.as_tensor(scale, dtype=torch.float32, device=self.scale.device).reshape(-1)
        # Those that share a scale are set together, each to the range that this scale has in its
        # type.
        for member in self.tied or (self,):
            half = (member.quant_max - member.quant_min) / 2
            member.activation_post_process.set_range(value * half)
            member.set_scale(value.detach().clone())

    def tie(self, others: Iterable[FakeQuantize]) -> None:
        """Share the largest scale that this one and others observe, or the one that is fixed."""
        self.tied = (self, *others)
        for member in self.tied:
            member.tied = self.tied
        if any(member.observed for member in self.tied):
            self._take_scale()

    def current_scale(self) -> Tensor:
        """The scale that values are rounded with, without gradient."""
        return self.scale.detach()

    def observe(self, x: Any) -> None:
        """Observe a tensor, or all tensors of a container, and update the scale."""
        super().observe(x)
        if self.activation_post_process.observed:
            self._take_scale()

    def _take_scale(self) -> None:
        scale = self.calculate_qparams()[0]
        # Of those that share a scale, one that is fixed decides; else the largest that was
        # observed.
        for member in self.tied:
            found = member.calculate_qparams()[0].to(scale.device)
            if isinstance(member.activation_post_process, FixedScaleObserver):
                scale = found
                break
            if member.observed:
                scale = torch.maximum(scale, found) if self.observed else found
        # A learned scale is a parameter, which `set_scale` starts.
        for member in self.tied or (self,):
            member.set_scale(scale.to(member.scale.device))

    def set_scale(self, scale: Tensor) -> None:
        """Round to another scale from now on; the range stays."""
        self.scale = scale
        self.zero_point = torch.zeros_like(scale, dtype=torch.long)

    def marked(self, x: Tensor) -> QTensor:
        """Round a tensor where that is enabled, and give it the scale."""
        # A file holds every rounding, whatever is switched on; its switches are no numbers then.
        rounds = torch.compiler.is_exporting() or bool(self.fake_quant_enabled[0])
        return QTensor(
            self.fake_quantize(x) if rounds else x,
            self.current_scale(),
            self.dtype,
            self.ch_axis,
            lenient=self.lenient,
            on_grid=rounds,
        )

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Round a plain tensor to the grid."""
        return fake_quantize(
            x,
            self.current_scale(),
            self.ch_axis,
            self.quant_min,
            self.quant_max,
            bool(self.saturate),
        )

    def extra_repr(self) -> str:
        gap = " " * 12
        return (
            f"fake_quant_enabled={self.fake_quant_enabled}, "
            f"observer_enabled={self.observer_enabled},{gap}"
            f"quant_min={self.quant_min}, quant_max={self.quant_max}, dtype={self.dtype}, "
            f"qscheme={self.qscheme}, ch_axis={self.ch_axis},{gap[:9]}"
            f"scale={self.scale.detach()}, zero_point={self.zero_point}"
        )

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        resize_to_loaded(self, state_dict, prefix, "scale", "zero_point")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class CalibFakeQuantize(_Observing):
    """Observe a tensor and return it unchanged.

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

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the scale and zero point found; 1 and 0 where nothing was seen."""
        if not self.observed:
            return torch.ones(1), torch.zeros(1, dtype=torch.long)
        found: tuple[Tensor, Tensor] = self.activation_post_process.calculate_qparams()
        return found

    def fake_quantize(self, x: Tensor) -> Tensor:
        """Return the tensor."""
        return x

    def marked(self, x: Tensor) -> QTensor:
        """Return the tensor unchanged."""
        return QTensor(x, torch.ones(1, device=x.device), self.dtype, on_grid=False)


class _WrappedCalibFakeQuantize(torch.nn.Module):
    """What a boundary's `CalibFakeQuantize` becomes in a QAT model: a `FakeQuantize` within."""

    def __init__(self, fake_quant: FakeQuantize) -> None:
        super().__init__()
        self.activation_post_process = fake_quant

    def forward(self, x: Any) -> Any:
        """Fake-quantize."""
        return self.activation_post_process(x)


# Fake quantizers that learn their range: LSQ and PACT.


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
        # A file has no gradients: it gets the two nodes.
        if torch.onnx.is_in_onnx_export():
            return super().fake_quantize(x)
        scale = self._positive()
        if self.use_grad_scaling:
            # The paper's gradient scale, 1 / √(values · largest integer); the value itself does not
            # change.
            count = x.numel() / scale.numel()
            share = (max(count, 1.0) * self.quant_max) ** -0.5
            scale = (scale - scale * share).detach() + scale * share
        scale = along(scale, x.dim(), self.ch_axis)
        steps = (x / scale).clamp(self.quant_min, self.quant_max)
        # Rounding has gradient 1, as in every straight-through estimator.
        return (steps + (steps.round() - steps).detach()) * scale


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
        # The base class sets a fixed scale before there is a parameter.
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
        # Clamping has its own gradient, which reaches α; rounding passes it on.
        return clamped + (super().fake_quantize(clamped) - clamped).detach()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A state without α is a calibration's: α starts from its scale.
        alpha, scale = state_dict.get(prefix + "alpha"), state_dict.get(prefix + "scale")
        if alpha is None and scale is not None:
            alpha = scale.detach().abs() * ((self.quant_max - self.quant_min) / 2)
            state_dict = {**state_dict, prefix + "alpha": alpha}
        resize_to_loaded(self, state_dict, prefix, "alpha")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
