"""What every run writes down, whichever command wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bevfusion_quant.run import CONFIG_FILE, RUN_VERSIONS, SUMMARY_FILE, Clock, RunRecord


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_a_summary_says_what_all_runs_say_and_what_this_one_found(tmp_path: Path) -> None:
    clock = Clock()
    with clock.step("measure"):
        pass
    record = RunRecord(tmp_path, "bevfusion-quant evaluate", clock, ("msgspec",))
    seconds, peak = record.write_summary({"frames": ["a"], "accuracy": None})
    content = read(tmp_path / SUMMARY_FILE)
    assert (content["format"], content["version"]) == ("bevfusion-quant run", RUN_VERSIONS[-1])
    assert content["command"] == "bevfusion-quant evaluate"
    assert content["threads"] == torch.get_num_threads()
    assert {"python", "torch", "msgspec"} <= set(content["versions"])
    assert (content["frames"], content["accuracy"]) == (["a"], None)
    assert content["seconds"] == seconds
    assert content["peak_memory_mib"] == peak > 0
    assert seconds["measure"] <= seconds["total"]


def test_where_nothing_was_computed_nothing_was_timed(tmp_path: Path) -> None:
    assert RunRecord(tmp_path, "bevfusion-quant report", None).write_summary({}) == ({}, 0.0)
    assert set(read(tmp_path / SUMMARY_FILE)) == {"format", "version", "command", "versions"}


def test_settings_taken_over_from_an_older_run_are_of_this_version(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "bevfusion-quant qat", Clock())
    record.write_settings({"version": RUN_VERSIONS[0], "weights": Path("w.pth")})
    content = read(tmp_path / CONFIG_FILE)
    assert content["version"] == RUN_VERSIONS[-1]
    assert content["weights"] == "w.pth"


def test_the_page_says_what_the_record_says(tmp_path: Path) -> None:
    told = RunRecord(tmp_path, "bevfusion-quant ptq", Clock()).on_page({"method": "mse"})
    assert told["command"] == "bevfusion-quant ptq"
    assert told["settings"] == {"method": "mse", "threads": torch.get_num_threads()}
