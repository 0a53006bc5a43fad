"""Ranges on disk: exact, whole, and refused as a whole."""

from __future__ import annotations

import copy
import json
import os
import pickle

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from bevquant_quantizers import (
    QuantDescriptor,
    TensorQuantizer,
    load_ranges,
    named_quantizers,
    save_ranges,
)


def build(shared=True, weight_shape=(8, 1, 1), **descriptor):
    first = TensorQuantizer(QuantDescriptor(**descriptor))
    model = nn.ModuleDict(
        {
            "act": first,
            "add": first if shared else TensorQuantizer(),
            "weight": TensorQuantizer(QuantDescriptor(axis=0)),
            "dynamic": TensorQuantizer(),
        }
    )
    first.amax = 0.1
    model["add"].amax = 0.1
    model["weight"].amax = torch.rand(weight_shape)
    return model


def ranges(model):
    return {
        e.name: None if e.quantizer.amax is None else e.quantizer.amax.clone()
        for e in named_quantizers(model)
    }


def same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        if value is None or b[key] is None:
            assert value is b[key] is None
        else:
            assert torch.equal(value, b[key])
            assert value.dtype == b[key].dtype == torch.float32


def test_round_trip(tmp_path):
    model, other = build(), build()
    other["dynamic"].amax = 3.0
    save_ranges(model, tmp_path / "r.json")
    load_ranges(other, tmp_path / "r.json")
    same(ranges(model), ranges(other))
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["schema"] == "bevquant-ranges/1"
    assert document["quantizers"][0]["names"] == ["act", "add"]
    assert document["quantizers"][2]["amax"] is None


@given(value=st.floats(0, width=32, allow_infinity=False, allow_nan=False))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_float32_comes_back_bit_for_bit(tmp_path, value):
    model, other = (TensorQuantizer(QuantDescriptor(amax=a)) for a in (float(value), 1.0))
    save_ranges(model, tmp_path / "r.json")
    load_ranges(other, tmp_path / "r.json")
    assert torch.equal(model.amax.view(torch.int32), other.amax.view(torch.int32))


def test_loads_into_quantizers_without_a_range(tmp_path):
    model = build()
    save_ranges(model, tmp_path / "r.json")
    bare = copy.deepcopy(model)
    for entry in named_quantizers(bare):
        entry.quantizer._buffers.pop("_amax", None)
    load_ranges(bare, tmp_path / "r.json")
    same(ranges(model), ranges(bare))
    assert bare["act"] is bare["add"]


def test_learned_ranges_are_saved_as_learned(tmp_path):
    desc = QuantDescriptor(learn_amax=True, amax=1.0)
    model, other = TensorQuantizer(desc), TensorQuantizer(desc)
    with torch.no_grad():
        model.clip.clip_value_max.fill_(2.5)
    save_ranges(model, tmp_path / "r.json")
    load_ranges(other, tmp_path / "r.json")
    assert other.clip.clip_value_max.item() == 2.5
    assert other.clip.clip_value_min.item() == -2.5


def edit(path, change):
    document = json.loads(path.read_text())
    change({entry["names"][0]: entry for entry in document["quantizers"]}, document)
    path.write_text(json.dumps(document))


def test_trap_14_every_misfit_is_listed_and_nothing_is_loaded(tmp_path):
    path = tmp_path / "r.json"
    save_ranges(build(), path)

    def change(entries, document):
        entries["act"]["amax"] = 9.0
        entries["weight"]["amax"] = [1.0, 2.0]
        entries["dynamic"]["names"] = ["other"]
        entries["act"]["num_bits"] = 4

    edit(path, change)
    model = build()
    before = ranges(model)
    with pytest.raises(ValueError, match="nothing was loaded") as error:
        load_ranges(model, path)
    text = str(error.value)
    assert "unexpected: other" in text
    assert "missing: dynamic" in text
    assert "misshapen: weight takes a range of shape (8, 1, 1), the file has (2,)" in text
    assert "differs: act.num_bits is 8 in the model, 4 in the file" in text
    same(before, ranges(model))


