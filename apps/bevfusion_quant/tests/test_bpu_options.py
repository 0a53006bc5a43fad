"""Options of `--target bpu`: branches, marches, layers on the CPU, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from bpu_split import Split, split
from torch import nn

from bevfusion_quant import InputError
from bevfusion_quant.bpu import BpuConfig, SplitUnits, bpu_parts, calibrating_form, for_march
from bevfusion_quant.cli import main
from bevquant_hybrid.march import get_march, set_march
from bevquant_hybrid.qtensor import as_float

CAMERA = "encoders.camera"


@cache
def branch_alone(branch: str) -> Split:
    return split(branch=branch)


@pytest.mark.parametrize(
    ("branch", "segments", "boundaries"),
    [
        ("camera", ["BPU", "CPU"], ["quant_images", "dequant_features"]),
        ("fuser", ["CPU", "CPU", "BPU", "CPU"],
         ["quant_camera_map", "quant_lidar_map", "dequant_map"]),
        ("decoder", ["CPU", "BPU", "CPU"], ["quant_fused_map", "dequant_map"]),
    ],
)  # fmt: skip
def test_a_branch_alone(branch: str, segments: list[str], boundaries: list[str]) -> None:
    one = branch_alone(branch)
    plan = one.units.plan(one.forms)
    assert [segment.place for segment in plan.segments] == segments
    assert [boundary.name for boundary in plan.boundaries] == boundaries
    assert plan.transfer_bytes > 0
    reasons = {n.name: n.reason for n in plan.nodes if n.place == "CPU" and n.kind == "operator"}
    if branch == "decoder":
        assert reasons["fuser"] == "--branch decoder quantizes the decoder alone"
    real, fake, integer = (one.values(model) for model in one.models)
    stage = {"camera": "neck"}.get(branch, branch)
    wanted, got = as_float(real[stage]), as_float(integer[stage])
    assert 0 < float((got - wanted).abs().max()) < 0.2 * float(wanted.abs().max())
    # What comes before the unit is the same float computation in all of them.
    before = {"camera": [], "fuser": ["neck", "camera", "lidar"], "decoder": ["fuser"]}[branch]
    for name in before:
        assert bool((real[name] == fake[name]).all())
        assert bool((real[name] == integer[name]).all())


def test_excluded_layers_run_on_the_cpu_in_float() -> None:
    one = split(branch="camera", exclude=("layer4.*", "neck.fpn_convs.0"))
    plan = one.units.plan(one.forms)
    places = {node.path: (node.place, node.reason) for node in plan.nodes}
    for layer in ("backbone.layer4.0.conv1", "backbone.layer4.0.conv3", "neck.fpn_convs.0.conv"):
        assert places[f"{CAMERA}.{layer}"] == ("CPU", "--exclude names it"), layer
    assert places[f"{CAMERA}.backbone.layer3.0.conv3"][0] == "BPU"
    names = [boundary.name for boundary in plan.boundaries]
    assert "backbone_layer4_0_conv1_input_dequant_0" in names
    # The last layer gives floats, so its stub has nothing to do.
    assert {b.name: b.transfer_bytes for b in plan.boundaries}["dequant_features"] == 0
    estimated = {layer.path for layer in one.units.estimates(one.forms)["camera"].layers}
    assert f"{CAMERA}.backbone.layer4.0.conv1" not in estimated
    assert f"{CAMERA}.backbone.layer3.0.conv1" in estimated
    fake, integer = (one.values(model) for model in one.models[1:])
    assert fake["camera/neck_fpn_convs_0_conv"].is_floating_point()
    apart = (fake["neck"] - integer["neck"]).abs().max()
    assert float(apart) < 0.1 * float(fake["neck"].abs().max())


def test_methods_set_different_ranges() -> None:
    one, layer = branch_alone("camera"), "backbone.layer1.0.conv1"
    steps = {}
    for method in ("percentile", "max", "mse", "entropy"):
        units = SplitUnits(one.model, replace(one.units.config, method=method))
        with for_march("bayes"):
            calibrated = units.calibrating()
            units.run(calibrated, one.batches)
        found = calibrated["camera"].get_submodule(f"{layer}.activation_post_process")
        steps[method] = float(found.calculate_qparams()[0])
    graph = one.forms["camera"].fake_graph
    kept = graph.get_submodule(f"{layer}.activation_post_process").scale
    assert steps["percentile"] == float(kept)
    real = one.values(one.models.real)["camera/backbone_layer1_0_conv1"]
    assert steps["percentile"] < steps["max"]
    assert steps["max"] * 127.5 == pytest.approx(float(real.max()))
    assert steps["mse"] <= steps["max"]
    assert steps["entropy"] <= steps["max"]


def test_ranges_cover_all_calibration_frames() -> None:
    both = split(seeds=(0, 1), branch="camera", method="max")
    images = [batch.images for batch in both.batches]
    step = float(both.forms["camera"].fake_graph.quant_images.activation_post_process.scale)
    assert step * 127.5 == pytest.approx(max(float(x.abs().max()) for x in images))


def test_the_march_is_put_back() -> None:
    set_march("bernoulli2")
    with for_march("bayes-e"):
        assert get_march() == "bayes-e"
    assert get_march() == "bernoulli2"
    with pytest.raises(InputError, match=r"--march mars.*bernoulli2, bayes"), for_march("mars"):
        pass
    assert get_march() == "bernoulli2"


def test_branches_without_a_bpu_part() -> None:
    assert bpu_parts("decoder") == ("decoder",)
    for branch in ("lidar", "head"):
        with pytest.raises(InputError, match=f"--branch {branch}.*--branch camera, fuser"):
            bpu_parts(branch)
    assert BpuConfig().method == "percentile"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--target bpu --branch lidar", "sparse convolutions"),
        ("--target bpu --branch head", "choose --branch camera, fuser, decoder, all"),
        ("--target bpu --quantize-head", "leave it out"),
        ("--target bpu --exclude encoders.lidar.backbone", "names nothing that runs on the BPU"),
        ("--target bpu --exclude nothing.like.it", "bevfusion-quant tree"),
        ("--target bpu --calibration-frames 5", "from 1 to"),
        ("--target bpu --seed -1", "must be from 0 to"),
        ("--march bayes", "goes with --target bpu"),
    ],
)
def test_options_that_do_not_fit(
    arguments: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(f"ptq --dataset street --config tiny {arguments}".split()) == 2
    assert list(tmp_path.iterdir()) == []
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    assert expected in captured.err


def test_points_alone_have_no_bpu_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("frame.npz", points=np.zeros((10, 5), np.float32))
    assert main("ptq --target bpu --points frame.npz --config tiny".split()) == 2
    assert "with --dataset, as they read images" in capsys.readouterr().err


def test_an_unknown_march_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("ptq --target bpu --dataset street --march mars".split()) == 2
    assert "bernoulli2" in capsys.readouterr().err


def test_a_method_without_observer_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"--method median: .*percentile, max, mse, entropy"):
        calibrating_form(nn.Identity(), "median", ())
