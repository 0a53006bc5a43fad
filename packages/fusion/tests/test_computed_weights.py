"""Layers whose weight torch computes in every call."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, prune

from bevquant_fusion import fuse_model


def _pruned(layer):
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


KINDS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "hook of weight_norm": utils.weight_norm,
    "hook of spectral_norm": utils.spectral_norm,
    "pruned": _pruned,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("with_inputs", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_computed_weights_become_parameters_and_fold(kind, with_inputs, inplace, randomise):
    torch.manual_seed(0)
    computed = KINDS[kind](nn.Conv2d(3, 8, 3, bias=False))
    model = randomise(nn.Sequential(computed, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1)))
    x = torch.randn(2, 3, 8, 8, dtype=model[3].weight.dtype)
    with torch.no_grad():
        wanted = model(x)
    result = fuse_model(model, x if with_inputs else None, inplace)
    assert result.plain == ("0",)
    assert [(item.conv, item.bn) for item in result.fused] == [("0", "1")]
    assert (result.model is model) == inplace
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    assert isinstance(result.model[0].weight, nn.Parameter)
    assert type(result.model[0]) is nn.Conv2d
    assert not result.model[0]._forward_pre_hooks
    copy.deepcopy(result.model)


def test_a_layer_in_training_keeps_its_parametrization():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.BatchNorm1d(4)).eval()
    model[0].train()
    result = fuse_model(model)
    assert result.plain == ()
    assert utils.parametrize.is_parametrized(result.model[0])


def test_weights_of_another_value_than_in_a_call_are_refused():
    class Counting(nn.Module):
        calls = 0

        def forward(self, weight):
            Counting.calls += 1
            return weight * Counting.calls

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    utils.parametrize.register_parametrization(model[0], "weight", Counting(), unsafe=True)
    with pytest.raises(ValueError, match="weights of 0 as parameters"):
        fuse_model(model, torch.randn(2, 3))
