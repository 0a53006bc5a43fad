"""Take over the quantizers of a model built with pytorch-quantization."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import check_kind

from ._descriptor import QuantDescriptor
from .calib._calibrator import Calibrator
from .calib._histogram_calibrator import HistogramCalibrator
from .calib._max import MaxCalibrator
from .nn import TensorQuantizer

_UPSTREAM = "pytorch_quantization."


def adopt_quantizers(model: nn.Module) -> list[str]:
    """Replace, in place, every quantizer of pytorch-quantization by one of this package.

    Bits, axis, range, learned range (the same parameters, so that an optimizer keeps them), the
    stages that are on, and what the calibrators have collected are carried over. A quantizer used
    in several places stays one object. pytorch-quantization itself is not imported: its classes
    are known by name.

    Args:
        model: A model that contains quantizers.

    Returns:
        The paths of the replaced quantizers, every place of a shared one included.

    Raises:
        TypeError: The model is itself a quantizer of pytorch-quantization, or a quantizer has a
            calibrator of an unknown class. Nothing is replaced then.

    Examples:
        >>> from torch import nn
        >>> adopt_quantizers(nn.Sequential(nn.Linear(2, 2)))
        []
    """
    if _is_upstream(model, "TensorQuantizer"):
        raise TypeError(
            "the model itself is a quantizer of pytorch-quantization, which cannot be replaced in "
            "place: wrap it, as in nn.Sequential(quantizer)"
        )
    check_kind(model, nn.Module, "a torch module")
    adopted: dict[nn.Module, TensorQuantizer] = {}
    places: dict[str, TensorQuantizer] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if _is_upstream(module, "TensorQuantizer"):
            if module not in adopted:
                adopted[module] = _adopted(module, path)
            places[path] = adopted[module]
    for path, quantizer in places.items():
        parent, _, name = path.rpartition(".")
        model.get_submodule(parent)._modules[name] = quantizer
    return list(places)


def _is_upstream(thing: object, name: str) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.startswith(_UPSTREAM) for cls in type(thing).__mro__
    )


def _adopted(old: Any, path: str) -> TensorQuantizer:
    new = TensorQuantizer(
        QuantDescriptor(
            num_bits=old._num_bits,
            name=path,
            fake_quant=old._fake_quant,
            axis=old._axis,
            learn_amax=old._learn_amax,
            scale_amax=old._scale_amax,
            unsigned=old._unsigned,
            narrow_range=old._narrow_range,
            calib_method=None,
        ),
        disabled=old._disabled,
        if_quant=old._if_quant,
        if_calib=old._if_calib,
    )
    amax = old._buffers.get("_amax")
    if amax is not None:
        new.register_buffer("_amax", amax.detach().clone())
    if old._learn_amax:
        new.clip.clip_value_min = old.clip.clip_value_min
        new.clip.clip_value_max = old.clip.clip_value_max
    new._if_clip = old._if_clip
    new._scale = old._scale
    new._calibrator = _adopted_calibrator(getattr(old, "_calibrator", None), path)
    return new.train(old.training)


def _adopted_calibrator(old: Any, path: str) -> Calibrator | None:
    if old is None:
        return None
    if _is_upstream(old, "MaxCalibrator"):
        largest = MaxCalibrator(old._num_bits, old._axis, old._unsigned, old._track_amax)
        largest._calib_amax = None if old._calib_amax is None else old._calib_amax.detach().clone()
        largest._amaxs = list(getattr(old, "_amaxs", []))
        largest.name = path
        return largest
    if _is_upstream(old, "HistogramCalibrator"):
        counted = HistogramCalibrator(
            old._num_bits, old._axis, old._unsigned, old._num_bins, None, old._skip_zeros
        )
        counted.name = path
        if old._calib_hist is not None:
            counted.load_histogram(*_histogram(old._calib_hist, old._calib_bin_edges))
        return counted
    raise TypeError(
        f"{path}: its calibrator is a {type(old).__qualname__}, which is unknown here: "
        "set the quantizer's _calibrator to None before adopting it"
    )


def _histogram(counts: Any, edges: Any) -> tuple[Tensor, Tensor]:
    """Copies of upstream's counts and edges, which it may leave one edge too long or too short."""
    counts = torch.as_tensor(copy.copy(counts)).detach().clone().round().to(torch.int64)
    edges = torch.as_tensor(copy.copy(edges)).detach().clone().cpu()
    missing = counts.numel() + 1 - edges.numel()
    if missing > 0:
        more = edges[-1] + (edges[1] - edges[0]) * torch.arange(1, missing + 1)
        edges = torch.cat([edges, more.to(edges)])
    return counts, edges[: counts.numel() + 1]
