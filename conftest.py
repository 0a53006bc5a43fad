"""What every test of the repository starts from."""

import builtins
from contextlib import suppress

import pytest
import torch

with suppress(ImportError):  # not every package's tests ask for it
    from hypothesis import settings

    # No test goes by the clock: on a machine with other work an example may take any time.
    settings.register_profile("bevquant", deadline=None)
    settings.load_profile("bevquant")


def pytest_addoption(parser):
    parser.addoption(
        "--first-cases", action="store_true", help="run the first case of each test alone"
    )


def pytest_collection_modifyitems(config, items):
    if config.getoption("first_cases"):
        first = {}
        for item in items:
            first.setdefault(item.nodeid.partition("[")[0], item)
        items[:] = first.values()


@pytest.fixture(autouse=True)
def _seed():
    """The same random weights in every order of the tests."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_shown_value():
    """No test meets, in ``builtins._``, what a doctest showed last.

    tyro hashes every value of ``builtins`` when it is imported, and a list there would fail the
    next test that parses a command line.
    """
    yield
    vars(builtins).pop("_", None)
