"""A reviewer's questions about a run, and the answers from its folders."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bev_data.metrics import points, span
from bevfusion.detectors import is_foreign
from bevfusion.model import trained_weights
from bevfusion.quantization import SimulationSummary
from bevfusion_quant.export import ONNX_FOLDER
from bevfusion_quant.frames import FIRST_TRAINING_SEED
from bevfusion_quant.pages import LOW_SQNR_DB
from bevfusion_quant.pages._format import decibels
from bevfusion_quant.report._gather import Evidence, Gathered, Measured, frames_text
from bevfusion_quant.report._headline import HeadlineGroup, HeadlineRow, headline_group
from bevfusion_quant.run import BpuSummary
from bevfusion_quant.stages import sizes_of
from bevquant_quantizers.documents import sha256

# Options that say where frames come from, with how many values each takes; 0 for any number.
_SOURCE = {"--points": 0, "--dataset": 1, "--data": 0, "--split": 1, "--data-version": 1}


def command_for(what: str, measured: Measured) -> str:
    """The command of a missing result with the frames of the run; "bpu" is `ptq --target bpu`."""
    run = measured.run
    source = _options(run, _SOURCE)
    if not source and run.frames and all(name.startswith("street_") for name in run.frames):
        source = ["--dataset", "street"]  # of a demo, which makes its own
    if what == "bpu":
        settings = run.settings
        model = ["--model", settings.model] if settings.model != "bevfusion" else []
        words = ["bevfusion-quant", "ptq", "--target", "bpu", *model, "--config", settings.config]
        return shlex.join([*words, *_weights(run), *source])
    words = ["bevfusion-quant", what, "--run", str(run.folder)]
    if what in ("simulate", "sensitivity"):
        words += source
        if "street" in source:
            # Streets that no run's ranges come from, unless somebody asks for them.
            words += ["--first", "100", "--count", "200" if what == "simulate" else "8"]
    if what == "qat":
        words += source
    return shlex.join(words)


def _weights(run: Evidence) -> list[str]:
    weights = run.settings.weights
    if weights is None:
        return []
    known = trained_weights(sizes_of(run.settings.model, run.settings.config).name)
    return ["--weights", "trained" if str(weights) == str(known) else str(weights)]


def _options(run: Evidence, wanted: dict[str, int]) -> list[str]:
    """Options of the run's command, each with its values."""
    found: list[str] = []
    words = iter(shlex.split(run.command))
    taking, left = False, 0
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("--"):
            taking = name in wanted and not equals
            # 0 stands for any number of values.
            left = wanted.get(name, 0) or -1
            if name in wanted:
                found.append(word)
        elif taking and left:
            found.append(word)
            left -= 1
    return found


LOST_DB = 0.5  # as the files of an export may lose beside the integer model
TOLERATED = 0.01  # of mean average precision: what an interval must rule out losing


@dataclass(frozen=True)
class Check:
    """One question with its answer.

    The state is "good", "look" where a reviewer should look closer, or "missing" without a
    measurement; then `command` is the command that measures it.
    """

    question: str
    answer: str
    state: str = "good"
    command: str = ""


def checks(gathered: Gathered, groups: Sequence[HeadlineGroup]) -> tuple[Check, ...]:
    """Questions about a run, in the order of the page."""
    return tuple(_checks(gathered, groups))


def _checks(gathered: Gathered, groups: Sequence[HeadlineGroup]) -> Iterator[Check]:
    main = gathered.main
    yield _accuracy("What does it lose against float?", main, groups)
    yield _held_out(main, groups)
    yield _integers(main)
    yield from _layers(main)
    yield from _calibration(main.run)
    if main.run.kind != "bpu":
        yield _sensitivity(main)
    yield _files(main)
    if not is_foreign(main.run.settings.model):  # which neither qat nor --target bpu takes
        yield from _trained(gathered, groups)
        yield _partition(gathered)


def _accuracy(question: str, measured: Measured, groups: Sequence[HeadlineGroup]) -> Check:
    found = headline_group(groups, measured.run)
    if found is None:
        answer = f"{measured.run.folder} was not scored on labelled frames"
        return Check(question, answer, "missing", command_for("simulate", measured))
    return Check(question, *_loss(found[1]))


