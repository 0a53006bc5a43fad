"""Every way to build, test and show bevquant: `nox -l` lists the sessions."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
MEMBERS = {p.parent.name: p.parent for p in sorted(ROOT.glob("*/*/pyproject.toml"))}
BUILD_TOOLS = ["hatchling", "editables"]

nox.options.default_venv_backend = "uv|virtualenv"
nox.options.sessions = ["tests"]
nox.options.reuse_existing_virtualenvs = True


def project(member: str) -> dict[str, Any]:
    """The [project] table of a member."""
    return tomllib.loads((MEMBERS[member] / "pyproject.toml").read_text())["project"]


def local_dependencies(member: str) -> list[str]:
    """Members that `member` needs, each after those it needs itself."""
    by_distribution = {project(m)["name"]: m for m in MEMBERS}
    ordered: list[str] = []
    for requirement in project(member)["dependencies"]:
        name = requirement.split("[")[0].split(">")[0].split("=")[0].strip()
        if name in by_distribution:
            needed = by_distribution[name]
            ordered += [m for m in [*local_dependencies(needed), needed] if m not in ordered]
    return ordered


def in_order(members: dict[str, str]) -> dict[str, str]:
    """The same members and extras, dependencies first."""
    ordered: dict[str, str] = {}
    for member, extras in members.items():
        for needed in local_dependencies(member):
            ordered.setdefault(needed, members.get(needed, ""))
        ordered.setdefault(member, extras)
    return ordered


def environment() -> dict[str, str]:
    """Settings that uv needs beside the ones it reads itself."""
    # uv does not read pip's variables; a wheel that lies on disk is found through this one.
    found = os.environ.get("PIP_FIND_LINKS")
    return {"UV_FIND_LINKS": found} if found else {}


def install(session: nox.Session, members: dict[str, str], *others: str) -> None:
    """Install members (name → extras), editable and dependencies first.

    One call names them all: no index knows them, so none may be asked for them.
    """
    pinned = ["-c", str(ROOT / "constraints.txt")]
    session.install(*pinned, "torch", *BUILD_TOOLS, *others, env=environment())
    paths = []
    for member, extras in in_order(members).items():
        paths += ["-e", f"{MEMBERS[member]}[{extras}]" if extras else str(MEMBERS[member])]
    if paths:
        session.install(*pinned, "--no-build-isolation", *paths, env=environment())


def everything() -> dict[str, str]:
    """All members with what their tests and their speed need."""
    extras = {
        "sparse": "numba,cpu,test",
        "quantizers": "numba,progress,test",
        "int8sim": "numba,cpu,test",
        "hybrid": "onnx,test",
    }
    return {m: extras.get(m, "cpu,test") for m in MEMBERS}


def test_folders(*members: str) -> list[str]:
    """Unit tests, and the sources for their doctests."""
    paths = [MEMBERS[m] for m in members or MEMBERS]
    return [str(p / name) for p in paths for name in ("tests", "src")]


def pytest(session: nox.Session, *folders: str) -> None:
    """Run tests on two processes, whose waiting threads leave the cores to each other."""
    chosen = session.posargs or folders
    session.run("pytest", "-n", "2", *chosen, env={"OMP_WAIT_POLICY": "PASSIVE"})


@nox.session
def demo(session: nox.Session) -> None:
    """The whole of BEVFusion on a street with six cameras; needs no data and no GPU."""
    fast = {"sparse": "numba,cpu", "quantizers": "numba", "int8sim": "numba"}
    install(session, {**fast, "bevfusion_quant": "cpu,export"})
    session.run("bevfusion-quant", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Doctests, unit, property, parity and end-to-end tests of every package together."""
    install(session, everything(), "pytorch-quantization")
    pytest(session, *test_folders(), "tests")


@nox.session
@nox.parametrize("package", [nox.param(m, id=m, tags=[m]) for m in MEMBERS])
def isolated(session: nox.Session, package: str) -> None:
    """One package with its declared dependencies alone passes its own tests."""
    # nuscenes-devkit asks for numpy below 2: here alone the app meets that numpy.
    extras = "cpu,nuscenes,test" if package == "bevfusion_quant" else "test"
    install(session, {package: extras})
    pytest(session, *test_folders(package))


@nox.session
def lint(session: nox.Session) -> None:
    """Style (ruff) and types (mypy, strict)."""
    install(session, everything(), "ruff", "mypy")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    for folder in MEMBERS.values():
        session.run("mypy", str(folder / "src"))


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every wheel, install the wheels alone, run the cross-package tests against them."""
    install(session, {}, "build", "pytest", "pytest-xdist", "pytest-randomly")
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    for member in in_order(dict.fromkeys(MEMBERS, "")):
        session.run(
            "python", "-m", "build", "--no-isolation", "--outdir", str(dist), str(MEMBERS[member])
        )
    built = [str(wheel) for wheel in sorted(dist.glob("*.whl"))]
    # The extras that examples of the READMEs use.
    session.install(
        "-c", "constraints.txt", *built, "spconv", "onnxruntime", "onnxscript", env=environment()
    )
    session.run("pytest", "tests", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Measured claims: each script prints ratios against named peers of the same run."""
    install(session, everything(), "pytorch-quantization", "nvidia-modelopt", "huggingface_hub")
    for script in session.posargs or sorted(str(p) for p in (ROOT / "benchmarks").glob("[!_]*.py")):
        session.run("python", script)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Over 100,000 damaged files and bad arguments, for every reader and every kernel; a table."""
    install(session, everything())
    session.run("python", "tests/fuzz.py", *session.posargs, env={"OMP_WAIT_POLICY": "PASSIVE"})
