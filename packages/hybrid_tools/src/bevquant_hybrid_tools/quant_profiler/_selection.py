"""Modules that a caller asks for by name and class, and their mark to stay as they train."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.ao.nn.quantized import FloatFunctional

from bevquant_hybrid.nn import qat


class Selection:
    """The modules that a caller asks for, by the start of their names and by class.

    A prefix that is the name of a module means it and what it holds (``conv1`` is not ``conv10``);
    any other is the start of names.

    Args:
        model: Where the names are from.
        prefixes: Starts of names, or one of them; empty for all, where `types` is empty too.
        types: Classes, or one of them.
        caller: For messages.

    Raises:
        TypeError: Something else.

    Warns:
        UserWarning: A prefix that no module's name starts with.
    """

    def __init__(
        self,
        model: nn.Module,
        prefixes: str | Iterable[str],
        types: type | Iterable[type],
        caller: str,
    ) -> None:
        self.prefixes = (prefixes,) if isinstance(prefixes, str) else tuple(prefixes)
        self.types: tuple[type, ...] = (types,) if isinstance(types, type) else tuple(types)
        for prefix in self.prefixes:
            if not isinstance(prefix, str):
                raise TypeError(f"{caller}: prefixes: expected strings, got {prefix!r}")
        for kind in self.types:
            if not isinstance(kind, type):
                raise TypeError(f"{caller}: types: expected classes, got {kind!r}")
        paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
        self._whole = {prefix for prefix in self.prefixes if prefix in paths}
        for prefix in self.prefixes:
            if not any(path.startswith(prefix) for path in paths):
                warnings.warn(
                    f"{caller}: no module's name starts with {prefix!r}", UserWarning, stacklevel=4
                )

    def names(self, path: str) -> bool:
        """Whether a prefix names a path."""
        return any(
            path == prefix or path.startswith(f"{prefix}." if prefix in self._whole else prefix)
            for prefix in self.prefixes
        )

    def takes(self, path: str, module: Any) -> bool:
        """Whether a module is asked for, by either; any is where neither was given."""
        if not self.prefixes and not self.types:
            return True
        return self.names(path) or (bool(self.types) and isinstance(module, self.types))


def set_preserve_qat_mode(
    model: nn.Module,
    prefixes: str | Iterable[str] = (),
    types: type | Iterable[type] = (),
    value: bool = True,
) -> list[str]:
    """Mark modules, so that convert leaves them in QAT form between fixed-point ones.

    It tells which conversion to integers costs accuracy. Of what is fused, the convolution's or
    linear layer's mark counts; of a function that fx made a module of, that module's in the QAT
    model. ``module.preserve_qat_mode = True`` does the same; a module without a mark goes by the
    one that holds it.

    Args:
        model: Float or QAT model.
        prefixes: Starts of names; the name of a module means it and what it holds.
        types: Classes. In a QAT model a float class means the QAT modules that stand for it.
        value: The mark.

    Returns:
        The names that were marked.

    Raises:
        TypeError: Prefixes that are no strings, types that are no classes.

    Warns:
        UserWarning: A prefix that no name starts with.

    Example:
        >>> set_preserve_qat_mode(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()), types=(nn.Conv2d,))
        ['0']
    """
    wanted = Selection(model, prefixes, types, "set_preserve_qat_mode")
    marked = []
    for path, module in model.named_modules():
        if wanted.names(path) or any(_stands_for(module, kind) for kind in wanted.types):
            module.preserve_qat_mode = value
            marked.append(path)
    return marked


def _stands_for(module: Any, kind: type) -> bool:
    """Whether a module is of a class, or the QAT form of one that is."""
    if isinstance(module, qat.FloatFunctional) and issubclass(kind, FloatFunctional):
        return True
    if isinstance(module, qat.SegmentLUT) and isinstance(module.function, kind):
        return True
    made_of = module.__dict__.get("_float_class")
    return isinstance(module, kind) or (made_of is not None and issubclass(made_of, kind))
