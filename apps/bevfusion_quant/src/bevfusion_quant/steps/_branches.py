"""What `--branch` means: which parts of the model are built, and which of them get quantizers."""

from __future__ import annotations

from bevfusion.model import PARTS
from bevfusion_quant.options import Branch

_DETECTORS = {
    "all": PARTS,
    "lidar-detector": ("lidar", "decoder", "head"),
    "camera-detector": ("camera", "decoder", "head"),
}


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
