"""The page to sign: what it is made of, what it says, what it refuses; made-up folders."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from review_runs import MadeUpRuns, accuracy

from bev_data.metrics import points, span
from bevfusion_quant import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.pages import read_sections
from bevfusion_quant.report import ReportResult, report_text, run_report
from bevfusion_quant.run import write_digests
from bevquant_quantizers.documents import sha256

EVIL = "fuser.</script><script>window.hurt=1</script>"
KEYS = [
    "verdict", "accuracy", "scene", "layers", "sensitivity", "quantizers", "integers", "export",
    "bpu", "decisions", "trail", "sign",
]  # fmt: skip


@pytest.fixture
def made(tmp_path: Path) -> MadeUpRuns:
    return MadeUpRuns(tmp_path / "runs")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> ReportResult:
    """Everything measured of a run with a name that means harm."""
    made = MadeUpRuns(tmp_path_factory.mktemp("full"), EVIL)
    run, trained, chip = made.everything()
    return run_report(run, qat=trained, bpu=chip, runs=made.root, command=f"report {EVIL}")


@pytest.fixture(scope="module")
def text(full: ReportResult) -> str:
    return (full.folder / "report.html").read_text(encoding="utf-8")


def answer(result: ReportResult, words: str) -> Any:
    (check,) = [check for check in result.checks if words in check.question]
    return check


def test_all_sections_each_from_the_folder_that_it_names(full: ReportResult, text: str) -> None:
    sections = read_sections(full.folder / "page.json")
    assert list(sections) == KEYS
    shown = re.findall(
        r'<section id="(\w+)"[^>]*><h2[^>]*>[^<]*</h2><p class="note source">From <code>([^<]*)<',
        text,
    )
    sources = {key: folder.rsplit("/", 1)[1] for key, folder in shown}
    assert {k: s.source[0] for k, s in sections.items() if s.source} == dict(shown)
    assert sources == {
        "accuracy": "simulate", "scene": "simulate", "layers": "simulate",
        "sensitivity": "sensitivity", "quantizers": "simulate", "integers": "simulate",
        "export": "export", "bpu": "bpu", "decisions": "ptq",
    }  # fmt: skip
    assert sections["layers"].script["layers"][0][0] == EVIL  # what its script draws came along


def test_the_headline_has_every_model_with_intervals(full: ReportResult, text: str) -> None:
    verdict = read_sections(full.folder / "page.json")["verdict"].html
    wanted = accuracy("float", "quantized", "integer")
    for entry in wanted.models:
        assert f">{points(entry.metrics.mean_ap)}<" in verdict
        assert f">{span(entry.metrics.interval)}<" in verdict
    for entry in wanted.models[1:]:
        assert f">{100 * entry.difference.mean_ap:+.2f}<" in verdict
        assert f">{span(entry.difference.interval, signed=True)}<" in verdict
    models = [[row.model for row in group.rows] for group in full.headline]
    assert models == [
        ["Float", "PTQ", "PTQ, integers"], ["Float", "QAT", "QAT, integers"],
        ["Float", "BPU", "BPU, integers"],
    ]  # fmt: skip
    assert models[0][1] in "\n".join(report_text(full))


def test_every_folder_is_named_with_command_and_digests(full: ReportResult, text: str) -> None:
    trail = read_sections(full.folder / "page.json")["trail"].html
    names = [evidence.folder.name for evidence in full.gathered.all]
    assert names == ["ptq", "simulate", "sensitivity", "export", "qat", "simulate-qat", "bpu"]
    for evidence in full.gathered.all:
        assert sha256(evidence.folder / "summary.json") in trail
        assert sha256(evidence.folder / "page.json") in trail
    for file in ("ptq/weights.safetensors", "export/onnx/fuser.onnx"):
        assert sha256(full.folder.parent / file) in trail
    assert "bevfusion-quant sensitivity --run" in trail
    for line in ("Name", "Date", "Signature", "Rejected"):
        assert f">{line}<" in text


def test_ids_are_unique_and_links_lead_somewhere(text: str) -> None:
    ids = re.findall(r'<[a-z][^>]*\sid="([^"]+)"', text)
    assert sorted(set(ids)) == sorted(ids)
    assert set(re.findall(r'href="#([^"]*)"', text)) <= set(ids)


def test_names_are_escaped_and_the_same_folders_give_the_same_page(
    full: ReportResult, text: str
) -> None:
    assert EVIL not in text
    assert len(re.findall(r"<script", text)) == 2
    run, trained, chip = (m.run.folder for m in full.gathered.measured)
    again = run_report(
        run, qat=trained, bpu=chip, runs=full.folder.parent, name="again",
        command=f"report {EVIL}",
    )  # fmt: skip
    assert (again.folder / "report.html").read_text(encoding="utf-8") == text
    shutil.rmtree(again.folder)


def test_what_nobody_measured_is_named_with_its_command(made: MadeUpRuns) -> None:
    run = made.model()
    result = run_report(run, runs=made.root)
    commands = [check.command for check in result.checks if check.state == "missing"]
    source = "--dataset street"
    simulate = f"bevfusion-quant simulate --run {run} {source} --first 100 --count 200"
    assert commands == [
        simulate,
        simulate,
        simulate,
        f"bevfusion-quant sensitivity --run {run} {source} --first 100 --count 8",
        f"bevfusion-quant export --run {run}",
        f"bevfusion-quant qat --run {run} {source}",
        f"bevfusion-quant ptq --target bpu --config tiny --weights w.pth {source}",
    ]
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    assert list(read_sections(result.folder / "page.json")) == [
        "verdict", "layers", "quantizers", "decisions", "trail", "sign",
    ]  # fmt: skip
    for command in commands:
        assert command in page
    assert "No model was compared with float" in page


def test_a_run_for_a_bpu_is_named_with_its_detector(made: MadeUpRuns) -> None:
    result = run_report(made.model(model="centerpoint"), runs=made.root)
    (command,) = {check.command for check in result.checks if "--target bpu" in check.command}
    assert "ptq --target bpu --model centerpoint --config tiny" in command


def test_the_newest_is_taken_and_the_others_named(made: MadeUpRuns) -> None:
    run = made.model()
    first = made.simulate(run)
    second = made.simulate(run, "simulate-2")
    made.simulate(run, "evaluate", integers=False)  # newer still, but without integers
    other = made.model("other")
    made.simulate(other, "simulate-3")
    result = run_report(run, runs=made.root)
    assert result.gathered.main.evaluation.folder == second
    (note,) = result.gathered.notes
    assert note.startswith(f"{second} was taken, not ")
    assert str(first) in note
    chosen = run_report(run, runs=made.root, take=[first], name="chosen")
    assert chosen.gathered.main.evaluation.folder == first
    assert str(second) in chosen.gathered.notes[0]


def test_what_was_measured_of_other_weights_is_not_taken(made: MadeUpRuns) -> None:
    run = made.model()
    stale = made.simulate(run)
    shutil.rmtree(run)
    made.model(content=b"other weights")
    result = run_report(run, runs=made.root)
    assert result.gathered.main.evaluation is None
    assert f"{stale} was made of other weights" in result.gathered.notes[0]
    with pytest.raises(InputError, match=r"--take .*simulate: it is of .*ptq with other weights"):
        run_report(run, runs=made.root, take=[stale], name="b")
    assert not (made.root / "b").exists()


def test_a_comparison_of_several_runs_leads_the_headline(made: MadeUpRuns) -> None:
    run, low = made.model(), made.model("low", weight_bits=4)
    made.simulate(run)
    compared = made.compare(run, low)
    result = run_report(run, runs=made.root)
    assert [group.source for group in result.headline] == [
        str(compared), str(made.root / "simulate"),
    ]  # fmt: skip
    assert [row.model for row in result.headline[0].rows] == [
        "Float",
        "PTQ (ptq)",
        "PTQ W4A8 (low)",
    ]
    # It has more frames than the simulation.
    assert answer(result, "lose against float").answer.startswith("PTQ (ptq): mAP")
    with pytest.raises(InputError, match="it compares other runs"):
        run_report(made.model("third"), runs=made.root, take=[compared], name="b")


def test_float_weights_are_the_same_by_content_not_by_name(
    made: MadeUpRuns, tmp_path: Path
) -> None:
    names = [tmp_path / name for name in ("a.pth", "b.pth")]
    for name in names:
        name.write_bytes(b"float weights")
    run = made.model(weights=str(names[0]))
    chip = made.model("bpu", target="bpu", weights=str(names[1]))
    result = run_report(run, bpu=chip, runs=made.root)
    assert answer(result, "on a BPU").state == "good"
    names[1].write_bytes(b"others")
    with pytest.raises(InputError, match="the two are not of one float model"):
        run_report(run, bpu=chip, runs=made.root, name="b")


def test_frames_that_set_the_ranges_are_told(made: MadeUpRuns) -> None:
    run = made.model()
    made.simulate(run, first=4996)
    check = answer(run_report(run, runs=made.root), "not made with")
    assert (check.state, check.answer[:17]) == ("look", "no: 1 of 8 frames")


def test_a_trained_run_is_judged_on_streets_it_was_not_trained_on(made: MadeUpRuns) -> None:
    told = {"run": "runs/ptq", "training_frames": "dataset street, first 1000000, count 4"}
    run = made.model("qat", qat=told)
    made.simulate(run)
    result = run_report(run, runs=made.root)
    assert answer(result, "not made with").state == "good"
    assert not [check for check in result.checks if "training it further" in check.question]
    made.simulate(run, "simulate-2", first=1_000_000)
    again = run_report(run, runs=made.root, name="b")
    assert answer(again, "not made with").state == "look"


def test_a_demo_answers_by_itself(made: MadeUpRuns) -> None:
    run = made.model("demo")
    content = json.loads((run / "summary.json").read_text())
    simulated, exported = made.simulate(run), made.export(run)
    for folder, key in (simulated, "integers"), (exported, "export"):
        content[key] = json.loads((folder / "summary.json").read_text())[key]
    (exported / "onnx").rename(run / "onnx")
    shutil.rmtree(simulated)
    shutil.rmtree(exported)
    (run / "summary.json").write_text(json.dumps(content))
    write_digests(run)
    result = run_report(run, runs=made.root)
    assert answer(result, "integers compute").state == "good"
    assert answer(result, "verified").answer == "1 file for tensorrt, verified and unchanged"
    page = (result.folder / "report.html").read_text(encoding="utf-8")
    assert sha256(run / "onnx" / "fuser.onnx") in page


def test_wrong_steps_and_changed_files_ask_for_a_look(made: MadeUpRuns) -> None:
    run = made.model()
    made.simulate(run, wrong=True)
    made.export(run)
    result = run_report(run, runs=made.root)
    assert answer(result, "integers compute").state == "look"
    assert "fuser.0" in answer(result, "integers compute").answer
    assert answer(result, "verified").state == "good"
    (made.root / "export" / "onnx" / "fuser.onnx").write_bytes(b"another file")
    changed = answer(run_report(run, runs=made.root, name="b"), "verified")
    assert changed.state == "look"
    assert changed.answer == "changed or gone since they were verified: fuser.onnx"


@pytest.mark.parametrize(("integer", "state"), [(26.9, "good"), (25.0, "look")])
def test_integers_of_a_bpu_are_judged_by_what_they_lose(
    made: MadeUpRuns, integer: float, state: str
) -> None:
    run = made.model("bpu", target="bpu")
    content = json.loads((run / "summary.json").read_text())
    content["bpu"]["stages"][0]["integer_sqnr_db"] = integer
    (run / "summary.json").write_text(json.dumps(content))
    write_digests(run)
    result = run_report(run, runs=made.root)
    assert answer(result, "integers compute").state == state
    missing = [check.command.split()[1] for check in result.checks if check.state == "missing"]
    assert "sensitivity" not in missing  # which such a run has none of


@pytest.mark.parametrize(
    ("low", "high", "state"),
    [(-0.002, 0.004, "good"), (-0.02, -0.001, "look"), (-0.02, 0.02, "look")],
)
def test_a_loss_beyond_chance_or_not_ruled_out_asks_for_a_look(
    made: MadeUpRuns, low: float, high: float, state: str
) -> None:
    interval = {"low": low, "high": high, "level": 0.95, "scenes": 9}
    assert judged_loss(made, -0.001, interval).state == state


def test_a_loss_without_an_interval_asks_for_a_look(made: MadeUpRuns) -> None:
    check = judged_loss(made, 0.0, None)
    assert check.state == "look"
    assert "without an interval" in check.answer


def judged_loss(made: MadeUpRuns, loss: float, interval: dict[str, Any] | None) -> Any:
    """What the review says of a run whose evaluation told this difference from float."""
    run = made.model()
    evaluation = made.simulate(run, integers=False)
    content = json.loads((evaluation / "summary.json").read_text())
    difference = content["accuracy"]["models"]["quantized"]["difference"]
    difference["mean_ap"], difference["interval"] = loss, interval
    (evaluation / "summary.json").write_text(json.dumps(content))
    write_digests(evaluation)
    return answer(run_report(run, runs=made.root), "lose against float")


def test_a_calibration_that_cannot_be_right_asks_for_a_look(made: MadeUpRuns) -> None:
    run = made.model()
    content = json.loads((run / "summary.json").read_text())
    content["calibration"]["findings"] = [
        {"tensor": name, "frame": "f", "kind": "all zero", "evidence": "all zero", "poor": True}
        for name in ("conv1", "conv2")
    ]
    (run / "summary.json").write_text(json.dumps(content))
    write_digests(run)
    check = answer(run_report(run, runs=made.root), "calibration warn")
    assert check.state == "look"
    assert check.answer == "it cannot be right: conv1, f: all zero (and 1 more)"


def _break(made: MadeUpRuns, run: Path, what: str) -> dict[str, Any]:
    """Damage something; the options that then meet it."""
    evaluation = made.simulate(run)
    if what == "no run":
        return {"run": made.root}
    if what == "evaluation":
        return {"run": evaluation}
    if what == "summary":
        (evaluation / "summary.json").write_text('{"format": ')
    if what == "newer":
        content = json.loads((evaluation / "summary.json").read_text())
        (evaluation / "summary.json").write_text(json.dumps({**content, "version": 99}))
        write_digests(evaluation)
    if what == "lacking":
        exported = made.export(run)
        content = json.loads((exported / "summary.json").read_text())
        (exported / "summary.json").write_text(json.dumps({**content, "export": None}))
        write_digests(exported)
    if what == "of another type":
        content = json.loads((evaluation / "summary.json").read_text())
        content["layers"][0]["sqnr_db"] = "loud"
        (evaluation / "summary.json").write_text(json.dumps(content))
        write_digests(evaluation)
    if what == "page":
        page = evaluation / "page.json"
        page.write_text(page.read_text().replace('"version":2', '"version":9'))
        write_digests(evaluation)
    if what == "gone":
        (evaluation / "page.json").unlink()
    if what == "edited":
        content = (evaluation / "summary.json").read_text()
        (evaluation / "summary.json").write_text(content.replace("28.0", "48.0"))
    if what == "no digests":
        (evaluation / "digests.json").unlink()
    if what == "script":
        page = evaluation / "page.json"
        data = json.loads(page.read_text())
        data["sections"][0]["data"] = [["script", {}, ["hurt()"]]]
        page.write_text(json.dumps(data))
        write_digests(evaluation)
    if what == "weights":
        (run / "weights.safetensors").write_bytes(b"something else")
    if what == "bpu":
        return {"bpu": made.model("second")}
    if what == "float weights":
        return {"bpu": made.model("chip", target="bpu", weights="v.pth")}
    if what == "float model":
        return {"bpu": made.model("chip", target="bpu", model="centerpoint")}
    if what == "digests":
        content = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**content, "sha256": None}))
        write_digests(run)
    if what == "another page":
        run_report(run, runs=made.root)
        return {"take": [made.root / "report"], "name": "again"}
    if what == "twice":
        return {"take": [evaluation, made.simulate(run, "simulate-2")]}
    return {}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("no run", "is no run of bevfusion-quant"),
        ("evaluation", r"--run .*simulate is of kind simulation of .*ptq: give --run .*ptq"),
        ("summary", r"simulate cannot be put on a page: .*: run its command again"),
        ("newer", "summary.json is of version 99, this program reads"),
        ("lacking", r"export cannot be put on a page: summary.json lacks .*, the results of"),
        ("of another type", r"at layers\[0\].sqnr_db: expected .*: run its command again"),
        ("page", "version 9, expected 2: run its command again"),
        ("gone", "cannot be put on a page: .*No such file"),
        ("edited", "summary.json is not the file that the run wrote: it was changed: run its"),
        (
            "no digests",
            "no digests.json, so its figures cannot be checked.*: run its command again",
        ),
        (
            "script",
            "its data of 'scene' do not fit that section's .*: run its command again",
        ),
        ("weights", "weights.safetensors is missing or was changed since the run wrote it"),
        ("bpu", "--bpu .*second is of kind ptq: give one of bpu"),
        ("float weights", "its weights is 'v.pth', that of .* is 'w.pth'"),
        ("float model", "its model is 'centerpoint', that of .* is 'bevfusion'"),
        ("digests", "has no digests of its files"),
        ("another page", "--take .*report is of kind report: name folders of evaluate, simulate"),
        ("twice", "--take names two of a kind"),
    ],
)
def test_what_cannot_be_signed_is_refused(made: MadeUpRuns, what: str, said: str) -> None:
    run = made.model()
    options = _break(made, run, what)
    before = sorted(made.root.iterdir())
    with pytest.raises(InputError, match=said):
        run_report(options.pop("run", run), runs=made.root, **options)
    assert sorted(made.root.iterdir()) == before


def test_the_command_counts_up_and_refuses_a_name_that_exists(
    made: MadeUpRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.model()
    words = ["report", "--run", str(run), "--runs", str(made.root)]
    assert main(words) == 0
    assert main(words) == 0
    assert (made.root / "report-2" / "report.html").is_file()
    told = capsys.readouterr().out
    assert "missing  What does it lose against float?" in told
    assert f"Page: {made.root}/report-2/report.html" in told
    assert main([*words, "--name", "report"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main([*words, "--name", "ptq", "--overwrite"]) == 2
    assert "would be replaced" in capsys.readouterr().err
    assert main([*words, "--name", "report", "--overwrite"]) == 0


def test_without_a_browser_nothing_is_written_and_the_way_out_told(
    made: MadeUpRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = made.model()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"--pdf needs Chromium or Chrome.*print report.html from"):
        run_report(run, runs=made.root, pdf=True)
    with pytest.raises(InputError, match=r"--browser .*nothing is no program"):
        run_report(run, runs=made.root, pdf=True, browser=tmp_path / "nothing")
    with pytest.raises(InputError, match=r"--browser .* goes with --pdf"):
        run_report(run, runs=made.root, browser=tmp_path / "nothing")
    fake = tmp_path / "chromium"
    fake.write_text("#!/bin/sh\necho it broke >&2\nexit 3\n")
    fake.chmod(0o755)
    with pytest.raises(InputError, match=r"did not print the page \(it broke\)"):
        run_report(run, runs=made.root, pdf=True)
    assert sorted(p.name for p in made.root.iterdir()) == ["ptq"]
