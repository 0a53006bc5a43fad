"""Treatment of a convolution's batch norm during quantization-aware training."""

from __future__ import annotations

__all__ = ["QATMode", "get_qat_mode", "set_qat_mode"]


class QATMode:
    """Names of the modes."""

    FuseBN = "fuse_bn"  # the batch norm is folded when the model is fused, and not trained
    # Convolution with a quantized weight, then the batch norm, which convert folds
    WithBN = "with_bn"
    # The folded weight γ/√(σ² + ε)·w is quantized, so that folding does not change the result
    WithBNReverseFold = "with_bn_reverse_fold"


_KNOWN = (QATMode.FuseBN, QATMode.WithBN, QATMode.WithBNReverseFold)
_chosen = [QATMode.FuseBN]


def set_qat_mode(mode: str) -> None:
    """Set the mode for later calls of fuse and prepare functions.

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
    """Return the current mode (default: `QATMode.FuseBN`)."""
    return _chosen[0]
