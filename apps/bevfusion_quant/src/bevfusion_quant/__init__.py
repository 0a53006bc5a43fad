"""BEVFusion from float PyTorch to verified INT8: the whole job, one command.

`bevfusion_quant.points` and `.scenes` give frames, `.voxelize` voxels, `.model` the LiDAR branch,
`.ptq` the steps of the job and the whole of it, `.pictures` what a run looks like.
"""

from bevfusion_quant._errors import InputError

__all__ = ["InputError"]
