"""A stand-in for a module while its forward is traced: same children, never written to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ._errors import UntraceableError

_CONTAINERS = (list, dict, set)


def shadow_of(
    module: nn.Module, read_training: Callable[[bool], Any]
) -> tuple[nn.Module, Callable[[], None]]:
    """Make the stand-in, and the check to call once the forward has run on it.

    Args:
        module: The module itself is only read.
        read_training: What ``self.training`` answers in the forward, given the real flag.

    Returns:
        The stand-in, and a function that raises where the forward stored something in a list,
        dict or set of the module.

    Raises:
        UntraceableError: The forward was replaced on the instance, so the class does not tell it.
    """
    cls = type(module)
    if "forward" in vars(module):
        raise UntraceableError("was replaced on the instance")

    def training(self: nn.Module) -> Any:
        return read_training(bool(vars(self)["training"]))

    def refuse(self: nn.Module, name: str, value: object) -> None:
        raise UntraceableError(f"assigns self.{name}")

    body = {"training": property(training), "__setattr__": refuse, "__module__": cls.__module__}
    shadow: nn.Module = object.__new__(type(cls.__name__, (cls,), body))
    copied = [k for k, v in vars(module).items() if type(v) in _CONTAINERS and k[:1] != "_"]
    vars(shadow).update(vars(module))
    vars(shadow).update({k: vars(module)[k].copy() for k in copied})

    def check() -> None:
        for key in copied:
            if len(vars(shadow)[key]) != len(vars(module)[key]):
                raise UntraceableError(f"writes to self.{key}")

    return shadow, check
