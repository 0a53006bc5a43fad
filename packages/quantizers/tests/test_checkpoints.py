"""Checkpoints as frameworks save them: weights are read, the rest is listed, nothing is run."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch

from bevquant_quantizers.documents import DocumentError, read_checkpoint, write_tensors

STATE = OrderedDict(
    [("a.weight", torch.randn(4, 3)), ("a.bias", torch.randn(4)), ("n", torch.tensor(7))]
)
STATE._metadata = OrderedDict(version=1)
BOTH = pytest.mark.parametrize("zipped", [True, False])


@pytest.fixture
def vanishing(tmp_path, monkeypatch):
    """A module of classes that is there while a file is written, and gone while it is read."""

    class Vanishing:
        def __init__(self) -> None:
            (tmp_path / "framework_x.py").write_text(
                "from collections import deque\n"
                "import numpy as np\n"
                "class HistoryBuffer:\n"
                "    def __init__(self):\n"
                "        self._log_history = np.arange(3.0)\n"
                "        self._statistics_methods = {'mean': max}\n"
                "class Config(dict):\n"
                "    __getattr__ = dict.__getitem__\n"
                "    def __reduce_ex__(self, protocol):\n"
                "        return Config, (), {'x': 1}, None, iter(self.items())\n"
                "class Callback:\n"
                "    def __setstate__(self, state):\n"
                "        raise RuntimeError('executed')\n"
                "    def __getstate__(self):\n"
                "        return {'best': 1}\n"
            )
            monkeypatch.syspath_prepend(str(tmp_path))
            importlib.invalidate_caches()
            self.module = importlib.import_module("framework_x")

        def remove(self) -> None:
            sys.modules.pop("framework_x")
            (tmp_path / "framework_x.py").unlink()
            importlib.invalidate_caches()
            with pytest.raises(ImportError):
                importlib.import_module("framework_x")

    return Vanishing()


def same(found: dict, wanted: dict = STATE) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[n], wanted[n]) for n in wanted)


@BOTH
def test_mmengine(tmp_path, vanishing, zipped):
    path = tmp_path / "epoch_20.pth"
    saved = {
        "meta": {
            "epoch": 20,
            "cfg": "model = dict(type='CenterPoint')\n" * 50,
            "mmengine_version": "0.10.7",
            "best": np.float64(0.61),
            "dataset_meta": {"classes": ("car",), "palette": np.ones((2, 3), np.uint8)},
        },
        "state_dict": STATE,
        "message_hub": {
            "log_scalars": OrderedDict(loss=vanishing.module.HistoryBuffer()),
            "runtime_info": OrderedDict(iter=np.int64(5)),
            "resumed_keys": defaultdict(bool),
        },
        "optimizer": torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]).state_dict(),
        "param_schedulers": [{"last_step": 3, "betas": np.array([0.1])}],
    }
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    vanishing.remove()
    found = read_checkpoint(path)
    assert same(found.tensors)
    assert (found.entry, found.averaged, found.entries) == ("state_dict", None, ("state_dict",))
    assert found.passed_over["message_hub.log_scalars.loss"] == "framework_x.HistoryBuffer"
    assert set(found.passed_over) >= {"meta", "message_hub", "optimizer", "param_schedulers"}
    assert found.facts == {"meta.epoch": 20, "meta.mmengine_version": "0.10.7", "meta.best": 0.61}


def test_mmengine_s_ema_hook_saves_the_averages_as_the_state_dict(tmp_path):
    averaged = {n: t + 1 for n, t in STATE.items()}
    beside = {"steps": torch.tensor(9), **{f"module.{n}": t for n, t in STATE.items()}}
    torch.save({"state_dict": averaged, "ema_state_dict": beside}, tmp_path / "e.pth")
    usual = read_checkpoint(tmp_path / "e.pth")
    assert same(usual.tensors, averaged)
    assert (usual.entry, usual.averaged) == ("state_dict", True)
    assert same(read_checkpoint(tmp_path / "e.pth", ema=True).tensors, averaged)
    raw = read_checkpoint(tmp_path / "e.pth", ema=False)
    assert same(raw.tensors)
    assert (raw.entry, raw.averaged) == ("ema_state_dict", False)
    assert "state_dict: dict" not in str(raw)
    assert "not averaged" in str(raw)


@pytest.mark.parametrize(
    ("plain", "averaged"),
    [
        ("state_dict", "state_dict_ema"),
        ("state_dict", "ema_state_dict"),
        ("model", "model_ema"),
        ("params", "params_ema"),
        ("model", "ema.shadow"),
    ],
)
def test_averages_elsewhere(tmp_path, plain, averaged):
    ema = {f"module.{n}": t + 1 for n, t in STATE.items()}
    ema["n_averaged"] = torch.tensor(3)
    for name in reversed(averaged.split(".")):
        ema = {name: ema}
    torch.save({plain: STATE, **ema, "epoch": 2}, tmp_path / "e.pth")
    usual = read_checkpoint(tmp_path / "e.pth")
    assert same(usual.tensors)
    assert (usual.entry, usual.averaged) == (plain, False)
    assert averaged.split(".")[0] in usual.passed_over
    chosen = read_checkpoint(tmp_path / "e.pth", ema=True)
    assert same(chosen.tensors, {n: t + 1 for n, t in STATE.items()})
    assert (chosen.entry, chosen.averaged) == (averaged, True)


def test_lightning(tmp_path, vanishing):
    path = tmp_path / "last.ckpt"
    config = vanishing.module.Config(lr=0.1, model=vanishing.module.Config(depth=3))
    saved = {
        "epoch": 3,
        "global_step": 900,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": {f"model.{n}": torch.nn.Parameter(t) for n, t in STATE.items() if n != "n"},
        "loops": {"fit_loop": {"state_dict": {"x": torch.ones(1)}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.ones(())}},
        "optimizer_states": [{"state": {0: {"exp_avg": torch.ones(3)}}}],
        "hyper_parameters": config,
        "own": vanishing.module.Callback(),
    }
    torch.save(saved, path)
    vanishing.remove()
    found = read_checkpoint(path)
    assert list(found.tensors) == ["model.a.weight", "model.a.bias"]
    assert found.entry == "state_dict"
    assert found.passed_over["hyper_parameters"] == "framework_x.Config"
    assert found.passed_over["hyper_parameters.model"] == "framework_x.Config"
    assert found.passed_over["own"] == "framework_x.Callback"
    assert found.facts["pytorch-lightning_version"] == "2.4.0"
    with pytest.raises(DocumentError, match=r"no averaged \(EMA\) weights.*state_dict \(2\)"):
        read_checkpoint(path, ema=True)


@BOTH
def test_openpcdet(tmp_path, zipped):
    path = tmp_path / "checkpoint_epoch_20.pth"
    saved = {"epoch": 20, "it": 100, "model_state": STATE, "version": "pcdet+0.6.0"}
    saved["optimizer_state"] = {"state": {}, "param_groups": []}
    torch.save(saved, path, _use_new_zipfile_serialization=zipped)
    found = read_checkpoint(path)
    assert same(found.tensors)
    assert found.entry == "model_state"
    assert found.facts == {"epoch": 20, "it": 100, "version": "pcdet+0.6.0"}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_bare_state_dicts_wrappers_and_other_forms(tmp_path, prefix):
    path = tmp_path / "w.pth"
    torch.save({f"{prefix}{n}": t for n, t in STATE.items()}, path)
    found = read_checkpoint(path)
    assert same(found.tensors)
    assert found.entry == ""
    assert found.passed_over == {}
    torch.save({**STATE, "_extra_state": b"x", "module.z": torch.ones(1)}, path)
    found = read_checkpoint(path)
    assert list(found.tensors) == [*STATE, "module.z"]
    assert found.passed_over == {"_extra_state": "bytes"}


def test_types_views_and_shared_memory(tmp_path):
    base = torch.arange(24.0)
    kinds = (torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int32, torch.bool)
    state = {
        **{str(kind): torch.tensor([0, 1, 3]).to(kind) for kind in kinds},
        "view": base[4:16].view(3, 4).T,
        "tied": base[4:16],
        "expanded": torch.ones(1).expand(5),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    for zipped in (True, False):
        torch.save(state, tmp_path / "w.pth", _use_new_zipfile_serialization=zipped)
        found = read_checkpoint(tmp_path / "w.pth").tensors
        assert all(torch.equal(found[n], t) and found[n].dtype == t.dtype for n, t in state.items())
        assert found["view"].data_ptr() == found["tied"].data_ptr()
    write_tensors(tmp_path / "w.safetensors", STATE)
    assert same(
        dict(sorted(read_checkpoint(tmp_path / "w.safetensors").tensors.items())),
        dict(sorted(STATE.items())),
    )


@pytest.mark.filterwarnings("ignore")  # quantized tensors are deprecated
def test_tensors_of_other_kinds_are_passed_over(tmp_path):
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    many = {f"x{i:03}": Bomb(os.getcwd) for i in range(30)}
    state = {"w": torch.ones(2), "q": quantized, "s": torch.eye(3).to_sparse()}
    torch.save({"state_dict": state, "many": many}, tmp_path / "w.pth")
    found = read_checkpoint(tmp_path / "w.pth")
    assert list(found.tensors) == ["w"]
    assert found.passed_over["state_dict.q"] == "torch._utils._rebuild_qtensor"
    assert found.passed_over["state_dict.s"] == "torch._utils._rebuild_sparse_tensor"
    assert str(found).splitlines()[-1] == "and 13 more"
    torch.save(state, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    with pytest.raises(DocumentError, match=r"numbers of the type torch\.QInt8Storage"):
        read_checkpoint(tmp_path / "w.pth")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_plain_pickles_of_numpy_arrays(tmp_path, protocol):
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "names": np.array(["car", None], object),
    }
    (tmp_path / "R-50.pkl").write_bytes(pickle.dumps({"model": arrays, "by": "D2"}, protocol))
    found = read_checkpoint(tmp_path / "R-50.pkl")
    assert found.entry == "model"
    assert list(found.tensors) == ["w", "fortran", "big"]
    for name, tensor in found.tensors.items():
        assert np.array_equal(tensor.numpy(), arrays[name])
    assert found.passed_over == {"by": "str", "model.names": "numpy array"}


def test_the_entry_is_named_or_asked_for(tmp_path):
    torch.save({"one": STATE, "two": STATE}, tmp_path / "w.pth")
    with pytest.raises(DocumentError, match=r"several entries.*one \(3\), two \(3\); name one"):
        read_checkpoint(tmp_path / "w.pth")
    assert read_checkpoint(tmp_path / "w.pth", key="two").entry == "two"
    with pytest.raises(DocumentError, match=r"no entry 'three'.*one \(3\)"):
        read_checkpoint(tmp_path / "w.pth", key="three")


# Hostile and damaged files ---------------------------------------------------------------------


class Bomb:
    def __init__(self, function, *args) -> None:
        self.call = function, args

    def __reduce__(self):
        return self.call


CALLS = [(os.mkdir, "exploded"), (os.system, "touch exploded"), (eval, "open('exploded', 'w')")]


@BOTH
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0].__name__)
def test_nothing_is_executed(tmp_path, monkeypatch, zipped, call):
    monkeypatch.chdir(tmp_path)
    saved = {"state_dict": {**STATE, "b": Bomb(*call)}, "meta": [Bomb(*call)]}
    torch.save(saved, "w.pth", _use_new_zipfile_serialization=zipped)
    found = read_checkpoint("w.pth")
    assert same(found.tensors)
    assert found.passed_over["state_dict.b"].endswith(call[0].__name__)
    assert found.passed_over["meta.0"].endswith(call[0].__name__)
    torch.save({"a": Bomb(*call)}, "w.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(DocumentError, match=r"no tensors by name, but an object of the class \w"):
        read_checkpoint("w.pth")
    assert not os.path.exists("exploded")


# Each tries, by opcodes, to reach a function, to change one, or to take memory.
OPCODES = {
    "inst": b"(S'touch exploded'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'touch exploded'\no.",
    "build on a function": b"ctorch._utils\n_rebuild_tensor_v2\n}S'__code__'\nK\x01sb.",
    "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ftouch exploded\x85R.",
    "getattr": b"cbuiltins\ngetattr\ncos\nS'system'\n\x86R(S'touch exploded'\ntR.",
    "new of a class": b"\x80\x02csubprocess\nPopen\n]S'touch'\naS'exploded'\na\x85\x81.",
    "huge bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
    "huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
    "huge memo": b"\x80\x02Nr\xff\xff\xff\xff.",
    "bytes of a size": b"cbuiltins\nbytearray\nI1000000000000\n\x85R.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02(lQ.",
    "empty stack": b"\x80\x02R.",
    "deep": b"(l" + b"\x85" * 100_000 + b".",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "laughs": b"\x80\x02]" + b"2\x86" * 60 + b".",
}


@pytest.mark.parametrize("name", OPCODES)
def test_opcodes_reach_nothing(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "w.pkl").write_bytes(OPCODES[name])
    with pytest.raises(DocumentError, match=r"w\.pkl cannot be read as a checkpoint"):
        read_checkpoint("w.pkl")
    assert not (tmp_path / "exploded").exists()
    assert torch.save({"a": torch.ones(2)}, "ok.pth") is None
    assert torch.equal(torch.load("ok.pth")["a"], torch.ones(2))


@BOTH
def test_every_cut_is_one_error(tmp_path, zipped):
    path = tmp_path / "w.pth"
    torch.save({"state_dict": STATE, "x": 1}, path, _use_new_zipfile_serialization=zipped)
    content = path.read_bytes()
    for size in range(0, len(content), 29):
        path.write_bytes(content[:size])
        with pytest.raises(DocumentError, match=r"w\.pth cannot be read as a checkpoint"):
            read_checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty: download"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "run git lfs pull"),
        (b"<!DOCTYPE html><html>", "it is a web page, not the file: download it again"),
    ],
)
def test_what_downloads_leave_in_place_of_a_file_is_named(tmp_path, content, message):
    path = tmp_path / "w.pth"
    path.write_bytes(content)
    with pytest.raises(DocumentError, match=message):
        read_checkpoint(path)


def repacked(path, change, compression=zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path) as old:
        members = {n: old.read(n) for n in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for name, content in change(members).items():
            new.writestr(name, content)


def test_archives_that_are_none_of_weights(tmp_path):
    path = tmp_path / "w.pth"
    torch.save({"a": torch.zeros(1 << 20)}, path)
    repacked(path, lambda members: members, zipfile.ZIP_DEFLATED)
    with pytest.raises(DocumentError, match=r"unpack to \d+ bytes, the file has \d+"):
        read_checkpoint(path)
    torch.save({"a": torch.randn(1000)}, path)
    repacked(path, lambda members: members, zipfile.ZIP_DEFLATED)
    assert read_checkpoint(path).tensors["a"].shape == (1000,)
    repacked(path, lambda members: {n: c[:100] if "data/" in n else c for n, c in members.items()})
    with pytest.raises(DocumentError, match="damaged, cut short"):
        read_checkpoint(path)
    torch.save({"a": torch.randn(1000)}, path)
    repacked(
        path, lambda members: {n: b"big" if "byteorder" in n else c for n, c in members.items()}
    )
    with pytest.raises(DocumentError, match="big-endian"):
        read_checkpoint(path)
    repacked(path, lambda members: {n: c for n, c in members.items() if "pkl" not in n})
    with pytest.raises(DocumentError, match=r"without data\.pkl"):
        read_checkpoint(path)
    torch.save({"a": torch.ones(2)}, path)
    repacked(path, lambda members: {**members, "archive/constants.pkl": b"."})
    with pytest.raises(DocumentError, match="TorchScript archive"):
        read_checkpoint(path)
    torch.save(torch.nn.Linear(2, 2), path)
    with pytest.raises(DocumentError, match=r"class torch\.nn\.modules\.linear\.Linear, a pickled"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    "view", [(0, (3, 6), (3, 2)), (11, (2,), (1,)), (-1, (2,), (1,)), (0, (2,), (-1,))]
)
def test_a_tensor_beyond_its_storage_is_damage(tmp_path, view):
    class Hostile:
        def __reduce__(self):
            storage = torch.arange(12.0)._typed_storage()
            return torch._utils._rebuild_tensor_v2, (storage, *view, False, OrderedDict())

    torch.save({"a": torch.ones(1), "b": Hostile()}, tmp_path / "w.pth")
    with pytest.raises(DocumentError, match="damaged"):
        read_checkpoint(tmp_path / "w.pth")


def test_random_damage_is_one_error_or_weights(tmp_path):
    generator = np.random.default_rng(0)
    path = tmp_path / "w.pth"
    for zipped in (True, False):
        buffer = io.BytesIO()
        saved = {"state_dict": STATE, "meta": {"x": np.float32(1), "y": [1, "a"]}}
        torch.save(saved, buffer, _use_new_zipfile_serialization=zipped)
        content = buffer.getvalue()
        for _ in range(300):
            changed = bytearray(content)
            for place in generator.integers(0, len(content), generator.integers(1, 6)):
                changed[place] = generator.integers(256)
            path.write_bytes(changed)
            with contextlib.suppress(DocumentError):
                assert read_checkpoint(path).tensors
