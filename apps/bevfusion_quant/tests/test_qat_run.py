"""Runs of quantization-aware training: they learn, stop, go on, and are runs like any other."""

from __future__ import annotations

import copy
import json
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from without_pictures import without_pictures

from bev_data.points import Frame
from bev_scenes import street_frame
from bevfusion.deployment import nvidia_pieces
from bevfusion.model import CONFIGS
from bevfusion.quantization import QatDetectorTrainer
from bevfusion.training import make_batch, order_of
from bevfusion_quant import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.ptq import FrameBatches, PtqConfig, load_run, run_evaluate, run_ptq
from bevfusion_quant.qat import QatConfig, QatResult, add_up, run_qat, trainer_for
from bevfusion_quant.run import as_settings
from bevfusion_quant.saved_run import LoadedRun, ModelSettings, save_model
from bevfusion_quant.train import (
    Augmentation,
    FrameSource,
    Motion,
    TrainConfig,
    head_loss,
    prepare_frames,
    read_checkpoint,
)
from bevquant_int8sim import simulate
from bevquant_qnn import PrecisionPlan, apply_precision, distillation_loss, precision_groups
from bevquant_quantizers import named_quantizers
from bevquant_quantizers.documents import sha256

CPU = torch.device("cpu")
STILL = Augmentation(flip=False, rotation=0.0, scale=0.0)
FOLLOWED = {"learn_ranges": False, "distill": 0.0}
LEARNED = {"learn_ranges": True, "train_float": True, "distill": 2.0}


def small_streets(count: int, labels: bool = True) -> list[Frame]:
    frames = [
        street_frame(seed, size="tiny", beams=8, sweeps=1, azimuth_steps=120)
        for seed in range(count)
    ]
    return frames if labels else [replace(frame, labels=None) for frame in frames]


SOURCE = FrameSource("2 small streets", partial(small_streets, 2))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LiDAR detector with weights of 4 bits, and its frames, prepared."""
    folder = tmp_path_factory.mktemp("runs")
    with without_pictures():
        config = PtqConfig("tiny", "lidar-detector", weight_bits=4)
        run_ptq(small_streets(1), config, runs=folder, name="ptq")
    prepare_frames(SOURCE, TrainConfig(branch="lidar"), folder / "frames", workers=0)
    return folder


@pytest.fixture(scope="module")
def start(runs: Path) -> LoadedRun:
    """The run, loaded once: nobody may change it."""
    return load_run(runs / "ptq")


@pytest.fixture
def quick_load(start: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand out copies of the loaded run: following its data flow anew takes a second."""
    monkeypatch.setattr("bevfusion_quant.qat.load_run", lambda run: copy.deepcopy(start))


def qat(runs: Path, to: Path, run: str | Path = "ptq", **given: Any) -> QatResult:
    names = ("resume", "overwrite", "judge_by", "name", "checkpoint_every", "device", "cameras")
    options = {name: given.pop(name) for name in names if name in given}
    source = given.pop("source", SOURCE)
    cache = runs / "frames" if source is SOURCE else to / "frames"
    config = QatConfig(**{"steps": 2, "batch": 1, **FOLLOWED, **given})
    with without_pictures():
        return run_qat(runs / run, source, config, runs=to, workers=0, cache=cache, **options)


def trainer(runs: Path, start: LoadedRun, **given: Any) -> QatDetectorTrainer:
    loaded = copy.deepcopy(start)
    config = QatConfig(**{"steps": 3, "batch": 2, **FOLLOWED, **given})
    frames = prepare_frames(SOURCE, TrainConfig(branch="lidar"), runs / "frames", workers=0)
    teacher = loaded.float_model if config.distill else None
    made = trainer_for(config, loaded.quantized_model, teacher, frames)
    made.survey()
    return made


def ranges(model: torch.nn.Module) -> list[torch.Tensor]:
    return [entry.quantizer.amax.detach().clone() for entry in named_quantizers(model)]


def test_the_loss_falls(runs: Path, start: LoadedRun) -> None:
    learning = trainer(runs, start, steps=6, lr=8e-3, augmentation=STILL)
    with torch.random.fork_rng():
        losses = [sum(learning.step(step)) for step in range(6)]
    assert sum(losses[-2:]) < 0.8 * sum(losses[:2])


