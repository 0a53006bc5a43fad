"""Training runs: they learn, they can be killed, they go on as if they had not been."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from bev_data.points import Frame
from bev_scenes import street_frame
from bevfusion.model import CONFIGS, build_model, load_weights
from bevfusion.training import CompactFrame
from bevfusion_quant import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.train import (
    Augmentation,
    FrameSource,
    TrainConfig,
    TrainResult,
    read_checkpoint,
    run_train,
)


def small_streets(count: int, cameras: str | None) -> list[Frame]:
    return [
        street_frame(seed, size="tiny", beams=8, sweeps=1, azimuth_steps=120, cameras=cameras)
        for seed in range(count)
    ]


def source(count: int, cameras: str | None = None) -> FrameSource:
    return FrameSource(f"{count} small streets", partial(small_streets, count, cameras))


def config(**settings) -> TrainConfig:
    return TrainConfig(**{"branch": "lidar", "steps": 3, "batch": 2, **settings})


def train(folder: Path, settings: TrainConfig, **options) -> TrainResult:
    frames = source(3, "tiny" if settings.branch != "lidar" else None)
    return run_train(frames, settings, folder, workers=0, **options)


def test_a_run_that_was_stopped_ends_with_the_same_bits(tmp_path: Path) -> None:
    settings = config(branch="all")
    train(tmp_path / "whole", settings)
    with pytest.raises(InputError, match=r"stopped after step 1 of 3.*--resume"):
        _stopped_at_once(tmp_path / "cut", settings)
    assert read_checkpoint(tmp_path / "cut" / "checkpoint.safetensors").step == 1
    assert not (tmp_path / "cut" / "weights.safetensors").exists()
    result = train(tmp_path / "cut", settings, resume=True)
    assert result.steps == 2
    for name in ("checkpoint.safetensors", "weights.safetensors"):
        whole, cut = (load_file(tmp_path / run / name) for run in ("whole", "cut"))
        assert whole.keys() == cut.keys()
        assert all(torch.equal(whole[key], cut[key]) for key in whole), name


def _stopped_at_once(folder: Path, settings: TrainConfig) -> None:
    """Train, with SIGTERM sent while the first step is under way."""
    sent = []

    def send(module: object, inputs: object) -> None:
        if not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    handle = torch.nn.modules.module.register_module_forward_pre_hook(send)
    try:
        train(folder, settings)
    finally:
        handle.remove()
        assert sent


def test_a_kill_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    settings = config()

    class Killed(BaseException):
        pass

    seen = []

    def kill(module: torch.nn.Module, inputs: object) -> None:
        if type(module).__name__ == "TransFusionHead":
            seen.append(True)
            if len(seen) == 3:
                raise Killed

    handle = torch.nn.modules.module.register_module_forward_pre_hook(kill)
    try:
        with pytest.raises(Killed):
            train(tmp_path / "cut", settings, checkpoint_every=1)
    finally:
        handle.remove()
    assert read_checkpoint(tmp_path / "cut" / "checkpoint.safetensors").step == 2
    train(tmp_path / "cut", settings, resume=True)
    train(tmp_path / "whole", settings)
    whole, cut = (load_file(tmp_path / run / "weights.safetensors") for run in ("whole", "cut"))
    assert all(torch.equal(whole[key], cut[key]) for key in whole)


def test_it_learns_four_streets_by_heart(tmp_path: Path) -> None:
    still = Augmentation(flip=False, rotation=0.0, scale=0.0)
    settings = config(steps=20, batch=4, lr=5e-3, augmentation=still)
    result = run_train(source(4), settings, tmp_path / "run", workers=0)
    first, last = (sum(result.losses[part]) for part in (0, -1))
    assert last < first / 2


def test_the_weights_load_as_any_checkpoint_does(tmp_path: Path) -> None:
    train(tmp_path / "run", config(steps=1, half=True), command="bevfusion-quant train …")
    path = tmp_path / "run" / "weights.safetensors"
    report = load_weights(build_model(CONFIGS["tiny"], ("lidar",)), path)
    assert report.layout == "KRSC"
    stored = load_file(path)
    types = {value.dtype for value in stored.values()}
    assert types == {torch.float16, torch.float32, torch.int64}
    assert stored["encoders.lidar.backbone.conv_input.1.running_var"].dtype == torch.float32
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["bevfusion-quant"])
    assert about["command"] == "bevfusion-quant train …"
    assert about["settings"]["steps"] == 1
    assert about["training_frames"] == "3 small streets"


def test_the_cameras_alone_train(tmp_path: Path) -> None:
    result = train(tmp_path / "run", config(branch="camera", steps=1))
    assert sum(result.losses[0]) > 0
    load_weights(
        build_model(CONFIGS["tiny"], ("camera",)), tmp_path / "run" / "weights.safetensors"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("branch", ["lidar", "all"])
def test_a_gpu_trains_as_the_cpu_does(tmp_path: Path, branch: str) -> None:
    settings = config(branch=branch, steps=1)
    heatmap = [
        train(tmp_path / device, settings, device=device).losses[0][0] for device in ("cpu", "cuda")
    ]
    assert heatmap[1] == pytest.approx(heatmap[0], rel=1e-3)  # the only loss before dropout


def test_a_run_starts_from_weights_that_fit(tmp_path: Path) -> None:
    train(tmp_path / "lidar", config(steps=1))
    start = tmp_path / "lidar" / "weights.safetensors"
    train(tmp_path / "all", config(branch="all", steps=1, lr=1e-12, clip=1e-9, start=start))
    before, after = load_file(start), load_file(tmp_path / "all" / "weights.safetensors")
    name = "encoders.lidar.backbone.encoder_layers.encoder_layer1.0.conv1.weight"
    torch.testing.assert_close(after[name], before[name], atol=1e-6, rtol=0)
    assert after["decoder.backbone.blocks.0.0.weight"].shape[1] == 32  # its own: another shape


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", config(steps=1))
    with pytest.raises(InputError, match="holds a run already"):
        train(tmp_path / "run", config(steps=1))
    with pytest.raises(InputError, match=r"steps was 1, now 2; lr was 0\.002, now 0\.01"):
        train(tmp_path / "run", config(steps=2, lr=0.01), resume=True)
    with pytest.raises(InputError, match=r"--out .*weights\.safetensors: it is a file"):
        train(tmp_path / "run" / "weights.safetensors", config(steps=1))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 nothing")
    with pytest.raises(InputError, match="is not a training checkpoint"):
        train(tmp_path, config(), resume=True)


def test_a_loss_that_is_no_number_ends_the_run_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"(step \d|head's outputs).*") as raised:
        train(tmp_path / "run", config(steps=30, lr=1e30), checkpoint_every=1)
    assert "lower" in str(raised.value) or "learning rate" in str(raised.value)
    assert (tmp_path / "run" / "checkpoint.safetensors").is_file()


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--device abacus"):
        train(tmp_path / "run", config(), device="abacus")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("steps", 0), ("batch", 0), ("lr", 0.0), ("clip", -1.0), ("seed", -1)]
)
def test_settings_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(InputError, match=f"--{name} "):
        config(**{name: value})


def test_the_command_trains_and_judges_on_other_streets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["train", "--dataset", "street", "--branch", "lidar", "--count", "1", "--steps", "1"]
    words += ["--batch", "1", "--held-out", "2", "--workers", "0", "--out", str(out)]
    assert main(words) == 0
    told = capsys.readouterr()
    assert "loss" in told.err
    assert "Held out: street, seeds 0 to 1" in told.out
    assert "mAP 0.0" in told.out
    with safe_open(out / "weights.safetensors", "pt") as file:
        about = json.loads(file.metadata()["bevfusion-quant"])
    assert about["held_out"]["count"] == 2
    assert about["command"].startswith("bevfusion-quant train --dataset street")
    assert CompactFrame.load(out / "frames" / "000000.npz").name == "street_1000000"
    assert main(words) == 2
    assert "--resume" in capsys.readouterr().err


def test_the_command_says_what_it_cannot_train_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.zeros((50, 5), np.float32).tofile(tmp_path / "bare.pcd.bin")
    words = ["train", "--points", str(tmp_path / "bare.pcd.bin"), "--branch", "lidar"]
    assert main([*words, "--workers", "0", "--out", str(tmp_path / "run")]) == 2
    assert "no labels" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "again"), [("train", "again with --resume to go on"), ("ptq", "again to start")]
)
def test_who_is_interrupted_hears_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, again: str
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("bevfusion_quant.cli._run", interrupted)
    assert main([command]) == 2
    assert again in capsys.readouterr().err
