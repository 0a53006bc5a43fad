"""Damaged files for every public reader, bad arguments for every kernel: what happens, as a table.

    python tests/fuzz.py [--seed 0] [--share 1.0] [--only NAME …] [--jobs 2]

Each mutant is made from a good file (or good arguments) by a generator of its own, seeded with the
seed, the target's name and its number, so that any one can be made again. Workers, one process for
thousands of mutants, read them one by one; a mutant has 10 seconds and 2 GiB. It ends as

- ok: what was changed does not matter to the reader, or is another valid value;
- clean: a ValueError (for kernels also TypeError) that somebody wrote a message for;
- wrong: any other exception; crash: the process died; hang, memory: a bound was passed.

The session fails unless the last four are 0.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import nn

SECONDS, GIBIBYTES, STUCK = 10.0, 2, 60.0
OUTCOMES = ("ok", "clean", "wrong", "crash", "hang", "memory")
Files = dict[str, bytes]
Rng = random.Random

# --- mutations -------------------------------------------------------------------------------

NASTY = [
    None, True, False, 0, -1, 1, 2, 2**31, 2**63 - 1, -(2**63), 1e308, -1e308, 1e-320, 0.5, "",
    "x", "abc", "no", "\x00", "é" * 50, [], {}, [1], ["mse"], [[]], {"a": 1}, 255, 256, 65536, 1e9,
    "<script>", "../../x", "nan", 3.0,
]  # fmt: skip
LITERALS = ["9" * 400, "-" + "9" * 30, "NaN", "Infinity", "1e400", "[" * 100_000, '{"a":' * 3000]


def changed_bytes(rng: Rng, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        place = rng.randrange(len(raw)) if raw else 0
        what = rng.randrange(8)
        if what <= 2 and raw:
            raw[place] ^= 1 << rng.randrange(8)
        elif what == 3:
            del raw[place:]
        elif what == 4:
            del raw[place : place + rng.randrange(1, 64)]
        elif what == 5:
            raw[place:place] = rng.randbytes(rng.randrange(1, 32))
        elif what == 6 and raw:
            start = rng.randrange(len(raw))
            raw[place : place + 16] = raw[start : start + 16]
        elif raw:
            raw[place : place + 8] = rng.choice([b"\0" * 8, b"\xff" * 8, rng.randbytes(8)])
    return bytes(raw)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(item, (*at, key))
    return found


def changed_value(rng: Rng, value: Any) -> Any:
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2])):
        at = rng.choice(places(value))
        new = copy.deepcopy(rng.choice(NASTY))
        if not at:
            value = new if rng.random() < 0.2 else value
            continue
        holder = value
        for key in at[:-1]:
            holder = holder[key]
        old, what = holder[at[-1]], rng.random()
        if what < 0.2 and isinstance(old, int | float) and not isinstance(old, bool):
            new = rng.choice([old + 1, old - 1, -old, old * 1000, old / 3, str(old), [old]])
        if what > 0.9:
            del holder[at[-1]]
        elif what > 0.8 and isinstance(holder, dict):
            holder["more"] = new
        elif what > 0.75 and isinstance(holder, list):
            holder.insert(at[-1], copy.deepcopy(old))
        else:
            holder[at[-1]] = new
    return value


def changed_json(rng: Rng, data: bytes) -> bytes:
    if rng.random() < 0.15:
        return changed_bytes(rng, data)
    value = changed_value(rng, json.loads(data))
    if rng.random() < 0.1 and isinstance(value, dict | list) and places(value)[1:]:
        *at, last = rng.choice(places(value)[1:])
        holder = value
        for key in at:
            holder = holder[key]
        holder[last] = "@@@"
        return json.dumps(value).replace('"@@@"', rng.choice(LITERALS)).encode()
    return json.dumps(value).encode()


def changed_array(rng: Rng, array: np.ndarray) -> np.ndarray:
    what = rng.randrange(7)
    if what == 0:
        return array.astype(rng.choice(["f4", "f8", "i8", "i4", "u1", "f2", "U8", "c8", "?"]))
    if what == 1:
        return array.reshape(-1)
    if what == 2:
        return array[..., :1] if array.ndim else array.reshape(1)
    if what == 3:
        return array[None]
    if what == 4:
        return np.zeros(rng.choice([(0,), (), (3,), (0, 7)]), array.dtype)
    array = array.copy()
    if array.size and array.dtype.kind in "iuf":
        top = np.iinfo(array.dtype).max if array.dtype.kind in "iu" else np.inf
        values = [0, 1, top, -1 if array.dtype.kind != "u" else 0]
        values += [np.nan, -np.inf, 1e-40] if array.dtype.kind == "f" else []
        with np.errstate(all="ignore"):
            array.reshape(-1)[rng.randrange(array.size)] = np.array(rng.choice(values)).astype(
                array.dtype
            )
    return array


def changed_npz(rng: Rng, data: bytes) -> bytes:
    if rng.random() < 0.5:
        return changed_bytes(rng, data)
    with np.load(io.BytesIO(data)) as file:
        arrays = {name: file[name] for name in file.files}
    name = rng.choice(sorted(arrays))
    if rng.random() < 0.1:
        del arrays[name]
    elif name == "header":
        arrays[name] = np.frombuffer(changed_json(rng, arrays[name].tobytes()), np.uint8)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                arrays[name] = changed_array(rng, arrays[name])
            except ValueError:
                arrays[name] = np.zeros(3)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def changed_tensors(rng: Rng, data: bytes) -> bytes:
    """Safetensors: bytes, the header, or the JSON in its metadata."""
    if rng.random() < 0.4:
        return changed_bytes(rng, data)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    texts = [key for key, text in header.get("__metadata__", {}).items() if text[:1] == "{"]
    if texts and rng.random() < 0.6:
        text = header["__metadata__"][texts[0]].encode()
        header["__metadata__"][texts[0]] = changed_json(rng, text).decode("utf-8", "replace")
    else:
        header = changed_value(rng, header)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data[8 + length :]


def changed_zip(rng: Rng, data: bytes) -> bytes:
    """A zip checkpoint: bytes, or the pickle in it."""
    if rng.random() < 0.4:
        return changed_bytes(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice([n for n in members if n.endswith("data.pkl")] * 3 + sorted(members))
    members[name] = changed_bytes(rng, members[name])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for key, content in members.items():
            archive.writestr(key, content)
    return buffer.getvalue()


def changed_text(rng: Rng, data: bytes) -> bytes:
    words = data.split(b" ")
    for _ in range(rng.choice([1, 2])):
        new = rng.choice([b"", b"nan", b"x", b"1e400", b"-1", b"9" * 400, b"\xff", b"inf", b"0"])
        words[rng.randrange(len(words))] = new
    return changed_bytes(rng, data) if rng.random() < 0.3 else b" ".join(words)


# --- targets ---------------------------------------------------------------------------------


class Target(NamedTuple):
    """A reader: good files, how each is changed, how they are read again.

    Attributes:
        files: The good ones by name.
        change: By name of a file; one of them is changed in each mutant.
        read: Reads them from a folder.
        sign: Brings checksums up to date in nine of ten mutants.
    """

    files: Files
    change: dict[str, Callable[[Rng, bytes], bytes]]
    read: Callable[[Path], Any]
    sign: Callable[[Files], Files] | None = None


def written(write: Callable[[Path], Any]) -> Files:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        found = [p for p in Path(folder).rglob("*") if p.is_file()]
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in found}


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


def document(make: Callable[[], Any]) -> Target:
    value = make()
    cls = type(value)
    files = {"d.json": value.to_json().encode()}
    return Target(files, {"d.json": changed_json}, lambda f: str(cls.load(f / "d.json")))


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

    return Target(files, change, read, sign)


def integer_manifest() -> Target:
    target = integer_model()
    return target._replace(change={"m/manifest.json": changed_json}, sign=None)


def hbm() -> Target:
    from bevquant_hybrid import runtime
    from bevquant_hybrid.runtime._file import write_program
    from bevquant_hybrid.runtime._program import Operand, Port, Program, Step, Value

    x, y, z = Operand("%0"), Operand("%1"), Operand("w", constant=True)
    program = Program(
        name="net",
        march="bayes",
        inputs=(Port("x", x, torch.int8, (1, 4)),),
        outputs=(Port("y", y, torch.int8, (2, 4)),),
        arguments={"tuple": [{"tensor": 0}]},
        result={"tensor": 0},
        steps=(
            Step(
                "aten::cat", {"tensors": (x, z), "dim": 0}, (Value("%1", torch.int8, (2, 4)),), "a"
            ),
        ),
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
    from bevquant_export import export_qdq_onnx, lint_onnx
    from bevquant_qnn import quantize_model
    from bevquant_quantizers import calibrate

    torch.manual_seed(0)
    x = torch.randn(1, 2, 8, 8)
    net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    net = quantize_model(net, example_inputs=x).model
    calibrate(net, [x], progress=False)
    files = written(lambda f: export_qdq_onnx(net, x, f / "n.onnx"))
    read = lambda f: lint_onnx(f / "n.onnx", "tensorrt")  # noqa: E731
    return Target(files, {"n.onnx": changed_bytes}, read)


def sparse_onnx(portable: bool) -> Target:
    """A sparse encoder's file in one of its two dialects; it is read and run."""
    import spconv.pytorch as spconv

    from bevquant_export import export_sparse_onnx, load_sparse_onnx
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
    kind = "portable" if portable else "libspconv"
    files = written(
        lambda f: export_sparse_onnx(
            net.model, frame, f / "s.onnx", batches=[frame], dialect=kind, verify=False
        )
    )
    change = changed_notes if portable else changed_bytes
    return Target(files, {"s.onnx": change}, lambda f: load_sparse_onnx(f / "s.onnx").run(*frame))


