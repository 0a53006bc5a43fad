"""spconv, imported late, with an error that names the extra that brings it."""

from __future__ import annotations

import warnings
from types import ModuleType

from bev_data import InputError

__all__ = ["require_spconv"]


def require_spconv() -> ModuleType:
    """`spconv.pytorch`.

    Raises:
        InputError: spconv is not installed; the message names the extra.
    """
    try:
        with warnings.catch_warnings():
            # spconv's annotations make torch warn at import; nothing a user could act on.
            warnings.simplefilter("ignore")
            import spconv.pytorch
    except ImportError as error:
        raise InputError(
            "the LiDAR branch is built from spconv modules, and spconv cannot be imported "
            f"({error}): "
            "install it with `pip install 'bevfusion[cpu]'` "
            "(or [cu120], [cu124], [cu126] for a CUDA build)"
        ) from error
    module: ModuleType = spconv.pytorch
    return module
