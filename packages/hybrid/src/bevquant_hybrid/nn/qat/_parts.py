"""Modules that a BPU computes in several steps: QAT parts that convert one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from torch import nn
from torch.ao.quantization import QConfig

from bevquant_hybrid._fake_quant._fake_quantize import FakeQuantize
from bevquant_hybrid._observers._range import FixedScaleObserver
from bevquant_hybrid.dtype import qint16
from bevquant_hybrid.nn.qat._base import (
    float_layer,
    module_path,
    name_place,
    remember_qconfig,
    take_over,
)


class Composed(nn.Module):
    """Base of modules whose forward calls QAT parts.

    The parts become fixed-point ones when the model is converted; the forward stays, since both
    kinds of part hand on quantized tensors.

    Attributes:
        float_class: What it is the QAT form of.
        settings: Attributes that it has from there.
        one_operator: Whether a file has one operator for it: its parts round to 16 bits, which
            files do not hold.
    """

    float_class: type[nn.Module]
    settings: tuple[str, ...] = ()
    one_operator = False
    qconfig: Any
    qualified_name: str
    optional: dict[str, str]  # parts that not every call needs, and what a call needs them for
    _float_source: tuple[nn.Module]  # in a tuple: no part of the model

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A part."""

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over a float module.

        Raises:
            TypeError: It is of another class than `float_class`, or has code of its own.
            ValueError: No qconfig with an activation, or settings that a BPU does not execute.
        """
        qconfig = qconfig or getattr(source, "qconfig", None)
        source, path = float_layer(source, cls.float_class), module_path(source)
        if qconfig is None:
            raise ValueError(f"{path} ({type(source).__name__}): no qconfig; set one for it")
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._float_source = (source,)
        self.qualified_name = path
        self.optional = {}
        self.training = source.training
        remember_qconfig(self, source, qconfig)
        for name in cls.settings:
            setattr(self, name, getattr(source, name))
        self.make_parts(source)
        return self

    def make_parts(self, source: Any) -> None:
        """Add the parts that a float module's form is made of."""
        raise NotImplementedError

    def part(
        self,
        name: str,
        kind: Any,
        source: nn.Module,
        needed_for: str = "",
        qconfig: Any = None,
    ) -> None:
        """Add the QAT form of a float part.

        Args:
            name: Of the part.
            kind: Its QAT class.
            source: The float part.
            needed_for: When a call needs it, if not always.
            qconfig: Its own settings; None for those of the whole.
        """
        if needed_for:
            self.optional[name] = needed_for
        source.train(self.training)
        name_place(source, f"{self.qualified_name}.{name}")
        self.add_module(name, kind.from_float(source, qconfig or self.qconfig))

    def drop_unused(self) -> None:
        """Drop optional parts that saw nothing: they have no scale to convert."""
        for name in self.optional:
            part = self._modules[name]
            fake_quant: Any = getattr(part, "activation_post_process", None)
            if fake_quant is not None and not fake_quant.observed:
                self._modules[name] = None

    def needed(self, name: str) -> Any:
        """Return an optional part.

        Raises:
            ValueError: It was dropped.
        """
        part = getattr(self, name)  # of arithmetic, a tracer notes the access
        if part is None:
            raise ValueError(
                f"{self.qualified_name} ({type(self).__name__}): called with "
                f"{self.optional[name]}, which no call before it was converted had, so that its "
                "values have no scale; calibrate or train with it too"
            )
        return part

    def to_float(self) -> nn.Module:
        """Return the float module."""
        made: nn.Module = self.float_source()
        return made

    def float_source(self) -> Any:
        """A copy of the float module, with the qconfig that its user gave it since."""
        source = self._float_source[0]
        made = take_over(type(source), source)
        for name, child in made._modules.items():
            made._modules[name] = None if child is None else take_over(type(child), child)
        prepared = self.__dict__["_prepared_with"][0]
        if self.qconfig is not prepared:
            made.qconfig = self.qconfig
        made.training = self.training
        return made


def linear_of(weight: Any, bias: Any) -> nn.Linear:
    """A linear layer with these parameters."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    made.weight, made.bias = weight, bias
    return made


def of_16_bits(qconfig: Any) -> QConfig:
    """Settings of a step within: as those of the result, but in 16 bits and never fixed.

    Raises:
        ValueError: They have no activation.
    """
    if qconfig.activation is None:
        raise ValueError(
            "its steps need scales, but its qconfig has no activation; set one "
            "(get_default_qat_qconfig), since only layers with a weight have a 32-bit output"
        )
    made = qconfig.activation()
    wide: Any = FakeQuantize.with_args(dtype=qint16)
    if not isinstance(made.activation_post_process, FixedScaleObserver):

        def wide() -> nn.Module:
            step: nn.Module = qconfig.activation(dtype=qint16)
            return step

    return QConfig(activation=wide, weight=None)
