"""The rulebook a module needs: found under its ``indice_key``, or built and kept there."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bevquant_sparse._geometry import Geometry, is_open, make_geometry, whole_numbers
from bevquant_sparse._modules import is_spconv1
from bevquant_sparse._rulebook import Rulebook, build_from_geometry


def describe(module: Any) -> str:
    """The module's name where spconv assigned one, and its class."""
    name = getattr(module, "_sparse_unique_name", "") or getattr(module, "name", None) or ""
    return f"{name} ({type(module).__name__})" if name else type(module).__name__


def rulebook_for(module: Any, x: Any, backend: str) -> tuple[Rulebook, dict[Any, Any]]:
    """The module's rulebook on ``x``, and a copy of ``x.indice_dict`` that holds it."""
    indice_dict = dict(x.indice_dict)
    key = getattr(module, "indice_key", None)
    kept = indice_dict.get(key) if key is not None else None
    if not isinstance(kept, Rulebook):
        kept = None
    if getattr(module, "inverse", False) and (kept is not None or not _keeps_grid(module, x)):
        return _inverse(module, x, kept), indice_dict
    if _keeps_grid(module, x):
        shape = whole_numbers(x.spatial_shape)
        return Rulebook.identity(x.indices, shape, x.batch_size), indice_dict
    if kept is not None:
        _check_reuse(module, x, kept)
        return kept, indice_dict
    try:
        geometry = _geometry(module, x)
        rulebook = _same_geometry(indice_dict, x.indices, geometry)
        if rulebook is None:
            rulebook = build_from_geometry(x.indices, geometry, backend)
            _note_version(rulebook)
    except ValueError as error:
        raise ValueError(f"{describe(module)}: {error}") from error
    indice_dict[_unnamed(geometry) if key is None else key] = rulebook
    return rulebook, indice_dict


def _same_geometry(
    indice_dict: dict[Any, Any], indices: Tensor, geometry: Geometry
) -> Rulebook | None:
    """A rulebook of this geometry on these very coordinates, whatever it is called."""
    # Layers without an ``indice_key``, as residual blocks have them, share theirs so: in memory, in
    # time, and in an exported graph, where equal sets of coordinates are then one value.
    for kept in indice_dict.values():
        if isinstance(kept, Rulebook) and kept.in_indices is indices:
            if _is_known(kept.geometry, geometry) and _unwritten(kept):
                return kept
    return None


def _is_known(one: Geometry, other: Geometry) -> bool:
    """Whether two geometries are equal; where a graph holds sizes open, for all sizes."""
    sizes = [(g.batch_size, *g.in_shape, *g.out_shape) for g in (one, other)]
    if torch.compiler.is_dynamo_compiling() or not is_open([*sizes[0], *sizes[1]]):
        return one == other
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return _unnamed(one) == _unnamed(other) and all(
        statically_known_true(a == b) for a, b in zip(*sizes, strict=True)
    )


def _unnamed(geometry: Geometry) -> tuple[object, ...]:
    """A key of plain values for layers without one; where the grid differs, the last one stays."""
    sizes = (geometry.kernel_size, geometry.stride, geometry.padding, geometry.dilation)
    return ("bevquant", geometry.subm, geometry.transposed, *sizes, geometry.output_padding)


def _note_version(rulebook: Rulebook) -> None:
    """Remember how often the coordinates had been written when the rulebook was built."""
    if not torch.compiler.is_compiling():
        version = _version(rulebook.in_indices)
        rulebook.table.derive("version of the coordinates", lambda: version)


def _unwritten(rulebook: Rulebook) -> bool:
    """Whether the coordinates are those that the rulebook was built for; a graph writes none."""
    if torch.compiler.is_compiling():
        return True
    noted = rulebook.table.derive("version of the coordinates", lambda: None)
    return noted == _version(rulebook.in_indices)


def _version(indices: Tensor) -> int | None:
    return None if indices.is_inference() else indices._version


def _sizes(module: Any, name: str, ndim: int, default: int) -> tuple[int, ...]:
    value = getattr(module, name, default)
    return (value,) * ndim if isinstance(value, int) else tuple(int(v) for v in value)


def _settings(module: Any, ndim: int) -> dict[str, tuple[int, ...]]:
    defaults = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1, "output_padding": 0}
    return {name: _sizes(module, name, ndim, value) for name, value in defaults.items()}


