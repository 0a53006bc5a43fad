"""Modules that need numba are searched for doctests only where it is installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("numba") else ["src/*_numba.py"]
