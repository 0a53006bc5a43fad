"""Of the containers that a forward is given, a call needs the members that the forward reads."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, is_dataclass, replace
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from bevquant_graph import ReadMembers, capture


class Calibration:
    """An object that can be neither copied nor compared."""

    def __init__(self):
        self.lock = Lock()

    def __eq__(self, other):
        raise TypeError("not compared")

    __hash__ = None


class Runs(nn.Module):
    """A forward that is a function of a layer and the one argument."""

    def __init__(self, run):
        super().__init__()
        self.layer, self.run = nn.Linear(4, 4), run

    def forward(self, d):
        return self.run(self.layer, d)


def rows(count=3):
    return torch.linspace(-1, 1, 4 * count).view(count, 4)


def example(**more):
    return {"frame_id": "a", "x": rows(), "gt": rows(2), "calib": Calibration(), **more}


def frame(**more):
    """Another frame: more rows, other members."""
    return {"path": "b.bin", "x": rows(5), **more}


def same(one, other):
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if is_dataclass(one):
        return type(one) is type(other) and same(vars(one), vars(other))
    return one is other or one == other


def returned(change):
    """A forward that changes its argument and returns it."""

    def run(layer, d):
        return change(layer, d) or d

    return run


def with_copy(layer, d):
    d = d.copy()
    d["y"] = layer(d.pop("x"))
    return d


def tries(layer, d):
    try:
        return layer(d["mask"])
    except KeyError:
        return layer(d["x"])


def deletes(layer, d):
    d["made"] = 2
    d["y"] = layer(d["x"]) * d["made"]
    del d["made"]


@dataclass
class Batch:
    x: Any
    name: Any = None
    y: Any = None

    def doubled(self):
        return 2 * self.x


META = [{"scale": 2.0, "path": "a"}]
OTHER_META = [{"scale": 2.0, "path": "b", "flip": True}]

TAKEN = {
    "a member": (lambda layer, d: layer(d["x"]), example(), frame()),
    "get and in": (
        lambda layer, d: layer(d.get("x")) * d.get("scale", 2) + ("mask" in d.keys()),
        example(),
        frame(),
    ),
    "try": (tries, example(), frame()),
    "returned": (
        returned(lambda layer, d: d.update(y=layer(d["x"]))), example(), frame(calib=Calibration()),
    ),
    "returned copy": (with_copy, example(), frame()),
    "written before": (
        returned(lambda layer, d: d.update(y=layer(d["x"]), z=d.setdefault("w", 1))),
        example(y=rows(), z=3),
        frame(y="old"),
    ),
    "written and deleted": (returned(deletes), example(), frame(made="by another")),
    "nested": (
        returned(lambda layer, d: d["a"].update(y=layer(d["a"]["x"]))),
        {"a": example(), "b": 1},
        {"a": frame(), "c": 2},
    ),
    "list of dicts": (
        lambda layer, d: layer(d["x"]) * d["metas"][0]["scale"],
        example(metas=META), frame(metas=OTHER_META),
    ),
    "list handed on": (
        lambda layer, d: {"y": layer(d["x"]), "metas": d["metas"]},
        example(metas=META), frame(metas=OTHER_META),
    ),
    "batch of dicts": (
        lambda layer, d: [layer(one["x"]) for one in d], [example(), example()], [frame(), frame()],
    ),
    "ordered": (
        returned(lambda layer, d: d.__setitem__("y", layer(d["x"]))),
        OrderedDict(example()),
        OrderedDict(frame()),
    ),
    "default": (lambda layer, d: layer(d["x"]), defaultdict(list, example()), frame()),
    "dataclass": (lambda layer, d: layer(d.doubled()), Batch(rows(), "a"), Batch(rows(5), 7, 8)),
    "dataclass returned": (
        returned(lambda layer, d: setattr(d, "y", layer(d.x))),
        Batch(rows(), "a", Calibration()),
        Batch(rows(5), {"b": 1}, "old"),
    ),
    "dataclass in a dict": (
        lambda layer, d: layer(d["b"].x), {"b": Batch(rows(), "a")}, {"b": Batch(rows(5)), "c": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_a_frame_has_other_members_than_the_example(name):
    run, given, other = TAKEN[name]
    net = Runs(run).eval()
    graph = capture(net, (given,))
    assert all(name.endswith((".x", "['x']")) for name in graph.input_names)
    before = copy.copy(other)
    got = graph.replay(other)
    assert type(other) is type(before)
    assert vars(other) == vars(before) if is_dataclass(other) else other == before
    own = [dict(one) for one in other] if isinstance(other, list) else copy.copy(other)
    own = {**own, "a": dict(own["a"])} if name == "nested" else own
    assert same(got, net(own))


REFUSED = {
    "missing": (lambda layer, d: layer(d["x"]), example(), {"frame_id": "a"}, r"\['x'\] missing"),
    "asked for": (
        lambda layer, d: layer(d["x"]) + ("mask" in d), example(), frame(mask=rows()),
        r"\['mask'\] not in the example",
    ),
    "get": (lambda layer, d: layer(d["x"]) * d.get("s", 2), example(), frame(s=3), r"\['s'\] not"),
    "pop": (
        returned(lambda layer, d: d.update(y=layer(d["x"]), z=d.pop("s", None))),
        example(), frame(s=3), r"\['s'\] not in the example",
    ),
    "try": (tries, example(), frame(mask=rows()), r"\['mask'\] not in the example"),
    "constant": (
        lambda layer, d: layer(d["x"]) * d["metas"][0]["scale"],
        example(metas=META), frame(metas=[{"scale": 3.0}]),
        r"\['metas'\]\[0\]\['scale'\]: the model was captured with 2.0 here, got 3.0;.* list of",
    ),
    "field": (lambda layer, d: layer(d.x) * d.y, Batch(rows(), y=2.0), Batch(rows(), y=3.0), "'y'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_member_that_is_read_is_required_by_name(name):
    run, given, other, message = REFUSED[name]
    graph = capture(Runs(run).eval(), (given,))
    with pytest.raises((TypeError, ValueError), match=message):
        graph.replay(other)


def two(**more):
    return {"x": rows(), "z": rows(), **more}


WHOLE = {
    "len": lambda layer, d: layer(d["x"]) * len(d),
    "truth": lambda layer, d: layer(d["x"]) if d else None,
    "dict": lambda layer, d: layer(dict(d)["x"]),
    "stars": lambda layer, d: layer({**d, "y": 1}["x"]),
    "call": lambda layer, d: (lambda x, **other: layer(x) * len(other))(**d),
    "or": lambda layer, d: layer((d | {"y": 1})["x"]),
    "items": lambda layer, d: sum(layer(value) for _, value in d.items()),
    "values": lambda layer, d: sum(map(layer, d.values())),
    "keys": lambda layer, d: sum(layer(d[key]) for key in sorted(d.keys())),
    "list": lambda layer, d: sum(layer(d[key]) for key in list(d)),
    "text": lambda layer, d: layer(d["x"]) if str(d) else None,
    "merged": lambda layer, d: layer({**{"y": 1}, **d}["x"]),
    "update": lambda layer, d: layer((lambda own: own.update(d) or own)({})["x"]),
    "pytree": lambda layer, d: layer(sum(_pytree.tree_leaves(d))),
    "another class": lambda layer, d: layer(d["x"]) + (d["z"] if type(d) is dict else 0),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whoever_looks_at_all_of_a_container_reads_all_of_it(name):
    graph = capture(Runs(WHOLE[name]).eval(), (two(),))
    with pytest.raises(TypeError, match=r"\['z'\] missing"):
        graph.replay({"x": rows()})
    if name != "another class":
        with pytest.raises(TypeError, match=r"\['more'\] not in the example"):
            graph.replay(two(more=rows()))


COPIES = {
    "asdict": lambda layer, d: layer(dataclasses.asdict(d)["x"]),
    "astuple": lambda layer, d: layer(dataclasses.astuple(d)[0]),
    "deepcopy": lambda layer, d: layer(copy.deepcopy(d).x),
    "written": lambda layer, d: layer(copy.deepcopy(d.x).mul_(2)) + layer(d.x),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_deep_copy_in_a_forward_copies_tensors(name):
    net = Runs(COPIES[name]).eval()
    graph = capture(net, (Frozen(rows(), 1),))
    other = Frozen(rows(5), 1)
    assert torch.equal(graph.replay(other), net(other))


def test_a_mapping_of_another_class_is_read_whole():
    graph = capture(Runs(lambda layer, d: layer(d["x"])).eval(), (UserDict(two()),))
    with pytest.raises(TypeError, match=r"\['z'\] missing"):
        graph.replay({"x": rows()})


class Decides(nn.Module):
    def forward(self, d):
        return d["x"] * 2 if d["x"].sum() > 100 else d["z"]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.decides, self.layer = Decides(), nn.Linear(4, 4)

    def forward(self, d, other):
        return self.layer(self.decides(d)) + other["x"]


def test_a_module_that_is_one_node_reads_what_it_gets():
    net = Mixed().eval()
    graph = capture(net, (two(unread=rows()), example()))
    assert "decides" in graph.opaque
    assert graph.input_names == ["d['x']", "d['z']", "d['unread']", "other['x']"]
    large = {"x": rows() + 100, "z": rows(), "unread": rows()}
    other = {"x": rows()}
    assert torch.equal(graph.replay(large, other), net(large, other))
    with pytest.raises(TypeError, match=r"\['unread'\] missing"):
        graph.replay(two(), other)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.vfe, self.neck = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, batch_dict):
        batch_dict["features"] = self.vfe(batch_dict["x"]).relu()
        batch_dict.update({"boxes": self.neck(batch_dict["features"])})
        return batch_dict


def test_an_example_that_was_used_by_a_float_run():
    net, used = Writes().eval(), two(frame_id="a")
    net(used)
    graph = capture(net, (used,))
    assert graph.input_names == ["batch_dict['x']"]
    assert same(graph.replay(frame()), net(frame()))
    again = capture(net, (used,))
    assert again is graph
    assert graph.of_copy(copy.deepcopy(net)).members == graph.members


def test_the_run_that_notes_leaves_model_and_example_alone():
    net, given = Writes().train(), example()
    graph = capture(net, (given,))
    assert net.training
    assert [*given] == [*example()]
    assert type(given) is dict
    assert not net.vfe._forward_pre_hooks
    assert graph.members.required(((given,), {})) == (({"x": given["x"]},), {})


def test_without_the_check_all_members_are_required():
    graph = capture(Writes().eval(), ({"x": rows(), "gt": rows()},), check=False)
    assert graph.members == ReadMembers()


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    name: Any = None


def test_frozen_dataclasses_with_slots():
    net = Runs(lambda layer, d: (layer(d.x), d)).eval()
    graph = capture(net, (Frozen(rows(), "a"),))
    other = Frozen(rows(5), Calibration())
    found, handed = graph.replay(other)
    assert torch.equal(found, net(other)[0])
    assert handed.name is other.name
    assert replace(other) is not other
