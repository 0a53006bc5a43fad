"""Result of a detector's export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bevquant_export.dense import QdqFile
from bevquant_export.lint import Finding
from bevquant_export.sparse import SparseExport
from bevquant_graph import HtmlTable
from bevquant_quantizers.documents import text_table

if TYPE_CHECKING:
    from bevquant_export.detector._chain import FrameCheck


@dataclass(frozen=True)
class DetectorMap:
    """A map that the sparse file computes and the dense file reads, under one name.

    Attributes:
        name: Output of the sparse file, and input of the dense file where that reads the map.
        shape: ``[frames, channels, …]`` of the example.
        amax: Range of the map. The first QuantizeLinear of the dense file has the scale amax/127.
            None where the dense file reads the map in float.
        made_by: Producer in the forward: operation, module, file and line.
    """

    name: str
    shape: tuple[int, ...]
    amax: float | None
    made_by: str


@dataclass(frozen=True)
class DetectorExport(HtmlTable):
    """Result of `export_detector`: the files and the checks that they passed.

    Attributes:
        folder: Folder of the files.
        target: Engine of the dense file.
        sparse: ``sparse.onnx`` and its layers; None for a model without voxels.
        dense: ``dense.onnx``; None where the model computes nothing on dense tensors.
        maps: Tensors that the sparse file passes to the dense file.
        outputs: Name of each tensor the model returns, with the file and output that holds it.
        left_out: Returned tensors that no file computes: inputs that are returned unchanged,
            coordinates.
        findings: Findings of the linter for both files.
        checks: One entry per frame that ran through both files; empty with ``verify=False``.
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
        files = [str(file) for file in (self.sparse, self.dense) if file is not None]
        parts = ["\n".join([*files, *(f"lint: {finding}" for finding in self.findings)])]
        if self.maps:
            heads = ("handed on", "shape", "range", "made by")
            parts.append(text_table([heads, *map(_row, self.maps)]))
        rows = [(name or "result", port, file) for name, (file, port) in self.outputs.items()]
        rows += [(name, "-", "in no file") for name in self.left_out]
        parts.append(text_table([("returned", "output", "file"), *rows]))
        return "\n\n".join([*parts, self._found()])

    def _found(self) -> str:
        """Results of the frames, one column each."""
        if not self.checks:
            return "not run one behind the other: whether they make what the model makes is unknown"
        columns = [check.rows() for check in self.checks]
        names = dict.fromkeys(name for column in columns for name in column)
        heads = ("one behind the other", *(check.frame for check in self.checks))
        rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
        table = text_table([heads, *rows])
        outputs = any(check.outputs for check in self.checks)
        note = "\ndB: SQNR of the outputs against the integer model that was not cut; "
        note += "fake: that of the fake-quantized model"
        return table + note * outputs


def _row(handed_on: DetectorMap) -> tuple[str, ...]:
    range_ = "float" if handed_on.amax is None else f"{handed_on.amax:.4g}"
    return handed_on.name, str(list(handed_on.shape)), range_, handed_on.made_by