def test_the_gradient_of_a_step_is_that_of_the_mean_loss(runs: Path, start: LoadedRun) -> None:
    with torch.random.fork_rng():
        learning = trainer(runs, start, augmentation=STILL)
        for module in learning.model.modules():
            if isinstance(module, torch.nn.Dropout | torch.nn.MultiheadAttention):
                setattr(module, "p" if isinstance(module, torch.nn.Dropout) else "dropout", 0.0)
        total = add_up(learning._parts(0))
        learning.optimizer.zero_grad()
        frames, model = learning._frames, learning.model
        chosen = order_of(0, 0, 2, len(frames))
        both = []
        for index in chosen:
            batch, targets = make_batch([frames[index]], [Motion()], model)
            both.append(head_loss(model(*batch), targets, model.head.config).total)
        ((both[0] + both[1]) / 2).backward()
    wanted = torch.cat(
        [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten()
         for p in learning._parameters()]
    )  # fmt: skip
    assert float(wanted.norm()) > 0
    torch.testing.assert_close(total.gradient, wanted, rtol=1e-4, atol=1e-6)
    assert float(total.losses.sum()) == pytest.approx(float(sum(both).detach()) / 2, rel=1e-5)


def test_distillation_pulls_the_map_to_the_float_models(runs: Path, start: LoadedRun) -> None:
    with torch.random.fork_rng():
        apart = []
        for weight in (0.0, 1000.0):
            learning = trainer(
                runs,
                start,
                steps=4,
                batch=1,
                lr=3e-3,
                distill=weight,
                train_float=True,
                augmentation=STILL,
            )
            for step in range(4):
                learning.step(step)
            apart.append(_distance(learning, start.float_model))
    assert apart[1] < 0.5 * apart[0]


def _distance(learning: QatDetectorTrainer, exact: torch.nn.Module) -> float:
    batch, _ = make_batch([learning._frames[0]], [Motion()], learning.model)
    maps = []
    for model in (learning.model.eval(), exact):
        hook = model.decoder["neck"].register_forward_hook(lambda m, a, out: maps.append(out))
        with torch.no_grad():
            model(*batch)
        hook.remove()
    return float(distillation_loss(*maps))


def _stopped_at_once(runs: Path, to: Path, **given: Any) -> None:
    """Train, with SIGTERM sent while the first step is under way."""
    step = QatDetectorTrainer.step

    def stop(self: QatDetectorTrainer, number: int) -> list[float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QatDetectorTrainer, "step", stop)
        qat(runs, to, **given)


@pytest.mark.usefixtures("quick_load")
@pytest.mark.parametrize("settings", [{}, LEARNED], ids=["followed", "learned"])
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    runs: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    qat(runs, tmp_path / "whole", **settings)
    cut = tmp_path / "cut"
    with pytest.raises(InputError, match=r"stopped after step 1 of 2.*--resume"):
        _stopped_at_once(runs, cut, **settings)
    checkpoint = cut / "qat.training" / "checkpoint.safetensors"
    assert read_checkpoint(checkpoint).step == 1
    assert not (cut / "qat").exists()
    with pytest.raises(InputError, match=r"go on with --resume, begin anew with --overwrite"):
        qat(runs, cut, **settings)
    with pytest.raises(InputError, match=r"lr was 0\.0003, now 0\.01.*another --name"):
        qat(runs, cut, resume=True, lr=0.01, **settings)
    result = qat(runs, cut, resume=True, **settings)
    assert result.steps == 1
    assert not checkpoint.exists()
    for name in ("weights.safetensors", "ranges.json", "float_weights.safetensors"):
        assert (cut / "qat" / name).read_bytes() == (tmp_path / "whole/qat" / name).read_bytes()


