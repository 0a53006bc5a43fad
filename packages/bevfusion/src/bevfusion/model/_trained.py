"""The trained weights that come with the package."""

from __future__ import annotations

from pathlib import Path

from bev_data import InputError

__all__ = ["named_weights", "trained_weights"]


def trained_weights(config: str) -> Path | None:
    """The file of trained weights for the sizes of a configuration; None where there is none.

    Its metadata say which command made it, on which frames, and how it does on others.

    Example:
        >>> trained_weights("nuscenes") is None
        True
    """
    path = Path(__file__).parent / "weights" / f"{config}.safetensors"
    return path if path.is_file() else None


def named_weights(weights: Path | str | None, config: str) -> Path | None:
    """The file that `--weights` means: "trained" the package's own, "random" none, else a path.

    Raises:
        InputError: "trained" for a configuration that the package has no weights for.
    """
    if weights is None or str(weights) == "random":
        return None
    if str(weights) != "trained":
        return Path(weights)
    path = trained_weights(config)
    if path is None:
        raise InputError(
            f"--weights trained: the package has none for config {config!r}; give a file that "
            "`bevfusion-quant train` wrote, or another checkpoint"
        )
    return path
