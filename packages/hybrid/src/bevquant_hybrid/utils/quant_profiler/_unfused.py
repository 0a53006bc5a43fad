"""Layers that could take in what follows them, and have not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn
from torch.ao.nn import quantized as torch_quantized
from torch.ao.quantization import FakeQuantizeBase
from torch.nn.modules.batchnorm import _BatchNorm

from bevquant_graph import layer_class
from bevquant_hybrid.nn.intrinsic._fused import ACTIVATIONS, ANCHORS
from bevquant_hybrid.nn.quantized.quantize import is_fixed_point
from bevquant_hybrid.utils.quant_profiler._calls import Call, record_calls
from bevquant_hybrid.utils.quant_profiler._tables import simple_table

__all__ = ["check_unfused_operations"]


def check_unfused_operations(
    model: nn.Module, example_inputs: Any, print_tabulate: bool = True
) -> list[list[str]]:
    """Find layers that stand before a batch norm, addition or ReLU that could be fused into them.

    A layer is a Conv2d, Conv3d, ConvTranspose2d or Linear; behind it any of batch norm, an addition
    of a FloatFunctional, and ReLU or ReLU6, in this order, each the only reader of the one before.
    The model is run, so that untraceable ones can be checked; functions are seen as readers, but
    are no members. Whether what was fused was fused rightly, `featuremap_similarity` of the model
    before and after tells.

    Args:
        model: Float model, before or after fusing.
        example_inputs: A tensor, or a tuple or list of the forward's arguments.
        print_tabulate: Print a table for each group.

    Returns:
        Groups of names: first those of layers that are called more than once, which are not fused
        as they are, then the others in the order of execution. The name of a module that is called
        more than once ends with ``(shared)``.

    Raises:
        ValueError: The model is prepared already.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid())
        >>> check_unfused_operations(model, torch.ones(1, 1, 1, 1))
        name    type
        ------  ------------------------------------------------
        0       <class 'torch.nn.modules.conv.Conv2d'>
        1       <class 'torch.nn.modules.batchnorm.BatchNorm2d'>
        [['0', '1']]
    """
    _refuse_prepared(model)
    calls = record_calls(model, example_inputs, keep=False)
    times = Counter(id(call.module) for call in calls)
    chains = [
        _chain(calls, i) for i, call in enumerate(calls) if layer_class(call.module) in ANCHORS
    ]
    chains = [chain for chain in chains if len(chain) > 1]
    chains.sort(key=lambda chain: times[id(chain[0].module)] == 1)
    groups, tables = [], []
    for chain in chains:
        names = [c.path + "(shared)" * (times[id(c.module)] > 1) for c in chain]
        if names in groups:  # all of it is shared: once is enough
            continue
        rows = [[name, str(type(c.module))] for name, c in zip(names, chain, strict=True)]
        groups.append(names)
        tables.append(simple_table(["name", "type"], rows))
    if print_tabulate and tables:
        print("\n\n".join(tables))
    return groups


def _refuse_prepared(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if is_fixed_point(module) or isinstance(module, FakeQuantizeBase):
            raise ValueError(
                f"check_unfused_operations: {path} ({type(module).__name__}) is of a prepared or "
                "converted model; check the float model, where fusing happens"
            )


def _chain(calls: list[Call], start: int) -> list[Call]:
    """A layer's call, and those that could be fused into it."""
    chain = [calls[start]]
    last = start
    while True:
        reader = _only_reader(calls, last)
        if reader is None:
            return chain
        call = calls[reader]
        if layer_class(call.module, _BatchNorm):
            fits = len(chain) == 1
        elif isinstance(call.module, torch_quantized.FloatFunctional):
            fits = _can_add(calls, call, last) and not any(c.method for c in chain)
        else:
            fits = layer_class(call.module) in ACTIVATIONS
        if not fits:
            return chain
        chain.append(call)
        last = reader
        if layer_class(call.module) in ACTIVATIONS:
            return chain


def _only_reader(calls: list[Call], index: int) -> int | None:
    """The one call that reads a result, seen through Identity; None for several, or the end."""
    while len(calls[index].readers) == 1 and calls[index].readers[0] >= 0:
        index = calls[index].readers[0]
        if layer_class(calls[index].module, nn.Identity) is None:
            return index
    return None


def _can_add(calls: list[Call], add: Call, mine: int) -> bool:
    """Whether an addition may join: of two tensors, the first not of a layer that could take it."""
    if add.method not in ("add", "add_relu") or len(set(add.sources)) != 2:
        return False
    first = add.sources[0]
    while first is not None and layer_class(calls[first].module, nn.Identity):
        first = calls[first].sources[0]
    if first is None or first == mine or len(calls[first].readers) != 1:
        return True
    if layer_class(calls[first].module, _BatchNorm):
        first = calls[first].sources[0]
    return first is None or layer_class(calls[first].module) not in ANCHORS
