"""The branch against mit-bevfusion's names, and against dense convolutions in float64."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bev_data import InputError
from bevfusion.model import CONFIGS, LidarConfig, build_lidar_branch, random_weights
from bevfusion.model._encoder import require_spconv

SMALL = dataclasses.replace(
    CONFIGS["tiny"].lidar,
    name="small",
    sparse_shape=(32, 24, 41),
    base_channels=3,
    encoder_channels=((3, 3, 4), (4, 4, 5), (5, 5, 6), (6, 6)),
    output_channels=7,
)


def voxels(config: LidarConfig, count: int = 300, batch: int = 1, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x, y, z = config.sparse_shape
    keys = torch.randint(batch * x * y * z, (2 * count,), generator=generator).unique()
    keys = keys[torch.randperm(len(keys), generator=generator)[:count]]
    columns = []
    for extent in (z, y, x):
        columns.append(keys % extent)
        keys = keys // extent
    coords = torch.stack([keys, *columns[::-1]], 1).int()
    return torch.randn(count, config.in_channels, generator=generator), coords


def expected_shapes(config: LidarConfig) -> dict[str, tuple[int, ...]]:
    """Every entry of the branch's state dict, sparse weights as RSCK, written out by hand."""
    shapes: dict[str, tuple[int, ...]] = {}

    def norm(path: str, width: int) -> None:
        for leaf in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{path}.{leaf}"] = (width,)
        shapes[f"{path}.num_batches_tracked"] = ()

    def unit(path: str, wide_in: int, wide_out: int, kernel=(3, 3, 3)) -> None:
        shapes[f"{path}.0.weight"] = (*kernel, wide_in, wide_out)
        norm(f"{path}.1", wide_out)

    root = "encoders.lidar.backbone"
    unit(f"{root}.conv_input", 5, 16)
    width = 16
    for stage, out in enumerate((32, 64, 128, 128), start=1):
        path = f"{root}.encoder_layers.encoder_layer{stage}"
        for block in (0, 1):
            for half in (1, 2):
                shapes[f"{path}.{block}.conv{half}.weight"] = (3, 3, 3, width, width)
                norm(f"{path}.{block}.bn{half}", width)
        if stage < 4:
            unit(f"{path}.2", width, out)
            width = out
    unit(f"{root}.conv_out", 128, 128, (1, 1, 3))
    return shapes


def test_state_dict_has_mit_bevfusions_names_and_shapes() -> None:
    model = build_lidar_branch(CONFIGS["nuscenes"].lidar)
    got = {
        name: (*t.shape[1:4], t.shape[4], t.shape[0]) if t.ndim == 5 else tuple(t.shape)
        for name, t in model.state_dict().items()
    }
    assert got == expected_shapes(CONFIGS["nuscenes"].lidar)


def test_full_size_map_is_256_by_180_by_180() -> None:
    config = CONFIGS["nuscenes"].lidar
    model = build_lidar_branch(config)
    with torch.no_grad():
        assert model(*voxels(config, 40), 1).shape == (1, 256, 180, 180)


