"""Calibration data that cannot give a right range: which tensor, which frame, why, what to do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from bevfusion_quant._errors import VerificationError
from bevquant_quantizers.documents import parse_json

if TYPE_CHECKING:
    from bev_data.points import Frame

__all__ = [
    "PoorData",
    "finding_lines",
    "frame_findings",
    "from_text",
    "refuse_poor",
    "to_text",
]

# A voxel has five values and an integer 127 magnitudes; a real frame has thousands of voxels.
_FEW_VOXELS = 26
_TOP_INTENSITY = 255.5
_VOXELS = "encoders.lidar"
_TOLD = 8


@dataclass(frozen=True)
class PoorData:
    """One finding.

    Attributes:
        tensor: Path of the quantizer that watched it, or of the branch that reads it.
        frame: Name of the frame, or which frames.
        kind: As `bevquant_quantizers.CalibrationFinding.kind`, or "few voxels" or "intensity".
        evidence: What was seen.
        remedy: What to do.
        poor: Whether the calibration cannot be right.
    """

    tensor: str
    frame: str
    kind: str
    evidence: str
    remedy: str
    poor: bool = True

    def __str__(self) -> str:
        return f"{self.tensor}, {self.frame}: {self.kind}: {self.evidence}; {self.remedy}"


def frame_findings(frame: Frame, voxels: int) -> tuple[PoorData, ...]:
    """Judge what a LiDAR branch is given.

    Args:
        frame: Points, or voxels made elsewhere.
        voxels: How many voxels it makes.
    """
    found = []
    if voxels < _FEW_VOXELS:
        evidence = f"{len(frame):,} {'voxels' if frame.points is None else 'points'} "
        evidence += f"in {voxels} voxel{'s' * (voxels != 1)}"
        remedy = "calibrate with whole scans: are the points copies, or at the sensor itself?"
        found.append(PoorData(_VOXELS, frame.name, "few voxels", evidence, remedy))
    rows = frame.points if frame.points is not None else frame.voxels and frame.voxels.features
    intensity = np.zeros(0, np.float32) if rows is None else rows[:, 3]
    wrong = int((~((intensity >= 0) & (intensity <= _TOP_INTENSITY))).sum())
    if wrong:
        evidence = (
            f"{wrong:,} of {len(intensity):,} intensities lie outside 0..255, "
            f"from {intensity.min():.3g} to {intensity.max():.3g}"
        )
        remedy = "scale them to 0..255, and leave broken points out"
        found.append(PoorData(_VOXELS, frame.name, "intensity", evidence, remedy))
    return tuple(found)


def finding_lines(findings: Sequence[PoorData]) -> tuple[str, ...]:
    """The first of them, one a line; one wrong frame may spoil every tensor."""
    told = tuple(map(str, findings[:_TOLD]))
    more = len(findings) - _TOLD
    return (*told, f"{more} more tensors: the page names them") if more > 0 else told


def refuse_poor(findings: Sequence[PoorData], told: str) -> None:
    """End the command where the calibration cannot be right.

    Raises:
        VerificationError: It cannot.
    """
    poor = [finding for finding in findings if finding.poor]
    if poor:
        more = f" (and {len(poor) - 1} more)" if len(poor) > 1 else ""
        raise VerificationError(
            f"the calibration cannot be right: {poor[0]}{more}: do not deploy this model, or say "
            "--allow-poor-calibration",
            told,
        )


def to_text(findings: Sequence[PoorData]) -> str:
    """The findings as text that `from_text` reads."""
    return json.dumps([asdict(finding) for finding in findings])


def from_text(text: str) -> tuple[PoorData, ...]:
    """What `to_text` wrote in this run's own files.

    Raises:
        DocumentError: It is something else.
    """
    found: tuple[PoorData, ...] = parse_json(text, tuple[PoorData, ...], what="list of findings")
    return found