def _loss(row: HeadlineRow) -> tuple[str, str]:
    """The difference in words; "look" if it is, or may be, a loss beyond chance."""
    answer = f"{row.model}: mAP {points(row.mean_ap)}"
    if row.difference is None:
        return f"{answer}, float's is not known", "look"
    answer += f", {100 * row.difference:+.2f} against float"
    interval = row.difference_interval
    if interval is None:
        return f"{answer}, without an interval", "look"
    answer += f" ({interval.level:.0%}: {span(interval, signed=True)})"
    if interval.high < 0:
        return f"{answer}: a loss beyond chance", "look"
    if interval.low < -TOLERATED:
        many = f"{100 * TOLERATED:g} point"
        return (f"{answer}: a loss of more than {many} is not ruled out: judge more frames", "look")
    return answer, "good"


def _held_out(main: Measured, groups: Sequence[HeadlineGroup]) -> Check:
    question = "Was it judged on frames that it was not made with?"
    found = headline_group(groups, main.run)
    if found is None:
        return Check(question, "it was not judged", "missing", command_for("simulate", main))
    frames = found[0].frames
    trained = main.run.summary.qat
    if trained is not None:
        return Check(question, *_trained_apart(trained.training_frames, frames))
    seen = set(main.run.frames) & set(frames)
    if seen:
        answer = f"no: {len(seen)} of {len(frames)} frames set its ranges, or stand beside those"
        return Check(question, answer, "look")
    return Check(question, f"none of the {len(frames)} frames is one of the run's")


def _trained_apart(source: str, frames: Sequence[str]) -> tuple[str, str]:
    """Training streets have seeds of their own; other splits are for the reader to check."""
    seeds = [name.removeprefix("street_") for name in frames if name.startswith("street_")]
    apart = len(seeds) == len(frames) and all(int(seed) < FIRST_TRAINING_SEED for seed in seeds)
    known = apart and "dataset street" in source
    return f"trained on {source}; judged on {frames_text(frames)}", "good" if known else "look"


def _integers(main: Measured) -> Check:
    question = "Do integers compute the quantized model?"
    for evidence in (main.evaluation, main.run):
        if evidence is None:
            continue
        if evidence.summary.integers is not None:
            return _simulated(question, evidence.summary.integers)
        if evidence.summary.bpu is not None:
            return _on_chip(question, evidence.summary.bpu)
    answer = "it was not run in integers"
    return Check(question, answer, "missing", command_for("simulate", main))


def _simulated(question: str, found: SimulationSummary) -> Check:
    if found.wrong:
        answer = f"more than a step off on the same input: {', '.join(found.wrong)}"
        return Check(question, answer, "look")
    many = len(found.layers)
    known = f", but for {len(found.explained)} with a known reason" * bool(found.explained)
    return Check(
        question, f"within one step on the same input, {many} operations of the model{known}"
    )


def _on_chip(question: str, found: BpuSummary) -> Check:
    """Integer model and BPU run have different inputs, so the losses to float are compared."""
    most = max((row.max_steps or 0 for row in found.layers), default=0)
    lost = [
        (row.fake_sqnr_db - row.integer_sqnr_db, row.title)
        for row in found.stages
        if row.fake_sqnr_db is not None and row.integer_sqnr_db is not None
    ]
    largest, where = max(lost, default=(0.0, ""))
    answer = f"up to {most:.0f} steps apart, each model on its own activations"
    if largest > LOST_DB:
        answer += f"; {where}: {largest:.1f} dB less than the quantized model against float"
    return Check(question, answer, "look" if largest > LOST_DB else "good")


def _layers(main: Measured) -> Iterator[Check]:
    evidence = main.evaluation or main.run
    levels = ((-math.inf if r.not_finite else r.sqnr_db, r) for r in evidence.summary.layers)
    rows = [(level, r.layer) for level, r in levels if level is not None]
    if not rows:
        return
    low = [layer for decibels, layer in rows if decibels < LOW_SQNR_DB]
    worst, where = min(rows, key=lambda row: row[0])
    answer = f"{len(low)} of {len(rows)} layers, worst {decibels(worst)} at {where}"
    yield Check(f"Which layers are below {LOW_SQNR_DB:g} dB?", answer, "look" if low else "good")