def changed_notes(rng: Rng, data: bytes) -> bytes:
    """An ONNX file: bytes, or the JSON in its metadata."""
    import onnx

    if rng.random() < 0.3:
        return changed_bytes(rng, data)
    model = onnx.load_model_from_string(data)
    note = rng.choice([note for note in model.metadata_props if note.value[:1] in "{["])
    note.value = changed_json(rng, note.value.encode()).decode("utf-8", "replace")
    content: bytes = model.SerializeToString()
    return content


def engine_layers() -> Target:
    from bevquant_export.lint._engine_layers import read_engine_layers

    port = {"Name": "x", "Dimensions": [1, 3], "Format/Datatype": "Int8 NHWC"}
    layer = {"Name": "conv", "LayerType": "CaskConvolution", "Inputs": [port], "Outputs": [port],
             "Metadata": "[ONNX Layer: conv]"}  # fmt: skip
    files = {"l.json": json.dumps({"Layers": [layer, "pool"], "Bindings": ["x"]}).encode()}
    return Target(files, {"l.json": changed_json}, lambda f: read_engine_layers(f / "l.json"))


class Devkit:
    """What nuscenes-devkit does with the tables where it is not installed: loads, and looks up."""

    def __init__(self, version: str, dataroot: str, verbose: bool) -> None:
        self.version, self.dataroot = version, dataroot
        for path in (Path(dataroot) / version).glob("*.json"):
            setattr(self, path.stem, json.loads(path.read_bytes()))
        self.rows = {
            (name, row["token"]): row
            for name, rows in vars(self).items()
            if isinstance(rows, list)
            for row in rows
        }
        for row in self.rows.values():
            if "sample_token" in row:
                sample = self.get("sample", row["sample_token"])
                if "channel" in row:
                    sample.setdefault("data", {})[row["channel"]] = row["token"]
                else:
                    sample.setdefault("anns", []).append(row["token"])

    def get(self, table: str, token: str) -> Any:
        return self.rows[table, token]

    def box_velocity(self, token: str) -> Any:
        here = self.get("sample_annotation", token)
        before = self.get("sample_annotation", here["prev"]) if here["prev"] else here
        return np.array(here["translation"]) - np.array(before["translation"])