@pytest.mark.usefixtures("quick_load")
def test_a_kill_leaves_the_checkpoint_before(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = QatDetectorTrainer.step

    class Killed(BaseException):
        pass

    def kill(self: QatDetectorTrainer, number: int) -> list[float]:
        if number == 1:
            raise Killed
        return step(self, number)

    monkeypatch.setattr(QatDetectorTrainer, "step", kill)
    with pytest.raises(Killed):
        qat(runs, tmp_path, checkpoint_every=1)
    assert read_checkpoint(tmp_path / "qat.training" / "checkpoint.safetensors").step == 1
    assert not (tmp_path / "qat").exists()


@pytest.fixture(scope="module")
def trained(runs: Path) -> Path:
    """A run with learned ranges."""
    return qat(runs, runs, name="trained", lr=5e-3, steps=2, **LEARNED).folder


@pytest.fixture(scope="module")
def reloaded(trained: Path) -> LoadedRun:
    return load_run(trained)


def test_the_written_run_is_a_run_like_any_other(
    trained: Path, start: LoadedRun, reloaded: LoadedRun, tmp_path: Path
) -> None:
    loaded = reloaded
    exact, before = loaded.float_model.state_dict(), start.float_model.state_dict()
    assert all(torch.equal(exact[name], value) for name, value in before.items())
    frames = small_streets(1)
    with without_pictures(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("bevfusion_quant.ptq.load_run", lambda run: reloaded)
        result = run_evaluate(trained, frames, runs=tmp_path, name="judged")
    models = [entry.model for entry in result.accuracy.models]
    assert models == ["float", "quantized"]
    batch = FrameBatches(frames, CONFIGS["tiny"], loaded.quantized_model)[0]
    with torch.no_grad():
        fake = loaded.quantized_model(*batch)["dense_heatmap"]
        integers = simulate(loaded.quantized_model, tuple(batch))(*batch)["dense_heatmap"]
        untrained = start.quantized_model(*batch)["dense_heatmap"]
    # One rounding in a hundred may fall to the other side; training moved the map further.
    assert (fake - integers).norm() < 0.2 * (fake - untrained).norm()


def test_learned_ranges_end_as_constants(runs: Path, trained: Path, reloaded: LoadedRun) -> None:
    state, before = (load_file(run / "weights.safetensors") for run in (trained, runs / "ptq"))
    assert state.keys() == before.keys()
    told = json.loads((trained / "ranges.json").read_text())["quantizers"]
    for entry in told:
        held = state[f"{entry['names'][0]}._amax"]
        assert held.flatten().tolist() == torch.tensor(entry["amax"]).flatten().tolist()
        assert bool((held > 0).all())
    names = [name for name in state if name.endswith("_amax")]
    moved = [name for name in names if not torch.equal(state[name], before[name])]
    assert len(moved) > 0.9 * len(names)
    model = reloaded.quantized_model
    assert {p.requires_grad for p in model.parameters()} == {True}
    assert not any("_amax" in name for name, _ in model.named_parameters())


def test_files_hold_the_head_as_trained(start: LoadedRun, reloaded: LoadedRun) -> None:
    trained, same = (
        nvidia_pieces(run.float_model, run.quantized_model)[-1] for run in (reloaded, start)
    )
    held = trained.float_module.state_dict()
    own, other = (
        {f"heads.object.{name}": value for name, value in model.head.state_dict().items()}
        for model in (reloaded.quantized_model, reloaded.float_model)
    )
    name = "heads.object.shared_conv.weight"
    assert torch.equal(held[name], own[name])
    assert not torch.equal(held[name], other[name])
    assert held.keys() == same.float_module.state_dict().keys() == other.keys()
    assert same.fake_module is same.float_module
    before = start.float_model.head.state_dict()["shared_conv.weight"]
    assert torch.equal(same.float_module.state_dict()[name], before)


def test_config_and_summary_say_what_was_done(runs: Path, trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    before = json.loads((runs / "ptq/config.json").read_text())
    assert config["weight_bits"] == 4
    assert config["branch"] == "lidar-detector"
    assert config["qat"]["run_sha256"] == before["sha256"] != config["sha256"]
    assert config["qat"]["settings"]["distill"] == 2.0
    summary = json.loads((trained / "summary.json").read_text())
    assert list(summary["qat"]["losses"][0]) == ["heatmap", "class", "box", "distillation"]
    assert summary["accuracy"] is None


def test_a_plan_stays_obeyed(
    runs: Path, start: LoadedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(start.quantized_model)
    groups = precision_groups(model)
    plan = PrecisionPlan.by_hand(
        model, {groups[1].modules[0]: "float", groups[3].modules[0]: "int16"}
    )
    apply_precision(model, plan)
    planned = tmp_path / "planned"
    planned.mkdir()
    plan.save(planned / "plan.json")
    config = {**start.config, "plan": "plan.json"}
    digests = {**save_model(planned, model), "plan.json": sha256(planned / "plan.json")}
    (planned / "config.json").write_text(json.dumps({**config, "sha256": digests}))
    kinds = [(e.quantizer._disabled, e.quantizer.num_bits) for e in named_quantizers(model)]
    assert {bits for off, bits in kinds if not off} == {8, 16}
    assert any(off for off, _ in kinds)
    settings, float_model = as_settings(ModelSettings, config), copy.deepcopy(start.float_model)
    loaded = LoadedRun(settings, start.sizes, float_model, model)
    monkeypatch.setattr("bevfusion_quant.qat.load_run", lambda run: loaded)
    result = qat(runs, tmp_path, planned, steps=1, batch=1)
    assert (result.folder / "plan.json").read_bytes() == (planned / "plan.json").read_bytes()
    after = named_quantizers(load_run(result.folder).quantized_model)
    assert [(e.quantizer._disabled, e.quantizer.num_bits) for e in after] == kinds


def test_runs_that_cannot_be_trained_are_refused(runs: Path, tmp_path: Path) -> None:
    cases = {
        "encoder": "encoder alone, and without a head",
        "bpu": "run for a BPU",
        "apart": "batch norms that are not folded",
        "judged": "it has figures of",
    }
    changes: dict[str, dict[str, Any]] = {
        "encoder": {"branch": "lidar"},
        "bpu": {"target": "bpu"},
        "apart": {"fold": False},
        "judged": {"evaluates": "runs/ptq"},
    }
    for name, changed in changes.items():
        config = json.loads((runs / "ptq/config.json").read_text())
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, **changed}))
    for name, told in cases.items():
        with pytest.raises(InputError, match=told):
            qat(runs, tmp_path, tmp_path / name)
    assert not list(tmp_path.glob("qat*"))


@pytest.mark.usefixtures("quick_load")
def test_frames_without_labels_are_refused(runs: Path, tmp_path: Path) -> None:
    bare = FrameSource("bare", partial(small_streets, 1, labels=False))
    with pytest.raises(InputError, match="training needs labelled points, and it has no labels"):
        qat(runs, tmp_path, source=bare)
    assert not (tmp_path / "qat").exists()


@pytest.mark.usefixtures("quick_load")
def test_a_loss_that_is_no_number_ends_the_run(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"step \d+: the loss is|head's outputs|NaN or inf"):
        qat(runs, tmp_path, steps=30, batch=1, lr=1e30, checkpoint_every=1)
    assert (tmp_path / "qat.training" / "checkpoint.safetensors").is_file()
    assert not (tmp_path / "qat").exists()


def test_other_inputs_are_refused_by_name(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--device abacus"):
        qat(runs, tmp_path, device="abacus")
    with pytest.raises(InputError, match="--checkpoint-every 0"):
        qat(runs, tmp_path, checkpoint_every=0)
    with pytest.raises(InputError, match="is the run that is read"):
        qat(runs, runs, name="ptq", overwrite=True)
    assert not list(tmp_path.iterdir())


def test_the_command_trains_and_judges(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["qat", "--run", str(runs / "ptq"), "--dataset", "street", "--count", "1"]
    words += ["--steps", "1", "--batch", "1", "--held-out", "1", "--workers", "0"]
    with pytest.MonkeyPatch.context() as patch:  # a street of the real size takes a second
        quick = partial(street_frame, beams=8, sweeps=1, azimuth_steps=120)
        patch.setattr("bev_scenes._frame.street_frame", quick)
        with without_pictures():
            assert main([*words, "--runs", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "qat:" in told.err
    assert "0 to 100 %" in told.out
    assert "mAP" in told.out
    assert f"Written to {tmp_path / 'qat'}" in told.out
    summary = json.loads((tmp_path / "qat/summary.json").read_text())
    assert summary["command"].startswith("bevfusion-quant qat --run")
    assert list(summary["accuracy"]["models"]) == ["float", "quantized"]
    assert summary["frames"][0]["name"] == "street_0"
    assert (tmp_path / "qat.training/frames/000000.npz").is_file()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("settings", [{}, LEARNED], ids=["followed", "learned"])
def test_a_gpu_trains_as_the_cpu_does(runs: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    heatmap = [
        qat(runs, tmp_path, name=device, device=device, steps=1, **settings).losses[0][0]
        for device in ("cpu", "cuda")
    ]
    assert heatmap[1] == pytest.approx(heatmap[0], rel=1e-3)  # the only loss before dropout
