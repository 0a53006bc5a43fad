"""The whole job on a small cloud: what is written, what it says, and that it comes back."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from clouds import cloud
from matplotlib.image import imread
from safetensors.torch import load_file

from bev_data.points import Frame
from bevfusion.model import CONFIGS, build_model, random_weights
from bevfusion_quant import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.ptq import (
    FrameBatches,
    PtqConfig,
    calibrate_branch,
    compare_layers,
    example_batch,
    fuse_branch,
    load_quantized,
    quantize_branch,
    run_ptq,
)

TINY = CONFIGS["tiny"]
FILES = {
    "summary.json", "config.json", "ranges.json", "weights.safetensors",
    "report.html", "bev.png", "layers.png", "page.json", "digests.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One run from the command line: two frames, the first of them for calibration."""
    here = tmp_path_factory.mktemp("here")
    before = Path.cwd()
    os.chdir(here)
    try:
        for seed in (1, 2):
            np.savez(f"frame{seed}.npz", points=cloud(seed=seed))
        arguments = (
            "ptq --points frame1.npz frame2.npz --config tiny --calibration-frames 1 --name a"
        )
        assert main(arguments.split()) == 0
        yield here / "runs" / "a"
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text(), parse_constant=pytest.fail)


def test_every_file_is_written_and_nothing_else(run: Path) -> None:
    assert {p.name for p in run.iterdir()} == FILES
    assert [p.name for p in run.parent.iterdir()] == ["a"]
    for picture in run.glob("*.png"):
        assert imread(picture).std() > 0.05


def test_summary_says_what_was_done(summary: dict) -> None:
    assert summary["command"] == (
        "bevfusion-quant ptq --points frame1.npz frame2.npz --config tiny --calibration-frames 1 "
        "--name a"
    )
    assert summary["frames"] == [
        {"name": "frame1", "size": 3000, "calibration": True},
        {"name": "frame2", "size": 3000, "calibration": False},
    ]
    assert {"python", "torch", "bevfusion-quant", "bevquant-qnn"} <= set(summary["versions"])
    assert len(summary["fusion"]["fused"]) == 21
    assert summary["fusion"]["skipped"] == []
    assert summary["fusion"]["largest_relative_change"] < 1e-4
    assert len(summary["quantization"]["quantized"]) >= 21
    assert len(summary["quantization"]["shared"]) == 8
    assert summary["calibration"]["batches"] == 1
    assert sum(summary["seconds"].values()) > summary["seconds"]["total"] > 0
    assert summary["peak_memory_mib"] > 100  # of the process, whatever else it ran before


def test_layers_are_all_there_in_order_and_sane(summary: dict) -> None:
    rows = summary["layers"]
    # The first convolution stays float.
    assert len(rows) == 20 + 8 + 1
    assert rows[0]["layer"] == "encoders.lidar.backbone.encoder_layers.encoder_layer1.0.conv1"
    assert rows[-2]["layer"] == "encoders.lidar.backbone.conv_out.0"
    assert rows[-1]["layer"] == "output"
    for row in rows:
        assert 15 < row["sqnr_db"] < 60
        assert 0.97 < row["cosine"] <= 1
    assert all(0 <= row["saturated"] < 0.05 for row in rows[:-1])


def test_quantizers_are_reported_once_with_every_path(summary: dict) -> None:
    rows = summary["quantizers"]
    paths = [path for row in rows for path in row["paths"]]
    assert len(rows) == 20 + 20
    assert len(paths) == len(set(paths)) == 20 + 20 + 8
    weights = [row for row in rows if row["paths"][0].endswith("_weight_quantizer")]
    assert all(row["saturated"] == 0 for row in weights)
    assert {row["channels"] for row in weights} == {8, 16, 32, 64}


def test_run_comes_back_bit_for_bit_and_repeats(run: Path) -> None:
    frame = Frame("frame1", cloud(seed=1))
    model = build_model(TINY, ("lidar",))
    (batch,) = FrameBatches([frame], TINY, model)
    random_weights(model, *batch, seed=0)
    fused = fuse_branch(model, example_batch(TINY)).model
    again = quantize_branch(fused, example_batch(TINY), first_layer=False).model
    calibrate_branch(again, [batch])
    loaded = load_quantized(run)
    with torch.no_grad():
        assert torch.equal(loaded(*batch), again(*batch))
        assert not torch.equal(loaded(*batch), fused(*batch))
    stored = load_file(run / "weights.safetensors")
    assert set(stored) == set(again.state_dict())
    assert not any("bn" in name or "running" in name for name in stored)
    assert compare_layers(fused, loaded, [batch]).rows[-1].sqnr_db > 15


def test_a_run_folder_that_is_none_cannot_be_loaded(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be loaded as a run"):
        load_quantized(tmp_path)
    for name in ("config.json", "ranges.json", "weights.safetensors"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "weights.safetensors").write_bytes(b"cut")
    with pytest.raises(InputError, match="cannot be loaded as a run"):
        load_quantized(tmp_path)


def test_overwrite_replaces_only_with_the_flag(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bev_picture", "layer_picture"):
        monkeypatch.setattr(f"bevfusion.pictures.{name}", lambda *_: [])
    frames = [Frame("frame3", cloud(seed=3))]
    config = PtqConfig("tiny", method="max")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_bytes((run / "config.json").read_bytes())
    (tmp_path / "b" / "of the user").touch()
    with pytest.raises(InputError, match="--overwrite"):
        run_ptq(frames, config, runs=tmp_path, name="b")
    with pytest.raises(InputError, match="of the user"):
        run_ptq(frames, config, runs=tmp_path, name="b", overwrite=True)
    assert (tmp_path / "b" / "of the user").exists()
    (tmp_path / "b" / "of the user").unlink()
    result = run_ptq(frames, config, runs=tmp_path, name="b", overwrite=True)
    assert json.loads((result.folder / "config.json").read_text())["method"] == "max"


def test_excluded_layers_stay_float(tmp_path: Path) -> None:
    example = example_batch(TINY)
    fused = fuse_branch(build_model(TINY, ("lidar",)), example).model
    stage = quantize_branch(fused, example, exclude=["conv_input"])
    kinds = dict(stage.model.lidar["backbone"].named_modules())
    assert type(kinds["conv_input.0"]).__name__ == "SubMConv3d"
    assert type(kinds["conv_out.0"]).__name__ == "QuantSparseConvolution"
    assert any("conv_input.0" in str(skipped) for skipped in stage.result.skipped)


def test_voxels_made_elsewhere_must_be_of_this_grid() -> None:
    frame = Frame(
        "v",
        voxels=(np.ones((2, 5), np.float32), np.array([[0, 1, 2, 3], [0, 360, 2, 3]], np.int32)),
    )
    with pytest.raises(InputError, match=r"1 of 2 voxels lie outside.*0, 360, 2, 3"):
        FrameBatches([frame], TINY, build_model(TINY, ("lidar",)))[0]
