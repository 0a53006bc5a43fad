"""BEVFusion and CenterPoint in plain PyTorch, and their training.

`bevfusion.model` builds the detector, loads checkpoints and decodes boxes; `bevfusion.training`
makes targets, losses and batches; `bevfusion.evaluation` runs models on frames and scores them;
`bevfusion.quantization` quantizes the detector; `bevfusion.deployment` cuts it into files.
"""

from bevfusion import evaluation, model, training

__version__ = "0.2.0"
__all__ = ["evaluation", "model", "training"]
