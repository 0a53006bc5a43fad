"""The distribution of all packages, their one version, and what the pages say about installing."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PROJECTS = {
    path.parent.name: tomllib.loads(path.read_text())["project"]
    for path in sorted(ROOT.glob("*/*/pyproject.toml"))
}
OURS = {project["name"]: member for member, project in PROJECTS.items()}


def name_of(requirement: str) -> str:
    return re.split(r"[\[><=! ]", requirement)[0]


def siblings(member: str) -> set[str]:
    """Packages of the repository that `member` needs, and those that these need."""
    direct = {OURS[n] for n in map(name_of, PROJECTS[member]["dependencies"]) if n in OURS}
    return direct.union(*(siblings(each) for each in direct))


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """Metadata of the distribution `bevquant`."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.metadata_of(ROOT)


def test_whole_needs_no_package_of_ours_from_an_index(whole: dict[str, Any]) -> None:
    extras = whole["optional-dependencies"].values()
    asked = {name_of(r) for rs in (whole["dependencies"], *extras) for r in rs}
    assert not asked & set(OURS)
    needed = {name_of(r) for p in PROJECTS.values() for r in p["dependencies"]}
    assert needed - set(OURS) <= {name_of(r) for r in whole["dependencies"]}


def test_whole_has_every_command_and_entry_point(whole: dict[str, Any]) -> None:
    for project in PROJECTS.values():
        assert project.get("scripts", {}).items() <= whole["scripts"].items()
        for group, entries in project.get("entry-points", {}).items():
            assert entries.items() <= whole["entry-points"][group].items()


def test_whole_holds_every_package_and_uv_finds_each() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    held = settings["hatch"]["build"]["targets"]["wheel"]["packages"]
    found = ROOT.glob("*/*/src/*/__init__.py")
    assert sorted(held) == sorted(p.parent.relative_to(ROOT).as_posix() for p in found)
    assert settings["uv"]["sources"] == {name: {"workspace": True} for name in OURS}


def test_every_package_has_the_same_version() -> None:
    found = set()
    for member in ROOT.glob("*/*/pyproject.toml"):
        settings = tomllib.loads(member.read_text())["tool"]["hatch"]["version"]
        text = (member.parent / settings["path"]).read_text()
        found.add(re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE).group(1))
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert found == {cited.group(1)}


def test_page_names_the_siblings_that_pip_needs() -> None:
    page = (ROOT / "docs/install.md").read_text()
    section = page[page.index("| package | siblings |") :].split("\n\n")[0].splitlines()[2:]
    said = {}
    for row in section:
        members, needed = (cell.strip() for cell in row.strip("|").split("|"))
        said |= {key: set(needed.replace("none", "").split()) for key in members.split(", ")}
    assert said == {member: siblings(member) for member in said}
    assert set(PROJECTS) - set(said) == {"bev_scenes", "bevfusion", "bevfusion_quant"}


def test_nobody_is_told_to_ask_an_index_for_our_names() -> None:
    asks = re.compile(rf"pip install (?:[^\n#`]*['\" ])?(?:{'|'.join(OURS)})(?![\w.-])(?! @)")
    tried = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/*/README.md")]
    tried += ROOT.glob("*/*/src/**/*.py")
    assert [p for p in tried if asks.search(p.read_text(encoding="utf-8"))] == []