def nuscenes() -> Target:
    from types import ModuleType

    from bevfusion_quant.datasets import open_dataset

    module = ModuleType("nuscenes.nuscenes")
    module.NuScenes = Devkit  # type: ignore[attr-defined]
    pose = {"rotation": [1.0, 0, 0, 0], "translation": [0.1, 0.2, 0.3]}
    end = {"prev": "", "next": ""}
    lidar = {"sample_token": "s", "ego_pose_token": "e", "calibrated_sensor_token": "c",
             "channel": "LIDAR_TOP", "width": 0, "height": 0, "next": ""}  # fmt: skip
    tables: dict[str, list[dict[str, Any]]] = {
        "scene": [{"token": "n", "name": "scene-1", "first_sample_token": "s"}],
        "sample": [{"token": "s", **end}],
        "ego_pose": [{"token": "e", **pose}],
        "calibrated_sensor": [{"token": "c", "camera_intrinsic": [], **pose}],
        "sample_data": [
            {"token": "d", "timestamp": 200, "filename": "1.bin", "prev": "b", **lidar},
            {"token": "b", "timestamp": 100, "filename": "0.bin", "prev": "", **lidar},
        ],
        "sample_annotation": [
            {"token": "a", "sample_token": "s", "visibility_token": "4", "size": [1.9, 4.5, 1.6],
             "category_name": "vehicle.car", "num_lidar_pts": 7, **pose, **end},
        ],
    }  # fmt: skip
    rows = np.random.default_rng(0).uniform(2, 9, (40, 5)).astype("<f4").tobytes()
    files = {f"v1.0-mini/{name}.json": json.dumps(t).encode() for name, t in tables.items()}

    def read(folder: Path) -> None:
        others = {name: sys.modules.get(name) for name in ("nuscenes", "nuscenes.nuscenes")}
        sys.modules |= {"nuscenes": ModuleType("nuscenes"), "nuscenes.nuscenes": module}
        try:
            list(open_dataset("nuscenes", folder, cameras="none"))
        finally:
            for name, other in others.items():
                if other is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = other

    return Target(files | {"0.bin": rows, "1.bin": rows}, dict.fromkeys(files, changed_json), read)


