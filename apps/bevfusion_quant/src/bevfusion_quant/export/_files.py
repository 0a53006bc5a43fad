"""The set of files: their names, what goes in and comes out, and which tensor that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from bevfusion_quant.export._parts import (
    BoxesPart,
    CameraPart,
    DecodedPart,
    DepthPart,
    FeaturesPart,
    FusedPart,
    HeldPart,
    PackedBoxesPart,
    SparsePart,
)

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion

__all__ = [
    "AUTOWARE_BOXES", "HEAD", "LIDAR", "POOLED", "FilePart", "autoware_files", "bpu_files",
    "nvidia_files",
]  # fmt: skip

LIDAR, HEAD = "lidar.backbone.xyz", "head.bbox"
POOLED = "pooled"
_LIDAR_PATH, _VIEW_PATH = "encoders.lidar.backbone", "encoders.camera.vtransform"


@dataclass(frozen=True)
class FilePart:
    """One file of the set.

    Attributes:
        name: Without its ending, as CUDA-BEVFusion has it.
        inputs: Name in the file to the tensor of the pipeline that goes in.
        outputs: Name in the file to the tensor that comes out.
        make: The part of a model that it holds.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    make: Callable[[Any], nn.Module]

    def module(self, model: BEVFusion) -> nn.Module:
        """The part of `model`; its layers are the model's own."""
        return self.make(model).eval()


_LIFTED = {"camera_feature": "context", "camera_depth_weights": "depth_weights"}
_CAMERA = FilePart(
    "camera.backbone", {"img": "images", "depth": "depth"}, _LIFTED, CameraPart
)  # fmt: skip
_VIEW = FilePart(
    "camera.vtransform", {"feat_in": POOLED}, {"feat_out": "camera"},
    lambda m: HeldPart(f"{_VIEW_PATH}.downsample", m.camera["vtransform"].downsample),
)  # fmt: skip
_LIDAR = FilePart(
    LIDAR, {"features": "features", "coords": "coords"}, {"lidar": "lidar"},
    lambda m: SparsePart(_LIDAR_PATH, m.lidar["backbone"]),
)  # fmt: skip
_FUSER = FilePart(
    "fuser", {"camera": "camera", "lidar": "lidar"}, {"middle": "middle"}, FusedPart
)  # fmt: skip
_HEAD = FilePart(
    HEAD, {"middle": "middle"},
    {name: name for name in ("score", "rot", "dim", "reg", "height", "vel")},
    lambda m: BoxesPart(m.head),
)  # fmt: skip

# For a BPU the view transform stays on the CPU, and so may the decoder.
_FEATURES = FilePart(
    "camera.backbone", {"img": "flat_images"}, {"features": "neck"}, FeaturesPart
)  # fmt: skip
_DEPTH = FilePart(
    "camera.depth", {"features": "neck", "depth": "flat_depth"}, _LIFTED,
    lambda m: _Named(_VIEW_PATH, DepthPart(m.camera["vtransform"])),
)  # fmt: skip
_FUSED_ALONE = FilePart(
    "fuser", {"camera": "camera", "lidar": "lidar"}, {"fused": "fused"},
    lambda m: FusedPart(m, decoder=False),
)  # fmt: skip
AUTOWARE_BOXES = FilePart(
    "head.autoware", {"middle": "middle"},
    {name: name for name in ("bbox_pred", "score", "label_pred")},
    lambda m: PackedBoxesPart(m.head),
)  # fmt: skip
"""The head as Autoware's node reads it, part of the whole file alone."""


class _Named(HeldPart):
    """With the names of its two inputs."""

    def forward(self, features: Any, depth: Any) -> Any:
        return self.get_submodule(self.path)(features, depth)


def nvidia_files(parts: Iterable[str]) -> tuple[FilePart, ...]:
    """CUDA-BEVFusion's set, as far as a model of these parts has it, in the order of execution.

    A detector of one sensor has its decoder, which elsewhere is in the fuser's file, in one alone.
    """
    parts = tuple(parts)
    wanted = {"camera": (_CAMERA, _VIEW), "lidar": (_LIDAR,), "fuser": (_FUSER,), "head": (_HEAD,)}
    if "fuser" not in parts:
        wanted["decoder"] = (_decoder(reads=parts[0]),)
    return tuple(file for part in parts for file in wanted.get(part, ()))


def autoware_files(parts: Iterable[str]) -> tuple[FilePart, ...]:
    """The LiDAR encoder, and of a LiDAR detector what follows it."""
    parts = tuple(parts)
    return nvidia_files(("lidar",) if "fuser" in parts else parts)


def _decoder(reads: str) -> FilePart:
    return FilePart("decoder", {reads: reads}, {"middle": "middle"}, DecodedPart)


def bpu_files(parts: Iterable[str], on_bpu: Iterable[str]) -> tuple[FilePart, ...]:
    """The set for a BPU: dense parts that run on it are one file each, or one together.

    Args:
        parts: That the model has.
        on_bpu: Those of camera, fuser and decoder that run on the BPU.
    """
    together = len({"fuser", "decoder"} & set(on_bpu)) == 2
    wanted = {
        "camera": (_FEATURES, _DEPTH, _VIEW),
        "lidar": (_LIDAR,),
        "fuser": (_FUSER,) if together else (_FUSED_ALONE, _decoder(reads="fused")),
        "head": (_HEAD,),
    }
    return tuple(file for part in parts for file in wanted.get(part, ()))
