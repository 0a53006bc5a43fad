"""Every way to build, test and show bevquant: `nox -l` lists the sessions."""

from __future__ import annotations

import os
import shutil
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
MEMBERS = {p.parent.name: p.parent for p in sorted(ROOT.glob("*/*/pyproject.toml"))}
BUILD_TOOLS = ["hatchling", "editables"]
# A worker that a test ends is replaced, and the next one skips that test: tests/limits.py.
WORKERS = ["-n", "2", "--max-worker-restart", "8"]

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
    link_compiled(session)


def link_compiled(session: nox.Session) -> None:
    """Link what another environment has compiled of Python's modules: 6 s of a session's CPU time.

    uv links one file into every environment, so each module has the date and the size in the head
    of its compiled form. Python compares them and compiles anew where they differ.
    """
    for own in Path(session.virtualenv.location).absolute().glob("lib/python*/site-packages"):
        for name in ("isolated-bevfusion_quant", "tests"):  # they have most packages
            other = own.parents[3] / name / own.relative_to(own.parents[2])
            if other != own and (other / "torch" / "__pycache__").is_dir():
                with suppress(OSError):  # the other one is changed just now
                    link_pycache(other, own)
                return


def link_pycache(other: Path, own: Path) -> None:
    """Link the compiled modules below one site-packages to another one, of packages that it has."""
    for folder in other.rglob("__pycache__"):
        to = own / folder.relative_to(other)
        if to.parent.is_dir():
            to.mkdir(exist_ok=True)
            for file in set(os.listdir(folder)) - set(os.listdir(to)):
                # Half-written, it has its name in a moment; some file systems have no links.
                with suppress(OSError):
                    os.link(folder / file, to / file)


def everything() -> dict[str, str]:
    """All members with what their tests and their speed need."""
    extras = {
        "sparse": "numba,cpu,test",
        "quantizers": "numba,progress,test",
        "int8sim": "numba,cpu,test",
        "hybrid": "onnx,test",
        "hybrid_tools": "test",
        "bev_data": "test",
        "bev_scenes": "test",
    }
    return {m: extras.get(m, "cpu,test") for m in MEMBERS}


def test_folders(*members: str) -> list[str]:
    """Unit tests, and the sources for their doctests."""
    paths = [MEMBERS[m] for m in members or MEMBERS]
    return [str(p / name) for p in paths for name in ("tests", "src")]


def pytest(session: nox.Session, *folders: str, **settings: str) -> None:
    """Run tests on two processes, whose waiting threads leave the cores to each other.

    Tests of a file run in one process: what they share, such as a run of the app, is made once.

    Args:
        session: Its `posargs` are handed on.
        folders: Run where these name no file; options among them always count.
        settings: Of the environment.
    """
    named = any(Path(argument.split("::")[0]).exists() for argument in session.posargs)
    chosen = [*session.posargs, *(f for f in folders if f.startswith("--") or not named)]
    # Compiled modules are kept: tests start many processes, each of which imports torch.
    # Freed maps are kept for the next layer, as in the app's own process.
    malloc = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
    env = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "", **malloc, **settings}
    by_file = ["--dist", "loadfile", "--no-loadscope-reorder"]  # in the order of conftest.py
    session.run("pytest", *WORKERS, *by_file, *chosen, env=env)


@nox.session
def demo(session: nox.Session) -> None:
    """A trained BEVFusion on a street with six cameras, quantized; needs no data and no GPU."""
    fast = {"sparse": "numba,cpu", "quantizers": "numba", "int8sim": "numba"}
    install(session, {**fast, "bevfusion_quant": "cpu,export"})
    session.run("bevfusion-quant", "demo", *session.posargs)


@nox.session
def pictures(session: nox.Session) -> None:
    """Draw docs/demo_page.png anew: the top of the demo's page, by Chromium or Chrome."""
    install(session, {"sparse": "numba,cpu", "bevfusion_quant": "cpu,export"})
    browsers = ("chromium", "chromium-browser", "google-chrome", "chrome")
    browser = next((found for name in browsers if (found := shutil.which(name))), None)
    if browser is None:
        session.error(f"none of {', '.join(browsers)} is on the path")
    page = Path(session.create_tmp()).absolute() / "runs" / "demo" / "report.html"
    session.chdir(page.parents[2])
    session.run("bevfusion-quant", "demo", "--name", "demo", "--overwrite")
    session.run(
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--window-size=1200,1640", f"--screenshot={ROOT / 'docs' / 'demo_page.png'}",
        page.as_uri(),
        external=True,
    )  # fmt: skip


