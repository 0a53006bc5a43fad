"""Targets by name: aliases, a whole one from outside, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import helper
from torch import nn

from bevquant_export import _target, find_target, lint_onnx, register_target, target_names
from bevquant_export.lint import Finding, Rule, main
from bevquant_export.targets import LintFile, Target
from bevquant_quantizers import plugins

NO_SOFTMAX = Rule("TOY001", "error", "no Softmax", "leave it out", ("toy",))


class Toy(Target):
    """Writes one Relu for any model."""

    name, title, aliases = "toy", "A toy", ("plaything",)
    rules = (NO_SOFTMAX,)
    domains = frozenset({"toy"})
    unverified = ("it runs nowhere",)
    command = "play {path.name}"

    def write(self, model: nn.Module, args: Any, path: Path, **options: Any) -> Any:
        onnx.save(net("Relu"), path)
        return path

    def lint(self, file: LintFile) -> Iterator[Finding]:
        for node in file.graphs[0].nodes:
            if node.op == "Softmax":
                yield NO_SOFTMAX.found(node.name, "it is one")

    def compare(self, made: Any, model: nn.Module, args: Any) -> Sequence[Any]:
        return ()


def net(op: str, domain: str = "") -> onnx.ModelProto:
    ports = [helper.make_tensor_value_info(name, 1, [1, 3]) for name in "xy"]
    node = helper.make_node(op, ["x"], ["y"], "n", domain=domain)
    opsets = [
        helper.make_opsetid(d, v) for d, v in {"": 13, domain: 13 if not domain else 1}.items()
    ]
    graph = helper.make_graph([node], "g", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def only(entry: EntryPoint) -> Callable[..., list[EntryPoint]]:
    """What `entry_points` answers where one target alone is installed."""
    return lambda group: [entry] if group == entry.group else []


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Toy:
    monkeypatch.setattr(_target, "_added", {})
    toy = Toy()
    register_target(toy)
    return toy


def test_names_and_aliases() -> None:
    assert find_target("tensorrt") is find_target("tensorrt10")
    assert find_target("tensorrt11").name == "tensorrt11"
    own = ("libspconv", "portable", "tensorrt10", "onnxruntime", "openvino", "horizon")
    assert {*own, "tensorrt"} <= set(target_names())
    with pytest.raises(ValueError, match="target 'tensor': expected one of libspconv, "):
        find_target("tensor")


def test_a_target_from_outside_is_linted_by_name(registered: Toy, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    registered.write(nn.ReLU(), torch.ones(1, 3), path)
    assert lint_onnx(path, "plaything") == []
    assert registered.commands(path) == ("play net.onnx",)
    onnx.save(net("Softmax"), path)
    assert [f.id for f in lint_onnx(path, "toy")] == ["TOY001"]
    assert lint_onnx(path, "onnxruntime") == []


def test_its_own_operators_are_known_to_it_alone(registered: Toy, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(net("Spin", "toy"), path)
    assert lint_onnx(path, "toy") == []
    assert [f.id for f in lint_onnx(path, "onnxruntime")] == ["ONX015"]


def test_the_command_line_knows_it(
    registered: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(net("Softmax"), tmp_path / "net.onnx")
    assert main([str(tmp_path / "net.onnx"), "--target", "toy"]) == 1
    assert "TOY001" in capsys.readouterr().out
    main(["--rules", "--target", "toy"])
    printed = capsys.readouterr().out
    assert "TOY001" in printed
    assert "ORT001" not in printed


def test_a_name_is_taken_once(registered: Toy) -> None:
    other = type("Other", (Toy,), {"name": "other", "aliases": ("tensorrt",)})()
    with pytest.raises(ValueError, match="target 'tensorrt': two targets have this name"):
        register_target(other)
    assert "other" not in target_names()


def test_a_broken_entry_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("broken", "no_such_module_at_all:TARGET", "bevquant.targets")
    monkeypatch.setattr(plugins, "entry_points", only(entry))
    _target._loaded.cache_clear()
    with pytest.raises(ImportError, match="target 'broken': its entry point no_such_module_at_all"):
        find_target("toy")
    _target._loaded.cache_clear()


def test_an_entry_point_adds_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("toy", f"{__name__}:TOY", "bevquant.targets")
    monkeypatch.setattr(plugins, "entry_points", only(entry))
    monkeypatch.setattr(EntryPoint, "load", lambda self: Toy())
    _target._loaded.cache_clear()
    assert find_target("plaything").title == "A toy"
    _target._loaded.cache_clear()


def test_an_entry_point_bears_a_name_of_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("game", f"{__name__}:TOY", "bevquant.targets")
    monkeypatch.setattr(plugins, "entry_points", only(entry))
    monkeypatch.setattr(EntryPoint, "load", lambda self: Toy())
    _target._loaded.cache_clear()
    with pytest.raises(ValueError, match=r"is called 'game', which is no name of it; .* toy"):
        find_target("toy")
    _target._loaded.cache_clear()


def test_every_target_says_how_it_is_built(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(net("Relu"), path)
    ten = find_target("tensorrt10").commands(path)[0]
    eleven = find_target("tensorrt11").commands(path)[0]
    assert "--int8" in ten
    assert "--fp16" in ten
    # Version 11 has no such flags, and takes the bindings' types from the file.
    assert eleven == "trtexec --onnx=net.onnx --saveEngine=net.plan"
    for name in ("tensorrt10", "tensorrt11", "horizon", "libspconv"):
        assert find_target(name).unverified
    assert find_target("onnxruntime").unverified == ()