def rank_message() -> Target:
    from bevfusion_quant.ranks._ranks import _packed, _unpacked

    own = {0: b"abc", 1: np.arange(6.0).reshape(2, 3), 2: torch.ones(2)}

    def change(rng: Rng, data: bytes) -> bytes:
        head, _, body = data.partition(b"\n")
        if rng.random() < 0.7:
            return changed_json(rng, head) + b"\n" + body
        return changed_bytes(rng, data)

    read = lambda f: _unpacked((f / "m").read_bytes())  # noqa: E731
    return Target({"m": _packed(own)}, {"m": change}, read)


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


def training_checkpoint() -> Target:
    from bevfusion_quant.train._checkpoint import read_checkpoint, restore, write_checkpoint

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


def prepared_frame() -> Target:
    from bev_data.points import Frame, Labels
    from bevfusion.training import CompactFrame, compact

    labels = Labels(np.ones((2, 7), np.float32), ("car", "bus"))
    frame = Frame("f", np.ones((9, 5), np.float32), labels=labels)
    files = written(lambda f: compact(frame, None).save(f / "p.npz"))

    def read(folder: Path) -> None:
        found = CompactFrame.load(folder / "p.npz")
        str((found.points, found.labels, found.network_images()))

    return Target(files, {"p.npz": changed_npz}, read)


def points_npz() -> Target:
    from bev_data.points import read_points

    arrays = {
        "points": np.ones((20, 5), np.float32), "boxes": np.ones((2, 7)),
        "names": np.array(["car", "bus"]),
    }  # fmt: skip
    files = written(lambda f: np.savez_compressed(f / "p.npz", **arrays))
    return Target(files, {"p.npz": changed_npz}, lambda f: read_points(f / "p.npz"))


def points_binary() -> Target:
    from bev_data.points import read_points

    rows = np.random.default_rng(0).uniform(0, 1, (40, 4)).astype("<f4")
    files = {"p.bin": rows.tobytes()}
    return Target(files, {"p.bin": changed_bytes}, lambda f: read_points(f / "p.bin"))


def points_tensor() -> Target:
    from bev_data.points import read_points, save_tensor

    files = written(lambda f: save_tensor(f / "p.tensor", np.ones((20, 5), np.float32)))
    return Target(files, {"p.tensor": changed_bytes}, lambda f: read_points(f / "p.tensor"))


def frame_folder() -> Target:
    from bev_data.cameras import Camera
    from bev_data.datasets import open_dataset, write_frame_folder
    from bev_data.points import Frame, Labels

    labels = Labels(np.ones((2, 7), np.float32), ("car", "bus"))
    camera = Camera("CAM_FRONT", np.zeros((8, 9, 3), np.uint8), np.diag([9.0, 9.0, 1.0]), np.eye(4))
    frame = Frame("f", np.ones((9, 5), np.float32), labels=labels, cameras=(camera,))
    files = written(lambda f: write_frame_folder(f / "frame", frame))
    change = {"frame/calib.json": changed_json, "frame/CAM_FRONT.png": changed_bytes}
    read = lambda f: open_dataset("files", [f / "frame"])[0]  # noqa: E731
    return Target(files, change, read)


def record() -> Target:
    from bevfusion_quant.ranks._records import pack, unpack

    files = {"r.npz": pack({"sums": np.arange(9.0), "names": np.array(["a", "b"])})}
    read = lambda f: unpack((f / "r.npz").read_bytes())  # noqa: E731
    return Target(files, {"r.npz": changed_npz}, read)


