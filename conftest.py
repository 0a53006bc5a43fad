"""What every test of the repository starts from."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    """The same random weights in every order of the tests."""
    torch.manual_seed(0)
