"""What every run writes down, whichever command wrote it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from bevfusion_quant.bpu import BpuConfig
from bevfusion_quant.ptq import PtqConfig
from bevfusion_quant.run import (
    CONFIG_FILE,
    RUN_VERSIONS,
    SUMMARY_FILE,
    Clock,
    RunRecord,
    RunSettings,
    read_settings,
    read_summary,
)
from bevquant_quantizers.documents import DocumentError


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


def test_freed_memory_goes_back_behind_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[str] = []
    monkeypatch.setattr(
        "bevfusion_quant.run._record.return_freed_memory", lambda: returned.append("back")
    )
    clock = Clock()
    for name in ("fuse", "calibrate"):
        with clock.step(name):
            returned.append(name)
    assert returned == ["fuse", "back", "calibrate", "back"]


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


@pytest.mark.parametrize("config", [PtqConfig(), BpuConfig()])
def test_settings_are_read_as_they_were_written(tmp_path: Path, config: Any) -> None:
    RunRecord(tmp_path, "", None).write_settings({**asdict(config), "sha256": {"a": "b"}})
    found = read_settings(tmp_path)
    assert (found.version, found.sha256, found.kind) == (RUN_VERSIONS[-1], {"a": "b"}, "ptq")
    assert found.written == read(tmp_path / CONFIG_FILE)
    for name in set(found.__struct_fields__) & set(asdict(config)):
        value = getattr(config, name)
        assert getattr(found, name) == (list(value) if isinstance(value, tuple) else value)


def test_what_older_runs_leave_out_is_what_they_did(tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text('{"format": "bevfusion-quant run", "config": "tiny"}')
    found = read_settings(tmp_path)
    assert (found.version, found.branch, found.method) == (1, "lidar", "mse")
    assert (found.fold, found.weight_bits, found.rounding, found.plan) == (True, 8, "nearest", None)
    assert found.quantize_first_layer
    assert RunSettings(weight_bits=4).output_weight_bits == 4


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("evaluates", "evaluation"), ("exports", "export"), ("measures", "sensitivity"),
        ("reviews", "report"),
    ],
)  # fmt: skip
def test_a_folder_is_what_its_settings_name(tmp_path: Path, key: str, kind: str) -> None:
    RunRecord(tmp_path, "", None).write_settings({"evaluates": "runs/a", key: "runs/a"})
    assert read_settings(tmp_path).kind == kind


def test_a_damaged_field_is_named(tmp_path: Path) -> None:
    record = RunRecord(tmp_path, "", None)
    record.write_settings({"weight_bits": "eight"})
    with pytest.raises(DocumentError, match=r"at weight_bits: expected `int`"):
        read_settings(tmp_path)
    record.write_summary({"accuracy": {"models": {"float": {"interval": {"low": 0.1}}}}})
    with pytest.raises(DocumentError, match=r"at accuracy.models\[…\].interval"):
        read_summary(tmp_path)


def test_frames_are_named_in_either_form(tmp_path: Path) -> None:
    RunRecord(tmp_path, "", None).write_summary({"frames": ["a", {"name": "b", "size": 3}]})
    assert read_summary(tmp_path).frame_names == ("a", "b")
