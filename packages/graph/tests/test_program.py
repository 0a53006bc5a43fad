"""An exported program becomes a module of layers again, at the author's paths, with equal bits."""

from __future__ import annotations

import copy
import warnings
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, export

from bevquant_graph import as_module, capture, module_of

IMAGE = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Block(nn.Module):
    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x))
        y += x
        return self.act(y)


class Net(nn.Module):
    """Layers registered in another order than they run, a block that runs twice, a list, a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU6())
        self.blocks = nn.ModuleList([Block(), Block(inplace=True)])
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2, groups=2, bias=False)
        self.norm, self.drop = nn.LayerNorm(4), nn.Dropout(0.5)
        self.register_buffer("shift", torch.ones(4), persistent=False)

    def forward(self, batch: dict[str, Tensor], *, scale: Tensor) -> dict[str, Any]:
        x = self.stem(batch["image"])
        x = self.blocks[1](self.blocks[0](self.blocks[0](x)))
        y = F.max_pool2d(self.up(x), 2)
        rows = self.norm(torch.cat([x, y], 2).mean((2, 3)) + self.shift)
        return {"scores": self.head(self.drop(rows)) * scale, "maps": [x, y]}


def same(one: Any, other: Any) -> bool:
    pairs = zip(*(torch.utils._pytree.tree_leaves(v) for v in (one, other)), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("strict", [False, True])
def test_a_program_is_a_module_of_layers_with_the_programs_parameters(strict: bool) -> None:
    net, inputs = Net().eval(), ({"image": IMAGE},)
    program = export(net, inputs, {"scale": torch.tensor(2.0)}, strict=strict)
    made = module_of(program)
    assert list(made.state_dict()) == list(net.state_dict())
    assert made.get_parameter("head.weight") is program.state_dict["head.weight"]
    kinds = {p: type(m) for p, m in net.named_modules() if type(m).__name__ in KINDS}
    assert {p: type(made.get_submodule(p)) for p in kinds} == kinds
    assert {type(made).__name__, type(made.get_submodule("blocks.0")).__name__} == {"Net", "Block"}
    wanted = net({"image": IMAGE}, scale=torch.tensor(3.0))
    assert same(made({"image": IMAGE}, scale=torch.tensor(3.0)), wanted)
    assert same(copy.deepcopy(made)(scale=torch.tensor(3.0), batch={"image": IMAGE}), wanted)


KINDS = {"Conv2d", "ConvTranspose2d", "Linear", "BatchNorm2d", "ReLU", "ReLU6", "Dropout"}


def test_a_graph_of_the_module_knows_the_authors_lines_and_names() -> None:
    net = Net().eval()
    made, inputs = as_module(export(net, ({"image": IMAGE},), {"scale": torch.ones(1)}), None)
    graph = capture(made, inputs)
    (mean,) = (n for n in graph.operations if "mean" in str(n.target))
    assert graph.location(mean).startswith(__file__)
    assert graph.input_names == ["batch['image']", "scale"]
    assert graph.replay(batch={"image": -IMAGE}, scale=torch.ones(1))["scores"].shape == (2, 2)


def test_a_program_with_open_sizes_takes_other_sizes_and_a_fixed_one_refuses_them() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    program = export(net, (IMAGE,), dynamic_shapes=({0: Dim.AUTO},))
    assert type(module_of(program)[0]) is nn.Conv2d

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * 2

    opened = module_of(export(Twice(), (IMAGE,), dynamic_shapes=({0: Dim.AUTO},)))
    assert opened(IMAGE[:1]).shape == (1, 4)
    fixed = module_of(export(Twice(), (IMAGE,)))
    with pytest.raises(ValueError, match=r"input x must have size 2 in axis 0.*dynamic_shapes"):
        fixed(IMAGE[:1])
    with pytest.raises(TypeError, match=r"expected the inputs \['x'\]"):
        fixed(IMAGE, IMAGE)


def test_layers_that_share_a_weight_share_it_in_the_module() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    made = module_of(export(Tied(), (torch.ones(1, 4),)))
    assert made.get_parameter("one.weight") is made.get_parameter("two.weight")


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


@pytest.mark.filterwarnings(
    "ignore:You are calling torch.compile inside torch.export"
)  # torch 2.10
@pytest.mark.parametrize(
    ("net", "met"),
    [
        (Branch().eval(), r"holds control flow .*cond.* in the model.*give the eager model"),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout()).train(), r"dropout.* in 1.*model\.eval\(\)"),
        (nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).train(), r"in 1.*model\.eval\(\)"),
    ],
)
def test_what_a_module_of_layers_cannot_hold_is_refused_by_node(net: nn.Module, met: str) -> None:
    with pytest.raises(ValueError, match=met):
        module_of(export(net, (IMAGE,)))


def test_random_numbers_are_refused_and_other_things_are_no_programs() -> None:
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand_like(x)

    with pytest.raises(ValueError, match="comes out otherwise when it runs again"):
        module_of(export(Noise(), (IMAGE,)))
    with pytest.raises(TypeError, match="expected an ExportedProgram"):
        module_of(cast(Any, nn.Linear(1, 1)))


def test_a_decomposed_program_computes_its_bits_and_a_flag_is_held_to_the_example() -> None:
    class Flag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor, double: bool = True) -> Tensor:
            x = self.norm(self.conv(x))
            return x * 2 if double else x

    net = Flag().eval()
    program = export(net, (IMAGE,), {"double": True})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own copying
        made = module_of(program.run_decompositions())
    assert type(made.get_submodule("conv")) is nn.Conv2d
    graph = capture(made, {"x": IMAGE, "double": True})
    assert same(graph.replay(x=IMAGE, double=True), net(IMAGE))
    with pytest.raises(ValueError, match="input double must be True"):
        module_of(program)(IMAGE, double=False)
