"""A real nuScenes frame through random weights: every backend against loops over its pairs."""

import numpy as np
import torch

from bevquant_int8sim import int8_sparse_conv, quantize
from bevquant_sparse import WeightLayout, build_rulebook


def test_real_voxels_two_layers(backend, real_frame, loop_requantize):
    features, coords = real_frame
    chosen = coords[:, 1].sub(720).abs() < 60  # a strip through the sensor
    features, coords = features[chosen], coords[chosen]
    generator = np.random.default_rng(0)
    shape = (1440, 1440, 41)
    scale = features.abs().amax(0) / 127
    x = quantize(features, scale, axis=1)
    rulebook = build_rulebook(coords, shape, 3, subm=True, batch_size=1)
    down = build_rulebook(coords, shape, 3, 2, 1, subm=False, batch_size=1)
    first = generator.integers(-127, 128, (27, 5, 16)).astype(np.int8)
    second = generator.integers(-127, 128, (27, 16, 32)).astype(np.int8)
    bias = generator.integers(-3000, 3000, 16).astype(np.int32)
    multiplier = generator.uniform(1e-4, 1e-3, 16)
    h = int8_sparse_conv(
        x, torch.from_numpy(first), torch.from_numpy(bias), rulebook, layout=WeightLayout.VCK,
        multiplier=torch.from_numpy(multiplier), relu=True, backend=backend,
    )  # fmt: skip
    acc = int8_sparse_conv(
        h, torch.from_numpy(second), None, down, layout=WeightLayout.VCK, backend=backend
    )
    wide = loop_pairs(x.numpy(), first, bias, rulebook)
    rows = generator.permutation(len(wide))[:300]
    assert (h.numpy()[rows] == loop_requantize(wide[rows], multiplier, low=0)).all()
    assert (acc.numpy() == loop_pairs(h.numpy(), second, 0, down)).all()


def loop_pairs(x, w, bias, rulebook):
    x = np.concatenate([x, np.zeros_like(x[:1])]).astype(np.int64)  # row −1: an absent neighbour
    out = np.zeros((rulebook.num_out, w.shape[2]), np.int64) + bias
    for offset, column in enumerate(rulebook.neighbours.numpy().T):
        for channel in range(x.shape[1]):
            out += x[column, channel, None] * w[offset, channel].astype(np.int64)
    return out
