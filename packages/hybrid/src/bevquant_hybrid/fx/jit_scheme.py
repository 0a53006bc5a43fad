"""Blocks of a forward that are traced as they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["Tracer"]


class Tracer:
    """Marks of parts whose control flow is not the same in every call."""

    @staticmethod
    @contextmanager
    def dynamic_block(module: nn.Module, name: str) -> Iterator[None]:
        """Mark calls inside a loop or branch, within its body.

        A trace here holds the calls that one run makes, with the loop's turns one after another:
        the block changes nothing that is computed. A loop whose length depends on data is refused
        by `quantization.prepare`, in a block or not.

        Args:
            module: Whose forward it is in.
            name: Of the block, another one for each in a forward.

        Raises:
            TypeError: No module (a function, for instance), or no name.

        Example:
            >>> with Tracer.dynamic_block(nn.Identity(), "Add"):
            ...     pass
        """
        if not isinstance(module, nn.Module) or not isinstance(name, str):
            raise TypeError(
                f"Tracer.dynamic_block({module!r}, {name!r}): expected the module whose forward it "
                "is in (self) and a name"
            )
        yield
