"""One plan of precisions: calibration, simulation and files agree on what each layer is."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bpu_split import TINY, small_frame
from decoder_runs import copied_run
from without_pictures import without_pictures

from bevfusion.deployment import nvidia_pieces, write_piece
from bevfusion.model import trained_weights
from bevfusion_quant import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.export import ONNX_FOLDER, export_run
from bevfusion_quant.integer import lowered
from bevfusion_quant.ptq import FrameBatches, PtqConfig, load_run, run_ptq
from bevfusion_quant.saved_run import (
    LoadedRun,
    apply_plan,
    read_plan,
    refuse_in_files,
    refuse_unsigned,
)
from bevquant_int8sim import simulate
from bevquant_int8sim.program import Float8Layer
from bevquant_qnn import PlannedGroup, PrecisionPlan, precision_groups

GROUPS = (
    ("decoder.backbone.blocks.0.0",),
    ("decoder.backbone.blocks.0.3",),
    ("decoder.backbone.blocks.1.0", "decoder.neck.deblocks.0.0"),
    ("decoder.backbone.blocks.1.3",),
    ("decoder.neck.deblocks.1.0",),
    ("decoder.neck.quant_concat",),
)
FLOAT = ("decoder.backbone.blocks.0.3", "decoder.neck.deblocks.1.0")
WIDE = "decoder.backbone.blocks.1.3"


@pytest.fixture(scope="module")
def runs(made_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder as it is, and by a plan made from it."""
    folder = tmp_path_factory.mktemp("runs")
    copied_run(made_runs, folder / "a")
    with without_pictures():
        chosen = {**dict.fromkeys(FLOAT, "float"), WIDE: "int16"}
        plan = PrecisionPlan(
            tuple(PlannedGroup(paths, chosen.get(paths[0], "int8")) for paths in GROUPS)
        )
        plan.save(folder / "wide.json")
        config = PtqConfig(
            "tiny", "decoder", weights=trained_weights("tiny"), plan=folder / "wide.json"
        )
        run_ptq([small_frame()], config, runs=folder, name="wide")
    return folder


@pytest.fixture(scope="module")
def wide(runs: Path) -> LoadedRun:
    (runs / "wide.json").unlink()  # the run has its own copy
    return load_run(runs / "wide")


def ranges(folder: Path) -> dict[str, dict]:
    entries = json.loads((folder / "ranges.json").read_text())["quantizers"]
    return {name: entry for entry in entries for name in entry["names"]}


def test_the_run_holds_the_plan_and_its_bits(runs: Path, wide: LoadedRun) -> None:
    plan = PrecisionPlan.load(runs / "wide/plan.json")
    for group in precision_groups(wide.quantized_model):
        precision = plan[group.name]
        assert all(q._disabled == (precision == "float") for q in group.quantizers)
        assert {q.num_bits for q in group.inputs} == {16 if precision == "int16" else 8}
        assert {q.num_bits for q in group.weights} <= {8}
    found, whole = ranges(runs / "wide"), ranges(runs / "a")
    for name, entry in found.items():
        layer = name.rpartition(".")[0]
        if layer in FLOAT:
            assert entry["amax"] is None
        elif layer == WIDE and "input" in name:
            assert entry["amax"] >= whole[name]["amax"]
        else:
            assert entry["amax"] == whole[name]["amax"]
    summary = json.loads((runs / "wide/summary.json").read_text())
    left = {row["path"]: row["reason"] for row in summary["quantization"]["skipped"]}
    assert all(left[path] == "the plan leaves it in float" for path in FLOAT)
    assert "16 bits" in left[WIDE]


def test_the_simulation_computes_as_planned(wide: LoadedRun) -> None:
    batches = FrameBatches([small_frame()], TINY, wide.quantized_model)
    model = simulate(wide.quantized_model, tuple(batches[0]))
    steps = {step.path: step for step in model.steps if step.path.startswith("decoder")}
    islands = {fallback.path for fallback in model.float_fallbacks}
    assert set(FLOAT) <= islands
    integer = {path for path, step in steps.items() if step.op.startswith("conv")}
    assert integer & set(FLOAT) == set()
    assert WIDE in integer
    assert "decoder.backbone.blocks.0.0" in integer
    with torch.no_grad():
        fake = wide.quantized_model(*batches[0])["dense_heatmap"]
        got = model(*batches[0])["dense_heatmap"]
        real = wide.float_model(*batches[0])["dense_heatmap"]
    assert float((got - fake).square().sum()) < 0.05 * float((real - fake).square().sum())


