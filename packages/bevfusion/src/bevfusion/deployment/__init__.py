"""The detector as the files that engines take: which part of it each holds, and all in a row.

CUDA-BEVFusion binds one set of files, Autoware's node another, a BPU takes a third. How they are
written is an exporter's matter: here is where the model is cut, and what goes in and comes out.
"""

from bevfusion.deployment._files import (
    AUTOWARE_BOXES,
    HEAD,
    LIDAR,
    POOLED,
    FilePart,
    HeldPart,
    ReadPart,
    autoware_files,
    bpu_files,
    nvidia_files,
)
from bevfusion.deployment._walk import STAGE_ENDS, Execute, between, file_boxes, walk, watching

__all__ = [
    "AUTOWARE_BOXES",
    "HEAD",
    "LIDAR",
    "POOLED",
    "STAGE_ENDS",
    "Execute",
    "FilePart",
    "HeldPart",
    "ReadPart",
    "autoware_files",
    "between",
    "bpu_files",
    "file_boxes",
    "nvidia_files",
    "walk",
    "watching",
]
