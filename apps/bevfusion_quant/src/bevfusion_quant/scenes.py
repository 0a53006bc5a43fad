"""Alias of `bev_scenes`."""

from bev_scenes import *  # noqa: F403
from bev_scenes import __all__ as __all__

if __name__ == "__main__":
    import runpy

    runpy.run_module("bev_scenes", run_name="__main__")
