"""Detectors in code of other projects: mmdetection3d, OpenPCDet, or a function of the user.

`load_detector` takes ``mmdet3d:CONFIG.py``, ``openpcdet:CONFIG.yaml`` or
``package.module:function``. `use_operator_standins` lets their code import without compiled
operators.
"""

from bevfusion.frameworks._detector import (
    ForeignDetector,
    ForeignModel,
    ForeignSizes,
    user_error,
    with_equal_rows,
)
from bevfusion.frameworks._extensions import use_operator_standins
from bevfusion.frameworks._load import load_detector

__all__ = [
    "ForeignDetector",
    "ForeignModel",
    "ForeignSizes",
    "load_detector",
    "use_operator_standins",
    "user_error",
    "with_equal_rows",
]
