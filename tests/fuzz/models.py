"""Files of quantized models: ranges, plans, integer programs, `.hbm`, ONNX, checkpoints."""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fuzz.mutate import (
    Rng,
    changed_bytes,
    changed_json,
    changed_notes,
    changed_npz,
    changed_onnx,
    changed_tensors,
    changed_zip,
)
from fuzz.target import Files, Target, document, written


def ranges() -> Target:
    from bevquant_quantizers import load_ranges, save_ranges

    model = small_quantized()
    files = written(lambda folder: save_ranges(model, folder / "r.json"))
    return Target(files, {"r.json": changed_json}, lambda f: load_ranges(model, f / "r.json"))


def small_quantized() -> nn.Module:
    from bevquant_quantizers import QuantDescriptor, TensorQuantizer

    torch.manual_seed(0)
    return nn.Sequential(
        TensorQuantizer(QuantDescriptor(calib_method="histogram", amax=1.5)),
        TensorQuantizer(QuantDescriptor(axis=1, amax=[[1.0, 2.0, 3.0, 4.0]])),
    )


def collection() -> Target:
    from bevquant_quantizers import QuantDescriptor, TensorQuantizer, calibrate

    def fresh() -> nn.Module:
        return nn.Sequential(
            TensorQuantizer(QuantDescriptor(calib_method="histogram")),
            TensorQuantizer(QuantDescriptor(calib_method="histogram", axis=1)),
            TensorQuantizer(QuantDescriptor(axis=1)),
        )

    batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    files = written(lambda f: calibrate(fresh(), batches[:2], resume=f / "c.npz", progress=False))

    def read(folder: Path) -> None:
        str(calibrate(fresh(), batches, resume=folder / "c.npz", progress=False))

    return Target(files, {"c.npz": changed_npz}, read)


def precision_plan() -> Target:
    from bevquant_qnn import PrecisionPlan, quantize_model

    net = quantize_model(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1))).model
    return document(lambda: PrecisionPlan.by_hand(net, {"0": "float"}))


def sensitivity_table() -> Target:
    from bevquant_qnn import SensitivityRow, SensitivityTable

    rows = tuple(SensitivityRow((f"l.{i}",), 9, {"int8": 30.0 + i}, 1.0) for i in range(3))
    return document(lambda: SensitivityTable("sqnr", 144.5, None, rows, 2))


def quant_config() -> Target:
    from bevquant_qnn import QuantConfig

    files = {"q.json": QuantConfig(exclude=("a.*",), weight_bits=4).to_json().encode()}
    read = lambda f: QuantConfig.from_json((f / "q.json").read_text("utf-8", "replace"))  # noqa: E731
    return Target(files, {"q.json": changed_json}, read)


