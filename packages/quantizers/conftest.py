"""Modules of the numba backend are searched for doctests only where numba is installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("numba") else ["src/*_numba.py"]
