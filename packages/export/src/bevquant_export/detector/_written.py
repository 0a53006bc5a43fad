"""What was written of a detector, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bevquant_export.dense import QdqFile
from bevquant_export.lint import Finding
from bevquant_export.sparse import SparseExport

if TYPE_CHECKING:
    from bevquant_export.detector._chain import FrameCheck


@dataclass(frozen=True)
class DetectorMap:
    """A map that the sparse file gives and the dense one takes, under one name.

    Attributes:
        name: Of the sparse file's output, and of the dense file's input where that reads it.
        shape: ``[frames, channels, …]`` in the example.
        amax: Its range, of which the dense file's first QuantizeLinear has the scale amax/127; None
            where that reads it in floats.
        made_by: What makes it in the forward: operation, module, file and line.
    """

    name: str
    shape: tuple[int, ...]
    amax: float | None
    made_by: str

    def __str__(self) -> str:
        range_ = "read in float" if self.amax is None else f"range {self.amax:.4g}"
        return f"{self.name} {list(self.shape)}, {range_}: {self.made_by}"


@dataclass(frozen=True)
class DetectorExport:
    """The files of a model, and what was found.

    Attributes:
        folder: Where they lie.
        target: Engine of the dense file.
        sparse: ``sparse.onnx``, with its layers; None where the model has no voxels.
        dense: ``dense.onnx``; None where nothing is computed behind ``dense()`` or beside it.
        maps: What the one gives and the other takes.
        outputs: What the model returns, by name, to file and output that it is there.
        left_out: What it returns that no file has: inputs handed through, coordinates.
        findings: Of the linter, both files.
        checks: Frames that went through both files; none where nothing was run.
    """

    folder: Path
    target: str
    sparse: SparseExport | None
    dense: QdqFile | None
    maps: tuple[DetectorMap, ...] = ()
    outputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    checks: tuple[FrameCheck, ...] = ()

    def __str__(self) -> str:
        lines = [str(file) for file in (self.sparse, self.dense) if file is not None]
        lines += [f"handed on: {map_}" for map_ in self.maps]
        lines += [
            f"returned: {name or 'result'}: {port} of {file}"
            for name, (file, port) in self.outputs.items()
        ]
        lines += [f"returned, in no file: {name}" for name in self.left_out]
        lines += [f"lint: {finding}" for finding in self.findings]
        lines += map(str, self.checks) if self.checks else ["not run one behind the other"]
        return "\n".join(lines)