def kitti() -> Target:
    from PIL import Image

    from bev_data.datasets import open_dataset

    def write(folder: Path) -> None:
        for name in ("velodyne", "calib", "label_2", "image_2"):
            (folder / "training" / name).mkdir(parents=True)
        top = folder / "training"
        rows = np.random.default_rng(0).uniform(0, 1, (40, 4)).astype("<f4")
        rows.tofile(top / "velodyne" / "000000.bin")
        matrix = "7e2 0 6e2 0 0 7e2 1e2 0 0 0 1 0"
        turn = "0 -1 0 0 0 0 -1 0 1 0 0 0"
        text = f"P2: {matrix}\nR0_rect: 1 0 0 0 1 0 0 0 1\nTr_velo_to_cam: {turn}\n"
        (top / "calib" / "000000.txt").write_text(text)
        label = "Car 0.00 0 1.5 600 150 700 200 1.5 1.6 3.9 1.8 1.5 8.4 0.01\n"
        (top / "label_2" / "000000.txt").write_text(label)
        Image.fromarray(np.zeros((8, 9, 3), np.uint8)).save(top / "image_2" / "000000.png")

    change = {f"training/{n}/000000.txt": changed_text for n in ("calib", "label_2")}
    read = lambda f: open_dataset("kitti", f / "training")[0]  # noqa: E731
    return Target(written(write), change, read)


def run_evidence() -> Target:
    from bevfusion_quant.ptq._run_folder import RUN_FORMAT, RUN_VERSIONS, write_digests
    from bevfusion_quant.ptq._summary import write_json
    from bevfusion_quant.report import ReportContent, write_report
    from bevfusion_quant.review._evidence import read_evidence

    head = {"format": RUN_FORMAT, "version": RUN_VERSIONS[-1]}

    def write(folder: Path) -> None:
        write_json(folder / "config.json", {**head, "config": "tiny", "sha256": {"a": "b"}})
        write_report(folder / "report.html", ReportContent("r", command="ptq", frames=("f",)))
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
    from bevfusion_quant.ptq import read_run_config

    settings = {
        "format": "bevfusion-quant run", "version": 3, "config": "tiny", "branch": "lidar",
        "method": "mse", "exclude": [], "fold": True, "quantize_head": False, "weight_bits": 8,
        "plan": None, "sha256": {"weights.safetensors": "0" * 64, "ranges.json": "0" * 64},
    }  # fmt: skip
    files = {"config.json": json.dumps(settings).encode()}
    return Target(files, {"config.json": changed_json}, read_run_config)


READERS: dict[str, Callable[[], Target]] = {
    "ranges": ranges, "saved collection": collection, "precision plan": precision_plan,
    "sensitivity table": sensitivity_table, "quant config": quant_config,
    "integer model": integer_model, "integer model's manifest": integer_manifest,
    "compiled .hbm": hbm, "partition plan": partition_plan, "CPU suggestion": cpu_suggestion,
    ".onnx (lint)": onnx_file, ".pth zip": lambda: state_dict("zip"),
    ".pth legacy": lambda: state_dict("legacy"), ".safetensors": lambda: state_dict("safetensors"),
    "training checkpoint": training_checkpoint, "prepared frame": prepared_frame,
    "points .npz": points_npz, "points .bin": points_binary, "points .tensor": points_tensor,
    "frame folder": frame_folder, "record of a rank": record, "KITTI frame": kitti,
    "run for report": run_evidence, "digests of a run": run_digests,
    "settings of a run": run_settings, "libspconv .onnx": lambda: sparse_onnx(portable=False),
    "portable .onnx": lambda: sparse_onnx(portable=True), "engine's layers": engine_layers,
    "nuScenes tables": nuscenes, "message of a rank": rank_message,
}  # fmt: skip


# --- kernels ---------------------------------------------------------------------------------


