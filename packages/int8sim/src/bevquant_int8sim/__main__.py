"""Compile the integer kernels ahead of the first run, and say which ones this machine can use.

    python -m bevquant_int8sim [backend …]

They are kept in numba's cache, where the processes that come after find them: in a container's
image, or beside a program that is still busy with something else. Without names all backends are
compiled; ``auto`` is the one that ``backend="auto"`` takes for int8.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from contextlib import suppress

import torch

from bevquant_int8sim import backend_report, choose_backend, plan_rulebook


def main(names: list[str]) -> int:
    """Compile; 0, 1 where only torch's products can be used, 2 for a backend that there is not."""
    with suppress(ImportError):  # without numba, which the report says
        from bevquant_int8sim import _compiled

        for module in pkgutil.iter_modules(_compiled.__path__, f"{_compiled.__name__}."):
            importlib.import_module(module.name)
        # What bevquant_sparse compiles for it.
        plan_rulebook(torch.zeros(1, 4, dtype=torch.int32), (1, 1, 1), 1, subm=True)
    if names == ["auto"]:
        names = [choose_backend("auto", torch.device("cpu"), torch.int8, "auto")]
    try:
        report = backend_report(*names)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for status in report:
        print(f"{status.name:9} {'' if status.available else 'not usable: '}{status.detail}")
    return 0 if any(s.available and s.name != "torch" for s in report) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
