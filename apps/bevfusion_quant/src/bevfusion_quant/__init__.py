"""BEVFusion, CenterPoint or your own detector, from float PyTorch to verified INT8.

Frames: `bevfusion_quant.points`, `.cameras`, `.scenes`, `.datasets`. Voxels: `.voxelize`.
Detectors and their parts: `.model`. The steps of a run: `.ptq`. Pages and pictures: `.report`,
`.pictures`.
"""

from bevfusion_quant._errors import InputError, VerificationError
from bevfusion_quant._version import __version__ as __version__

__all__ = ["InputError", "VerificationError"]