class Call(NamedTuple):
    """A kernel with good arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})


def kernels() -> dict[str, Call]:
    import bevquant_fusion as fusion
    import bevquant_int8sim as sim
    import bevquant_quantizers as quantizers
    import bevquant_sparse as sparse

    g = torch.Generator().manual_seed(0)

    def q8(*shape: int) -> torch.Tensor:
        return torch.randint(-20, 20, shape, generator=g, dtype=torch.int8)

    def f32(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    bias, multiplier = torch.ones(4, dtype=torch.int32), torch.full((4,), 0.01, dtype=torch.float64)
    rows = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2]], dtype=torch.int32)
    made = sparse.build_rulebook(rows, (4, 4, 4), 3, 1, 1, 1, subm=True)
    bn = [torch.ones(4), torch.ones(4), 1e-5, torch.ones(4), torch.ones(4)]

    def histogram(x: Any, bits: int, bins: int, method: str, stride: int, start: int) -> Any:
        calibrator = quantizers.calib.HistogramCalibrator(bits, None, False, num_bins=bins)
        calibrator.collect(x)
        return calibrator.compute_amax(method, stride=stride, start_bin=start)

    return {
        "quantize": Call(sim.quantize, (f32(3, 4), 0.1)),
        "dequantize": Call(sim.dequantize, (q8(3, 4), 0.1)),
        "requantize": Call(
            sim.requantize, (torch.arange(12, dtype=torch.int32).reshape(3, 4), 0.1)
        ),
        "int8_linear": Call(
            sim.int8_linear, (q8(3, 5), q8(4, 5), bias), {"multiplier": multiplier}
        ),
        "int8_conv1d": Call(
            sim.int8_conv1d, (q8(1, 3, 9), q8(4, 3, 3), bias), {"multiplier": multiplier}
        ),
        "int8_conv2d": Call(
            sim.int8_conv2d,
            (q8(1, 3, 9, 9), q8(4, 3, 3, 3), bias),
            {"multiplier": multiplier, "stride": 2, "padding": 1, "dilation": 1, "groups": 1},
        ),
        "int8_conv3d": Call(
            sim.int8_conv3d,
            (q8(1, 3, 5, 5, 5), q8(4, 3, 3, 3, 3), bias),
            {"multiplier": multiplier},
        ),
        "int8_conv_transpose2d": Call(
            sim.int8_conv_transpose2d,
            (q8(1, 3, 4, 4), q8(3, 4, 2, 2), bias),
            {"multiplier": multiplier, "stride": 2},
        ),
        "int8_sparse_conv": Call(
            sim.int8_sparse_conv,
            (q8(3, 2), q8(27, 2, 4), bias, made),
            {"layout": sparse.WeightLayout.VCK, "multiplier": multiplier},
        ),
        "build_rulebook": Call(
            sparse.build_rulebook, (rows, (4, 4, 4), 3, 1, 1, 1), {"subm": False}
        ),
        "sparse_conv": Call(
            sparse.sparse_conv,
            (f32(3, 2), f32(27, 2, 4), f32(4), made),
            {"layout": sparse.WeightLayout.VCK},
        ),
        "permute_weight": Call(
            sparse.permute_weight,
            (f32(3, 3, 3, 2, 4), sparse.WeightLayout.RSCK, sparse.WeightLayout.KRSC),
        ),
        "fuse_conv_bn_weights": Call(fusion.fuse_conv_bn_weights, (f32(4, 3, 3, 3), f32(4), *bn)),
        "fuse_linear_bn_weights": Call(fusion.fuse_linear_bn_weights, (f32(4, 3), f32(4), *bn)),
        "fake_quantize": Call(quantizers.fake_quantize, (f32(3, 4), torch.tensor(1.5), 8)),
        "HistogramCalibrator": Call(histogram, (f32(40), 8, 64, "mse", 1, 16)),
        "save and load of ranges of": Call(_ranges_of, (1.5, 8, None)),
    }


def _ranges_of(amax: Any, bits: Any, axis: Any) -> Any:
    from bevquant_quantizers import QuantDescriptor, TensorQuantizer

    return TensorQuantizer(QuantDescriptor(num_bits=bits, axis=axis, amax=amax))(torch.ones(2, 3))


def changed_argument(rng: Rng, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        what = rng.choice([0, 3, 4, 6, 7]) if value.dim() == 0 else rng.randrange(9)
        if what == 0:
            return value.to(rng.choice([torch.float64, torch.int32, torch.int64, torch.float16,
                                        torch.bool, torch.uint8, torch.complex64]))  # fmt: skip
        if what == 1:
            return value[..., :-1]
        if what == 2:
            return value[:0]
        if what == 3:
            return value.unsqueeze(0)
        if what == 4:
            return value.reshape(-1)
        if what == 5:
            return value.transpose(0, -1) if value.dim() else value
        if what == 6:
            value = value.clone(memory_format=torch.contiguous_format)
            if value.numel():
                worst = [0, -1, 127, 2**31 - 1] if not value.is_floating_point() else [
                    float("nan"), float("inf"), 0.0, -1.0, 1e38, 1e-45]  # fmt: skip
                new = torch.tensor(rng.choice(worst)).to(value.dtype)
                value.view(-1)[rng.randrange(value.numel())] = new
            return value
        if what == 7:
            return rng.choice([None, 3, "x", [1.0], value.tolist()])
        return torch.zeros((0,) * value.dim(), dtype=value.dtype)
    if isinstance(value, bool):
        return rng.choice([None, 1, "x", not value])
    if isinstance(value, int | float):
        numbers = [0, -1, 10**9, 2**63, 10**400, 0.5, float("nan"), float("inf"), 1e-320, -value]
        others = [None, "x", True, [value], (value, value), (1, 2, 3, 4)]
        return rng.choice([*numbers, *others])
    if isinstance(value, tuple | list) and value and rng.random() < 0.7:
        items = list(value)
        items[rng.randrange(len(items))] = rng.choice([0, -1, 10**12, 2**63, 1.5, "x", None, True])
        return type(value)(items)
    return rng.choice([None, 0, "x", [], (), 1.5, {}])


# --- running ---------------------------------------------------------------------------------


class Hang(BaseException):
    """A mutant has had its time."""


def clean(error: BaseException, kernel: bool) -> bool:
    """Whether somebody wrote this message for a user, as far as its class tells."""
    raw = (UnicodeError, json.JSONDecodeError, msgspec.MsgspecError, np.linalg.LinAlgError)
    if isinstance(error, raw):
        return False
    if isinstance(error, RecursionError | ZeroDivisionError | FloatingPointError):
        return False
    if isinstance(error, ValueError):
        return bool(str(error))
    # `OverflowError`s of ours are classes of their own, which say where an accumulator left int32.
    ours = type(error).__module__.startswith(("bevquant", "bevfusion"))
    return ours or (kernel and isinstance(error, TypeError))


def _alarm(number: int, frame: Any) -> None:
    raise Hang


class Mutants:
    """The mutants of one target, by number.

    Args:
        name: Of a reader or a kernel.
        seed: Of all mutants.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        signal.signal(signal.SIGALRM, _alarm)
        self.call = kernels()[name.removeprefix("kernel ")] if name.startswith("kernel ") else None
        self.target = None if self.call else READERS[name]()
        self.folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=_fast()))

    def run(self, number: int) -> tuple[str, str]:
        """The outcome of one mutant, and what it said."""
        rng = Rng(f"{self.seed}/{self.name}/{number}")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            work = self._prepared(rng)
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            outcome, said = "ok", ""
        except Hang:
            return "hang", ""
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome = "clean" if clean(error, self.call is not None) else "wrong"
            said = f"{type(error).__name__}: {str(error)[:300]}"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        if grown > GIBIBYTES * 2**19:  # half of what it may have at most
            return "memory", said
        return outcome, said

    def _prepared(self, rng: Rng) -> Callable[[], Any]:
        if self.call is not None:
            args, kwargs = list(self.call.args), dict(self.call.kwargs)
            for _ in range(rng.choice([1, 1, 2])):
                at = rng.choice([*range(len(args)), *kwargs])
                if isinstance(at, int):
                    args[at] = changed_argument(rng, args[at])
                else:
                    kwargs[at] = changed_argument(rng, kwargs[at])
            function = self.call.function
            return lambda: function(*args, **kwargs)
        assert self.target is not None
        files = dict(self.target.files)
        name = rng.choice(sorted(self.target.change))
        files[name] = self.target.change[name](rng, files[name])
        if self.target.sign is not None and rng.random() < 0.9:
            files = self.target.sign(files)
        for path, content in files.items():
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / path).write_bytes(content)
        read = self.target.read
        return lambda: read(self.folder)

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _fast() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def counts(share: float) -> dict[str, int]:
    """Mutants by target; the readers' own numbers, and for each kernel a thousand."""
    numbers = {name: WHOLE[name] for name in READERS}
    numbers |= {f"kernel {name}": WHOLE_KERNEL for name in KERNELS}
    return {name: max(1, round(number * share)) for name, number in numbers.items()}


