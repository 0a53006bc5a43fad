"""The quantizers of a model: each once, under its paths; by exact path; switched for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from bevquant_graph import check_kind

from .nn import TensorQuantizer


@dataclass(frozen=True)
class NamedQuantizer:
    """One quantizer object and all of its paths, in the order of the module tree."""

    names: tuple[str, ...]
    quantizer: TensorQuantizer

    @property
    def name(self) -> str:
        """The first path."""
        return self.names[0]


def named_quantizers(model: nn.Module) -> list[NamedQuantizer]:
    """List every quantizer once, a shared one under all of its paths.

    Example:
        >>> from torch import nn
        >>> shared = TensorQuantizer()
        >>> [entry.names for entry in named_quantizers(nn.ModuleDict({"a": shared, "b": shared}))]
        [('a', 'b')]
    """
    check_kind(model, nn.Module, "a torch module")
    found: dict[int, tuple[TensorQuantizer, list[str]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, TensorQuantizer):
            found.setdefault(id(module), (module, []))[1].append(path)
    return [NamedQuantizer(tuple(names), quantizer) for quantizer, names in found.values()]


def select(model: nn.Module, *patterns: str) -> list[NamedQuantizer]:
    """Choose quantizers by path; without patterns, all of them.

    A pattern is compared with whole path components, never with parts of one: ``conv1`` takes the
    quantizers of the module ``conv1``, not those of ``conv10``. ``*``, ``?`` and ``[…]`` stand for
    characters within a component, ``**`` for any number of components. A pattern that reaches a
    module takes every quantizer below it.

    Args:
        model: Any module.
        *patterns: Paths, such as ``backbone.conv1``, ``*.conv?._weight_quantizer`` or
            ``**._input_quantizer``.

    Raises:
        ValueError: A pattern that reaches no quantizer.

    Examples:
        >>> from torch import nn
        >>> model = nn.ModuleDict({"conv1": TensorQuantizer(), "conv10": TensorQuantizer()})
        >>> [entry.name for entry in select(model, "conv1")]
        ['conv1']
        >>> [entry.name for entry in select(model, "conv*")]
        ['conv1', 'conv10']
    """
    every = named_quantizers(model)
    if not patterns:
        return every
    chosen: set[int] = set()
    for pattern in patterns:
        parts = pattern.split(".")
        hits = {
            i
            for i, entry in enumerate(every)
            if any(_reaches(parts, name.split(".")) for name in entry.names)
        }
        if not hits:
            known = ", ".join(entry.name for entry in every[:8]) or "none at all"
            raise ValueError(
                f"no quantizer lies at or below {pattern!r}: the model has {known}"
                f"{', …' if len(every) > 8 else ''}; '*' stays within one path component, '**' "
                "crosses them"
            )
        chosen |= hits
    return [every[i] for i in sorted(chosen)]


def _reaches(pattern: list[str], path: list[str]) -> bool:
    """Say whether the pattern matches the path, or a module above it."""
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_reaches(pattern[1:], path[i:]) for i in range(len(path)))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _reaches(pattern[1:], path[1:])


def uncalibrated(model: nn.Module) -> list[str]:
    """List the quantizers that would quantize, but have no usable range.

    Such a range is missing (dynamic), NaN, infinite, negative, or 0 for the whole tensor. A zero
    for some channels of a weight is usable: those channels are zero.

    Args:
        model: Any module; a quantizer used in several places is listed once, at the first.

    Returns:
        Their paths in the order of `model.named_modules()`. Disabled quantizers are left out.

    Examples:
        >>> from torch import nn
        >>> from bevquant_quantizers import TensorQuantizer
        >>> uncalibrated(nn.Sequential(TensorQuantizer(), TensorQuantizer(disabled=True)))
        ['0']
    """
    check_kind(model, nn.Module, "a torch module")
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, TensorQuantizer) and not module._disabled and module._if_quant
        if not _usable(module.amax_in_use)
    ]


def _usable(amax: Tensor | None) -> bool:
    if amax is None:
        return False
    return bool(amax.isfinite().all() and (amax >= 0).all() and (amax > 0).any())


@contextmanager
def quantization_disabled(model: nn.Module, *patterns: str) -> Iterator[None]:
    """Run a block with quantizers that return their inputs: the float model.

    On leaving, by an exception too, each quantizer gets back its own state: one that was off stays
    off. Blocks nest.

    Args:
        model: Any module.
        *patterns: Paths as `select` takes them; none means every quantizer.

    Raises:
        ValueError: A pattern that reaches no quantizer.

    Examples:
        >>> import torch
        >>> from bevquant_quantizers import TensorQuantizer
        >>> quantizer = TensorQuantizer()
        >>> with quantization_disabled(quantizer):
        ...     quantizer(torch.tensor([0.1, 1.0]))
        tensor([0.1000, 1.0000])
    """
    with _switched(model, patterns, on=False):
        yield


@contextmanager
def quantization_enabled(model: nn.Module, *patterns: str) -> Iterator[None]:
    """Run a block with quantizers that quantize, those that are off included.

    On leaving, by an exception too, each quantizer gets back its own state. Blocks nest.

    Args:
        model: Any module.
        *patterns: Paths as `select` takes them; none means every quantizer.

    Raises:
        ValueError: A pattern that reaches no quantizer.

    Examples:
        >>> import torch
        >>> from bevquant_quantizers import QuantDescriptor, TensorQuantizer
        >>> quantizer = TensorQuantizer(QuantDescriptor(amax=127.0), disabled=True)
        >>> with quantization_enabled(quantizer):
        ...     quantizer(torch.tensor([1.4]))
        tensor([1.])
        >>> quantizer(torch.tensor([1.4]))
        tensor([1.4000])
    """
    with _switched(model, patterns, on=True):
        yield


@contextmanager
def _switched(model: nn.Module, patterns: tuple[str, ...], *, on: bool) -> Iterator[None]:
    saved = [
        (entry.quantizer, entry.quantizer._disabled, entry.quantizer._if_quant)
        for entry in select(model, *patterns)
    ]
    try:
        for quantizer, _, if_quant in saved:
            quantizer._disabled = not on
            quantizer._if_quant = on or if_quant
        yield
    finally:
        for quantizer, disabled, if_quant in saved:
            quantizer._disabled, quantizer._if_quant = disabled, if_quant
