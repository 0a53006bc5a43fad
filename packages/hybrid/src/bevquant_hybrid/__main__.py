"""Run a script whose imports of horizon_plugin_pytorch find this package."""

from __future__ import annotations

import os
import runpy
import sys

from bevquant_hybrid.stand_in import stand_in


def main() -> None:
    """``python -m bevquant_hybrid script.py [argument …]``."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise SystemExit("usage: python -m bevquant_hybrid script.py [argument ...]")
    del sys.argv[0]
    script = sys.argv[0]
    if not os.path.isfile(script):
        raise SystemExit(f"python -m bevquant_hybrid: there is no file {script}")
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    stand_in()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
