"""Finished folders made up for tests: runs, and what was measured of them, as commands write it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from bpu_outcome import outcome as bpu_outcome
from integer_rows import layer_row, simulation
from metric_scenes import random_frames

from bev_data.metrics import Accuracy, AccuracyAccumulator, Bootstrap
from bevfusion.model.head import NUSCENES_CLASSES
from bevfusion_quant.export import ExportedFile, ExportedSet, FileLayer, FilePort
from bevfusion_quant.pages import ReportBoxes, ReportContent, ReportScene, write_report
from bevfusion_quant.run import RUN_FORMAT, RUN_VERSIONS, versions, write_digests
from bevfusion_quant.sensitivity import SensitivityOutcome
from bevquant_qnn import LayerRow, SensitivityRow, SensitivityTable
from bevquant_quantizers import QuantizerValues
from bevquant_quantizers.documents import sha256, write_json

__all__ = ["LAYERS", "MadeUpRuns", "accuracy"]

HEAD = {"format": RUN_FORMAT, "version": RUN_VERSIONS[-1]}
LAYERS = 6


def accuracy(*models: str, frames: int = 8, worse: float = 0.05) -> Accuracy:
    """Each model a little worse than the one before."""
    found, there = random_frames(3, frames, classes=("car", "bus"))
    accumulator = AccuracyAccumulator(NUSCENES_CLASSES, bootstrap=Bootstrap(50))
    for step, model in enumerate(models):
        aside = np.float32([worse * step, 0, 0, 0, 0, 0, 0])
        for index, (seen, real) in enumerate(zip(found, there, strict=True)):
            moved = seen._replace(boxes=seen.boxes + aside, labels=3 * seen.labels)
            accumulator.add(model, index, f"street_{100 + index}", moved, real)
    result = accumulator.result()
    assert result is not None
    return result


class MadeUpRuns:
    """Writes folders below `root`, each a second after the one before.

    Args:
        root: The folder of all runs.
        evil: Stands wherever a layer has its name.
    """

    def __init__(self, root: Path, evil: str = "fuser.0") -> None:
        self.root, self.evil, self.clock = root, evil, 1_000_000_000

    def model(self, name: str = "ptq", *, content: bytes = b"weights", **config: Any) -> Path:
        """A run of ptq; with qat={…} of qat, with target="bpu" one for a BPU."""
        folder = self.root / name
        folder.mkdir(parents=True)
        (folder / "weights.safetensors").write_bytes(content + name.encode())
        digests = {"weights.safetensors": sha256(folder / "weights.safetensors")}
        settings = {"config": "tiny", "branch": "all", "weights": "w.pth", "seed": 0, **config}
        summary: dict[str, Any] = {"calibration": {"warnings": [], "quantizers": []}}
        more: dict[str, Any] = {}
        if "qat" in config:
            summary = {"qat": config["qat"], "accuracy": None}
        if config.get("target") == "bpu":
            outcome = bpu_outcome(self.evil)
            ends = [replace(s, stage="decoder") for s in outcome.comparison.stages]
            summary = {"bpu": {**outcome.summary(), "stages": ends}, "warnings": []}
            more = {"bpu": outcome}
        command = f"bevfusion-quant ptq --dataset street --count 2 --weights w.pth --name {name}"
        content_of_page = ReportContent(
            name,
            layers=self._layers(),
            quantizers=self._quantizers(),
            quantization={"skipped": [{"path": self.evil, "reason": "a softmax stays float"}]},
            **more,
        )
        self._write(
            folder, {**settings, "sha256": digests}, summary, command, ("street_5000",),
            content_of_page,
        )  # fmt: skip
        return folder

    def simulate(
        self,
        of: Path,
        name: str = "simulate",
        *,
        integers: bool = True,
        wrong: bool = False,
        frames: int = 8,
        first: int = 100,
    ) -> Path:
        """What `simulate` writes, or without integers `evaluate`."""
        models = ("float", "quantized", "integer") if integers else ("float", "quantized")
        found = accuracy(*models, frames=frames)
        row = layer_row(self.evil, forced_max_steps=3 if wrong else 1, why="")
        done = simulation(row, layer_row("fuser.1")) if integers else None
        boxes = ReportBoxes(np.array([[0.0, 8, 0, 4, 2, 1.5, 0.3]]), ("car",), np.array([0.9]))
        points = np.random.default_rng(0).uniform(-20, 20, (300, 3))
        scene = ReportScene(
            "street", points, (-20.0, -20.0, 20.0, 20.0), "points", None, boxes, boxes, (), boxes
        )
        content = ReportContent(
            name,
            scene=scene,
            accuracy=found,
            layers=self._layers(),
            quantizers=self._quantizers(),
            integers=done,
        )
        summary = {
            "evaluates": str(of),
            "layers": self._layers(),
            "stages": [{"stage": "decoder", "title": "Decoder", "sqnr_db": 28.0}],
            "accuracy": found.summary(),
            **({} if done is None else {"integers": done.summary()}),
        }
        names = [f"street_{first + index}" for index in range(frames)]
        return self._measured(of, name, {}, summary, names, content)

    def sensitivity(self, of: Path, name: str = "sensitivity") -> Path:
        rows = tuple(
            SensitivityRow((layer,), 1000, {"int8": 30.0 + i}, None)
            for i, layer in enumerate([self.evil, "decoder.1", "decoder.2"])
        )
        table = SensitivityTable("sqnr", 144.5, None, rows, 2)
        outcome = SensitivityOutcome(table, "decoder.neck", ("int8",), None, "", "")
        content = ReportContent(name, sensitivity=outcome)
        summary = {"sensitivity": outcome.summary()}
        return self._measured(of, name, {"measures": str(of)}, summary, ["street_100"], content)

    def export(self, of: Path, name: str = "export") -> Path:
        folder = self.root / name / "onnx"
        folder.mkdir(parents=True)
        (folder / "fuser.onnx").write_bytes(b"a file")
        port = FilePort("middle", "float32", (1, 64, 40, 40))
        layer = FileLayer(self.evil, "conv", "int8", 10, 0, 0.0, "nothing", True, file="fuser.onnx")
        file = ExportedFile(
            "fuser.onnx", "int8", "TensorRT", "trtexec --onnx=fuser.onnx", 6,
            sha256(folder / "fuser.onnx"), {}, 13, (port,), (port,), {}, None, (), (), (), (layer,),
        )  # fmt: skip
        made = ExportedSet("tensorrt", folder, (file,), (), (), "street_0")
        content = ReportContent(name, export=made)
        summary = {"export": made.summary()}
        return self._measured(of, name, {"exports": str(of)}, summary, ["street_0"], content)

    def compare(self, *of: Path, name: str = "compare", frames: int = 12) -> Path:
        names = [f"{run.name} quantized" for run in of]
        found = accuracy("float", *names, frames=frames)
        entries = [{"run": str(run), "name": run.name, **_config(run)} for run in of]
        folder = self.root / name
        folder.mkdir(parents=True)
        self._write(
            folder, {"evaluates": [str(run) for run in of], "compares": entries},
            {"accuracy": found.summary()}, f"bevfusion-quant compare --run {of[0]}",
            [f"street_{100 + index}" for index in range(frames)], ReportContent(name),
        )  # fmt: skip
        return folder

    def everything(self) -> tuple[Path, Path, Path]:
        """A run with all that can be measured of it, a run of qat, and one for a BPU."""
        run = self.model()
        self.simulate(run)
        self.sensitivity(run)
        self.export(run)
        told = {"run": str(run), "training_frames": "dataset street, first 1000000, count 4"}
        trained = self.model("qat", qat=told)
        self.simulate(trained, "simulate-qat")
        chip = self.model("bpu", target="bpu")
        return run, trained, chip

    def _measured(
        self,
        of: Path,
        name: str,
        config: dict[str, Any],
        summary: dict[str, Any],
        frames: Sequence[str],
        content: ReportContent,
    ) -> Path:
        folder = self.root / name
        folder.mkdir(parents=True, exist_ok=True)
        settings = {"evaluates": str(of), "run_sha256": _config(of)["sha256"], **config}
        command = f"bevfusion-quant {name} --run {of}"
        self._write(folder, settings, summary, command, frames, content)
        return folder

    def _write(
        self,
        folder: Path,
        config: dict[str, Any],
        summary: dict[str, Any],
        command: str,
        frames: Sequence[str],
        content: ReportContent,
    ) -> None:
        write_json(folder / "config.json", {**HEAD, **config})
        write_report(folder / "report.html", replace(content, command=command))
        told = {"command": command, "versions": versions(), "frames": [{"name": n} for n in frames]}
        write_json(folder / "summary.json", {**HEAD, **told, **summary})
        write_digests(folder)
        self.clock += 1
        os.utime(folder / "summary.json", (self.clock, self.clock))

    def _layers(self) -> list[LayerRow]:
        names = [self.evil, *(f"decoder.{index}" for index in range(1, LAYERS))]
        return [
            LayerRow(name, "QuantConv2d", 8, 100.0, 40.0 - i, 0.999, 0.001, 2.0)
            for i, name in enumerate(names)
        ]

    def _quantizers(self) -> list[QuantizerValues]:
        seen = QuantizerValues((f"{self.evil}._input_quantizer",), 8, np.array([2.0]))
        values = np.random.default_rng(0).standard_normal(400)
        seen.largest, seen.total = float(np.abs(values).max()), values.size
        seen.counts = np.histogram(values, seen.edges)[0]
        return [seen]


def _config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return content
