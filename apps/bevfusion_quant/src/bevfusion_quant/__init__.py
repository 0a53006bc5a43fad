"""BEVFusion from float PyTorch to verified INT8: the whole job, one command.

`bevfusion_quant.points`, `.cameras`, `.scenes` and `.datasets` give frames, `.voxelize` voxels,
`.model` the detector or parts of it, `.ptq` the steps of the job and the whole of it, `.report` and
`.pictures` what a run looks like.
"""

from bevfusion_quant._errors import InputError, VerificationError
from bevfusion_quant._version import __version__ as __version__

__all__ = [
    "InputError",
    "VerificationError",
]
