"""Integer models in files: the same results, and every kind of damage refused."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from bevquant_int8sim import IntegerModel, simulate
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, activation=None):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(), nn.MaxPool2d(2))
        self.act = activation or nn.LeakyReLU(0.1)
        self.plain = nn.Conv2d(8, 8, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.out = nn.Conv2d(12, 4, 3, padding="same")
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.plain(self.act(self.stem(x)))
        wide = F.interpolate(x, scale_factor=2.0, mode="nearest")
        x = torch.cat([wide, self.up(x)], 1)
        x = F.silu(self.out(x))
        return {"scores": self.head(self.pool(x).flatten(1)), "map": x[:, :, 1:-1]}


def model_of(**settings):
    torch.manual_seed(0)
    net = Net(**settings).eval()
    config = QuantConfig(exclude=("plain",))
    quantized = quantize_model(net, config, example_inputs=X).model
    calibrate(quantized, [X], method="max")
    return simulate(quantized, X)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "model"
    model_of().save(folder)
    return folder


@pytest.fixture
def saved(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "model"))


def assert_same(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_loaded_model_computes_the_same(tmp_path):
    model = model_of()
    model.save(tmp_path / "model")
    loaded = IntegerModel.load(tmp_path / "model")
    assert_same(loaded(X), model(X))
    assert repr(loaded) == repr(model)
    assert loaded.float_fallbacks == model.float_fallbacks
    other = torch.randn(3, 3, 16, 16)
    assert_same(loaded(other), model(other))


def test_float_weights_that_lie_channels_last_do_too(tmp_path):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(64, 8, 3), nn.Conv2d(64, 64, 3)

        def forward(self, x):
            return {"a": self.a(x), "b": self.b(x)}

    x = torch.randn(1, 64, 24, 24, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = Two().eval()
    net.b.to(memory_format=torch.channels_last)
    quantized = quantize_model(net, QuantConfig(exclude=("b",)), example_inputs=x).model
    calibrate(quantized, [x], method="max")
    model = simulate(quantized, x)
    model.save(tmp_path / "model")
    assert_same(IntegerModel.load(tmp_path / "model")(x), model(x))


def test_saving_again_replaces_what_was_saved(saved):
    before = {p.name for p in saved.parent.iterdir()}
    model_of().save(saved)
    assert {p.name for p in saved.parent.iterdir()} == before
    IntegerModel.load(saved)


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_an_interrupted_save_leaves_the_old_model(saved, monkeypatch, call):
    """The disk is full, or the new folder cannot take the old one's place."""
    before = {p: p.read_bytes() for p in saved.iterdir()}
    calls, real = [], getattr(os, call)

    def fails(*args):
        calls.append(args)
        if call == "rename" and len(calls) != 2:  # the old folder is out of the way by then
            return real(*args)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="No space left"):
        model_of().save(saved)
    assert {p: p.read_bytes() for p in saved.iterdir()} == before
    assert list(saved.parent.iterdir()) == [saved]
    IntegerModel.load(saved)


def test_loaded_onto_a_device(saved):
    model = IntegerModel.load(saved, device="meta")
    held = [t for step in model.steps for t in step.tensors.values()]
    assert {t.device.type for t in held} == {"meta"}


def test_other_folders_are_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(ValueError, match="no saved integer model"):
        model_of().save(tmp_path / "notes")
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="does not exist"):
        model_of().save(tmp_path / "nowhere" / "model")