def test_files_hold_int8_and_float_as_planned(runs: Path, wide: LoadedRun, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    model = copy.deepcopy(wide.quantized_model)
    apply_plan(model, read_plan(runs / "wide/plan.json").before_calibration())
    batch = FrameBatches([small_frame()], TINY, model)[0]
    (piece,) = (p for p in nvidia_pieces(wide.float_model, model) if p.file.name == "fuser")
    seen = []
    hook = model.fuser.register_forward_pre_hook(lambda module, args: seen.append(args))
    with torch.no_grad():
        model(*batch)
    hook.remove()
    written = write_piece(piece, seen[0], [], tmp_path, "onnxruntime")
    graph = onnx.load(written.path).graph
    made_by = {node.output[0]: node.op_type for node in graph.node}
    integer = {
        node.name: made_by.get(node.input[1]) == "DequantizeLinear"
        for node in graph.node
        if node.op_type in ("Conv", "ConvTranspose")
    }
    in_float = {name for name, is_integer in integer.items() if not is_integer}
    assert len(integer) == 7
    assert len(in_float) == 3  # the fuser, and two layers of the decoder
    for path in FLOAT:
        assert any(path in name for name in in_float)


def test_fp8_layers_are_simulated_and_written(runs: Path, wide: LoadedRun, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    model = copy.deepcopy(wide.quantized_model)
    plan = read_plan(runs / "wide/plan.json")
    chosen = {**dict.fromkeys(FLOAT, "float"), WIDE: "int8"}
    groups = (replace(g, precision=chosen.get(g.modules[0], "fp8")) for g in plan)
    apply_plan(model, replace(plan, groups=tuple(groups)))
    refuse_in_files(
        replace(plan, groups=(replace(plan.groups[0], precision="fp8"),)), runs, "tensorrt"
    )
    batch = FrameBatches([small_frame()], TINY, model)[0]
    integer = lowered(model, batch, "auto")
    found = [s.path for s in integer.steps if isinstance(s.target, Float8Layer)]
    assert "decoder.backbone.blocks.0.0" in found
    assert WIDE not in found
    (piece,) = (p for p in nvidia_pieces(wide.float_model, model) if p.file.name == "fuser")
    seen = []
    hook = model.fuser.register_forward_pre_hook(lambda module, args: seen.append(args))
    with torch.no_grad():
        model(*batch)
    hook.remove()
    for target in ("tensorrt", "onnxruntime"):
        written = write_piece(piece, seen[0], [], tmp_path, target)
        kinds = {t.data_type for t in onnx.load(written.path).graph.initializer}
        assert onnx.TensorProto.FLOAT8E4M3FN in kinds


def test_files_refuse_sixteen_bits_by_name_before_anything_runs(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(f"export --run {runs / 'wide'} --runs {runs} --name never".split()) == 2
    told = capsys.readouterr().err
    assert f"{WIDE} (int16)" in told
    assert "--target onnxruntime, or" in told
    assert "load the run" not in told
    assert not (runs / "never").exists()
    with pytest.raises(InputError, match="int16"):
        run_ptq(
            [small_frame()], PtqConfig("tiny", "decoder", plan=runs / "wide/plan.json"),
            runs=runs, name="never", export="tensorrt",
        )  # fmt: skip


def test_sixteen_bits_in_files_of_onnxruntime(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    made = export_run(
        runs / "wide", [small_frame()], target="onnxruntime", runs=tmp_path, name="files"
    )
    assert not made.exported.failures
    files = (tmp_path / "files" / ONNX_FOLDER).glob("*.onnx")
    stored = {t.data_type for path in files for t in onnx.load(path).graph.initializer}
    assert onnx.TensorProto.INT16 in stored


def test_int4_plans_have_files_for_every_engine(runs: Path) -> None:
    plan = PrecisionPlan(tuple(PlannedGroup(paths, "int4") for paths in GROUPS))
    for target in ("tensorrt", "tensorrt11", "onnxruntime", "openvino", "autoware", "horizon"):
        refuse_in_files(plan, runs, target)


def test_unsigned_runs_have_files_for_engines_with_such_integers(runs: Path) -> None:
    for target in ("onnxruntime", "openvino"):
        refuse_unsigned(True, runs, target)
    for target in ("tensorrt", "tensorrt11", "autoware", "horizon"):
        refuse_unsigned(False, runs, target)
        with pytest.raises(InputError, match="--target onnxruntime or openvino, or quantize"):
            refuse_unsigned(True, runs, target)


def test_a_plan_that_does_not_fit_or_is_none_is_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ptq = f"ptq --dataset street --config tiny --runs {runs} --name never"
    plan = f"--plan {runs / 'wide/plan.json'}"
    assert main(f"{ptq} --branch fuser {plan}".split()) == 2
    told = capsys.readouterr().err
    assert "decoder.backbone.blocks.0.0: not in the model" in told
    assert main(f"{ptq} --branch decoder --target bpu {plan}".split()) == 2
    assert "a BPU's layers are int8" in capsys.readouterr().err
    (tmp_path / "plan.json").write_text("{}")
    assert main(f"{ptq} --branch decoder --plan {tmp_path / 'plan.json'}".split()) == 2
    assert "is no plan of precisions" in capsys.readouterr().err
    assert not (runs / "never").exists()


def test_a_changed_plan_is_no_plan_of_the_run(runs: Path, tmp_path: Path) -> None:
    for file in (runs / "wide").iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace('"float"', '"int8"', 1))
    with pytest.raises(InputError, match=r"plan\.json is not the file that the run wrote"):
        load_run(tmp_path)
