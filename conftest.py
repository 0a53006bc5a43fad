"""What every test of the repository starts from."""

import builtins
import gc
import logging
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest

with suppress(ImportError):  # not every package's tests ask for it
    from hypothesis import settings

    # No test goes by the clock: on a machine with other work an example may take any time.
    settings.register_profile("bevquant", deadline=None)
    settings.load_profile("bevquant")

pytest_plugins = ["limits"]

gc.disable()  # until all is imported and collected


def pytest_addoption(parser):
    """`--first-cases` and `--files`, by which sessions are short; `--standin`."""
    parser.addoption(
        "--first-cases", action="store_true", help="run the first case of each test alone"
    )
    parser.addoption(
        "--files", type=int, metavar="N", help="run one test of each of at most N files"
    )
    parser.addoption(
        "--standin", action="store_true", help="bevquant_sparse stands in for an absent spconv"
    )


def pytest_sessionstart(session):
    """The stand-in is in place before a test asks for spconv, and after conftests are loaded."""
    if session.config.getoption("standin"):
        from bevquant_sparse import use_standin

        use_standin()


@pytest.hookimpl(trylast=True)  # when their order is random
def pytest_collection_modifyitems(config, items):
    """Keep one case of each test where that is asked for; what takes long comes first.

    Files are handed out in this order: a file of whole runs at the end would keep one process busy
    while the other has nothing left to do.
    """
    if config.getoption("first_cases"):
        first = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        items[:] = first.values()
    most = config.getoption("files")
    if most is not None:
        of_files = {item.nodeid.partition("::")[0]: item for item in items}
        items[:] = [*of_files.values()][:most]
    # Across packages, then tests of one package, then doctests.
    items.sort(key=lambda item: ("/src/" in item.nodeid, item.nodeid.startswith("packages/")))


def pytest_collection_finish():
    """What was imported and collected stays to the end: no garbage is looked for among it.

    And it is looked for less often: tracing a model makes millions of objects that live a while.
    """
    # For each of a test's three phases pytest puts its two handlers on every logger that does not
    # propagate, of which torch has forty; from those that do it hears all the same.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """Look for garbage once at the end: pytest does so five times, and Python as it stops."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    """The same random weights and number of threads in every order of the tests.

    By the generator itself: `torch.manual_seed` notes for each kind of device that is not in use
    who called it, line by line, for every test anew.
    """
    import torch  # not by the process that hands tests out

    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    threads = torch.get_num_threads()
    yield
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_shown_value():
    """No test meets, in ``builtins._``, what a doctest showed last.

    tyro hashes every value of ``builtins`` when it is imported, and a list there would fail the
    next test that parses a command line.
    """
    yield
    vars(builtins).pop("_", None)


@pytest.fixture(params=[1, 2, 3])
def threads(request):
    """Torch's threads: one, two, and an odd number."""
    import torch

    torch.set_num_threads(request.param)
    return request.param


@pytest.fixture(scope="session")
def spconv():
    """`spconv.pytorch`, or with `--standin` its stand-in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecations in spconv's own import
        return pytest.importorskip("spconv.pytorch", reason="the spconv extra is not installed")


@pytest.fixture
def spconv_numbers(spconv):
    """`spconv.pytorch` as an oracle: on one thread, as its CPU kernels race with more."""
    if hasattr(sys.modules["spconv"], "STANDIN"):
        pytest.skip("compares with spconv's own kernels, and spconv is absent")
    import torch

    torch.set_num_threads(1)
    return spconv


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real frames, where it is at hand."""
    said = os.environ.get("BEVQUANT_DATA")
    folder = Path(said) if said else Path(__file__).resolve().parent.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no real data: set BEVQUANT_DATA")
    return folder


@pytest.fixture(scope="session")
def document():
    """Text of a document of Horizon's plugin, by the number that its file name starts with."""
    said = os.environ.get("BEVQUANT_DATA")
    shared = Path(said).parent if said else Path(__file__).resolve().parent.parent / "shared"

    def read(number: str) -> str:
        found = sorted((shared / "seeds").glob(f"{number}_*.txt"))
        if not found:
            pytest.skip(f"document {number} is not in {shared / 'seeds'}")
        return found[0].read_text()

    return read


@pytest.fixture(scope="session")
def keyframe_info(real_data: Path) -> dict:
    """mmdetection3d's record of one real nuScenes keyframe, with the folder and the class names."""
    from bevquant_quantizers.documents import read_plain_pickle

    found = sorted((real_data / "mmdet3d_demo/nuscenes").glob("*.pkl"))
    if not found:
        pytest.skip("no nuScenes keyframe among the real data")
    content = read_plain_pickle(found[0])
    (info,) = content["data_list"]
    return {**info, "folder": found[0].parent, "classes": list(content["metainfo"]["categories"])}
