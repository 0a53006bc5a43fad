"""Base classes and shared functions of QAT modules, and operators without a weight."""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_graph import layer_class, own_code
from bevquant_hybrid.march import ON_FOUR_AXES
from bevquant_hybrid.nn import _correlation, _functions, _roi_align
from bevquant_hybrid.qtensor import QTensor, as_float

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def take_over(cls: type[ModuleT], source: nn.Module) -> ModuleT:
    """Make a module of `cls` with the parameters, buffers, settings and hooks of `source`."""
    made = cls.__new__(cls)
    # Dictionaries are copied: a module that is added to one of the two is not in the other.
    made.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict) else value
        for name, value in source.__dict__.items()
    }
    return made


def give_back(cls: type[ModuleT], qat: nn.Module) -> ModuleT:
    """Undo `take_over`: no fake quantizers, and the user's qconfig."""
    made = take_over(cls, qat)
    for name in ("weight_fake_quant", "activation_post_process"):
        made._modules.pop(name, None)
        made.__dict__.pop(name, None)
    # A qconfig that came from a parent is none of this module's own.
    prepared, own = made.__dict__.pop("_prepared_with", (None, True))
    if not own and getattr(made, "qconfig", None) is prepared:
        made.__dict__.pop("qconfig", None)
    return made


def remember_qconfig(made: Any, source: nn.Module, qconfig: Any) -> None:
    """Record a module's qconfig, and whether the user set it on this module."""
    made._prepared_with = (qconfig, "qconfig" in source.__dict__)
    made.qconfig = qconfig


def hand_over_qconfig(source: nn.Module, made: nn.Module) -> None:
    """Move a qconfig from a module to its new parent."""
    if "qconfig" in source.__dict__:
        made.qconfig = source.__dict__.pop("qconfig")


def name_place(module: Any, path: str) -> None:
    """Record a module's path in its model, for `module_path`."""
    module.qualified_name = path


def module_path(module: nn.Module) -> str:
    """A module's path in its model, if prepare recorded it."""
    return getattr(module, "qualified_name", "") or type(module).__name__


def float_layer(source: nn.Module, cls: type[ModuleT] | None = None) -> ModuleT:
    """Return the float module for a QAT form, after a check of its class and forward."""
    if layer_class(source, *([cls] if cls else [])) is None:
        wanted = cls.__name__ if cls else "a layer of torch or of bevquant_hybrid"
        raise TypeError(
            f"{module_path(source)} ({type(source).__name__}): expected {wanted}; "
            f"{own_code(source) or 'it is of another class'}, which a QAT form would leave out: "
            "write that as a module of its own behind the layer, or run it on the CPU (hybrid_dict)"
        )
    return cast(ModuleT, source)


def first_prepared(model: nn.Module) -> str:
    """Path and class of the first module of a model that holds a fake quantizer; ``""``: none."""
    for path, module in model.named_modules():
        if isinstance(module, FakeQuantizeBase):
            owner = path.rpartition(".")[0]
            return f"{owner or path} ({type(model.get_submodule(owner)).__name__})"
    return ""


@contextmanager
def errors_that_name(path: str) -> Iterator[None]:
    """Put a module's path in front of errors about its settings."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if not path or str(error).startswith((f"{path} ", f"{path}:")):
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{path}: {error}") from error


def activation_of(qconfig: Any) -> nn.Module | None:
    """Make the fake quantizer of an output; None for a 32-bit output."""
    made: nn.Module | None = None if qconfig.activation is None else qconfig.activation()
    return made


def scaling_qconfig(source: nn.Module, qconfig: Any = None) -> Any:
    """The given qconfig or the module's own, which must have an activation."""
    found = qconfig or getattr(source, "qconfig", None)
    if found is None or found.activation is None:
        raise ValueError(
            f"{module_path(source)} ({type(source).__name__}): its result needs a scale, but its "
            "qconfig has no activation; set one (get_default_qat_qconfig), since only layers with "
            "a weight have a 32-bit output"
        )
    return found


def expect_pictures(model: nn.Module, march: str, hybrid: bool) -> None:
    """Set whether QAT modules of a model warn of inputs without four axes."""
    module: Any
    for module in model.modules():
        if "_prepared_with" in module.__dict__:
            # BERNOULLI2 computes on four axes; for hybrid models the mapper decides.
            module.wants_pictures = march in ON_FOUR_AXES and not hybrid


