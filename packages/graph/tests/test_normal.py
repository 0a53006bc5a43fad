"""Aliases have one form in a captured graph, with the model's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_graph import called_name, capture

aten = torch.ops.aten
# Name of the operator in the graph, name in the forward → call on x of shape [2, 4, 6, 6].
CALLS: dict[tuple[str, str], Callable[[Tensor], Any]] = {
    ("permute", "transpose"): lambda x: x.transpose(1, -1),
    ("permute", "swapaxes"): lambda x: x.swapaxes(1, 2),
    ("permute", "swapdims"): lambda x: x.swapdims(0, 2),
    ("permute", "movedim"): lambda x: x.movedim((0, 1), (2, 0)),
    ("permute", "moveaxis"): lambda x: x.moveaxis(1, -1),
    ("permute", "t"): lambda x: x[0, 0].t(),
    ("permute", "mT"): lambda x: x.mT,
    ("permute", "numpy_T"): lambda x: x[0, 0].T,
    ("reshape", "view"): lambda x: x.view(x.shape[0], -1),
    ("cat", "concat"): lambda x: torch.concat([x, x], 1),
    ("cat", "concatenate"): lambda x: torch.concatenate([x, x], -1),
    ("cat", "hstack"): lambda x: torch.hstack([x, x]),
    ("cat", "vstack"): lambda x: torch.vstack([x, x]),
    ("cat", "dstack"): lambda x: torch.dstack([x, x]),
    ("cat", "column_stack"): lambda x: torch.column_stack([x, x]),
    ("repeat", "tile"): lambda x: x.tile(2, 1),
    ("expand", "broadcast_to"): lambda x: x[:1].broadcast_to(3, 4, 6, 6),
    ("split", "split_with_sizes"): lambda x: x.split([1, 3], 1),
    ("pad", "constant_pad_nd"): lambda x: torch.constant_pad_nd(x, (1, 2), 0.5),
    ("clamp", "clip"): lambda x: x.clip(0, 1),
    ("mul", "multiply"): lambda x: torch.multiply(x, x),
    ("div", "true_divide"): lambda x: torch.true_divide(x, 3),
    ("sub", "subtract"): lambda x: torch.subtract(x, x.exp(), alpha=2),
    ("div", "divide"): lambda x: x.clone().divide_(1.5),
    ("atan2", "arctan2"): lambda x: torch.arctan2(x, x + 1),
    ("ge", "greater_equal"): lambda x: torch.greater_equal(x, 0),
    ("bitwise_and", "__and__"): lambda x: (x > 0) & (x < 1),
    ("sigmoid", "special_expit"): torch.special.expit,
    ("round", "special_round"): lambda x: torch.special.round(x, decimals=1),
}


class Called(nn.Module):
    def __init__(self, call: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Any:
        return self.call(x)


@pytest.mark.parametrize(("name", "called"), CALLS)
@pytest.mark.parametrize("open_sizes", [True, False])
def test_an_alias_has_the_form_of_its_operator(name: str, called: str, open_sizes: bool) -> None:
    net, x = Called(CALLS[name, called]), torch.randn(2, 4, 6, 6)
    graph = capture(net, x, open_sizes=open_sizes)
    last = [n for n in graph.operations if "getitem" not in str(n.target)][-1]
    assert last.target._schema.name == f"aten::{name}"
    assert called_name(last) in (called, name)
    for made, wanted in zip(graph.replay(x), net(x), strict=True):
        assert torch.equal(made, wanted)


def test_operands_that_torch_raises_keep_their_own_form() -> None:
    x = torch.randn(6)
    graph = capture(Called(lambda x: (torch.hstack([x, x]), torch.vstack([x, x]))), x)
    assert [n.target for n in graph.operations] == [aten.cat.default, aten.vstack.default]


def test_a_write_through_an_alias_reaches_its_memory() -> None:
    def written(x: Tensor) -> Tensor:
        y = x.clone()
        y.swapaxes(1, 2)[:, 1:].multiply_(2)
        y.movedim(1, -1)[..., 0] = 0
        y.view(2, -1)[:, 3] = 7
        return y

    x = torch.randn(2, 4, 6, 6)
    graph = capture(Called(written), x)
    assert torch.equal(graph.replay(x), written(x))
