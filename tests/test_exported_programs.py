"""A user of `torch.export` comes in: from a program to the integers of its model, and to a file."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, export

from bevquant_export import export_qdq_onnx
from bevquant_fusion import fuse_model
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import use_bevquant_kernels

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))


class Block(nn.Module):
    def __init__(self, taken: int, given: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(taken, given, 3, stride, 1), nn.BatchNorm2d(given)
        self.conv2, self.norm2 = nn.Conv2d(given, given, 3, 1, 1), nn.BatchNorm2d(given)
        self.down, self.act = nn.Conv2d(taken, given, 1, stride), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        return self.act(y + self.down(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 8, 2), Block(8, 16, 2))
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(16 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(x)), 1))


class Pyramid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)
        self.deblock = nn.Sequential(nn.ConvTranspose2d(8, 8, 2, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.out = nn.ModuleDict({"map": nn.Conv2d(16, 4, 3, padding=1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = F.relu(self.low(x))
        up = self.deblock(F.relu(self.high(low)))
        return {"map": self.out["map"](torch.cat([low, up], 1))}


class Depthwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 1), nn.ReLU6(),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6(),
            nn.Dropout(0.1), nn.Conv2d(8, 4, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.parametrize("kind", [Residual, Pyramid, Depthwise])
def test_a_program_gives_its_models_integers_and_a_verified_file(
    kind: type[nn.Module], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = kind().eval()
    program = export(net, (IMAGES,), dynamic_shapes=({0: Dim.AUTO},))
    eager = quantize_model(fuse_model(copy.deepcopy(net), IMAGES).model, None, IMAGES).model
    model = quantize_model(fuse_model(program).model, None, IMAGES).model
    calibrate(eager, [IMAGES])
    model.load_state_dict(eager.state_dict())
    wanted, got = (simulate(m, IMAGES) for m in (eager, model))
    assert wanted.program.steps  # integers, not one float island
    pairs = zip(*(torch.utils._pytree.tree_leaves(m(IMAGES)) for m in (wanted, got)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert len(got.float_fallbacks) == len(wanted.float_fallbacks) == 0
    file = export_qdq_onnx(model, IMAGES, tmp_path / "net.onnx")
    assert file.verified != "no"
    assert not file.floats


def test_the_module_of_a_program_is_taken_too() -> None:
    net = Residual().eval()
    program = export(net, (IMAGES,)).module()
    fused = fuse_model(program, (IMAGES,))
    assert len(fused.fused) == 4
    torch.testing.assert_close(fused.model(IMAGES), net(IMAGES))
    assert len(quantize_model(fused.model, example_inputs=(IMAGES,)).quantized) == 10


def test_sparse_convolutions_in_a_program_are_refused_by_node() -> None:
    spconv = pytest.importorskip("spconv.pytorch")

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = spconv.SubMConv3d(2, 4, 3, indice_key="a")

        def forward(self, features: Tensor, indices: Tensor) -> Tensor:
            x = spconv.SparseConvTensor(features, indices, [8, 8, 8], 1)
            return self.conv(x).features

    net = Sparse().eval()
    use_bevquant_kernels(net)
    indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
    program = export(net, (torch.ones(2, 2), indices), strict=False)
    with pytest.raises(ValueError, match=r"sparse convolutions.* in conv.*give the eager model"):
        quantize_model(program)