@nox.session
def tests(session: nox.Session) -> None:
    """Doctests, unit, property, parity and end-to-end tests of every package together.

    Each of the two processes has half of the cores: threads that take turns on a core cost 6 to 9 %
    of the CPU time (Intel Xeon). On two cores that is one thread, but in the tests that are about
    threads, which set their own number; whole runs of the app on all cores are what `isolated` has.
    """
    install(session, everything(), "pytorch-quantization")
    share = str(max(1, (os.cpu_count() or 1) // 2))
    # Not each member's own folders: conftests of what is named here are imported, with torch, by
    # the process that hands tests out too, before the two others start.
    pytest(
        session, *sorted({p.parent.name for p in MEMBERS.values()}), "tests", OMP_NUM_THREADS=share
    )


@nox.session
@nox.parametrize("package", [nox.param(m, id=m, tags=[m]) for m in MEMBERS])
def isolated(session: nox.Session, package: str) -> None:
    """One package with its declared dependencies alone passes its own tests.

    `-- --first-cases` runs one case of each test: enough to see that nothing is missing. With
    `--files 12` it is one test of twelve files, others in each run, as their order is random.
    """
    # nuscenes-devkit asks for numpy below 2: here alone the app meets that numpy.
    extras = {"bevfusion_quant": "cpu,nuscenes,test", "bevfusion": "cpu,test"}.get(package, "test")
    install(session, {package: extras})
    # Files for CPUs without VNNI, which `tests` writes only on such a CPU.
    settings = {"BEVQUANT_CPU": "any"} if package == "export" else {}
    pytest(session, *test_folders(package), **settings)


# Tests of sparse models, whose classes are spconv's or the stand-in's.
SPARSE_TESTS = [
    "packages/sparse/tests",
    "packages/graph/tests/test_layer_class.py",
    "packages/fusion/tests/test_fuse_model_sparse.py",
    "packages/fusion/tests/test_sparse_modules.py",
    "packages/qnn/tests/test_sparse_convolution.py",
    "packages/qnn/tests/test_sparse_model.py",
    "packages/int8sim/tests/test_model_sparse.py",
    "packages/int8sim/tests/test_sparse_idioms.py",
    "packages/export/tests/sparse",
    "packages/bevfusion/tests/test_checkpoint.py",
    "packages/bevfusion/tests/test_model.py",
    "tests/test_exported_programs.py",
    "tests/test_integer_lidar.py",
    "tests/test_lidar_slice.py",
]


@nox.session
def nospconv(session: nox.Session) -> None:
    """Sparse models where spconv is not installed: one case of each test, in three minutes.

    `bevquant_sparse.use_standin()` takes spconv's place. Tests that compare with spconv's own
    kernels are skipped. `-- packages/qnn/tests` runs every case of other tests.
    """
    members = {m: extras.replace("cpu,", "") for m, extras in everything().items()}
    install(session, members)
    short = [] if session.posargs else ["--first-cases"]
    pytest(session, *short, *SPARSE_TESTS, "--standin")


# What may change the bits of a result: torch's kernels, the BLAS, oneDNN, numba's code, threads.
# Four of them in nine machines, each pair of values on one (an orthogonal array); 1 to 4 threads go
# round. MKL's own switch does nothing beside `MKL_CBWR`, so it has machines of its own. numba knows
# no CPU named "host", and keeps the features of the one at hand under any name but "generic".
_NUMBA: list[dict[str, str]] = [
    {},
    {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+popcnt,+sse4.2",
    },
    {"NUMBA_CPU_NAME": "generic"},
]
COVERING: list[dict[str, str]] = [
    {
        "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512")[i],
        "MKL_CBWR": ("COMPATIBLE", "AVX2", "AVX512")[j],
        "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX512_CORE", "AVX2")[(i + j) % 3],
        "OMP_NUM_THREADS": str(1 + (i + j) % 4),
        **_NUMBA[(i + 2 * j) % 3],
    }
    for i in range(3)
    for j in range(3)
]
SHORT_MACHINES = [COVERING[0], COVERING[4]]  # all as old as can be, and all AVX2; numba's own code
MACHINES = [
    *COVERING,
    *({"MKL_ENABLE_INSTRUCTIONS": name} for name in ("SSE4_2", "AVX2", "AVX512")),
]
# The quick ones among the tests marked `bits`, for the short form.
SHORT_TESTS = [
    "packages/sparse/tests/test_conv_determinism.py",
    "packages/sparse/tests/test_pool.py",
    "packages/quantizers/tests/test_fake_quant.py",
    "packages/quantizers/tests/test_stream.py",
    "packages/int8sim/tests/test_dense_conv.py",
    "packages/int8sim/tests/test_sparse_conv.py",
]


