"""mit-bevfusion's detector in plain PyTorch, and the parts that train it.

`bevfusion.model` builds it, loads its checkpoints and finds boxes; `bevfusion.training` makes
targets, losses and batches; `bevfusion.evaluation` runs models on frames and counts what they find;
`bevfusion.quantization` quantizes the detector, `bevfusion.deployment` cuts it into engines' files.
"""

from bevfusion import evaluation, model, training

__version__ = "0.2.0"
__all__ = ["evaluation", "model", "training"]