def kernel_of(module: Any, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Kernel size and dilation of a module."""
    settings = _settings(module, ndim)
    return settings["kernel_size"], settings["dilation"]


def _keeps_grid(module: Any, x: Any) -> bool:
    """A 1×…×1 kernel that moves nothing: every row meets itself, in the input's order."""
    settings = _settings(module, len(x.spatial_shape))
    subm = bool(getattr(module, "subm", False))
    return (
        all(k == 1 for k in settings["kernel_size"])
        and all(s == 1 for s in settings["stride"])
        and (subm or not any(settings["padding"] + settings["output_padding"]))
    )


def _geometry(module: Any, x: Any) -> Geometry:
    ndim = len(x.spatial_shape)
    settings = _settings(module, ndim)
    transposed = bool(getattr(module, "transposed", False))
    if not transposed:
        # spconv ignores it there, so modules may carry one.
        settings["output_padding"] = (0,) * ndim
    return make_geometry(
        whole_numbers(x.spatial_shape),
        settings["kernel_size"],
        settings["stride"],
        settings["padding"],
        settings["dilation"],
        settings["output_padding"],
        subm=bool(getattr(module, "subm", False)),
        transposed=transposed,
        batch_size=x.batch_size,
    )


def _inverse(module: Any, x: Any, kept: Rulebook | None) -> Rulebook:
    key = module.indice_key
    if kept is None:
        raise ValueError(
            f"{describe(module)}: no rulebook under indice_key={key!r}; an inverse convolution "
            "undoes the strided convolution or pooling that ran before it under the same "
            "indice_key, through these kernels too (use_bevquant_kernels on the whole model)"
        )
    if kept.subm:
        raise ValueError(
            f"{describe(module)}: indice_key={key!r} belongs to a SubM convolution; an inverse "
            "convolution needs the key of a strided convolution or pooling"
        )
    given = _settings(module, len(kept.kernel_size))["kernel_size"]
    if given != kept.kernel_size:
        raise ValueError(_conflict(module, kept, "kernel_size", given, kept.kernel_size))
    inverse = kept.inverse()
    _check_rows(module, x, inverse)
    return inverse


def borrows(module: Any, kept: Rulebook) -> bool:
    """Whether a SubM module runs along the rulebook of another kernel, as spconv 1 lets it."""
    # Element k of the weight, row-major, multiplies the neighbours at element k of that kernel; the
    # rest of a larger weight is not read. spconv 2 refuses it.
    kernel, dilation = kernel_of(module, len(kept.kernel_size))
    return (
        kept.subm
        and bool(getattr(module, "subm", False))
        and (kernel, dilation) != (kept.kernel_size, kept.dilation)
        and math.prod(kernel) >= kept.kernel_volume
        and is_spconv1(module)
    )


def _check_reuse(module: Any, x: Any, kept: Rulebook) -> None:
    if borrows(module, kept):
        _check_rows(module, x, kept)
        return
    settings = _settings(module, len(kept.kernel_size))
    wanted: dict[str, object] = {
        "subm": bool(getattr(module, "subm", False)),
        "transposed": bool(getattr(module, "transposed", False)),
        "kernel_size": settings["kernel_size"],
        "dilation": settings["dilation"],
    }
    if not kept.subm:
        # Names only: spconv refuses any second use; the very same convolution is harmless.
        wanted |= {"stride": settings["stride"], "padding": settings["padding"]}
    for name, value in wanted.items():
        if value != getattr(kept, name):
            raise ValueError(_conflict(module, kept, name, value, getattr(kept, name)))
    _check_rows(module, x, kept)


def _check_rows(module: Any, x: Any, kept: Rulebook) -> None:
    """The tensor must have the very coordinates the rulebook was built for."""
    shape = whole_numbers(x.spatial_shape)
    if shape != kept.in_shape:
        raise ValueError(_conflict(module, kept, "spatial_shape", shape, kept.in_shape))
    rows, expected = x.indices, kept.in_indices
    if rows.shape != expected.shape:
        raise ValueError(_conflict(module, kept, "voxels", rows.shape[0], expected.shape[0]))
    if rows is not expected and not bool((rows == expected).all()):
        raise ValueError(
            f"{describe(module)}: the coordinates differ from those the rulebook under "
            f"indice_key={module.indice_key!r} was built for; give this layer another indice_key"
        )


def _conflict(module: Any, kept: Rulebook, name: str, value: object, expected: object) -> str:
    owner = "SubM" if kept.subm else "transposed" if kept.transposed else "strided"
    return (
        f"{describe(module)}: indice_key={module.indice_key!r} holds the rulebook of a {owner} "
        f"convolution with kernel_size={kept.kernel_size}, stride={kept.stride}, "
        f"padding={kept.padding}, dilation={kept.dilation} on spatial_shape={kept.in_shape}, but "
        f"this module has {name}={value} where {expected} is expected; give it another indice_key "
        "or the same settings; a network trained with spconv 1 or mmcv, which run it all the same, "
        "is quantized after bevquant_fusion.fuse_model with example inputs"
    )
