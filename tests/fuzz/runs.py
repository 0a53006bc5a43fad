"""Files of the app: runs, checkpoints of training, what processes send each other."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fuzz.mutate import Rng, changed_bytes, changed_json, changed_npz, changed_tensors
from fuzz.target import Files, Target, written


def rank_message() -> Target:
    from bevquant_quantizers.ranks._ranks import _packed, _unpacked

    own = {0: b"abc", 1: np.arange(6.0).reshape(2, 3), 2: torch.ones(2)}

    def change(rng: Rng, data: bytes) -> bytes:
        head, _, body = data.partition(b"\n")
        if rng.random() < 0.7:
            return changed_json(rng, head) + b"\n" + body
        return changed_bytes(rng, data)

    read = lambda f: _unpacked((f / "m").read_bytes())  # noqa: E731
    return Target({"m": _packed(own)}, {"m": change}, read)


def training_checkpoint() -> Target:
    from bevfusion_quant.train import read_checkpoint, restore, write_checkpoint

    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    identity = {"training_frames": "street", "settings": {"lr": 0.1}}
    files = written(
        lambda f: write_checkpoint(f / "c.safetensors", *fresh(), 1, [[1.0, 2.0]], identity)
    )
    read = lambda f: restore(read_checkpoint(f / "c.safetensors"), *fresh())  # noqa: E731
    return Target(files, {"c.safetensors": changed_tensors}, read)


def prepared_list() -> Target:
    from types import SimpleNamespace

    from bevfusion_quant.train import prepare_frames

    class Source:
        describe = "none"

        def open(self) -> list[Any]:
            return [None]

    form: Any = SimpleNamespace(config="tiny", image_size=(8, 16), cameras=("CAM_FRONT",))
    files = written(lambda f: _with_frame(prepare_frames, Source(), form, f))
    read = lambda f: prepare_frames(Source(), form, f, workers=0)  # noqa: E731
    return Target(files, {"frames.json": changed_json}, read)


def _with_frame(prepare: Callable[..., Any], source: Any, form: Any, folder: Path) -> None:
    """The list, and a file in the place of the frame that it names, which is not made again."""
    with suppress(AttributeError):  # there is no frame to make
        prepare(source, form, folder, workers=0)
    (folder / "000000.npz").touch()


def frame_record() -> Target:
    """A frame's note and boxes, as a process keeps them for the next run."""
    from bev_data.points import Labels
    from bevfusion.evaluation import (
        FrameNote,
        PoorData,
        detections_of,
        detections_record,
        note_of,
        note_record,
    )
    from bevfusion.model.head import Detections
    from bevquant_quantizers.ranks import pack, unpack

    labels = Labels(np.ones((2, 7), np.float32), ("car", "bus"))
    poor = PoorData("encoders.lidar", "f", "few voxels", "1 voxel", "calibrate")
    found = Detections(
        np.ones((2, 7), np.float32), np.ones(2, np.float32), np.zeros(2, np.int64),
        np.zeros((2, 2), np.float32),
    )  # fmt: skip
    kept = note_record(FrameNote("f", 9, labels, (poor,)))
    kept |= detections_record("found", found)

    def read(folder: Path) -> None:
        found = unpack((folder / "r.npz").read_bytes())
        str((note_of(found), detections_of("found", found)))

    def change(rng: Rng, data: bytes) -> bytes:
        if rng.random() < 0.5:
            return changed_npz(rng, data)
        found = unpack(data)
        text = changed_json(rng, str(found["frame.findings"]).encode())
        return pack({**found, "frame.findings": np.array(text.decode("utf-8", "replace"))})

    return Target({"r.npz": pack(kept)}, {"r.npz": change}, read)