def test_other_sharing_is_refused(tmp_path):
    save_ranges(build(shared=True), tmp_path / "r.json")
    with pytest.raises(ValueError, match="shared otherwise"):
        load_ranges(build(shared=False), tmp_path / "r.json")
    save_ranges(build(shared=False), tmp_path / "r.json")
    with pytest.raises(ValueError, match="shared otherwise"):
        load_ranges(build(shared=True), tmp_path / "r.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a ranges file"),
        (b"\xff\xfe", "not a ranges file"),
        (b"[]", "expected `object`"),
        (b'{"schema": "bevquant-ranges/3", "quantizers": []}', "bevquant-ranges/3"),
        (b'{"schema": "bevquant-ranges/1"}', "damaged"),
        (b'{"schema": "bevquant-ranges/1", "quantizers": [3]}', "damaged"),
        (
            b'{"schema": "bevquant-ranges/1", "quantizers": [{"names": ["act"]}]}',
            "missing required field",
        ),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    path = tmp_path / "r.json"
    path.write_bytes(content)
    model = build()
    before = ranges(model)
    with pytest.raises(ValueError, match=message):
        load_ranges(model, path)
    same(before, ranges(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, "x", [[1.0], [1.0, 2.0]], {}])
def test_damaged_values_are_refused(tmp_path, value):
    path = tmp_path / "r.json"
    save_ranges(build(), path)
    edit(path, lambda entries, _: entries["act"].update(amax=value))
    with pytest.raises(ValueError, match="damaged"):
        load_ranges(build(), path)


def test_names_listed_twice_are_refused(tmp_path):
    path = tmp_path / "r.json"
    save_ranges(build(), path)
    edit(path, lambda entries, document: document["quantizers"].append(entries["act"]))
    with pytest.raises(ValueError, match="act is listed twice"):
        load_ranges(build(), path)


def test_trap_14_pickles_are_never_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "exploded"),))

    (tmp_path / "r.json").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(ValueError, match="not a ranges file"):
        load_ranges(build(), tmp_path / "r.json")
    assert not (tmp_path / "exploded").exists()


def test_unusable_ranges_and_places_are_refused(tmp_path):
    model = build()
    model["act"].amax = float("nan")
    with pytest.raises(ValueError, match="act"):
        save_ranges(model, tmp_path / "r.json")
    with pytest.raises(ValueError, match="folder"):
        save_ranges(build(), tmp_path / "absent" / "r.json")
    with pytest.raises(ValueError, match="cannot read"):
        load_ranges(build(), tmp_path / "absent.json")
    with pytest.raises(ValueError, match="no quantizer"):
        save_ranges(nn.Linear(2, 2), tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "r.json"
    save_ranges(build(), path)
    old = path.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_ranges(build(), path)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_factors_of_channels_go_with_their_range(tmp_path):
    model, other = (nn.Sequential(TensorQuantizer(QuantDescriptor(amax=4.0))) for _ in range(2))
    model[0].channel_factors = torch.tensor([1.0, 512.0])
    save_ranges(model, tmp_path / "ranges.json")
    assert '"bevquant-ranges/2"' in (tmp_path / "ranges.json").read_text()
    load_ranges(other, tmp_path / "ranges.json")
    assert other[0].channel_factors.tolist() == [1.0, 512.0]
    again = nn.Sequential(TensorQuantizer())
    again.load_state_dict(model.state_dict())
    assert again[0].channel_factors.tolist() == [1.0, 512.0]
    # Without them a file is one that earlier readers take, and takes those of the model away.
    other[0].channel_factors = None
    save_ranges(other, tmp_path / "plain.json")
    assert '"bevquant-ranges/1"' in (tmp_path / "plain.json").read_text()
    load_ranges(model, tmp_path / "plain.json")
    assert model[0].channel_factors is None
    wrong = (tmp_path / "ranges.json").read_text().replace("512.0", "-1.0")
    (tmp_path / "ranges.json").write_text(wrong)
    with pytest.raises(ValueError, match="factors"):
        load_ranges(model, tmp_path / "ranges.json")