class SmallNet(nn.Module):
    """What a saved program may hold: layers, a pool, a join, views, functions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU6(), nn.MaxPool2d(2))
        self.act, self.up = nn.LeakyReLU(0.1), nn.ConvTranspose2d(4, 2, 2, 2)
        self.out, self.pool = nn.Conv2d(6, 2, 3, padding=1), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.act(self.stem(x))
        wide = nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")
        x = self.out(torch.cat([wide, self.up(x)], 1))
        return {"scores": self.head(self.pool(x).flatten(1)), "map": x[:, :, 1:-1]}


def integer_model() -> Target:
    from bevquant_int8sim import IntegerModel, simulate
    from bevquant_qnn import quantize_model
    from bevquant_quantizers import calibrate

    torch.manual_seed(0)
    x = torch.randn(1, 2, 8, 8)
    net = quantize_model(SmallNet().eval(), example_inputs=x).model
    calibrate(net, [x], method="max", progress=False)
    files = written(lambda f: simulate(net, x, backend="torch").save(f / "m"))

    def sign(files: Files) -> Files:
        manifest = json.loads(good["m/manifest.json"])
        for name in manifest["sha256"]:
            manifest["sha256"][name] = hashlib.sha256(files[f"m/{name}"]).hexdigest()
        return files | {"m/manifest.json": json.dumps(manifest, indent=1).encode()}

    good = files
    change = {"m/program.json": changed_json, "m/tensors.safetensors": changed_tensors}
    with tempfile.TemporaryDirectory() as folder:
        for name, content in good.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_bytes(content)
        signature = IntegerModel.load(Path(folder) / "m").program.signature

    def read(folder: Path) -> None:
        model = IntegerModel.load(folder / "m", backend="torch")
        if model.program.signature == signature:
            model(x)

    # A program that reads another input than it says calls the input wrong: a TypeError.
    return Target(files, change, read, sign, types=True)


def integer_manifest() -> Target:
    target = integer_model()
    return target._replace(change={"m/manifest.json": changed_json}, sign=None)


def hbm() -> Target:
    from bevquant_hybrid import runtime
    from bevquant_hybrid.runtime import Port, Program, operator_step, write_program
    from bevquant_int8sim.program import Ref, TensorType, Value

    x, y, z = Ref("%0"), Ref("%1"), Ref("w")
    program = Program(
        name="net",
        march="bayes",
        inputs=(Port("x", x, torch.int8, (1, 4)),),
        outputs=(Port("y", y, torch.int8, (2, 4)),),
        signature=((x,), {}),
        sparse_inputs={},
        result=y,
        steps=(operator_step("aten::cat", {"tensors": (x, z), "dim": 0}, ("%1",), "a"),),
        values={"%1": Value(TensorType(torch.int8, (2, 4)), "%1")},
        constants={"w": torch.ones(1, 4, dtype=torch.int8)},
    )
    files = written(lambda f: write_program(program, f / "n.hbm", "fuzz"))

    def sign(files: Files) -> Files:
        content = files["n.hbm"]
        at = content.find(b"sha256")
        start = content.find(b'\\": \\"', at) + 6
        if at < 0 or start < 6 or len(content) < start + 64:
            return files
        content = content[:start] + b"0" * 64 + content[start + 64 :]
        digest = hashlib.sha256(content).hexdigest().encode()
        return {"n.hbm": content[:start] + digest + content[start + 64 :]}

    def read(folder: Path) -> None:
        model = runtime.load(folder / "n.hbm")
        if [(p.dtype, p.shape) for p in model.inputs] == [(torch.int8, (1, 4))]:
            model(torch.ones(1, 4, dtype=torch.int8))

    return Target(files, {"n.hbm": changed_tensors}, read, sign)


def partition_plan() -> Target:
    from bevquant_hybrid.partition import Plan, PlanNode

    nodes = (
        PlanNode("x", "input"),
        PlanNode("q", "quantize", inputs=("x",), shape=(1, 3), inserted=True, dtype="qint8"),
        PlanNode("c", "operator", "BPU", "why", "conv", "m", ("q",), (1, 3), 0, False, "qint8"),
    )
    return document(lambda: Plan("bayes", nodes, ("a warning",)))


def cpu_suggestion() -> Target:
    from bevquant_hybrid.partition import CpuMove, CpuSuggestion

    rows = (CpuMove("a", ("b",), 1.0, 2.0, 0.1, 3, "because"),)
    return document(lambda: CpuSuggestion("bayes", "m", 1.0, 1.0, 1.0, (), rows))


def onnx_file() -> Target:
    from bevquant_export import (
        export_qdq_onnx,
        find_target,
        lint_onnx,
        note_calibration,
        target_names,
    )  # fmt: skip
    from bevquant_qnn import quantize_model
    from bevquant_quantizers import calibrate

    torch.manual_seed(0)
    x = torch.randn(1, 2, 8, 8)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    net = quantize_model(net, example_inputs=x).model
    calibrate(net, [x], progress=False)
    files = written(lambda f: export_qdq_onnx(net, x, f / "n.onnx"))

    def read(folder: Path) -> None:
        """Inspected for one of the targets, whose command line is asked for, and noted upon."""
        names = target_names()
        target = names[(folder / "n.onnx").stat().st_size % len(names)]
        lint_onnx(folder / "n.onnx", target)
        note_calibration(folder / "n.onnx", ["poor"])
        find_target(target).commands(folder / "n.onnx")

    return Target(files, {"n.onnx": changed_onnx}, read)


def qdq_file() -> Target:
    """The same file, read as an integer model."""
    from bevquant_export import load_qdq_onnx

    files = onnx_file().files
    return Target(files, {"n.onnx": changed_onnx}, lambda f: load_qdq_onnx(f / "n.onnx"))


def sparse_encoder() -> tuple[nn.Module, tuple[Any, ...]]:
    """A small calibrated one, and a frame."""
    import spconv.pytorch as spconv

    from bevquant_qnn import QuantConfig, quantize_model
    from bevquant_quantizers import calibrate
    from bevquant_sparse import use_bevquant_kernels

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = spconv.SubMConv3d(5, 16, 3, indice_key="subm1")
            self.down = spconv.SparseConv3d(16, 32, 3, 2, 1, indice_key="spconv1")
            self.relu = nn.ReLU()

        def forward(self, features: torch.Tensor, coords: torch.Tensor, batch_size: int) -> Any:
            x = self.stem(spconv.SparseConvTensor(features, coords, [8, 8, 4], batch_size))
            return self.down(x.replace_feature(self.relu(x.features)))

    torch.manual_seed(0)
    coords = (torch.rand(1, 8, 8, 4) < 0.3).nonzero().int().contiguous()
    frame = (torch.rand(len(coords), 5), coords, 1)
    encoder = Encoder().eval()
    use_bevquant_kernels(encoder)
    net = quantize_model(encoder, QuantConfig(quantize_first_layer=False), example_inputs=frame)
    calibrate(net.model, [frame], forward=lambda m, batch: m(*batch), progress=False)
    return net.model, frame


def sparse_onnx(portable: bool) -> Target:
    """A sparse encoder's file in one of its two dialects; it is read and run."""
    from bevquant_export import export_sparse_onnx, load_sparse_onnx

    model, frame = sparse_encoder()
    kind = "portable" if portable else "libspconv"
    files = written(
        lambda f: export_sparse_onnx(
            model, frame, f / "s.onnx", batches=[frame], dialect=kind, verify=False
        )
    )
    change = changed_notes if portable else changed_bytes
    return Target(files, {"s.onnx": change}, lambda f: load_sparse_onnx(f / "s.onnx").run(*frame))


