"""Shape checks of the package's own annotations, and what several test files share."""

import jaxtyping
import pytest
import torch
from torch import nn

jaxtyping.install_import_hook("bevquant_fusion", "beartype.beartype")


@pytest.fixture
def randomise():
    """Give a model float64 parameters and batch norms with awkward statistics, in eval mode."""

    def apply(model):
        model.double().eval()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(0.05, 3.0)
                if module.affine:
                    module.weight.data.normal_()
                    module.weight.data[0] = 0.0
                    module.weight.data[-1] = -abs(module.weight.data[-1]) - 0.1
                    module.bias.data.normal_()
        return model

    return apply


@pytest.fixture
def error_of():
    """Largest difference of two float64 tensors relative to the largest expected value."""

    def measure(actual, expected):
        assert actual.dtype == expected.dtype == torch.float64
        assert actual.shape == expected.shape
        scale = expected.abs().max()
        assert scale > 0
        return ((actual - expected).abs().max() / scale).item()

    return measure


@pytest.fixture
def cloud(spconv):
    """A random sparse tensor of any rank in float64."""

    def make(channels, shape=(6, 7, 8), voxels=60, batch=2):
        axes = [torch.randint(0, n, (voxels,)) for n in (batch, *shape)]
        indices = torch.unique(torch.stack(axes, 1), dim=0).int().contiguous()
        features = torch.randn(len(indices), channels, dtype=torch.float64)
        return spconv.SparseConvTensor(features, indices, list(shape), batch)

    return make