@pytest.mark.parametrize("name", ["manifest.json", "program.json", "tensors.safetensors"])
def test_a_changed_byte_is_refused(saved, name):
    raw = bytearray((saved / name).read_bytes())
    for place in range(0, len(raw), max(1, len(raw) // 60)):
        damaged = bytearray(raw)
        damaged[place] ^= 1
        (saved / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=str(saved)):
            IntegerModel.load(saved)


def test_every_byte_of_the_manifest_counts(saved):
    raw = (saved / "manifest.json").read_bytes()
    changed = [raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :] for i in range(len(raw))]
    for damaged in (*changed, raw.replace(b"\n", b"\r\n"), raw + b"\n", raw[:-1], b""):
        (saved / "manifest.json").write_bytes(damaged)
        with pytest.raises(ValueError, match=str(saved)):
            IntegerModel.load(saved)


def test_what_is_no_file_is_refused(saved):
    with pytest.raises(
        ValueError, match=r"cannot read .*program\.json.*manifest\.json: no such file"
    ):
        IntegerModel.load(saved / "program.json")
    (saved / "program.json").unlink()
    (saved / "program.json").mkdir()
    with pytest.raises(ValueError, match=r"cannot read .*program\.json: not a regular file"):
        IntegerModel.load(saved)


@pytest.mark.parametrize("name", ["manifest.json", "program.json", "tensors.safetensors"])
def test_a_missing_file_is_refused(saved, name):
    (saved / name).unlink()
    with pytest.raises(ValueError, match=f"cannot read .*{name}: no such file"):
        IntegerModel.load(saved)


def test_another_schema_is_refused(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps(manifest | {"schema": 1}, indent=1))
    with pytest.raises(ValueError, match=r"schema 1, expected 2; make the model again .*simulate"):
        IntegerModel.load(saved)


def rewrite(folder, change_program=None, change_tensors=None):
    """Change a saved model and bring its checksums up to date."""
    data = json.loads((folder / "program.json").read_text())
    if change_program is not None:
        change_program(data)
    (folder / "program.json").write_text(json.dumps(data, indent=1))
    if change_tensors is not None:
        tensors = load_file(folder / "tensors.safetensors")
        change_tensors(tensors)
        save_file(tensors, folder / "tensors.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["sha256"]:
        manifest["sha256"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))


def step_of(folder, path):
    steps = json.loads((folder / "program.json").read_text())["steps"]
    return next(i for i, step in enumerate(steps) if step["path"] == path)


def test_a_missing_tensor_is_refused(saved):
    name = f"{step_of(saved, 'up')}.weight"
    rewrite(saved, change_tensors=lambda t: t.pop(name))
    with pytest.raises(ValueError, match=rf"up: the tensor {name} is missing"):
        IntegerModel.load(saved)


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        ("weight", lambda t: t.float(), "weight is torch.float32, expected torch.int8"),
        ("bias", lambda t: t.long(), "bias is torch.int64, expected torch.int32"),
        ("bias", lambda t: t[1:], r"bias has shape \(3,\), expected \(4,\)"),
        ("multiplier", lambda t: t.float(), "multiplier is torch.float32"),
        ("weight", lambda t: t[0], "a weight of shape"),
        ("multiplier", lambda t: t * math.nan, "multiplier is not positive and finite"),
        ("multiplier", torch.zeros_like, "multiplier is not positive and finite"),
    ],
)
def test_tensors_of_wrong_type_or_shape_are_refused(saved, tensor, change, message):
    name = f"{step_of(saved, 'up')}.{tensor}"
    rewrite(saved, change_tensors=lambda t: t.update({name: change(t[name]).contiguous()}))
    with pytest.raises(ValueError, match=f"up: {message}"):
        IntegerModel.load(saved)


def test_a_step_without_its_scale_is_refused(saved):
    data = json.loads((saved / "program.json").read_text())
    number = next(i for i, s in enumerate(data["steps"]) if s["kind"] == "Dequantize")
    name = f"{number}.scale"

    def change(program):
        del program["steps"][number]["scale"]

    rewrite(saved, change, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match="missing required field `scale`"):
        IntegerModel.load(saved)


@pytest.mark.parametrize("stride", ["x", [None, 1], {"a": 1}])
def test_arguments_that_torch_does_not_take_name_the_module(saved, stride):
    number = step_of(saved, "stem.2")

    def change(program):
        program["steps"][number]["kwargs"]["$dict"]["stride"] = stride

    rewrite(saved, change)
    with pytest.raises(ValueError, match=r"stem\.2"):
        IntegerModel.load(saved)(X)


@pytest.mark.parametrize("signature", [1, [], {"$tuple": [{"$tuple": []}, 3]}])
def test_a_signature_of_another_form_is_refused(saved, signature):
    rewrite(saved, lambda program: program.update(signature=signature))
    with pytest.raises(ValueError, match="signature: expected positional and named inputs"):
        IntegerModel.load(saved)


