"""What becomes of a batch norm behind a convolution while a model trains quantized."""

from __future__ import annotations

__all__ = ["QATMode", "get_qat_mode", "set_qat_mode"]


class QATMode:
    """Names of the modes.

    Attributes:
        FuseBN: The batch norm is folded when the model is fused; nothing of it is trained.
        WithBN: conv with a quantized weight, then the batch norm; folded by convert.
        WithBNReverseFold: The weight is quantized as it will be once folded, γ/√(σ² + ε)·w, so
            that folding at any time changes nothing.
    """

    FuseBN = "fuse_bn"
    WithBN = "with_bn"
    WithBNReverseFold = "with_bn_reverse_fold"


_KNOWN = (QATMode.FuseBN, QATMode.WithBN, QATMode.WithBNReverseFold)
_chosen = [QATMode.FuseBN]


def set_qat_mode(mode: str) -> None:
    """Choose the mode that fuse and prepare functions read from now on.

    Raises:
        ValueError: No such mode.

    Example:
        >>> set_qat_mode("fuse_bn")
        >>> get_qat_mode()
        'fuse_bn'
    """
    if mode not in _KNOWN:
        raise ValueError(f"set_qat_mode({mode!r}): expected one of {', '.join(_KNOWN)}")
    _chosen[:] = [mode]


def get_qat_mode() -> str:
    """Return the mode set last; `QATMode.FuseBN` at the start."""
    return _chosen[0]
