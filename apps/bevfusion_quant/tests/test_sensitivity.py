"""Sensitivity of a run: against the plain loop, by labels, on the page, and what is refused."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest
import torch
from bpu_split import small_frame
from decoder_runs import copied_run

from bev_data.metrics import DetectionRules, evaluate_detections
from bevfusion.model import CONFIGS
from bevfusion.quantization import sensitivity_output
from bevfusion_quant import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.ptq import FrameBatches, load_run
from bevfusion_quant.saved_run import LoadedRun
from bevfusion_quant.sensitivity import (
    SensitivityResult,
    measure_sensitivity,
    parse_budget,
    plan_within,
    refine_within,
    run_sensitivity,
)
from bevquant_qnn import PrecisionPlan, SensitivityTable, precision_groups

TINY = CONFIGS["tiny"]
EVIL = "</svg><script>window.hurt=1</script>"


@pytest.fixture(scope="module")
def frames() -> list:
    return [small_frame(seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def runs(made_runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that quantizes the decoder, six groups of layers, in the whole model."""
    folder = tmp_path_factory.mktemp("runs")
    copied_run(made_runs, folder / "a")
    return folder


@pytest.fixture(scope="module")
def loaded(runs: Path) -> LoadedRun:
    return load_run(runs / "a")


@pytest.fixture
def quick_load(loaded: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hand out copies of the loaded run: following its data flow anew takes most of a second."""
    monkeypatch.setattr("bevfusion_quant.sensitivity.load_run", lambda run: copy.deepcopy(loaded))


@pytest.fixture(scope="module")
def batches(frames: list, loaded: LoadedRun) -> FrameBatches:
    return FrameBatches(frames, TINY, loaded.quantized_model)


@pytest.fixture(scope="module")
def result(runs: Path, frames: list) -> SensitivityResult:
    """Of both precisions, with a plan."""
    return run_sensitivity(
        runs / "a", frames, precisions=("int8", "int16"), budget="time=1.6", plan_rounds=0,
        runs=runs,
        name="s", command=EVIL,
    )  # fmt: skip


def outputs(loaded: LoadedRun, batches: FrameBatches, on: set[int]) -> list[dict]:
    """The model's outputs with these groups quantized and all others in float."""
    groups = precision_groups(loaded.quantized_model)
    for number, group in enumerate(groups):
        for quantizer in group.quantizers:
            quantizer._disabled = number not in on
    try:
        with torch.no_grad():
            return [loaded.quantized_model(*batch) for batch in batches]
    finally:
        for group in groups:
            for quantizer in group.quantizers:
                quantizer._disabled = False


def test_the_heat_maps_sqnr_is_that_of_the_plain_loop(
    loaded: LoadedRun, batches: FrameBatches
) -> None:
    table = measure_sensitivity(loaded.quantized_model, batches, output="heatmap")
    count = len(precision_groups(loaded.quantized_model))
    everything = set(range(count))
    wanted = outputs(loaded, batches, set())

    def sqnr(on: set[int]) -> float:
        signal = noise = 0.0
        for float_one, got in zip(wanted, outputs(loaded, batches, on), strict=True):
            heat = float_one["dense_heatmap"].double()
            signal += float(heat.square().sum())
            noise += float((got["dense_heatmap"].double() - heat).square().sum())
        return 10 * float(torch.tensor(signal / noise, dtype=torch.float64).log10())

    assert len(table.rows) == count == 6
    assert table.batches == 2
    assert table.quantized_score == pytest.approx(sqnr(everything), abs=1e-9)
    for number in (0, count - 1):
        row = table.rows[number]
        assert row.alone["int8"] == pytest.approx(sqnr({number}), abs=1e-9)
        assert row.without == pytest.approx(sqnr(everything - {number}), abs=1e-9)


def test_the_task_is_judged_as_evaluation_judges_it(
    loaded: LoadedRun, batches: FrameBatches
) -> None:
    table = measure_sensitivity(
        loaded.quantized_model, batches, metric="mAP", without=False
    )  # fmt: skip
    head = loaded.quantized_model.head
    low_x, low_y, _, high_x, high_y, _ = TINY.lidar.point_cloud_range
    rules = DetectionRules(extent=(low_x, low_y, high_x, high_y))
    there = [batches.frame_labels(index) for index in range(2)]

    def mean_ap(on: set[int]) -> float:
        found = [head.decode(output)[0] for output in outputs(loaded, batches, on)]
        return 100 * evaluate_detections(found, there, rules=rules).mean_ap

    assert table.metric == "mAP"
    assert table.float_score == pytest.approx(mean_ap(set()), abs=1e-12)
    assert table.rows[3].alone["int8"] == pytest.approx(mean_ap({3}), abs=1e-12)
    assert table.quantized_score is None


def test_sixteen_bits_lose_less_and_ranges_stay(
    result: SensitivityResult, loaded: LoadedRun, batches: FrameBatches
) -> None:
    rows = result.outcome.table.rows
    assert all(row.alone["int16"] > row.alone["int8"] for row in rows)
    before = {k: v.clone() for k, v in loaded.quantized_model.state_dict().items()}
    measure_sensitivity(
        loaded.quantized_model, batches.head(1), precisions=("int16",), without=False
    )
    after = loaded.quantized_model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_plans_score_is_that_of_its_model(
    result: SensitivityResult, loaded: LoadedRun, batches: FrameBatches
) -> None:
    """Set as `ptq --plan` sets it, and run whole."""
    batches = batches.head(1)
    table = measure_sensitivity(loaded.quantized_model, batches, without=False)
    budget = parse_budget("time=1.6")
    estimated = plan_within(loaded.quantized_model, table, budget)
    found = refine_within(loaded.quantized_model, batches, estimated, table, budget, rounds=1)
    groups = precision_groups(loaded.quantized_model)
    on = {number for number, group in enumerate(groups) if found.plan[group.name] == "int8"}
    assert 0 < len(on) < len(groups)
    maps: list[torch.Tensor] = []
    keep = loaded.quantized_model.decoder["neck"].register_forward_hook(
        lambda module, args, output: maps.append(output.double())
    )
    outputs(loaded, batches, set())
    outputs(loaded, batches, on)
    keep.remove()
    exact, got = maps
    wanted = 10 * (exact.square().sum() / (got - exact).square().sum()).log10()
    assert found.plan.score == pytest.approx(float(wanted), abs=1e-9)
    assert found.plan.score >= found.start.score
    assert found.plan.time <= 1.6
    assert found.tried > len(groups)


@pytest.mark.usefixtures("quick_load")
def test_an_estimate_is_named_and_ranks_the_groups(
    runs: Path, result: SensitivityResult, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"sensitivity --run {runs / 'a'} --dataset street --estimate --runs {runs} --name e"
    assert main(arguments.split()) == 0
    assert "SQNR (layers estimated) of the decoder's map, 1 frame" in capsys.readouterr().out
    table = SensitivityTable.load(runs / "e" / "sensitivity.json")
    assert table.estimated
    measured = result.outcome.table
    assert [row.modules for row in table] == [row.modules for row in measured]
    assert table.worst_first("int8")[0].name == measured.worst_first("int8")[0].name


def test_what_is_written_is_what_was_found(runs: Path, result: SensitivityResult) -> None:
    folder, outcome = runs / "s", result.outcome
    assert SensitivityTable.from_json((folder / "sensitivity.json").read_text()) == outcome.table
    assert PrecisionPlan.load(folder / "plan.json") == outcome.plan
    assert outcome.plan.time <= 1.6
    assert {group.precision for group in outcome.plan} > {"int8"}
    summary = json.loads((folder / "summary.json").read_text(), parse_constant=pytest.fail)
    told = summary["sensitivity"]
    assert told["table"] == json.loads((folder / "sensitivity.json").read_text())
    assert told["plan"] == json.loads((folder / "plan.json").read_text())
    first, refined = told["plan_from"]["first"], outcome.refined
    assert told["plan_from"]["plans_measured"] == refined.tried > 0
    assert outcome.plan.measured
    assert outcome.plan.score >= first["measured_score"] == refined.start.score
    assert first["estimated_score"] == outcome.estimated.score
    assert f"the best of {refined.tried} measured" in (folder / "report.html").read_text()
    assert len(told["measured"]) == refined.tried
    assert [plan["time"] for plan in told["front"]] == [plan.time for plan in outcome.front]
    page = (folder / "report.html").read_text()
    assert page.count('class="dot"') == refined.tried
    assert (told["scored"], told["unit"]) == ("the decoder's map", "dB")
    assert len(summary["frames"]) == 2
    assert json.loads((runs / "a/config.json").read_text())["plan"] is None
    with pytest.raises(InputError, match=r"it has figures of .* and no model"):
        load_run(folder)


def test_the_bars_are_the_losses(runs: Path, result: SensitivityResult) -> None:
    text = (runs / "s/report.html").read_text(encoding="utf-8")
    section = text[text.index('<section id="sensitivity"') : text.index('<section id="reproduce"')]
    section, _, plans = section.partition('<figure class="chart plans"')
    assert len(re.findall('<th scope="row"', plans)) == len(result.outcome.front) > 1
    rows = re.findall(r"<tr>(<th scope=\"row\".*?)</tr>", section)
    table = result.outcome.table
    worst = table.worst_first("int8")
    assert len(rows) == len(worst)
    assert section.count(" dB</") == 3, "the unit stands above the column"
    largest = max(table.loss(row, p) for row in table for p in ("int8", "int16"))
    for shown, row in zip(rows, worst, strict=True):
        for name in ("int8", "int16"):
            (bar,) = re.findall(rf'<rect [^>]*width="([\d.]+)"[^>]*class="{name}"', shown)
            assert float(bar) == pytest.approx(100 * table.loss(row, name) / largest, abs=0.006)
        chosen = result.outcome.plan[row.name]
        assert f'class="precision {chosen}">{chosen}<' in shown
        assert len(re.findall(r"<td[^>]*>[+−]?[\d.]+</td>", shown)) == 3
    assert EVIL not in text
    assert "--share" not in section  # drawn as SVG


def test_the_command_prints_the_table_and_the_plan(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = f"sensitivity --run {runs / 'a'} --dataset street --metric kl --runs {runs}"
    assert (
        main([*arguments.split(), "--alone-only", "--budget", "score=-1", "--plan-rounds", "0"])
        == 0
    )
    printed = capsys.readouterr().out
    assert "KL divergence, negative, of the head's heat map, 1 frame, 6 groups of layers" in printed
    assert "decoder.neck.quant_concat" in printed
    assert "Plan for score=-1: 6 int8; estimated time 1 and size 1 times int8's" in printed
    assert (runs / "sensitivity/plan.json").exists()


@pytest.mark.usefixtures("quick_load")
def test_a_score_that_float_does_not_reach_leaves_the_table(
    runs: Path, frames: list, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_sensitivity(
        runs / "a", frames[:1], metric="mAP", budget="score=100", without=False, runs=runs,
        name="unreached",
    )  # fmt: skip
    assert found.outcome.plan is None
    assert "no plan reaches mAP 100" in found.outcome.refusal
    assert (runs / "unreached/sensitivity.json").exists()
    assert not (runs / "unreached/plan.json").exists()
    assert "no plan reaches mAP" in (runs / "unreached/report.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("quick_load")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--budget 1.2", "write time=1.2"),
        ("--budget time=nan", "write time=1.2"),
        ("--budget time=0.9", "the fastest plan takes 1 times"),
        ("--budget score=200", "the largest sqnr that a model can have is 144.5"),
        ("--budget time=1.2 --plan-rounds -1", "must be from 0 to"),
        ("--metric kl --output map", "the map has none"),
        ("--metric mAP --output map", "mAP judges the boxes"),
        ("--metric kl --estimate", "it estimates sqnr alone"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(
    runs: Path, capsys: pytest.CaptureFixture[str], options: str, told: str
) -> None:
    arguments = f"sensitivity --run {runs / 'a'} --dataset street --runs {runs} --name never"
    assert main([*arguments.split(), *options.split()]) == 2
    assert told in capsys.readouterr().err
    assert not (runs / "never").exists()


def test_runs_for_a_bpu_and_bare_branches_are_named(
    runs: Path, tmp_path: Path, frames: list, loaded: LoadedRun
) -> None:
    config = json.loads((runs / "a/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "target": "bpu"}))
    with pytest.raises(InputError, match="is a run for a BPU"):
        run_sensitivity(tmp_path, frames, runs=tmp_path)
    with pytest.raises(InputError, match="name one or more of int4, int8, int16"):
        run_sensitivity(runs / "a", frames, precisions=("int3",), runs=tmp_path)
    with pytest.raises(InputError, match="metric='psnr': expected one of"):
        sensitivity_output(loaded.quantized_model, "psnr")
    assert parse_budget("score=35").score == 35


def test_frames_without_labels_have_no_map(
    frames: list, loaded: LoadedRun, batches: FrameBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FrameBatches, "frame_labels", lambda self, index: None)
    with pytest.raises(InputError, match="none of the frames has labels"):
        measure_sensitivity(loaded.quantized_model, batches, metric="mAP")
