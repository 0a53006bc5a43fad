"""Files of compiled models: what is in them, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import nn
from torch.quantization import DeQuantStub

from bevquant_hybrid import runtime
from bevquant_hybrid.quantization import (
    QuantStub,
    compile_model,
    convert,
    get_default_qat_qconfig,
    prepare_qat,
)

X = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def path(tmp_path) -> Path:
    model = nn.Sequential(QuantStub(scale=1 / 128), nn.Conv2d(1, 2, 1), nn.Sigmoid(), DeQuantStub())
    model.qconfig = get_default_qat_qconfig()
    qat = prepare_qat(model)
    qat(X)
    compile_model(convert(qat.eval()), X, hbm=tmp_path / "net.hbm", march="bernoulli2")
    return tmp_path / "net.hbm"


def metadata(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["bevquant_hybrid"])


def sign(path: Path, data: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write a file whose checksum is right, whatever it says."""
    tensors = load_tensors(path.read_bytes()) if tensors is None else tensors
    text = json.dumps(data | {"sha256": "0" * 64})
    content = save_tensors(tensors, metadata={"bevquant_hybrid": text})
    digest = hashlib.sha256(content).hexdigest()
    path.write_bytes(content.replace(b"0" * 64, digest.encode(), 1))


def test_what_a_file_says(path) -> None:
    data = metadata(path)
    assert data["schema"] == 3
    assert data["march"] == "bernoulli2"
    assert data["name"] == "Sequential"
    assert data["options"]["opt"] == "O2"
    (port,) = data["inputs"]
    assert (port["name"], port["dtype"], port["shape"]) == ("input", "float32", [2, 1, 4, 4])
    assert load_tensors(path.read_bytes())[f"constant.{port['scale']}"].tolist() == [1 / 128]
    steps = data["program"]["steps"]
    calls = ["quantize", "conv", "requantize", "lookup", "dequantize"]
    assert [step["function"] for step in steps] == [f"bevquant_hybrid.{c}.default" for c in calls]
    assert [step["path"] for step in steps] == ["0", "1", "1", "2", "3"]
    content = path.read_bytes()
    digest = data["sha256"].encode()
    assert hashlib.sha256(content.replace(digest, b"0" * 64)).hexdigest().encode() == digest


def test_a_signed_copy_is_read(path) -> None:
    before = runtime.load(path)(X)
    sign(path, metadata(path))
    assert torch.equal(runtime.load(path)(X), before)


def test_every_damage_is_found(path) -> None:
    content = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(len(content), (300,), generator=generator).tolist()
    bits = torch.randint(8, (300,), generator=generator).tolist()
    for place, bit in zip([*places, 0, 7, 8, len(content) - 1], [*bits, 0, 0, 0, 7], strict=True):
        damaged = bytearray(content)
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"net\.hbm"):
            runtime.load(path)
    for size in (*range(0, len(content), 97), len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"net\.hbm"):
            runtime.load(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match=r"truncated or changed|cut short"):
        runtime.load(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short"),
        (b"\x7fELF" + bytes(200), "cut short"),
        (b"PK\x03\x04" + bytes(200), "cut short"),
        (save_tensors({"a": torch.ones(1)}), "its header holds no program"),
        (save_tensors({}, metadata={"bevquant_hybrid": "[1]"}), "expected `object`"),
        (
            save_tensors({}, metadata={"bevquant_hybrid": "[" * 100_000}),
            "levels deep|malformed|truncated|expected `object`",
        ),
    ],
)
def test_files_of_others_are_refused(tmp_path, content: bytes, reason: str) -> None:
    (tmp_path / "other.hbm").write_bytes(content)
    with pytest.raises(ValueError, match=rf"other\.hbm.* file of compile_model.*({reason})"):
        runtime.load(tmp_path / "other.hbm")


