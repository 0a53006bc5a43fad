"""How much each step of an integer model computes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from bevquant_int8sim.model._execute import geometry
from bevquant_int8sim.model._float_sparse import FloatSparseConv
from bevquant_int8sim.model._program import Step

__all__ = ["Products", "operations"]

_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    **flop_registry,
}


class Products(TorchDispatchMode):
    """Counts the multiplications of torch's own convolutions and matrix products.

    Attributes:
        count: Of all calls so far, by torch's own formulas.
    """

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run one operator, and count."""
        out = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            self.count += formula(*args, **(kwargs or {}), out_val=out) // 2
        return out


def operations(step: Step, given: tuple[Any, ...], made: tuple[Any, ...], products: int) -> int:
    """Multiplications of a step; of one that multiplies no matrices, the values that it computes.

    A sparse convolution multiplies where an input meets an output: pairs · in · out channels. What
    moves values, or makes no tensor, has none.

    Args:
        step: Any.
        given: What it read.
        made: What it made.
        products: What `Products` counted in it.
    """
    if step.op in ("host", "constant", "sites", "move"):
        return 0
    module, weight = step.module, step.tensors.get("weight")
    if isinstance(module, FloatSparseConv):
        rulebook, _ = given[1].convolved(module.geometry, module.key, step.path)
        return int(rulebook.num_pairs) * module.weight[0].numel()
    if weight is None:
        return products or sum(v.numel() for v in made if isinstance(v, Tensor))
    if step.op == "sparse_conv":
        rulebook, _ = given[1].convolved(geometry(step), step.attributes["indice_key"], step.path)
        return int(rulebook.num_pairs) * weight[0].numel()
    each = given[0] if step.op == "conv_transpose" else made[0]
    return int(each.numel()) * weight[0].numel()
