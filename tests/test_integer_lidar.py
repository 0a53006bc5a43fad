"""The app's LiDAR encoder in integers: calibrated by its own steps, run by int8sim."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevquant_int8sim import IntegerModel, compare, simulate

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("spconv.pytorch", reason="spconv is not installed")

from bevfusion.model import CONFIGS, Batch, build_model
from bevfusion_quant.ptq import calibrate_branch, fuse_branch, quantize_branch

CONFIG = CONFIGS["tiny"]


def frame(seed: int, count: int = 1500, batch_size: int = 1) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    sizes = (batch_size, *(size // 5 for size in CONFIG.lidar.sparse_shape))
    columns = [torch.randint(0, size, (count,), generator=generator) for size in sizes]
    coords = torch.unique(torch.stack(columns, 1), dim=0).int()
    features = torch.randn(len(coords), CONFIG.lidar.in_channels, generator=generator)
    return Batch(features, coords.contiguous(), batch_size)


def inputs(batch: Batch) -> tuple[Any, ...]:
    return batch.features, batch.coords, batch.batch_size


def folded(config: Any, example: Batch) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(config, ("lidar",))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.05, 0.2)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)
    return fuse_branch(model, example).model


@pytest.fixture(scope="module")
def models() -> tuple[nn.Module, nn.Module]:
    model = folded(CONFIG, frame(0))
    quantized = quantize_branch(copy.deepcopy(model), frame(0), branch="lidar").model
    calibrate_branch(quantized, [frame(seed) for seed in range(3)], method="mse")
    return model, quantized


def test_every_layer_is_an_integer_layer(models: Any) -> None:
    model = simulate(models[1], inputs(frame(0)))
    ops = [step.op for step in model.steps]
    assert model.float_fallbacks == ()
    assert ops.count("sparse_conv") == 21
    assert ops.count("add") == 8
    assert ops.count("quantize") == 1
    assert ops.count("dequantize") == ops.count("requantize") == 0
    made = {step.path for step in model.steps if step.op == "sparse_conv"}
    layers = {n for n, m in models[1].named_modules() if type(m).__name__.startswith("QuantSparse")}
    assert made == layers


def test_agrees_with_the_fake_quantized_model(models: Any) -> None:
    table = compare(*models, [inputs(frame(5)), inputs(frame(6, batch_size=2))])
    assert table.wrong == ()
    assert len(table.rows) == 30
    for row in table.rows:
        assert row.forced_max_steps is None or row.forced_max_steps <= 1, row.path
        assert row.integer_sqnr_db == pytest.approx(row.fake_sqnr_db, abs=0.7), row.path


def test_any_backend_and_saved_form_give_the_same_map(models: Any, tmp_path: Path) -> None:
    model = simulate(models[1], inputs(frame(0)))
    model.save(tmp_path / "lidar")
    expected = model(*inputs(frame(9, batch_size=2)))
    assert expected.shape == (2, 128, 40, 40)
    for backend in ("portable", "torch"):
        loaded = IntegerModel.load(tmp_path / "lidar", backend=backend)
        assert torch.equal(loaded(*inputs(frame(9, batch_size=2))), expected)


def test_real_voxels() -> None:
    features, coords = real_frame()
    near = (coords[:, 1] - 720).abs() < 50
    batch = Batch(features[near], coords[near].contiguous(), 1)
    model = folded(CONFIGS["nuscenes"], batch)
    quantized = quantize_branch(copy.deepcopy(model), batch, branch="lidar").model
    calibrate_branch(quantized, [batch], method="max")
    table = compare(model, quantized, [inputs(batch)])
    assert table.wrong == ()
    assert max(row.forced_max_steps or 0 for row in table.rows) <= 1
    assert all(12 <= (row.peak_bits or 16) <= 24 for row in table.rows)


def real_frame() -> tuple[Tensor, Tensor]:
    folder = Path(os.environ.get("BEVQUANT_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not (folder / "nvidia_scn").is_dir():
        pytest.skip("real voxels not found: set BEVQUANT_DATA")

    def read(name: str) -> Tensor:
        raw = (folder / "nvidia_scn" / name).read_bytes()
        _, rank, kind = np.frombuffer(raw, "<i4", 3)
        shape = np.frombuffer(raw, "<i4", rank, 12)
        values = np.frombuffer(raw, {1: "<i4", 2: "<f2"}[int(kind)], offset=12 + 4 * rank)
        return torch.from_numpy(values.reshape(shape).copy())

    features = read("in_features.torch.fp16.tensor").float()
    return features, read("in_indices_xyz.torch.int32.tensor")
