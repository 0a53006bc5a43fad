"""What our kernels use of numba: a compiled function keeps the type of the function it was."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

_F = TypeVar("_F", bound=Callable[..., Any])

config: Any
types: Any

@overload
def njit(function: _F, /) -> _F: ...
@overload
def njit(signature: str = ..., /, **options: Any) -> Callable[[_F], _F]: ...
def __getattr__(name: str) -> Any: ...
