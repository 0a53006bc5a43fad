"""A model's forward as operations on tensors: names, views and sparse tensors taken apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx, nn

from bevquant_int8sim.model._form import FLOAT, Form
from bevquant_int8sim.model._layer import Layer

# Questions about a tensor, whose answers are the same for its integers.
METADATA = frozenset("shape size ndim dim device numel nelement".split())


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation that makes one tensor (or a host value).

    Attributes:
        kind: ``"input"``, ``"constant"``, ``"quantizer"``, ``"layer"``, ``"relu"``, ``"move"``
            (values stay as they are, also in integers), ``"add"``, ``"average"``, ``"float"``,
            ``"host"`` or ``"sites"``.
        path: Module, or the module whose forward calls the function.
        output: Name of what it makes.
        args: Positional arguments with `Ref`s in the place of tensors.
        kwargs: Keyword arguments.
        function: What to call, where the kind does not say it.
        what: Class of the module or name of the function.
        natural: Form in which the result comes about; a sum of integers counts as accumulators.
        layer: Weight and settings of a quantized layer.
        module: Module that is called as it is.
        tensor: Value of a constant.
        reason: Why it is computed in float.
        moved: Names of the tensors that a move passes on; its other arguments are host values.
        sites: Name of the sites made, for sparse layers.
        ceiling: Upper limit of a ReLU6.
        linear: A move that mixes values: a ReLU behind it cannot be done before it.
    """

    kind: str
    path: str
    output: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    function: Callable[..., Any] | None = None
    what: str = ""
    natural: Form = FLOAT
    layer: Layer | None = None
    module: nn.Module | None = None
    tensor: Tensor | None = None
    reason: str = ""
    moved: tuple[str, ...] = ()
    sites: str = ""
    ceiling: float | None = None
    linear: bool = False


@dataclass(frozen=True, eq=False)
class Operations:
    """All operations of a model in order.

    Attributes:
        operations: In order of execution.
        signature: Arguments of the model, with `Ref`s.
        sparse_inputs: Features to sites of sparse inputs.
        result: What the model returns, with `Ref`s and `SparseRef`s.
        hosts: Names of what is no tensor: sites, sizes, numbers.
        nodes: Names of tensors to the nodes of the graph.
        fixed: Inputs to the sizes, by axis, that the forward fixes.
    """

    operations: tuple[Operation, ...]
    signature: tuple[tuple[Any, ...], Mapping[str, Any]]
    sparse_inputs: Mapping[str, str]
    result: Any
    hosts: frozenset[str]
    nodes: Mapping[str, fx.Node]
    fixed: Mapping[str, Mapping[int, int]]
