"""The stand-in for spconv, put in its place where spconv is absent."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys


def use_standin() -> None:
    """Make ``import spconv.pytorch`` work in this process where spconv is not installed.

    spconv's modules, tensors and names then are this package's: they run on its rulebooks and
    convolutions, on CPU and CUDA, differentiable, the same at any thread count. Models import them
    unedited, classes have spconv's names, state dicts are spconv 2's and load from spconv 1's.
    ``algo`` and the like are accepted and choose nothing. Names that it cannot compute
    (``spconv.utils.Point2VoxelCPU3d``, ``ops.get_indice_pairs``, …) raise when they are called.

    Call it before a model's code is imported, once in each process. A second call does nothing.

    Raises:
        RuntimeError: spconv is installed, or another module of that name is loaded.

    Example:
        >>> use_standin()                                              # doctest: +SKIP
        >>> import spconv.pytorch as spconv                            # doctest: +SKIP
        >>> spconv.SubMConv3d(4, 16, 3, indice_key="subm1")            # doctest: +SKIP
    """
    if getattr(sys.modules.get("spconv"), "STANDIN", None):
        return
    _refuse_beside_spconv()
    from bevquant_sparse._sparse_tensor import register_sparse_tensor
    from bevquant_sparse._standin import (
        _algorithms,
        _constants,
        _conv,
        _functional,
        _pool,
        _pytorch,
        _refused,
        _sequential,
        _spconv,
        _tables,
        _tensor,
        _voxels,
    )  # fmt: skip

    files = (
        _spconv, _constants, _algorithms, _pytorch, _tensor, _sequential, _conv, _pool, _tables,
        _functional, _voxels,
    )  # fmt: skip
    modules = {m.__name__: m for m in (*files, *_refused.made_modules(_tables.Identity))}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    register_sparse_tensor(_tensor.SparseConvTensor)


def _refuse_beside_spconv() -> None:
    loaded = sys.modules.get("spconv")
    try:
        spec = importlib.util.find_spec("spconv") if loaded is None else loaded.__spec__
    except (ImportError, ValueError):  # hidden by an import hook
        spec = None
    if loaded is None and (spec is None or spec.origin is None):  # a bare folder has no origin
        return
    names = importlib.metadata.packages_distributions().get("spconv", [])
    raise RuntimeError(
        f"use_standin: {' and '.join(names) or 'a module named spconv'} is at hand "
        f"({getattr(spec, 'origin', None) or 'loaded'}), and the stand-in never takes its place. "
        f"Remove the call, or uninstall it (pip uninstall {' '.join(names) or 'spconv'})"
    )
