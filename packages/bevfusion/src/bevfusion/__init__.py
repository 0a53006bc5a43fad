"""mit-bevfusion's detector in plain PyTorch, and the parts that train it.

`bevfusion.model` builds it, loads its checkpoints and finds boxes; `bevfusion.training` makes
targets, losses and batches.
"""

from bevfusion import model, training

__all__ = ["model", "training"]