WHOLE = {
    "ranges": 8000, "saved collection": 2500, "precision plan": 8000, "sensitivity table": 8000,
    "quant config": 8000, "integer model": 2500, "integer model's manifest": 1000,
    "compiled .hbm": 6000, "partition plan": 8000, "CPU suggestion": 8000, ".onnx (lint)": 1000,
    ".pth zip": 3000, ".pth legacy": 3000, ".safetensors": 4000, "training checkpoint": 2000,
    "prepared frame": 3000, "points .npz": 4000, "points .bin": 4000, "points .tensor": 4000,
    "frame folder": 3000, "record of a rank": 3000, "KITTI frame": 1000, "run for report": 3000,
    "digests of a run": 1000, "settings of a run": 8000,
    "libspconv .onnx": 2000, "portable .onnx": 2000, "engine's layers": 4000,
    "nuScenes tables": 2500, "message of a rank": 4000,
}  # fmt: skip
KERNELS = (
    "quantize", "dequantize", "requantize", "int8_linear", "int8_conv1d", "int8_conv2d",
    "int8_conv3d", "int8_conv_transpose2d", "int8_sparse_conv", "build_rulebook", "sparse_conv",
    "permute_weight", "fuse_conv_bn_weights", "fuse_linear_bn_weights", "fake_quantize",
    "HistogramCalibrator", "save and load of ranges of",
)  # fmt: skip
WHOLE_KERNEL = 1000


