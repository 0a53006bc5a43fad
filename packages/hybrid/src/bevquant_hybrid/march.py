"""The BPU micro-architecture that models are prepared for, one per process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "HAS_QINT4",
    "JOINS_AT_ONE_SCALE",
    "KNOWN",
    "ON_FOUR_AXES",
    "March",
    "get_march",
    "require_march",
    "set_march",
    "use_march",
]


class March:
    """Names of the BPU micro-architectures."""

    BERNOULLI2 = "bernoulli2"  # RDK X3, XJ3
    BAYES = "bayes"  # Journey 5, RDK Ultra
    BAYES_E = "bayes-e"  # RDK X5; the operator limits of `BAYES`
    NASH_E = "nash-e"  # Journey 6E, RDK S100
    NASH_M = "nash-m"  # Journey 6M
    NASH_P = "nash-p"  # Journey 6P
    # Spellings on one page of the documents.
    Bernoulli2 = BERNOULLI2
    Bayes = BAYES


_NASH = (March.NASH_E, March.NASH_M, March.NASH_P)
KNOWN = (March.BERNOULLI2, March.BAYES, March.BAYES_E, *_NASH)
# Differences between marches in prepare and convert; limits are in the support table.
JOINS_AT_ONE_SCALE = (March.BERNOULLI2,)  # others rescale inputs of concatenations
ON_FOUR_AXES = (March.BERNOULLI2,)
HAS_QINT4 = _NASH  # weights
_chosen: list[str] = []  # the march set last, if any


def set_march(march: str) -> None:
    """Choose the march that models are prepared, converted and checked for.

    Args:
        march: A constant of `March`, or its name in upper or lower case (``"bayes"``,
            ``"BAYES_E"``).

    Raises:
        ValueError: No march of that name.

    Example:
        >>> set_march("BAYES_E")
        >>> get_march() == March.BAYES_E
        True
    """
    name = str(march).strip().lower().replace("_", "-")
    if name not in KNOWN:
        raise ValueError(f"set_march({march!r}): expected one of {', '.join(KNOWN)}")
    _chosen[:] = [name]


def get_march() -> str | None:
    """Return the current march, or None."""
    return _chosen[0] if _chosen else None


@contextmanager
def use_march(march: str) -> Iterator[None]:
    """Set the march within a `with` block, then restore the previous one.

    Raises:
        ValueError: No march of that name.

    Example:
        >>> set_march("BAYES")
        >>> with use_march("bayes-e"):
        ...     get_march()
        'bayes-e'
        >>> get_march()
        'bayes'
    """
    before = list(_chosen)
    set_march(march)
    try:
        yield
    finally:
        _chosen[:] = before


def require_march(caller: str) -> str:
    """Return the march, for a function that requires one; the error names `caller`."""
    march = get_march()
    if march is None:
        raise RuntimeError(
            f"{caller}: no march is set; call "
            "bevquant_hybrid.march.set_march(March.BAYES) (or BERNOULLI2, BAYES_E, NASH_E, …) first"
        )
    return march