def test_settings_that_only_show_in_the_run_name_the_step(saved):
    number = step_of(saved, "pool")

    def change(program):
        program["steps"][number]["kwargs"]["$dict"]["output_size"] = [[1], [1]]

    rewrite(saved, change)
    with pytest.raises(ValueError, match="pool"):
        IntegerModel.load(saved)(X)
    with pytest.raises(TypeError, match="expected 1 positional inputs"):
        IntegerModel.load(saved)()


def test_a_step_that_makes_another_number_of_values_is_named(saved):
    number = step_of(saved, "stem.2")

    def change(program):
        outputs = program["steps"][number]["outputs"]
        program["steps"][number]["outputs"] = [*outputs, *program["steps"][0]["outputs"]]

    rewrite(saved, change)
    with pytest.raises(ValueError, match=r"stem\.2: max_pool makes 2 values"):
        IntegerModel.load(saved)


def test_only_listed_functions_can_be_called(saved):
    def change(data):
        next(s for s in data["steps"] if s.get("function"))["function"] = "torch.load"

    rewrite(saved, change)
    with pytest.raises(ValueError, match=r"calls 'torch\.load', which a saved program may not"):
        IntegerModel.load(saved)


@torch.library.custom_op("bevquant_int8sim_tests::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    """Half of it."""
    return x / 2


@halved.register_fake
def _(x):
    return torch.empty_like(x)


class Halved(nn.Module):
    def forward(self, x):
        return halved(x)


def test_an_operator_of_another_library_is_called_where_that_is_trusted(tmp_path):
    model = model_of(activation=Halved())
    model.save(tmp_path / "model")
    with pytest.raises(ValueError, match=r"act: .*load\(\.\.\., operators=\['bevquant_int8sim_te"):
        IntegerModel.load(tmp_path / "model")
    loaded = IntegerModel.load(tmp_path / "model", operators=["bevquant_int8sim_tests"])
    assert_same(loaded(X), model(X))


def test_an_operator_that_nobody_registered_is_named(tmp_path):
    model_of(activation=Halved()).save(tmp_path / "model")

    def change(data):
        step = next(s for s in data["steps"] if "halved" in s.get("function", ""))
        step["function"] = "bevquant_int8sim_tests.doubled.default"

    rewrite(tmp_path / "model", change)
    with pytest.raises(ValueError, match="not registered here: import the library first"):
        IntegerModel.load(tmp_path / "model", operators=["bevquant_int8sim_tests"])


@pytest.mark.parametrize("name", ["aten.relu_.default", "aten.from_file.default", "aten.relu"])
def test_no_operator_that_writes_or_reads_files_is_called(saved, name):
    def change(data):
        next(s for s in data["steps"] if s.get("function"))["function"] = name

    rewrite(saved, change)
    with pytest.raises(ValueError, match="which a saved program may not"):
        IntegerModel.load(saved)


def test_steps_must_read_what_was_made(saved):
    def change(data):
        data["steps"][1]["args"] = {"$tuple": [{"$ref": data["steps"][-1]["outputs"][0]}]}

    rewrite(saved, change)
    with pytest.raises(ValueError, match="no step made before"):
        IntegerModel.load(saved)


def test_own_modules_cannot_be_saved(tmp_path):
    class Own(nn.Module):
        def forward(self, x):
            return x * 2 if bool(x.detach().mean() > -1e9) else x

    with pytest.raises(ValueError, match=r"act \(Own\): .*Own is not among the layer types"):
        model_of(activation=Own()).save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_steps_that_no_layer_takes_are_refused(saved, name):
    """A transposed convolution of stride 65536 has as many phases."""

    def change(program):
        large = [[65536, 65536], [1, 1]] if name == "padding" else [65536, 1]
        program["steps"][step_of(saved, "stem.0")][name] = large

    rewrite(saved, change)
    with pytest.raises(ValueError, match=r"stem\.0: strides, paddings and dilations .* above 1024"):
        IntegerModel.load(saved)