class Dense:
    """The encoder by dense convolutions: submanifold ones keep the mask, strided ones grow it."""

    def __init__(self, backbone: nn.Module) -> None:
        self.backbone = backbone

    def conv(self, module: nn.Module, x: torch.Tensor, mask: torch.Tensor):
        weight = module.weight.permute(0, 4, 1, 2, 3)
        y = F.conv3d(x, weight, stride=module.stride, padding=module.padding)
        if not module.subm:
            ones = torch.ones(1, 1, *module.kernel_size, dtype=mask.dtype)
            mask = (F.conv3d(mask, ones, stride=module.stride, padding=module.padding) > 0).to(mask)
        return y * mask, mask

    def norm(self, module: nn.BatchNorm1d, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(
            x, module.running_mean, module.running_var, module.weight, module.bias, eps=module.eps
        )
        return y * mask

    def unit(self, members: nn.Module, x: torch.Tensor, mask: torch.Tensor):
        x, mask = self.conv(members[0], x, mask)
        return self.norm(members[1], x, mask).relu(), mask

    def block(self, b: nn.Module, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = self.norm(b.bn1, self.conv(b.conv1, x, mask)[0], mask).relu()
        return (self.norm(b.bn2, self.conv(b.conv2, h, mask)[0], mask) + x).relu()

    def __call__(self, features, coords, batch: int, shape) -> torch.Tensor:
        x = torch.zeros(batch, features.shape[1], *shape, dtype=features.dtype)
        mask = torch.zeros(batch, 1, *shape, dtype=features.dtype)
        b, i, j, k = coords.long().unbind(1)
        x[b, :, i, j, k] = features
        mask[b, 0, i, j, k] = 1
        x, mask = self.unit(self.backbone.conv_input, x, mask)
        for stage in self.backbone.encoder_layers._modules.values():
            x = self.block(stage[0], x, mask)
            x = self.block(stage[1], x, mask)
            if len(stage) == 3:
                x, mask = self.unit(stage[2], x, mask)
        x, mask = self.unit(self.backbone.conv_out, x, mask)
        n, c, h, w, d = x.shape
        flat = torch.empty(n, c * d, h, w, dtype=x.dtype)
        for channel in range(c):
            for height in range(d):
                flat[:, channel * d + height] = x[:, channel, :, :, height]
        return flat


def test_encoder_equals_dense_convolutions_in_float64() -> None:
    model = build_lidar_branch(SMALL)
    features, coords = voxels(SMALL, 400, batch=2)
    random_weights(model, features[coords[:, 0] == 0], coords[coords[:, 0] == 0], seed=3)
    model.double()
    with torch.no_grad():
        got = model(features.double(), coords, 2)
        wanted = Dense(model.lidar["backbone"])(features.double(), coords, 2, SMALL.sparse_shape)
    assert got.shape == (2, 14, 4, 3)
    assert wanted.abs().max() > 0.1
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_random_weights_keep_every_layer_alive_and_small() -> None:
    config = CONFIGS["tiny"].lidar
    model = build_lidar_branch(config)
    features, coords = voxels(config, 3000)
    features = features * torch.tensor([20.0, 20.0, 1.0, 60.0, 0.1])
    random_weights(model, features, coords, seed=1)
    spread: list[float] = []
    hooks = [
        m.register_forward_hook(lambda m, i, o: spread.append(float(o.std())))
        for m in model.modules()
        if isinstance(m, nn.BatchNorm1d)
    ]
    with torch.no_grad():
        model(features, coords, 1)
    assert len(hooks) == len(spread) == 21
    assert min(spread) > 0.3
    assert max(spread) < 3


def test_random_weights_repeat_and_differ_by_seed() -> None:
    features, coords = voxels(SMALL)
    models = [build_lidar_branch(SMALL) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        random_weights(model, features, coords, seed=seed)
    a, b, c = (m.state_dict() for m in models)
    last = "encoders.lidar.backbone.conv_out.0.weight"
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a[last], c[last])


def test_random_weights_return_what_the_model_then_makes() -> None:
    model = build_lidar_branch(SMALL)
    features, coords = voxels(SMALL)
    made = random_weights(model, features, coords)
    with torch.no_grad():
        assert torch.equal(made, model(features, coords, 1))


def test_random_weights_of_a_single_voxel_are_finite() -> None:
    model = build_lidar_branch(SMALL)
    features, coords = voxels(SMALL, 1)
    random_weights(model, features, coords)
    with torch.no_grad():
        assert torch.isfinite(model(*voxels(SMALL, 200), 1)).all()


ABSENT = """
import sys
sys.modules["spconv"] = None  # importing it fails
from bevfusion.model import CONFIGS, build_lidar_branch
conv = build_lidar_branch(CONFIGS["tiny"].lidar).lidar.backbone.conv_input[0]
print(type(conv).__module__, tuple(conv.weight.shape))
"""


def test_without_spconv_the_standin_is_used_and_named_once() -> None:
    done = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True)
    assert done.stdout == "spconv.pytorch.conv (8, 3, 3, 3, 5)\n"
    assert done.stderr.count("bevquant_sparse stands in for it") == 1


def test_a_broken_spconv_is_reported(spconv_numbers, monkeypatch) -> None:
    def broken(name):
        raise ImportError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr("bevfusion.model._encoder.importlib.import_module", broken)
    with pytest.raises(InputError, match=r"\(libcudart.so.12.*repair it, or uninstall it"):
        require_spconv()
