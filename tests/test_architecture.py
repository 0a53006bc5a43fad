"""The folder tree says what the design says: imports point down, and each package stands alone."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MEMBERS = sorted(p.parent for p in ROOT.glob("*/*/pyproject.toml"))
MAY_IMPORT = {
    "bevquant_sparse": set(),
    "bevquant_graph": {"bevquant_sparse"},
    "bevquant_fusion": {"bevquant_sparse", "bevquant_graph"},
    "bevquant_quantizers": {"bevquant_sparse", "bevquant_graph"},
    "bevquant_qnn": {"bevquant_sparse", "bevquant_graph", "bevquant_fusion", "bevquant_quantizers"},
    "bevquant_int8sim": {
        "bevquant_sparse",
        "bevquant_graph",
        "bevquant_fusion",
        "bevquant_quantizers",
        "bevquant_qnn",
    },
    "bevquant_export": {
        "bevquant_sparse",
        "bevquant_graph",
        "bevquant_fusion",
        "bevquant_quantizers",
        "bevquant_qnn",
        "bevquant_int8sim",
    },
    "bevquant_hybrid": {
        "bevquant_sparse",
        "bevquant_graph",
        "bevquant_fusion",
        "bevquant_quantizers",
        "bevquant_qnn",
        "bevquant_int8sim",
    },
    "bevquant_hybrid_tools": {
        "bevquant_graph",
        "bevquant_quantizers",
        "bevquant_qnn",
        "bevquant_hybrid",
    },
    "bev_data": {"bevquant_sparse", "bevquant_quantizers"},
    "bev_scenes": {"bevquant_sparse", "bevquant_quantizers", "bev_data"},
    "bevfusion": {
        "bevquant_sparse",
        "bevquant_graph",
        "bevquant_fusion",
        "bevquant_quantizers",
        "bevquant_qnn",
        "bevquant_int8sim",
        "bevquant_export",
        "bev_data",
    },
    "bevfusion_quant": {
        "bevfusion",
        "bev_data",
        "bev_scenes",
        "bevquant_sparse",
        "bevquant_graph",
        "bevquant_fusion",
        "bevquant_quantizers",
        "bevquant_qnn",
        "bevquant_int8sim",
        "bevquant_export",
        "bevquant_hybrid",
        "bevquant_hybrid_tools",
    },
}
LATE = {"spconv", "pytorch_quantization", "modelopt", "onnx", "onnxruntime", "nuscenes"}
# Comes with torch's compiler, whose import takes as long as torch's own: where a model is captured.
LATE |= {"sympy"}


def package_of(member: Path) -> str:
    (package,) = [p.name for p in (member / "src").iterdir() if (p / "__init__.py").exists()]
    return package


@cache
def statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Every import of a file, wherever it stands."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports(path: Path) -> set[str]:
    """Top-level names that a file imports."""
    names: set[str] = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)
def test_imports_point_down(member: Path) -> None:
    package = package_of(member)
    for path in (member / "src").rglob("*.py"):
        ours = {n for n in imports(path) if n.startswith("bev")}
        assert ours - {package} <= MAY_IMPORT[package], path


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)
def test_declared_dependencies_are_those_imported(member: Path) -> None:
    project = tomllib.loads((member / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[><=! ]", d)[0].replace("-", "_") for d in project["dependencies"]}
    sources = (member / "src").rglob("*.py")
    imported = set().union(*(imports(p) for p in sources))
    package = package_of(member)
    assert {n for n in imported if n in MAY_IMPORT} - {package} <= declared


IMPORTED = """
import atexit, gc, importlib, json, os, sys
gc.disable(); atexit.register(gc.freeze)  # a quarter of what imports take
import torch  # once for all of them