def command_line() -> Target:
    """Options of every command up to where it would begin: one line, and exit code 2."""
    from unittest import mock

    from bevfusion_quant import cli

    lines = [
        ["demo", "--seed", "3", "--name", "a"],
        ["ptq", "--dataset", "street", "--count", "3", "--seed", "1", "--method", "mse",
         "--branch", "all", "--cameras", "CAM_FRONT", "--exclude", "a.*", "--weight-bits", "8"],
        ["train", "--dataset", "street", "--steps", "3", "--workers", "1", "--runs", "r"],
        ["evaluate", "--run", "x", "--resamples", "100", "--name", "n", "--first", "2"],
        ["compare", "--runs", "r", "--resamples", "3", "--resample-seed", "4"],
    ]  # fmt: skip

    def change(rng: Rng, data: bytes) -> bytes:
        line = list(rng.choice(lines))
        for _ in range(rng.choice([1, 1, 2])):
            line[rng.randrange(1, len(line))] = rng.choice(WORDS)
        return json.dumps(line).encode()

    def read(folder: Path) -> None:
        said = io.StringIO()
        with (
            mock.patch("bevfusion_quant.commands.execute", return_value=""),
            redirect_stderr(said),
            redirect_stdout(io.StringIO()),
        ):
            try:
                code = cli.main(json.loads((folder / "line.json").read_bytes()))
            except SystemExit as error:
                code = int(error.code or 0)
        lines = said.getvalue().splitlines()
        if code == 2 and lines:
            raise ValueError(lines[-1])
        if code:
            raise RuntimeError(f"exit code {code}: {lines}")

    return Target({"line.json": json.dumps(lines[0]).encode()}, {"line.json": change}, read)


WORDS = [
    "", "x", "-1", "0", "1e12", "9" * 20, "9" * 400, "nan", "inf", "--", "-", "--nope", "[", "\x01",
    "../x", "é", "None", "True", "0x10", "1.5", "a" * 300, "CAM_NOPE", "--count", "--help",
]  # fmt: skip


def record() -> Target:
    from bevquant_quantizers.ranks import pack, unpack

    files = {"r.npz": pack({"sums": np.arange(9.0), "names": np.array(["a", "b"])})}
    read = lambda f: unpack((f / "r.npz").read_bytes())  # noqa: E731
    return Target(files, {"r.npz": changed_npz}, read)


def run_evidence() -> Target:
    from bevfusion_quant.pages import ReportContent, write_report
    from bevfusion_quant.report import read_evidence
    from bevfusion_quant.run import RUN_FORMAT, RUN_VERSIONS, write_digests
    from bevquant_qnn import LayerRow
    from bevquant_quantizers.documents import write_json

    head = {"format": RUN_FORMAT, "version": RUN_VERSIONS[-1]}

    def write(folder: Path) -> None:
        write_json(folder / "config.json", {**head, "config": "tiny", "sha256": {"a": "b"}})
        content = ReportContent(
            "r", command="ptq", frames=("f",), settings={"method": "mse"}, seconds={"total": 1.0},
            quantization={"skipped": [{"path": "heads.object", "reason": "a softmax"}]},
            layers=[LayerRow("decoder.0", "QuantConv2d", 8, 9.0, 40.0, 0.99, 0.0, 2.0)],
        )  # fmt: skip
        write_report(folder / "report.html", content)
        write_json(folder / "summary.json", {**head, "command": "ptq", "frames": [{"name": "f"}]})
        write_digests(folder)

    files = written(write)

    def sign(files: Files) -> Files:
        digests = json.loads(files["digests.json"])
        for name in digests["sha256"]:
            digests["sha256"][name] = hashlib.sha256(files[name]).hexdigest()
        return files | {"digests.json": json.dumps(digests).encode()}

    def read(folder: Path) -> None:
        found = read_evidence(folder)
        str((found.command, found.frames, found.model_digests))

    change = dict.fromkeys(("config.json", "summary.json", "page.json"), changed_json)
    return Target(files, change, read, sign)


def run_digests() -> Target:
    return run_evidence()._replace(change={"digests.json": changed_json}, sign=None)


def run_settings() -> Target:
    from bevfusion_quant.saved_run import read_run_config

    settings = {
        "format": "bevfusion-quant run", "version": 3, "config": "tiny", "branch": "lidar",
        "method": "mse", "exclude": [], "fold": True, "quantize_head": False, "weight_bits": 8,
        "plan": None, "sha256": {"weights.safetensors": "0" * 64, "ranges.json": "0" * 64},
    }  # fmt: skip
    files = {"config.json": json.dumps(settings).encode()}
    return Target(files, {"config.json": changed_json}, read_run_config)


READERS: dict[str, tuple[int, Callable[[], Target]]] = {
    "training checkpoint": (2000, training_checkpoint),
    "message of a rank": (4000, rank_message),
    "record of a rank": (3000, record),
    "list of prepared frames": (3000, prepared_list),
    "record of a frame": (2000, frame_record),
    "command line": (500, command_line),
    "run for report": (3000, run_evidence),
    "digests of a run": (1000, run_digests),
    "settings of a run": (8000, run_settings),
}
