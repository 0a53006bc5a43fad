"""Shape annotations: jaxtyping where it is installed, plain tensors elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item):
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Bool", "Float", "Int"]
