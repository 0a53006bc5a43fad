"""Marks of dynamic blocks in a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

__all__ = ["Tracer"]


class Tracer:
    """Marks of blocks whose control flow differs between calls."""

    @staticmethod
    @contextmanager
    def dynamic_block(module: nn.Module, name: str) -> Iterator[None]:
        """Mark calls inside a loop or branch, within its body.

        A trace holds the calls of one run, with loops unrolled: the block does not change the
        result. `quantization.prepare` refuses a loop whose length depends on data, inside a block
        or not.

        Args:
            module: Module of the forward.
            name: Name of the block, unique in a forward.

        Raises:
            TypeError: `module` is not a module (but a function, for instance), or `name` is not a
                string.

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
