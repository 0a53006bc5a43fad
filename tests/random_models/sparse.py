"""Random sparse models: convolutions, pools and sums on voxels, with or without a dense tail."""

from __future__ import annotations

import random
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_sparse import to_dense, use_bevquant_kernels
from random_models.network import Candidate, Network, grow, leave_out, settle

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import spconv.pytorch as spconv

GRID = (9, 8, 7)


class SparseNetwork(Network):
    """Takes features and coordinates; returns features, sparse tensors, or maps.

    Attributes:
        returns: ``"features"`` or ``"tensor"``, where a result is sparse.
    """

    returns = "tensor"

    def forward(self, x: Any, coords: Any = None, batch_size: Any = 1) -> Any:
        return self.follow(_begin(x, coords, batch_size))

    def finish(self, value: Any) -> Any:
        sparse = isinstance(value, spconv.SparseConvTensor)
        return value.features if sparse and self.returns == "features" else value


def _begin(given: Any, coords: Any = None, batch_size: Any = 1) -> Any:
    if isinstance(given, dict):
        given, coords, batch_size = given["features"], given["coords"], given["batch_size"]
    if isinstance(given, Tensor):
        return spconv.SparseConvTensor(given, coords, list(GRID), batch_size)
    return given


def _is_sparse(x: Any) -> bool:
    return isinstance(x, spconv.SparseConvTensor)


def _subm(rng: random.Random, x: Any) -> Any:
    if not _is_sparse(x):
        return None
    kernel = rng.choice([1, 3, (3, 1, 3)])
    key = None if rng.random() < 0.5 else f"subm{kernel}{tuple(x.spatial_shape)}{len(x.indices)}"
    padding = 1 if kernel == 3 else 0
    conv = spconv.SubMConv3d(
        x.features.shape[1], rng.choice([4, 6]), kernel, padding=padding, indice_key=key,
        bias=rng.random() < 0.5,
    )  # fmt: skip
    return _chain(rng, conv), lambda m, v: m(v)


def _chain(rng: random.Random, conv: Any) -> nn.Module:
    if rng.random() < 0.3:
        return conv
    return spconv.SparseSequential(
        conv, nn.BatchNorm1d(conv.out_channels), rng.choice([nn.ReLU(), nn.ReLU(), nn.LeakyReLU()])
    )


def _strided(rng: random.Random, x: Any) -> Any:
    if not _is_sparse(x) or min(x.spatial_shape) < 3:
        return None
    key = None if rng.random() < 0.4 else f"down{rng.random()}"
    kernel, stride, padding = rng.choice(
        [(3, 2, 1), (2, 2, 0), (3, 1, 1), ((1, 1, 3), (1, 1, 2), 0)]
    )
    conv = spconv.SparseConv3d(
        x.features.shape[1], rng.choice([4, 6]), kernel, stride, padding, indice_key=key
    )
    return _chain(rng, conv), lambda m, v: m(v)


def _inverse(rng: random.Random, x: Any) -> Any:
    if not _is_sparse(x):
        return None
    keys = [k for k in x.indice_dict if str(k).startswith("down")]
    if not keys:
        return None
    size = getattr(x.indice_dict[keys[-1]], "ksize", None) or x.indice_dict[keys[-1]].kernel_size
    conv = spconv.SparseInverseConv3d(x.features.shape[1], 4, list(size), indice_key=keys[-1])
    return conv, lambda m, v: m(v)


def _pool(rng: random.Random, x: Any) -> Any:
    if not _is_sparse(x) or min(x.spatial_shape) < 3:
        return None
    kinds = [spconv.SparseMaxPool3d, spconv.SparseMaxPool3d, spconv.SparseAvgPool3d]
    return rng.choice(kinds)(*rng.choice([(3, 2, 1), (2, 2, 0)])), lambda m, v: m(v)


def _transposed(rng: random.Random, x: Any) -> Any:
    if not _is_sparse(x) or max(x.spatial_shape) > 12:
        return None
    return spconv.SparseConvTranspose3d(x.features.shape[1], 4, 2, 2), lambda m, v: m(v)


def _on_features(rng: random.Random, x: Any) -> Any:
    if not _is_sparse(x):
        return None
    width = x.features.shape[1]
    module, function = rng.choice([
        (nn.BatchNorm1d(width), lambda m, f: m(f)), (nn.ReLU(), lambda m, f: m(f)),
        (nn.Linear(width, 6), lambda m, f: m(f)), (nn.Sigmoid(), lambda m, f: f * m(f)),
        (nn.LayerNorm(width), lambda m, f: m(f)), (nn.Identity(), lambda m, f: f * 0.5),
        (nn.Identity(), lambda m, f: torch.cat([f, f.relu()], 1)),
        (nn.Identity(), lambda m, f: f[:, : f.shape[1] // 2]),
    ])  # fmt: skip
    return module, lambda m, v: v.replace_feature(function(m, v.features))


def _pair(rng: random.Random, x: Any, y: Any) -> Any:
    if not (_is_sparse(x) and _is_sparse(y) and x.features.shape[0] == y.features.shape[0]):
        return None
    if x.spatial_shape != y.spatial_shape or not torch.equal(x.indices, y.indices):
        return None
    function = lambda a, b: torch.cat([a, b], 1)  # noqa: E731
    if x.features.shape == y.features.shape:
        function = rng.choice([
            lambda a, b: a + b, lambda a, b: (a + b).relu(), lambda a, b: torch.cat([a, b], 1),
        ])  # fmt: skip
    return None, lambda a, b: a.replace_feature(function(a.features, b.features))


def _dense(rng: random.Random, x: Any) -> Any:
    if not _is_sparse(x):
        return None

    def function(v: Any) -> Tensor:
        made = to_dense(v.features, v.indices, v.spatial_shape, v.batch_size)
        return made.flatten(1, 2)

    return None, function


def _tail(rng: random.Random, x: Any) -> Any:
    if _is_sparse(x):
        return None
    conv = nn.Conv2d(x.shape[1], 6, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(6), nn.ReLU()), lambda m, v: m(v)


CANDIDATES = (
    Candidate("subm", _subm), Candidate("subm", _subm), Candidate("strided", _strided),
    Candidate("strided", _strided), Candidate("inverse", _inverse), Candidate("pool", _pool),
    Candidate("transposed", _transposed), Candidate("features", _on_features),
    Candidate("pair", _pair, 2), Candidate("pair", _pair, 2), Candidate("dense", _dense),
    Candidate("tail", _tail),
)  # fmt: skip


def _frame(generator: torch.Generator, share: float, form: str) -> tuple[Any, ...]:
    coords = (torch.rand(1, *GRID, generator=generator) < share).nonzero().int().contiguous()
    features = torch.randn(len(coords), 4, generator=generator)
    if form == "tensor":
        return (spconv.SparseConvTensor(features, coords, list(GRID), 1),)
    if form == "batch":
        return ({"features": features, "coords": coords, "batch_size": 1},)
    return features, coords, 1


def make(seed: int, skipped: Collection[int] = ()) -> tuple[Network, list[tuple[Any, ...]]]:
    """A model, and frames for it with other numbers of voxels."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    form = rng.choice(["columns", "columns", "tensor", "batch"])
    frames = [_frame(generator, share, form) for share in (0.25, 0.2, 0.15)]
    start = _begin(*frames[0])
    length = rng.randint(2, 6)
    steps, parts, returned = grow(rng, CANDIDATES, start, length, use_bevquant_kernels)
    net = SparseNetwork(leave_out(steps, skipped), parts, returned)
    net.returns = rng.choice(["features", "tensor"])
    return settle(net, generator), frames