def autoware_onnx() -> Target:
    """A file for Autoware's plugin, with pairs in its metadata: inspected, run, joined, cut."""
    from bevquant_export import lint_onnx
    from bevquant_export.targets.autoware import (
        behind_encoder,
        export_autoware_onnx,
        join_autoware_onnx,
        run_on_frame,
    )  # fmt: skip

    model, frame = sparse_encoder()
    made: list[Any] = []
    files = written(
        lambda f: made.append(
            export_autoware_onnx(model, frame, f / "a.onnx", batches=[frame], rulebook_inputs=True)
        )
    )
    permutation = made[0].permutation

    def read(folder: Path) -> None:
        lint_onnx(folder / "a.onnx", "autoware")
        what = (folder / "a.onnx").stat().st_size % 3
        if what == 0:
            run_on_frame(folder / "a.onnx", frame, permutation)
        elif what == 1:
            join_autoware_onnx(folder / "a.onnx", [], folder / "joined.onnx")
        else:
            behind_encoder(folder / "a.onnx", "no such output")

    return Target(files, {"a.onnx": changed_onnx}, read)


def descriptor_yaml() -> Target:
    from bevquant_quantizers import QuantDescriptor

    made = QuantDescriptor(4, axis=(0, 1), amax=[[1.0], [2.0]], unsigned=True, scale_amax=0.5)

    def change(rng: Rng, data: bytes) -> bytes:
        if rng.random() < 0.5:
            return changed_bytes(rng, data)
        return changed_json(rng, json.dumps(made.dict()).encode())

    read = lambda f: QuantDescriptor.from_yaml(  # noqa: E731
        (f / "q.yaml").read_text("utf-8", "replace")
    )
    return Target({"q.yaml": made.to_yaml().encode()}, {"q.yaml": change}, read, types=True)


def engine_layers() -> Target:
    from bevquant_export.lint import read_engine_layers

    port = {"Name": "x", "Dimensions": [1, 3], "Format/Datatype": "Int8 NHWC"}
    layer = {"Name": "conv", "LayerType": "CaskConvolution", "Inputs": [port], "Outputs": [port],
             "Metadata": "[ONNX Layer: conv]"}  # fmt: skip
    files = {"l.json": json.dumps({"Layers": [layer, "pool"], "Bindings": ["x"]}).encode()}
    return Target(files, {"l.json": changed_json}, lambda f: read_engine_layers(f / "l.json"))


def state_of() -> dict[str, torch.Tensor]:
    return {f"module.l{i}.weight": torch.arange(12.0).reshape(3, 4) for i in range(3)}


def state_dict(kind: str) -> Target:
    from safetensors.torch import save

    from bevfusion.model import read_state_dict

    buffer = io.BytesIO()
    torch.save(state_of(), buffer, _use_new_zipfile_serialization=kind == "zip")
    name = "w.safetensors" if kind == "safetensors" else "w.pth"
    content = save(state_of()) if kind == "safetensors" else buffer.getvalue()
    change = {"safetensors": changed_tensors, "zip": changed_zip, "legacy": changed_bytes}[kind]
    return Target({name: content}, {name: change}, lambda f: read_state_dict(f / name))


READERS: dict[str, tuple[int, Callable[[], Target]]] = {
    "ranges": (8000, ranges),
    "saved collection": (2500, collection),
    "precision plan": (8000, precision_plan),
    "sensitivity table": (8000, sensitivity_table),
    "quant config": (8000, quant_config),
    "integer model": (2500, integer_model),
    "integer model's manifest": (1000, integer_manifest),
    "compiled .hbm": (6000, hbm),
    "partition plan": (8000, partition_plan),
    "CPU suggestion": (8000, cpu_suggestion),
    ".onnx (lint)": (1000, onnx_file),
    ".onnx (qdq)": (500, qdq_file),
    "libspconv .onnx": (2000, lambda: sparse_onnx(portable=False)),
    "portable .onnx": (2000, lambda: sparse_onnx(portable=True)),
    "Autoware's .onnx": (1500, autoware_onnx),
    "descriptor's YAML": (4000, descriptor_yaml),
    "engine's layers": (4000, engine_layers),
    ".pth zip": (3000, lambda: state_dict("zip")),
    ".pth legacy": (3000, lambda: state_dict("legacy")),
    ".safetensors": (4000, lambda: state_dict("safetensors")),
}