def lacks(settings: dict[str, str]) -> bool:
    """Whether the CPU at hand lacks the instructions that the settings force."""
    forced = {settings.get(name, "").lower() for name in ("ATEN_CPU_CAPABILITY", "MKL_CBWR")}
    file = Path("/proc/cpuinfo")
    flags = set(file.read_text().split()) if file.exists() else set()
    return ("avx512" in forced and "avx512f" not in flags) or (
        "avx2" in forced and "avx2" not in flags
    )


@nox.session
def portability(session: nox.Session) -> None:
    """Tests of equal bits, once for each kind of machine that this one can pretend to be.

    Twelve machines, in which each two values of two settings meet; what fails on one is looked for
    by setting one variable at a time. About two minutes of one core each.

    `-- short` runs two combined machines and the quick tests, in a minute on two cores. The
    tests themselves go through 1 to 4 threads and every address from 4 to 64 bytes. A machine
    with instructions that this CPU lacks is passed over, with a line that says so.

    MKL obeys `MKL_ENABLE_INSTRUCTIONS` on Intel CPUs only: on AMD ones (tried on one) the
    results of its products did not change with it, while `MKL_CBWR` did change them.
    """
    short = "short" in session.posargs
    install(session, everything(), *([] if short else ["pytorch-quantization"]))
    folders = SHORT_TESTS if short else [f for f in test_folders() if f.endswith("tests")]
    for settings in SHORT_MACHINES if short else MACHINES:
        name = " ".join(f"{key}={value}" for key, value in settings.items())
        if lacks(settings):
            session.warn(f"passed over, this CPU lacks the instructions: {name}")
            continue
        session.log(name)
        env = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONDONTWRITEBYTECODE": "", **settings}
        if cpu := settings.get("NUMBA_CPU_NAME"):
            # One folder a CPU name: numba's cache holds the name in its key, this holds the rest.
            # The CPU at hand has its code beside the sources, from other sessions.
            env["NUMBA_CACHE_DIR"] = str(Path(session.create_tmp()) / cpu)
        session.run("pytest", "-q", *WORKERS, "-m", "bits", *folders, env=env)


@nox.session
def lint(session: nox.Session) -> None:
    """Style (ruff) and types (mypy, strict)."""
    install(session, everything(), "ruff", "mypy")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy", *(str(folder / "src") for folder in MEMBERS.values()))


DOCS = ["mkdocs-material", "mkdocstrings", "mkdocstrings-python", "ruff"]


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation into site/; a dead link or a missing public docstring fails."""
    # Pages print the tables of export and hybrid; all else is read as text.
    install(session, {"export": "", "hybrid": "onnx"}, *DOCS)
    session.run("mkdocs", "build", "--strict", *session.posargs, env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session
def wheels(session: nox.Session) -> None:
    """Run the install page's lines in clean environments, and the tests against built wheels."""
    fresh = Path(session.create_tmp()) / "fresh"
    python = str(fresh / "bin" / "python")
    fusion = [str(MEMBERS[member]) for member in ("sparse", "graph", "fusion")]
    runs_fusion = [python, "-c", "import bevquant_fusion"]
    for tool, wanted, shown in (
        ("uv", [f"{ROOT}[cpu,onnxruntime]"], [str(fresh / "bin" / "bevfusion-quant"), "--version"]),
        ("uv", fusion[-1:], runs_fusion),
        ("pip", fusion, runs_fusion),
    ):
        shutil.rmtree(fresh, ignore_errors=True)
        session.run("python", "-m", "venv", str(fresh), silent=True)
        installs = ["uv", "pip", "install", "--python", python]
        installs = installs if tool == "uv" else [python, "-m", "pip", "install"]
        session.run(
            *installs, "-q", "-c", "constraints.txt", *wanted, env=environment(), external=True
        )
        session.run(*shown, external=True)
    install(session, {}, "build", "pytest", "pytest-xdist", "pytest-randomly")
    dist = Path(session.create_tmp()) / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--no-isolation", "--wheel", "--outdir", str(dist), ".")
    (wheel,) = dist.glob("*.whl")
    # The extras that examples of the READMEs use.
    extras = f"{wheel}[cpu,onnxruntime,pt2e,yaml]"
    session.install("-c", "constraints.txt", extras, env=environment())
    session.run("pytest", "tests", *session.posargs)


