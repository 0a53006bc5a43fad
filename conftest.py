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
    """A doctest leaves what it showed last in ``builtins._``, and tyro, when it is imported,
    hashes every value of ``builtins``: a list there would fail the next test that parses."""
    yield
    vars(builtins).pop("_", None)
