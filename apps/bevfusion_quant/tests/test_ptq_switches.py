"""What `ptq` can be told about weights, kept in the run and obeyed by all that reads it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from bpu_split import TINY, small_frame
from decoder_runs import copied_run
from torch import Tensor, nn
from without_pictures import without_pictures

from bevfusion.deployment import nvidia_pieces, write_piece
from bevfusion.model import Batch
from bevfusion_quant import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.export import export_run
from bevfusion_quant.ptq import FrameBatches, PtqConfig, load_run, run_evaluate, run_ptq
from bevfusion_quant.run import PAGE_FILE, RunSettings
from bevfusion_quant.saved_run import LoadedRun
from bevfusion_quant.sensitivity import precisions_of, run_sensitivity
from bevquant_int8sim import simulate
from bevquant_quantizers import TensorQuantizer

SETTINGS = {
    "four": {"weight_bits": 4},
    "rounded": {"weight_bits": 4, "rounding": "gptq", "bias_correction": True},
    "apart": {"fold": False},
    "searched": {"search_ranges": True},
}


@cache
def frame() -> Any:
    return small_frame()


@pytest.fixture(scope="module")
def runs(made_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder with each of the switches."""
    folder = tmp_path_factory.mktemp("runs")
    for name, settings in SETTINGS.items():
        copied_run(made_runs, folder / name, **settings)
    return folder


@pytest.fixture(scope="module")
def loaded(runs: Path) -> dict[str, LoadedRun]:
    return {name: load_run(runs / name) for name in SETTINGS}


@pytest.fixture(scope="module")
def batch(loaded: dict[str, LoadedRun]) -> Batch:
    return FrameBatches([frame()], TINY, loaded["four"].quantized_model)[0]


def keep(kept: list[Tensor], module: nn.Module, inputs: Any, output: Tensor) -> None:
    kept.append(output)


