"""A whole detector as the files of its engines: cut at ``dense()``, written, held together.

`_parts` finds where voxels become maps, and makes two graphs of one. `_export` writes a file of
each and sends frames through both, which `_chain` holds against the model that was not cut.
"""

from __future__ import annotations

from bevquant_export.detector._chain import FrameCheck, MapCheck, OutputCheck
from bevquant_export.detector._export import export_detector
from bevquant_export.detector._written import DetectorExport, DetectorMap

__all__ = [
    "DetectorExport",
    "DetectorMap",
    "FrameCheck",
    "MapCheck",
    "OutputCheck",
    "export_detector",
]