def _calibration(run: Evidence) -> Iterator[Check]:
    found = run.summary.calibration
    if found is not None:
        poor = [item for item in found.findings if item.poor]
        if poor:
            more = f" (and {len(poor) - 1} more)" if len(poor) > 1 else ""
            first = f"{poor[0].tensor}, {poor[0].frame}: {poor[0].evidence}"
            yield Check("Did the calibration warn?", f"it cannot be right: {first}{more}", "look")
            return
        warnings = len(found.warnings) + sum(len(q.warnings) for q in found.quantizers)
        warnings += sum(item.kind != "channels" for item in found.findings)
    elif run.summary.warnings is not None:
        warnings = len(run.summary.warnings)
    else:
        return
    answer = f"{warnings} warning{'s' * (warnings != 1)}" if warnings else "no"
    yield Check("Did the calibration warn?", answer, "look" if warnings else "good")


def _sensitivity(main: Measured) -> Check:
    question = "Which layers cost most?"
    found = None if main.sensitivity is None else main.sensitivity.summary.sensitivity
    if found is None:
        answer = "the losses of single layers were not measured"
        return Check(question, answer, "missing", command_for("sensitivity", main))
    worst = found.table.worst_first()[0]
    precision = min(worst.alone, key=worst.alone.__getitem__)
    more = f" and {len(worst.modules) - 1} more" * (len(worst.modules) > 1)
    score = f"{worst.alone[precision]:.4g} {found.unit}".strip()
    answer = f"{worst.modules[0]}{more}: {score} of {found.scored}, alone in {precision}"
    return Check(question, answer)


def _files(main: Measured) -> Check:
    question = "Are the files verified, and still the ones that were?"
    evidence = main.export or main.run
    found = evidence.summary.export
    if found is None:
        return Check(question, "no files were written", "missing", command_for("export", main))
    if not found.verified:
        return Check(question, f"not verified: {found.failures[0]}", "look")
    files = exported_files(evidence)
    changed = [name for name, _, same in files if not same]
    if changed:
        answer = f"changed or gone since they were verified: {', '.join(changed)}"
        return Check(question, answer, "look")
    many = f"{len(files)} file{'s' * (len(files) != 1)}"
    return Check(question, f"{many} for {found.target}, verified and unchanged")


def exported_files(evidence: Evidence) -> list[tuple[str, str, bool]]:
    """Each file's name, the sha256 of its verification, and whether it is unchanged."""
    folder = evidence.folder / ONNX_FOLDER
    files = []
    made = evidence.summary.export
    for file in () if made is None else made.files:
        for name, digest in {file.name: file.sha256, **file.companions}.items():
            path = folder / name
            files.append((name, digest, path.is_file() and sha256(path) == digest))
    return files


def _trained(gathered: Gathered, groups: Sequence[HeadlineGroup]) -> Iterator[Check]:
    """Answer for the trained run shown beside; a main run that was trained is answered above."""
    if gathered.main.run.kind != "ptq":
        return
    question = "What does training it further bring?"
    if gathered.qat is None:
        answer = "no run of qat stands beside (--qat)"
        yield Check(question, answer, "missing", command_for("qat", gathered.main))
    else:
        yield _accuracy(question, gathered.qat, groups)


def _partition(gathered: Gathered) -> Check:
    question = "What runs where on a BPU?"
    chip = gathered.main if gathered.main.run.kind == "bpu" else gathered.bpu
    found = None if chip is None else chip.run.summary.bpu
    if found is None:
        answer = "no run for a BPU stands beside (--bpu)"
        return Check(question, answer, "missing", command_for("bpu", gathered.main))
    on_bpu = sum(len(segment.nodes) for segment in found.segments if segment.place == "BPU")
    broken = [text for estimate in found.estimates.values() for text in estimate.violations]
    answer = (
        f"{on_bpu} operators on the BPU ({found.march}), {len(found.on_cpu)} on the CPU, "
        f"{found.transfer_bytes:,} bytes between them in a frame"
    )
    if broken:
        return Check(question, f"{answer}; not allowed: {broken[0]}", "look")
    return Check(question, answer)
