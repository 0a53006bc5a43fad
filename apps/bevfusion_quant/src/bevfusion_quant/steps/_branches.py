"""What `--branch` means: which parts of the model are built, and which of them get quantizers."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from bevfusion.model import PARTS
from bevfusion_quant.options import Branch

_DETECTORS = {
    "all": PARTS,
    "lidar-detector": ("lidar", "decoder", "head"),
    "camera-detector": ("camera", "decoder", "head"),
}

FOLDED_APART = (
    "encoders.camera.backbone", "encoders.camera.neck", "encoders.camera.vtransform",
    "encoders.lidar.backbone", "fuser", "decoder.backbone", "decoder.neck", "heads.object",
)  # fmt: skip
"""Modules with a forward of their own: batch norms are folded in one after the other."""

_ADDED = ("quant_add", "quant_concat", "residual_quantizer")
# Prefixes that a pattern may leave out.
_PREFIXES = (*FOLDED_APART, "encoders.camera", "encoders.lidar", "encoders", "decoder", "heads")


def built_parts(branch: Branch) -> tuple[str, ...]:
    """The parts of the model that a branch needs: a sensor's own, a detector's, or all of them.

    Example:
        >>> built_parts("lidar"), built_parts("fuser")
        (('lidar',), ('camera', 'lidar', 'fuser', 'decoder', 'head'))
    """
    return (branch,) if branch in ("camera", "lidar") else _DETECTORS.get(branch, PARTS)


def is_detector(branch: Branch) -> bool:
    """Whether more than one part is quantized, so that the head may go along."""
    return branch in _DETECTORS


def reads_images(branch: Branch) -> bool:
    """Whether a part that is built reads the cameras."""
    return "camera" in built_parts(branch)


def quantized_parts(branch: Branch, *, with_head: bool = False) -> tuple[str, ...]:
    """The parts that get quantizers.

    `all` and the detectors of one sensor leave the head float, as NVIDIA's deployment of BEVFusion
    does, unless `with_head`.
    """
    if not is_detector(branch):
        return (branch,)
    return tuple(part for part in built_parts(branch) if with_head or part != "head")


def why_float(part: str, branch: Branch) -> str:
    """Why a part that is built stays float, for the report."""
    if not is_detector(branch):
        return f"--branch {branch} quantizes the {branch} alone"
    return (
        "the head stays float, as in NVIDIA's deployment, where it runs in fp16; --branch head "
        "quantizes it alone, --quantize-head along with the rest"
    )


def expand_patterns(model: nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Full paths or globs for patterns that leave the part's own path out.

    `conv_input` becomes `encoders.lidar.backbone.conv_input`, `layer1.*` the layers of the camera's
    backbone. A pattern that names modules as it stands is kept, and so is one that names none, for
    `quantize_model` to refuse.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    expanded: list[str] = []
    for pattern in patterns:
        candidates = [pattern, *(f"{prefix}.{pattern}" for prefix in _PREFIXES)]
        owner, _, name = pattern.rpartition(".")
        if owner and name.startswith(_ADDED):  # not there yet: its owner is
            known = [c for c in candidates if _names(c.rpartition(".")[0], paths)]
        else:
            known = [c for c in candidates if _names(c, paths)]
        expanded += [pattern] if pattern in known else known or [pattern]
    return tuple(dict.fromkeys(expanded))


def _names(pattern: str, paths: list[str]) -> bool:
    return bool(pattern) and any(fnmatchcase(path, pattern) for path in paths)
