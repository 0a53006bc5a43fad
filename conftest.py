"""What every test of the repository starts from."""

import builtins

import pytest
import torch


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