@nox.session
@nox.parametrize(
    ("python", "torch"),
    [("3.11", "2.10.0"), *((version, "") for version in ("3.11", "3.12", "3.13", "3.14"))],
    ids=["floor", "3.11", "3.12", "3.13", "3.14"],
)
def compat(session: nox.Session, torch: str) -> None:
    """The floor and the newest of torch, and newer Pythons, without this repository's pins.

    Run by a weekly workflow: each asks for a Python and a torch of its own. spconv has no wheels
    for Python 3.14, so the stand-in takes its place there.
    """
    absent = session.python == "3.14"
    sparse = "" if absent else "cpu,"
    wanted = f"torch=={torch}" if torch else "torch"
    session.install(wanted, f"{ROOT}[{sparse}onnxruntime]", env=environment())
    session.install(
        "pytest", "pytest-xdist", "pytest-randomly", "hypothesis", "jaxtyping", "beartype"
    )
    folders = test_folders("sparse", "graph", "fusion", "quantizers", "qnn", "int8sim")
    pytest(session, *folders, *(["--standin"] if absent else []))


@nox.session
def mutation(session: nox.Session) -> None:
    """One-token mutations of the numerics: are the tests able to fail? By hand; takes hours."""
    install(session, everything(), "pytorch-quantization")
    session.run("python", "mutation/run.py", *session.posargs, env={"OMP_WAIT_POLICY": "PASSIVE"})


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
    env = {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT / "tests")}
    session.run("python", "-m", "fuzz", *session.posargs, env=env)


@nox.session
def random(session: nox.Session) -> None:
    """Random models from float to files; a table of how each stage ends, and seeds to repeat it.

    `-- --count 500 --seed 0 --kind dense` chooses how many models, from which seed, of which kind.
    """
    install(session, everything())
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests")}
    session.run("python", "-m", "random_models", *session.posargs, env=env)


# Their full dependencies include CUDA builds and viewers: see docs/howto/from_mmdetection3d.md.
MMDET3D = ["mmdet3d==1.4.0", "mmdet==3.3.0", "mmengine==0.10.7", "mmcv-lite==2.1.0"]
MMDET3D_NEEDS = ["addict", "yapf", "rich", "termcolor", "terminaltables", "pycocotools", "shapely",
                 "opencv-python-headless", "six", "pyyaml", "scipy", "matplotlib"]  # fmt: skip


@nox.session
def mmdet3d(session: nox.Session) -> None:
    """Tests against mmdetection3d's wheels, which others skip.

    `-- table` runs the configurations that the table of docs/howto/from_mmdetection3d.md lacks;
    `-- table centerpoint` those with this in their name.
    """
    install(session, everything(), *MMDET3D_NEEDS)
    session.install("-c", "constraints.txt", "--no-deps", *MMDET3D, env=environment())
    if session.posargs[:1] == ["table"]:
        session.run("python", "tests/mmdet3d_configs.py", *session.posargs[1:])
        return
    folder = MEMBERS["bevfusion"] / "tests"
    names = ("test_centerpoint_mmdet3d.py", "test_mmdet3d_frames.py")
    pytest(session, *(str(folder / name) for name in names), "tests/test_mmdet3d.py")


# Imported by the packages below, which are installed without what they ask for: they ask for a
# torch of their own.
ZOO_NEEDS = ["huggingface_hub", "tokenizers", "regex", "safetensors", "pyyaml", "requests",
             "tqdm", "filelock", "packaging", "pillow"]  # fmt: skip


@nox.session
def zoo(session: nox.Session) -> None:
    """Public models taken through the whole path: fold, quantize, calibrate, simulate, export."""
    folder = Path(os.environ.get("BEVQUANT_ZOO", ROOT.parent / "shared" / "zoo"))
    if not (folder / "score.py").is_file():
        session.skip(f"no score.py in {folder}; name the folder of the zoo in BEVQUANT_ZOO")
    install(session, everything(), *ZOO_NEEDS)
    session.install(
        "-c", "constraints.txt", "--no-deps", "timm", "transformers", "torchvision",
        env=environment(),
    )  # fmt: skip
    session.run("python", str(folder / "score.py"), *session.posargs)