def quantized_input(module: nn.Module, x: Tensor, what: str = "input") -> Tensor:
    """Return the float values of a quantized input."""
    if isinstance(x, QTensor):
        if getattr(module, "wants_pictures", False) and x.dim() != 4:
            warnings.warn(
                f"{module_path(module)} ({type(module).__name__}): its {what} has shape "
                f"{tuple(x.shape)}, but BERNOULLI2 computes on [N, C, H, W]; reshape it to four "
                "axes before the QuantStub, or run this operator on the CPU",
                UserWarning,
                stacklevel=3,
            )
        if x.dtype == "qint32" and not x.lenient:
            raise TypeError(
                f"{module_path(module)} ({type(module).__name__}): its {what} is the 32-bit output "
                "of another layer; give that layer a qconfig with an activation"
            )
        return as_float(x)
    if getattr(module, "lenient", False):
        return x
    raise TypeError(
        f"{module_path(module)} ({type(module).__name__}): its {what} is a float tensor of shape "
        f"{tuple(getattr(x, 'shape', ()))}, expected a quantized one; put a QuantStub before it, "
        "or keep the module float (qconfig = None, or hybrid_dict)"
    )


def quantized_output(module: Any, x: Tensor) -> Tensor:
    """Pass a result through the module's fake quantizer, if it has one."""
    fake_quant = module.activation_post_process
    if fake_quant is None:
        return x
    quantized: Tensor = fake_quant(x)
    return quantized


class OfFloat(nn.Module):
    """Base of QAT modules that convert back to their float module."""

    _float_class: type[nn.Module]

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over a float module."""
        self = take_over(cls, source)
        self._float_class = type(source)
        remember_qconfig(self, source, qconfig or getattr(source, "qconfig", None))
        return self

    def to_float(self) -> nn.Module:
        """Return the float module."""
        made = give_back(self._float_class, self)
        made.__dict__.pop("_float_class")
        return made


class KeepsScale(OfFloat):
    """A float module under its QAT name; its output keeps the input's scale.

    It needs no fake quantizer: its output values lie on the input's grid.
    """


class OutputQuantized(OfFloat):
    """A float module without a weight whose result is quantized.

    Attributes:
        reads: Positions of the arguments that are quantized tensors or lists of them.
    """

    reads: ClassVar[tuple[int, ...]] = (0,)
    activation_post_process: Any

    @classmethod
    def from_float(cls, source: nn.Module, qconfig: Any = None) -> Self:
        """Take over a float module.

        Raises:
            ValueError: No qconfig, or one without an activation.
        """
        qconfig = scaling_qconfig(source, qconfig)
        self = super().from_float(float_layer(source), qconfig)
        self.register_module("activation_post_process", activation_of(qconfig))
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute on float values and quantize the result."""
        compute: Any = super().forward
        if kwargs:  # `reads` counts places
            args = inspect.signature(compute).bind(*args, **kwargs).args
        values = list(args)
        for what, place in zip(("input", "second input"), self.reads, strict=False):
            values[place] = self._float(values[place], what)
        return quantized_output(self, compute(*values))

    def _float(self, value: Any, what: str) -> Any:
        if isinstance(value, list | tuple):
            return [quantized_input(self, x, f"feature map {i}") for i, x in enumerate(value)]
        return value if isinstance(value, int | float) else quantized_input(self, value, what)


def derived(
    role: type[nn.Module], source: type[nn.Module], module: str, **attributes: Any
) -> type[Any]:
    """The QAT or converted subclass of a float class, under the same name."""
    name = source.__name__
    text = f"`{name}`: {(role.__doc__ or '').splitlines()[0]}"
    bases = (role, source) if role is not source else (source,)
    return type(name, bases, {"__module__": module, "__doc__": text, **attributes})


# Of several tensors: the places of those that are quantized.
GLU, LayerNorm, RMSNorm, Where, MultiScaleRoIAlign, Correlation = (
    derived(OutputQuantized, kind, __name__, reads=reads)
    for kind, reads in (
        (nn.GLU, (0,)),
        (_functions.LayerNorm, (0,)),
        (nn.RMSNorm, (0,)),
        (_functions.Where, (1, 2)),
        (_roi_align.MultiScaleRoIAlign, (0,)),
        (_correlation.Correlation, (0, 1)),
    )
)


class Div(OutputQuantized, _functions.Div):
    """x / y with a scale of its own."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Divide, and quantize the result."""
        numerator = quantized_input(self, x)
        divisor = quantized_input(self, y, "second input")
        # As in fixed point: x/0 is the largest integer (the fake quantizer clamps), 0/0 is 0. The
        # observer gets finite values, and the divisor that is 0 no gradient.
        zero = divisor == 0
        ratio = torch.div(numerator, divisor.masked_fill(zero, 1.0))
        return quantized_output(self, torch.where(zero, numerator.sign() * largest(self), ratio))


def largest(module: Any) -> Tensor | float:
    """The largest value on a module's current scale; 0 before the first observation."""
    fake_quant = module.activation_post_process
    if not getattr(fake_quant, "observed", False) or not hasattr(fake_quant, "current_scale"):
        return 0.0
    top: Tensor = fake_quant.current_scale() * fake_quant.quant_max
    return top
