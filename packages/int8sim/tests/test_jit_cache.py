"""numba's cache on disk: what its key covers, and that a bad folder costs nothing but time."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="the numba extra is not installed")

from bevquant_int8sim._compiled import jit
from bevquant_sparse.runtime import jit as runtime_jit

MODULE = """
import importlib.util
import sys

if sys.argv[1] == "full":
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # no file may grow beyond 100 bytes

# The module alone: importing torch would take longer than all the rest.
spec = importlib.util.spec_from_file_location("jit", sys.argv[2])
jit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(jit)


@jit.compiled("int64(int64)")
def doubled(x):
    return 2 * x


print(doubled(21), doubled.stats.cache_hits if doubled.stats.cache_path else None)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the module in a process of its own with that cache folder; what it prints."""
    folder = tmp_path_factory.mktemp("module")
    script = folder / "doubling.py"
    script.write_text(MODULE)
    # numba's other places for a cache: beside the source, and the user's own.
    (folder / "__pycache__").write_text("not a folder")
    environment = os.environ | {"XDG_CACHE_HOME": str(script), "HOME": str(script)}

    def call(cache, mode="plain"):
        # -B: bytecode written under the limit would be cut off, and all others would read it.
        done = subprocess.run(
            [sys.executable, "-B", str(script), mode, runtime_jit.__file__],
            env=environment | {"NUMBA_CACHE_DIR": str(cache)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return call


@pytest.fixture(scope="module")
def compiled(run, tmp_path_factory):
    """The cache that a first run leaves."""
    cache = tmp_path_factory.mktemp("cache")
    run(cache)
    return cache


@pytest.fixture
def cache(compiled, tmp_path):
    """A copy of it, with its times."""
    return shutil.copytree(compiled, tmp_path / "cache")


def files(folder, ending):
    return sorted(folder.rglob(f"*.{ending}"))


def test_the_next_process_reads_what_this_one_compiled(run, cache):
    stamps = [f.stat().st_mtime_ns for f in files(cache, "nbc")]
    assert stamps
    assert run(cache)[0] == "42"
    assert [f.stat().st_mtime_ns for f in files(cache, "nbc")] == stamps


def test_a_folder_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").touch()
    assert run(tmp_path / "file" / "below a file") == ["42", "None"]


@pytest.mark.skipif(sys.platform == "win32", reason="limits of file sizes are POSIX")
def test_a_full_disk(run, tmp_path):
    assert run(tmp_path / "cache", "full")[0] == "42"


@pytest.mark.parametrize("ending", ["nbc", "nbi"])
def test_damaged_files(run, cache, ending):
    (file,) = files(cache, ending)
    file.write_bytes(file.read_bytes()[:40])
    assert run(cache)[0] == "42"


def test_the_key_covers_every_module_that_generates_code(tmp_path, monkeypatch):
    folder = Path(jit.__file__).parent
    for file in folder.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    version = jit._version.__wrapped__
    before = version()
    generators = reachable("tile_loops", folder) | {"jit", "kernels"}
    assert len(generators) > 5
    for name in sorted(generators):
        source = (tmp_path / f"{name}.py").read_text()
        (tmp_path / f"{name}.py").write_text(source + "# changed\n")
        assert version() != before, f"{name} does not count"
        (tmp_path / f"{name}.py").write_text(source)
    assert version() == before


def reachable(module, folder):
    """The package's modules that `module` imports, and those that these import."""
    found, left = set(), [module]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "bevquant_int8sim._compiled."
            ):
                left.append(node.module.rpartition(".")[2])
    return found
