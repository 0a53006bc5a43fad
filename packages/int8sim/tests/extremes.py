"""Random operands at which wrong arithmetic shows."""

from __future__ import annotations

import numpy as np
import torch


def int8(generator, *shape):
    """Extremes, and what lies between."""
    some = generator.choice(np.array([-128, -127, 127, 0, -1]), shape)
    any_ = generator.integers(-128, 128, shape)
    return torch.from_numpy(np.where(generator.random(shape) < 0.5, some, any_).astype(np.int8))
