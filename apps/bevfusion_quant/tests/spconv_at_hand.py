"""Importing this skips a module of tests where spconv, which makes the LiDAR branch, is absent."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("spconv") is None:
    pytest.skip("spconv is not installed", allow_module_level=True)
