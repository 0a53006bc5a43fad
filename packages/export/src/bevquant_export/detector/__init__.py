"""A whole detector as the files of its engines: split at ``dense()``, written, verified.

`_parts` finds where voxels become maps, and splits the graph there. `_export` writes a file of each
part and runs frames through both, which `_chain` compares with the model that was not split.
"""

from __future__ import annotations

from bevquant_export.detector._chain import (
    DetectorExport,
    DetectorMap,
    FrameCheck,
    MapCheck,
    OutputCheck,
)
from bevquant_export.detector._export import export_detector

__all__ = [
    "DetectorExport",
    "DetectorMap",
    "FrameCheck",
    "MapCheck",
    "OutputCheck",
    "export_detector",
]
