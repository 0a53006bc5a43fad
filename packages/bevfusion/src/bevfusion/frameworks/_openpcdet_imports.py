"""OpenPCDet's code without its build, its data sets' packages and CUDA."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bevfusion.frameworks import _operators as operators
from bevfusion.frameworks._extensions import _Extension, use_operator_standins
from bevfusion.frameworks._openpcdet_config import Settings


def _scatter_max(source: Tensor, index: Tensor, dim: int) -> tuple[Tensor, None]:
    return operators.scatter_points(source, index[:, None], "max")[0], None


def _scatter_mean(source: Tensor, index: Tensor, dim: int) -> Tensor:
    return operators.scatter_points(source, index[:, None], "mean")[0]


def _uncompiled(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda function: function


PACKAGES: Mapping[str, Mapping[str, Any]] = {
    "pcdet.version": {"__version__": "0+0000000"},  # its setup.py writes this file
    "easydict": {"EasyDict": Settings},
    "numba": {"jit": _uncompiled, "njit": _uncompiled},
    "torch_scatter": {"scatter_max": _scatter_max, "scatter_mean": _scatter_mean},
    "SharedArray": {},
    "torchvision": {},
    "scipy": {},
    "scipy.optimize": {"linear_sum_assignment": None},
    "scipy.spatial": {"Delaunay": None},
    "pcdet.datasets": {},  # imports the tools of every data set
    "pcdet.datasets.augmentor": {},
}
"""Imports of OpenPCDet's models; functions without an entry serve training and cameras alone."""


def _is_absent(name: str) -> bool:
    try:
        return name not in sys.modules and importlib.util.find_spec(name) is None
    except ImportError:  # of the parent
        return True


@contextmanager
def _packages(folder: Path) -> Iterator[None]:
    """Stand-ins for absent packages, and `pcdet.datasets` without its readers, while imported."""
    made: dict[str, ModuleType] = {}
    for name, contents in PACKAGES.items():
        if name not in sys.modules and (name.startswith("pcdet.datasets") or _is_absent(name)):
            made[name] = _Extension(name, contents)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


class _OnTheCpu(TorchFunctionMode):
    """`tensor.cuda()` is the tensor."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return args[0] if function is Tensor.cuda else function(*args, **(kwargs or {}))


@contextmanager
def without_cuda() -> Iterator[None]:
    """Run OpenPCDet's code on the CPU, with the names of old numpy that it uses."""
    names = [name for name in ("int", "float") if not hasattr(np, name)]
    with ExitStack() as stack:
        for name in names:
            setattr(np, name, {"int": int, "float": float}[name])
            stack.callback(delattr, np, name)
        stack.enter_context(_OnTheCpu())
        yield


def import_openpcdet(checkout: Path | None) -> ModuleType:
    """The module ``pcdet.models``.

    Args:
        checkout: The folder that has ``pcdet``; None for the installed one.

    Raises:
        ImportError: It is absent, or a package that its models need.
    """
    if checkout is not None and str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    spec = importlib.util.find_spec("pcdet")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("No module named 'pcdet'")
    use_operator_standins()
    with _packages(Path(spec.submodule_search_locations[0])), without_cuda():
        return importlib.import_module("pcdet.models")