def layers_of(model: nn.Module) -> dict[str, Any]:
    """The layers whose weights are quantized."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(getattr(module, "_weight_quantizer", None), TensorQuantizer)
    }


def test_weights_have_the_bits_that_the_run_says(
    runs: Path, loaded: dict[str, LoadedRun], batch: Batch
) -> None:
    assert json.loads((runs / "four/config.json").read_text())["weight_bits"] == 4
    for name in ("four", "rounded"):
        model = loaded[name].quantized_model
        for path, layer in layers_of(model).items():
            out_axis = 1 if "deblocks.1" in path else 0
            weight = layer.weight_quantizer(layer.weight).detach()
            for channel in weight.movedim(out_axis, 0).flatten(1):
                assert len(channel.unique()) <= 16, path
        steps = simulate(model, tuple(batch)).steps
        integers = [step.tensors["weight"] for step in steps if step.op.startswith("conv")]
        assert integers
        assert {int(weight.abs().max()) for weight in integers} <= {7, 8}


def test_rounded_weights_are_the_runs_own_and_float_keeps_its(
    runs: Path, loaded: dict[str, LoadedRun]
) -> None:
    plain, rounded = loaded["four"], loaded["rounded"]
    exact = plain.float_model.state_dict()
    assert not (runs / "four/float_weights.safetensors").exists()
    for name, value in rounded.float_model.state_dict().items():
        assert torch.equal(value, exact[name]), name
    for path, layer in layers_of(rounded.quantized_model).items():
        # on the grid already: its quantizer changes nothing
        got = layer.weight_quantizer(layer.weight)
        torch.testing.assert_close(got, layer.weight, rtol=1e-6, atol=0)
        assert not torch.equal(layer.weight, exact[f"{path}.weight"])
        assert not torch.equal(layer.bias, exact[f"{path}.bias"])
    told = json.loads((runs / "rounded/summary.json").read_text())["rounding"]
    assert {row["path"] for row in told["layers"]} == set(layers_of(rounded.quantized_model))
    assert all(row["error"] <= row["nearest"] for row in told["layers"])


def test_searched_ranges_are_the_runs_own(runs: Path, loaded: dict[str, LoadedRun]) -> None:
    rows = json.loads((runs / "searched/summary.json").read_text())["searched_ranges"]
    assert rows
    assert all(row["after_db"] >= row["before_db"] for row in rows)
    ranges = {
        name: {
            path: float(module.amax)
            for path, module in loaded[name].quantized_model.named_modules()
            if isinstance(module, TensorQuantizer) and module.amax is not None
            if module.amax.numel() == 1
        }
        for name in ("searched", "apart")
    }
    assert all(value > 0 for value in ranges["searched"].values())
    assert load_run(runs / "searched").settings.search_ranges


def test_rounding_brings_the_decoder_nearer_to_float(
    loaded: dict[str, LoadedRun], batch: Batch
) -> None:
    errors = {}
    for name in ("four", "rounded"):
        run, maps = loaded[name], []
        for model in (run.float_model, run.quantized_model):
            hook = model.decoder["neck"].register_forward_hook(partial(keep, maps))
            with torch.no_grad():
                model(*batch)
            hook.remove()
        errors[name] = float((maps[1] - maps[0]).norm() / maps[0].norm())
    assert errors["rounded"] < 0.8 * errors["four"]


def test_without_folding_batch_norms_stay_and_stay_float(
    runs: Path, loaded: dict[str, LoadedRun], batch: Batch
) -> None:
    run, folded = loaded["apart"], loaded["four"]
    for model, count in ((run.quantized_model, True), (folded.quantized_model, False)):
        norms = [m for m in model.decoder.modules() if isinstance(m, nn.BatchNorm2d)]
        assert bool(norms) == count
    with torch.no_grad():
        apart, together = (model.float_model(*batch) for model in (run, folded))
    torch.testing.assert_close(
        apart["dense_heatmap"], together["dense_heatmap"], rtol=1e-3, atol=1e-3
    )
    told = json.loads((runs / "apart/summary.json").read_text())
    assert not told["fusion"]["fused"]
    assert {row["reason"] for row in told["fusion"]["skipped"]} == {
        "--no-fold leaves batch norms as they are"
    }


def test_a_changed_float_file_is_refused(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "rounded"
    shutil.copytree(runs / "rounded", copy)
    shutil.copy(copy / "weights.safetensors", copy / "float_weights.safetensors")
    with pytest.raises(InputError, match=r"float_weights\.safetensors is not the file that"):
        load_run(copy)


def test_integers_and_files_need_folding(runs: Path, tmp_path: Path) -> None:
    frames = [frame()]
    with pytest.raises(InputError, match="cannot be run in integers: ptq --no-fold left"):
        run_evaluate(runs / "apart", frames, runs=tmp_path, integers="auto")
    with pytest.raises(InputError, match="cannot be written as files: ptq --no-fold left"):
        export_run(runs / "apart", frames, runs=tmp_path)
    config = PtqConfig("tiny", "decoder", fold=False)
    for wanted in ({"integers": "auto"}, {"export": "tensorrt"}):
        with pytest.raises(InputError, match="need batch norms folded"):
            run_ptq(frames, config, runs=tmp_path, **wanted)
    assert not list(tmp_path.iterdir())


def test_a_detector_of_the_lidar_alone(tmp_path: Path) -> None:
    seen = dataclasses.replace(frame(), cameras=())
    with without_pictures():
        run_ptq([seen], PtqConfig("tiny", "lidar-detector", "max"), runs=tmp_path, name="l")
    run = load_run(tmp_path / "l")
    assert run.float_model.parts == ("lidar", "decoder", "head")
    paths = layers_of(run.quantized_model)
    assert {path.split(".")[0] for path in paths} == {"encoders", "decoder"}
    told = json.loads((tmp_path / "l/summary.json").read_text())
    left = {row["path"]: row["reason"] for row in told["quantization"]["skipped"]}
    assert left["heads.object"].startswith("the head stays float")
    pieces = nvidia_pieces(run.float_model, run.quantized_model)
    assert [(piece.file.name, piece.kind) for piece in pieces] == [
        ("lidar.backbone.xyz", "sparse"), ("decoder", "int8"), ("head.bbox", "float"),
    ]  # fmt: skip


OUTPUTS = {"heatmap_head.1"} | {
    f"prediction_heads.0.{name}.1" for name in ("center", "height", "dim", "rot", "vel", "heatmap")
}


def test_outputs_of_a_head_keep_8_bits_and_older_runs_their_4(tmp_path: Path) -> None:
    seen = dataclasses.replace(frame(), cameras=())
    with without_pictures(page=True):
        for name, settings in {"new": {}, "old": {"output_weight_bits": 4}}.items():
            config = PtqConfig(
                "tiny", "lidar-detector", "max", quantize_head=True, weight_bits=4, **settings
            )
            run_ptq([seen], config, runs=tmp_path, name=name)
    told = json.loads((tmp_path / "old/config.json").read_text())
    assert told.pop("output_weight_bits") == 4
    (tmp_path / "old/config.json").write_text(json.dumps(told))  # as earlier versions wrote it
    wide = {"new": OUTPUTS, "old": set()}
    for name in wide:
        run = load_run(tmp_path / name)
        bits = {
            path.removeprefix("heads.object."): layer.weight_quantizer.num_bits
            for path, layer in layers_of(run.quantized_model).items()
        }
        assert {path for path, n in bits.items() if n == 8} == wide[name]
        assert set(bits.values()) - {8} == {4}
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        left = summary["quantization"]["skipped"]
        noted = [row["path"] for row in left if row["reason"].endswith("its weight has 8 bits")]
        assert {path.removeprefix("heads.object.") for path in noted} == wide[name]
        page = (tmp_path / name / PAGE_FILE).read_text()
        assert ("its weight has 8 bits" in page) == bool(wide[name])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"weight_bits": 3}, "--weight-bits 3: weights have 4 to 8 bits"),
        ({"weight_bits": 9}, "--weight-bits 9: weights have 4 to 8 bits"),
        ({"output_weight_bits": 3}, "--output-weight-bits 3: weights have 4 to 8 bits"),
        ({"weight_bits": 4, "plan": Path("plan.json")}, "leave one of the two out"),
        ({"output_weight_bits": 4, "plan": Path("plan.json")}, "leave one of the two out"),
        ({"rounding": "up"}, "--rounding up: expected one of gptq, nearest"),
        ({"fold": False, "rounding": "gptq"}, "leave --no-fold out"),
        ({"fold": False, "bias_correction": True}, "have no bias to correct"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    settings: dict[str, Any], match: str, tmp_path: Path
) -> None:
    config = PtqConfig("tiny", **settings)
    with pytest.raises(InputError, match=match):
        run_ptq([frame()], config, runs=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "match"),
    [
        ("--weight-bits 4", "--weight-bits: for a BPU batch norms are folded"),
        ("--rounding gptq --no-fold", "--rounding, --no-fold: for a BPU"),
        ("--branch lidar-detector", "for a BPU the detector is the whole one"),
    ],
)
def test_a_bpu_takes_none_of_the_switches(
    option: str, match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"ptq --target bpu --dataset street --config tiny {option}".split()) == 2
    assert match in capsys.readouterr().err


def test_sensitivity_measures_at_the_bits_of_the_run(runs: Path, tmp_path: Path) -> None:
    measured = run_sensitivity(runs / "four", [frame()], without=False, runs=tmp_path)
    assert measured.outcome.precisions == ("int4",)
    # what all groups lose together, each alone, is about what the run loses at 4 bits
    alone = [row.alone["int4"] for row in measured.outcome.table]
    assert min(alone) < 40
    with pytest.raises(InputError, match="no layer can be put back into float"):
        run_sensitivity(runs / "rounded", [frame()], runs=tmp_path)


def test_a_plan_knows_no_weights_of_five_bits() -> None:
    with pytest.raises(InputError, match="weights of 5 bits are none of the precisions"):
        precisions_of(RunSettings(weight_bits=5), (), "runs/five")
    assert precisions_of(RunSettings(), (), "runs/old") == ("int8",)
    assert precisions_of(RunSettings(weight_bits=4), ("int16",), "runs/four") == ("int16",)


def test_files_of_four_bits_hold_the_integers_of_the_run(
    loaded: dict[str, LoadedRun], tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    run = loaded["four"]
    pieces = nvidia_pieces(run.float_model, run.quantized_model)
    (piece,) = (p for p in pieces if p.file.name == "fuser")
    maps = tuple(torch.rand(1, n, 8, 8) for n in TINY.fuser.in_channels)
    graph = onnx.load(write_piece(piece, maps, [], tmp_path, "tensorrt").path).graph
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    quantized = {
        node.input[0]: (held[node.input[1]], next((a.i for a in node.attribute), 1))
        for node in graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] in held
    }
    convolutions = [p for p in layers_of(run.quantized_model) if p != "decoder.neck.deblocks.1.0"]
    assert set(quantized) == {f"{path}.weight" for path in convolutions}
    for name, (scale, axis) in quantized.items():
        along = [-1 if i == axis else 1 for i in range(held[name].ndim)]
        integers = held[name] / scale.reshape(along)
        assert abs(integers - integers.round()).max() < 1e-3, name
        assert abs(integers).max().round() == 7, name