# Workers are forked from a process that has imported what the targets need: an import of torch for
# each took more time than a thousand mutants.
_SERVER = multiprocessing.get_context("forkserver")
_IMPORTED = ["torch", "numba", "onnx", "spconv.pytorch", "bevquant_export", "bevquant_fusion",
             "bevquant_hybrid.quantization", "bevquant_hybrid.partition",
             "bevfusion_quant.datasets", "bevfusion_quant.model", "bevfusion_quant.review",
             "bevfusion_quant.train"]  # fmt: skip


def worker(name: str, seed: int, start: int, stop: int, out: Connection) -> None:
    """Run mutants in this process; of each its number before it begins, then what became of it."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    torch.set_num_threads(1)
    mutants = Mutants(name, seed)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + GIBIBYTES * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in range(start, stop):
        out.send(number)
        out.send((number, *mutants.run(number)))
    mutants.close()


def attack(name: str, count: int, seed: int, show: Callable[[str], None] = print) -> Counter[str]:
    """Run all mutants of a target in workers, a new one after each that died."""
    tally: Counter[str] = Counter()
    seen: set[str] = set()
    start, began = 0, time.monotonic()
    while start < count:
        results, out = _SERVER.Pipe(duplex=False)
        process = _SERVER.Process(target=worker, args=(name, seed, start, count, out))
        process.start()
        out.close()
        current, stuck = -1, False
        heard = time.monotonic() + 600  # what it may take to make its good files
        while True:
            if not results.poll(1.0):
                if time.monotonic() - heard > STUCK:
                    stuck = True
                    process.kill()
                continue
            heard = time.monotonic()
            try:
                said = results.recv()
            except (EOFError, OSError):
                break
            if isinstance(said, int):
                current = said
                continue
            number, outcome, text = said
            tally[outcome] += 1
            start = number + 1
            kind = f"{outcome} {text[:60]}"
            if outcome not in ("ok", "clean") and kind not in seen:
                seen.add(kind)
                show(f"  {name} #{number}: {outcome}: {text}")
        process.join()
        results.close()
        if start < count:
            if current < start:
                raise RuntimeError(f"{name}: the worker does not begin")
            outcome = "hang" if stuck else "crash"
            tally[outcome] += 1
            show(f"  {name} #{current}: {outcome}: exit code {process.exitcode}")
            start = current + 1
    show(f"{name}: {dict(tally)} in {time.monotonic() - began:.0f} s")
    return tally


def table(results: dict[str, Counter[str]]) -> str:
    rows = [["", "mutants", *OUTCOMES]]
    for name, tally in results.items():
        rows.append([name, str(tally.total()), *(str(tally[o]) for o in OUTCOMES)])
    total = sum(results.values(), Counter())
    rows.append(["together", str(total.total()), *(str(total[o]) for o in OUTCOMES)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [r[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(r[1:], widths[1:], strict=True))]
        )
        for r in rows
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the whole run's mutants")
    parser.add_argument("--only", nargs="*", help="targets whose names hold one of these")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    from concurrent.futures import ThreadPoolExecutor

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    _SERVER.set_forkserver_preload(["__main__", *_IMPORTED])
    chosen = {
        name: number
        for name, number in counts(options.share).items()
        if not options.only or any(word in name for word in options.only)
    }
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = {n: pool.submit(attack, n, number, options.seed) for n, number in chosen.items()}
        results = {name: future.result() for name, future in waiting.items()}
    print(table(results))
    bad = sum(tally[outcome] for tally in results.values() for outcome in OUTCOMES[2:])
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