for package in sys.argv[1:]:
    if not os.fork():
        module = importlib.import_module(package)
        modules = sorted({m.split(".")[0] for m in sys.modules})
        unknown = [n for n in module.__all__ if not hasattr(module, n)]
        print(json.dumps([package, modules, unknown]), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, tuple[set[str], list[str]]]:
    """Package to what a process has imported that imports it, and to public names it lacks."""
    command = [sys.executable, "-c", IMPORTED, *map(package_of, MEMBERS)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = map(json.loads, lines.splitlines())
    return {package: ({*modules}, unknown) for package, modules, unknown in found}


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)
def test_importing_a_package_imports_no_optional_library(
    member: Path, imported: dict[str, tuple[set[str], list[str]]]
) -> None:
    package = package_of(member)
    modules, _ = imported[package]
    assert package in modules
    assert not LATE & modules


def test_no_drawer_modules() -> None:
    drawers = {"core", "common", "utils", "helpers", "misc"}
    named = [p for m in MEMBERS for p in m.rglob("*.py") if p.stem.strip("_") in drawers]
    assert named == []


def test_public_names_are_listed_and_exist(imported: dict[str, tuple[set[str], list[str]]]) -> None:
    assert {package: unknown for package, (_, unknown) in imported.items()} == {
        package_of(member): [] for member in MEMBERS
    }


def module_imports(source: Path) -> dict[str, set[str]]:
    """Which modules of a package each of them names in an import, wherever the import stands."""
    paths = {
        ".".join(p.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): p
        for p in source.rglob("*.py")
    }
    named: dict[str, set[str]] = {}
    for module, path in paths.items():
        parts = module.split(".")
        package = parts if path.stem == "__init__" else parts[:-1]
        found: set[str] = set()
        for node in statements(path):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            else:
                above = package[: len(package) + 1 - node.level] if node.level else []
                home = ".".join([*above, *([node.module] if node.module else [])])
                for alias in node.names:
                    whole = f"{home}.{alias.name}"
                    found.add(whole if whole in paths else home)
        named[module] = found & paths.keys() - {module}
    return named


def circles(named: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that reach each other, largest first."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            new = named[left.pop()] - seen
            seen |= new
            left += new
        return seen

    reach = {module: reached(module) for module in named}
    found = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in named
        if module in reach[module]
    }
    return sorted(map(set, found), key=len, reverse=True)


def test_relative_imports_are_read(tmp_path: Path) -> None:
    files = {"a/__init__": "from .b import c", "a/b": "from . import d", "a/d": "from .b import e"}
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert module_imports(tmp_path) == {"a": {"a.b"}, "a.b": {"a.d"}, "a.d": {"a.b"}}


def test_circles_are_found() -> None:
    named = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "f"}, "f": {"e"}}
    assert sorted(map(sorted, circles(named))) == [["b", "c"], ["e", "f"]]


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)
def test_no_circle_between_sub_packages(member: Path) -> None:
    """Folders of a package are layers; modules beside them may be below, between or above."""
    package, source = package_of(member), member / "src"
    between: dict[str, set[str]] = {}
    for module, found in module_imports(source).items():
        folder, *others = (".".join(name.split(".")[:2]) for name in (module, *found))
        between.setdefault(folder, set()).update(set(others) - {folder})
    folders = {f for f in between if (source / f.replace(".", "/")).is_dir()} - {package}
    assert circles({folder: between[folder] & folders for folder in folders}) == []


def test_layers_of_the_app() -> None:
    (source,) = [m / "src" for m in MEMBERS if package_of(m) == "bevfusion_quant"]
    named = module_imports(source)
    assert named["bevfusion_quant"] == {"bevfusion_quant._errors", "bevfusion_quant._version"}
    run = {m: found for m, found in named.items() if m.split(".")[1:2] == ["run"]}
    reached = {".".join(n.split(".")[:2]) for found in run.values() for n in found}
    assert reached <= {f"bevfusion_quant.{name}" for name in ("run", "_errors", "ranks")}


@pytest.mark.parametrize("member", MEMBERS, ids=lambda m: m.name)
def test_no_import_circle(member: Path) -> None:
    assert circles(module_imports(member / "src")) == []
