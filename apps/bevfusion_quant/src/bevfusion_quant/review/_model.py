"""Runs that hold a model: as they were written, and of one float model."""

from __future__ import annotations

from pathlib import Path

from bevfusion_quant._errors import InputError
from bevfusion_quant.review._evidence import Evidence, read_evidence
from bevfusion_quant.run import sha256

__all__ = ["check_alike", "read_model"]


def read_model(folder: Path, option: str, kinds: tuple[str, ...]) -> Evidence:
    """Read a run that holds a model, its files as they were written.

    Args:
        folder: Of the run.
        option: What it was named with, for messages.
        kinds: Of `Evidence.kind`: what is taken there.

    Raises:
        InputError: No such run, one of another kind, or its files were changed.
    """
    evidence = read_evidence(folder)
    if evidence.kind not in kinds:
        of = evidence.settings.evaluates
        told = f"{evidence.kind} of {of}" if of else f"run of kind {evidence.kind}"
        hint = f"give {option} {of}" if of else f"give one of {', '.join(kinds)}"
        raise InputError(f"{option} {folder} is a {told}: {hint}")
    if not evidence.model_digests:
        raise InputError(
            f"{option} {folder} does not say the digests of its files, so nothing can be told to "
            "belong to it: quantize again with this version"
        )
    for name, digest in evidence.model_digests.items():
        path = folder / name
        if not path.is_file() or sha256(path) != digest:
            raise InputError(
                f"{path} is missing or not the file that the run wrote: nothing that was measured "
                "of the run tells of it; quantize again"
            )
    return evidence


def check_alike(main: Evidence, other: Evidence, option: str) -> None:
    """Refuse a run that did not begin with the float model of the main one.

    Raises:
        InputError: Sizes, weights or, of random weights, seeds differ.
    """
    first, second = main.settings, other.settings
    for key in ("config", "weights", "seed"):
        one, two = getattr(first, key), getattr(second, key)
        alike = one == two or (key == "weights" and _same_bytes(one, two))
        if not alike and not (key == "seed" and first.weights):
            raise InputError(
                f"{option} {other.folder}: its {key} is {two!r}, that of {main.folder} is {one!r}: "
                "the two are not of one float model; name runs of the same weights"
            )


def _same_bytes(one: str | None, two: str | None) -> bool:
    """Whether two names of weights are of one content; not where a file is gone since."""
    paths = [Path(str(name)) for name in (one, two)]
    return all(path.is_file() for path in paths) and len({sha256(path) for path in paths}) == 1