def test_no_file(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        runtime.load(tmp_path / "absent.hbm")


def test_another_schema_is_named(path) -> None:
    sign(path, metadata(path) | {"schema": 2})
    with pytest.raises(ValueError, match=r"net\.hbm is not .*schema 2, expected 3; compile"):
        runtime.load(path)


def test_missing_and_idle_tensors_are_named(path) -> None:
    data, tensors = metadata(path), load_tensors(path.read_bytes())
    sign(path, data, {name: t for name, t in tensors.items() if name != "constant.1.weight"})
    with pytest.raises(ValueError, match=r"net\.hbm: the tensor '1\.weight' is missing"):
        runtime.load(path)
    sign(path, data, tensors | {"more": torch.ones(1)})
    with pytest.raises(ValueError, match="tensors that no step uses: more"):
        runtime.load(path)
    scale = data["inputs"][0]["scale"]
    sign(path, data, {name: t for name, t in tensors.items() if name != f"constant.{scale}"})
    with pytest.raises(ValueError, match=rf"'{scale}'.*missing"):
        runtime.load(path)
    data["program"]["constants"].remove("1.weight")
    sign(path, data, {name: t for name, t in tensors.items() if name != "constant.1.weight"})
    with pytest.raises(ValueError, match=r"net\.hbm: 1: operator reads '1\.weight'"):
        runtime.load(path)
    data["program"]["constants"] += ["1.weight", "more"]
    sign(path, data, tensors | {"constant.more": torch.ones(1)})
    with pytest.raises(ValueError, match="tensors that nothing reads: more"):
        runtime.load(path)


def _step(data: dict[str, Any], number: int) -> dict[str, Any]:
    return data["program"]["steps"][number]


def _operator(data: dict[str, Any], name: str) -> None:
    _step(data, 1)["function"] = name


def _argument(data: dict[str, Any], step: int, **arguments: Any) -> None:
    for kind in ("kwargs", "constants"):
        for name in arguments:
            _step(data, step)[kind]["$dict"].pop(name, None)
    _step(data, step)["constants"]["$dict"].update(arguments)


WRONG = {
    r"1: it calls 'aten.system.default', which": lambda d: _operator(d, "aten.system.default"),
    r"1: it calls 'aten.rand.default', which": lambda d: _operator(d, "aten.rand.default"),
    r"1: it calls 'bevquant_hybrid._x.*not registered": lambda d: _operator(
        d, "bevquant_hybrid._x.default"
    ),
    r"step 1 \(aten::matmul\): a program may not": lambda d: _operator(d, "aten.matmul.default"),
    r"1: it calls no operator of torch": lambda d: _operator(d, "torch.matmul"),
    r"1: its step is not a relu: object contains unknown field": lambda d: _step(d, 1).update(
        kind="Relu"
    ),
    r"step 1 .*no argument 'device'": lambda d: _argument(d, 1, device="cuda"),
    r"groups='one' is no int": lambda d: _argument(d, 1, groups="one"),
    r"groups=True is no int": lambda d: _argument(d, 1, groups=True),
    r"stride=\('a',\) is no List\[int\]": lambda d: _argument(d, 1, stride={"$tuple": ["a"]}),
    r"x=None is no Tensor": lambda d: _argument(d, 1, x=None),
    r"step 1 .*: weight missing": lambda d: _step(d, 1)["kwargs"]["$dict"].pop("weight"),
    r"0: operator reads '%2', which no step": lambda d: _step(d, 0)["kwargs"]["$dict"].update(
        x={"$ref": "%2"}
    ),
    r"1: a constant reads '%1'": lambda d: _argument(d, 1, x={"$ref": "%1"}),
    r"1: operator makes '%1', which is there": lambda d: _step(d, 2).update(outputs=["%1"]),
    r"outputs: expected `array` of length >= 1": lambda d: _step(d, 2).update(outputs=[]),
    r"at kwargs: expected `object`, got `array`": lambda d: _step(d, 1).update(kwargs=[1]),
    r"required field `march`": lambda d: d.pop("march"),
    r"[Ii]nvalid enum value 'complex64'": lambda d: d["inputs"][0].update(dtype="complex64"),
    r"shape\[0\]: expected `int` >= 0": lambda d: d["inputs"][0].update(shape=[-1]),
    r"or has no shape": lambda d: d["inputs"][0].update(shape=None),
    r"required field `steps`": lambda d: d["program"].pop("steps"),
    r"the value '%1' has no type": lambda d: d["program"]["values"]["%1"].update(form="number"),
    r"its outputs are not nested": lambda d: d["outputs"][0].update(operand="%9"),
    r"its outputs are not nested as many": lambda d: d["program"].update(result=[]),
    r"the result '%9' is made by no step": lambda d: d["program"].update(result={"$ref": "%9"}),
    r"its outputs is a SparseRef: expected": lambda d: d["program"].update(
        result={"$sparse": ["%1", "%1"]}
    ),
    r"unknown form 'tensor'": lambda d: d["program"].update(result={"tensor": 1}),
    r"expected positional": lambda d: d["program"].update(signature={"$ref": "input"}),
    r"[Ii]nvalid enum value 'qint4'": lambda d: d["outputs"][0].update(quantized="qint4"),
    r"[Ii]nvalid enum value 'up'": lambda d: d["outputs"][0].update(rounding="up"),
}


@pytest.mark.parametrize("reason", WRONG)
def test_what_no_program_says_is_refused(path, reason: str) -> None:
    data = metadata(path)
    WRONG[reason](data)
    sign(path, data)
    with pytest.raises(ValueError, match=rf"net\.hbm: .*{reason}"):
        runtime.load(path)


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [("conv", "weight", {"$ref": "1.bias"}), ("conv", "stride", {"$tuple": [2**62, 1]}),
     ("conv", "dilation", {"$tuple": [1] * 5})],
)  # fmt: skip
def test_what_only_shows_when_it_runs_names_the_operator(path, name, argument, value) -> None:
    data = metadata(path)
    (step,) = (s for s in data["program"]["steps"] if f".{name}." in s["function"])
    (kind,) = (k for k in ("kwargs", "constants") if argument in step[k]["$dict"])
    before = step[kind]["$dict"].pop(argument)
    step[kind]["$dict"][argument] = value
    tensors = load_tensors(path.read_bytes())
    if "$ref" in before:
        data["program"]["constants"].remove(before["$ref"])
        del tensors[f"constant.{before['$ref']}"]
    sign(path, data, tensors)
    with pytest.raises(ValueError, match=f"{name}|{argument}="):
        runtime.load(path)(X)


def test_nonsense_in_any_field_is_a_value_error(path) -> None:
    data = metadata(path)
    accepted = set()
    for key in data.keys() - {"schema", "sha256", "written_by"}:
        for nonsense in (None, 7, "a", [1], {"a": 1}, [[]], [{}], -1.5):
            sign(path, data | {key: nonsense})
            try:
                runtime.load(path)
                accepted.add((key, type(nonsense)))
            except ValueError:
                pass
    assert accepted == {("march", str), ("name", str), ("options", dict)}


def test_a_failure_leaves_the_old_file(path, monkeypatch) -> None:
    import os

    before = path.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    model = nn.Sequential(QuantStub(scale=1 / 128))
    model.qconfig = get_default_qat_qconfig()
    with pytest.raises(OSError, match="no space"):
        compile_model(convert(prepare_qat(model)), X, hbm=path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["net.hbm"]
