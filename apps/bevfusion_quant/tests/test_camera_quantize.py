"""The camera branch folds and quantizes without lists of names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bevfusion.model import CameraConfig
from bevfusion.model.camera import Bottleneck, DepthLSSTransform, GeneralizedLSSFPN, ResNet
from bevquant_fusion import fuse_model
from bevquant_qnn import QuantConcat, QuantConv2d, quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate

CONFIG = CameraConfig(
    image_size=(64, 96),
    neck_channels=12,
    xbound=(-10.0, 10.0, 1.0),
    ybound=(-12.0, 12.0, 1.0),
    dbound=(1.0, 9.0, 0.5),
    out_channels=8,
)
Inputs = tuple[Tensor, Tensor, Tensor]


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = ResNet((1, 2, 1, 2), 4)
        self.neck = GeneralizedLSSFPN(self.backbone.out_channels, CONFIG.neck_channels)
        self.vtransform = DepthLSSTransform(CONFIG)

    def forward(self, images: Tensor, depth: Tensor, cells: Tensor) -> Tensor:
        maps = self.neck(self.backbone(images.flatten(0, 1)))
        features = maps[0].unflatten(0, (images.shape[0], images.shape[1]))
        out: Tensor = self.vtransform(features, depth, cells)
        return out


@pytest.fixture
def branch() -> Branch:
    torch.manual_seed(0)
    model = Branch()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            assert part.running_mean is not None
            assert part.running_var is not None
            part.running_mean.normal_(0, 0.1)
            part.running_var.uniform_(0.3, 0.6)
            part.weight.data.uniform_(0.8, 1.4)
            part.bias.data.normal_(0.1, 0.1)
    return model.eval()


@pytest.fixture
def inputs() -> Inputs:
    generator = torch.Generator().manual_seed(0)
    rows, columns = CONFIG.feature_size
    points = 2 * 16 * rows * columns
    cells = torch.randint(-100, 20 * 24, (points,), generator=generator).clamp_min(-1)
    images = torch.randn(1, 2, 3, *CONFIG.image_size, generator=generator)
    depth = torch.rand(1, 2, 1, *CONFIG.image_size, generator=generator) * 50
    return images, depth, cells


def test_every_batch_norm_is_folded(branch: Branch, inputs: Inputs) -> None:
    norms = {n for n, m in branch.named_modules() if isinstance(m, nn.BatchNorm2d)}
    for example in (inputs, None):
        result = fuse_model(branch, example)
        assert {f.bn for f in result.fused} == norms
        assert not result.skipped
        assert not result.untraced
        with torch.no_grad():
            torch.testing.assert_close(result.model(*inputs), branch(*inputs), rtol=1e-3, atol=1e-4)


def test_quantizers_are_shared_as_cuda_bevfusion_shares_them(
    branch: Branch, inputs: Inputs
) -> None:
    model = quantize_model(fuse_model(branch, inputs).model, example_inputs=inputs).model
    backbone, neck = model.get_submodule("backbone"), model.get_submodule("neck")
    concats = [m for m in neck.modules() if isinstance(m, QuantConcat)]
    assert len(concats) == 2
    for layer, lateral in (("layer3", 0), ("layer4", 1)):
        shared = backbone.get_submodule(f"{layer}.0.conv1")._input_quantizer
        assert backbone.get_submodule(f"{layer}.0.downsample.0")._input_quantizer is shared
        assert neck.get_submodule(f"lateral_convs.{lateral}.conv")._input_quantizer is shared
        assert sum(concat.input_quantizer is shared for concat in concats) == 1
    for name, block in backbone.named_modules():
        if type(block).__name__ == Bottleneck.__name__:
            assert isinstance(block.residual_quantizer, TensorQuantizer), name
            own = block.conv1._input_quantizer is block.residual_quantizer
            assert own == (block.downsample is None), name
    view = model.get_submodule("vtransform")
    convs = [m for m in view.modules() if isinstance(m, nn.Conv2d)]
    assert len(convs) == 9
    assert all(isinstance(m, QuantConv2d) for m in convs)


def test_calibrated_branch_stays_close_and_its_pooling_float(
    branch: Branch, inputs: Inputs
) -> None:
    fused = fuse_model(branch, inputs).model
    with torch.no_grad():
        wanted = fused(*inputs)
    model = quantize_model(fused, example_inputs=inputs).model
    calibrate(model, [inputs], forward=lambda m, batch: m(*batch), method="max")
    with torch.no_grad():
        got = model(*inputs)
    noise = (got - wanted).square().mean() / wanted.square().mean()
    assert 1e-7 < noise < 1e-2


def test_gradients_pass_the_quantized_branch(branch: Branch, inputs: Inputs) -> None:
    model = quantize_model(fuse_model(branch, inputs).model, example_inputs=inputs).model
    calibrate(model, [inputs], forward=lambda m, batch: m(*batch), method="max")
    model(*inputs).square().mean().backward()
    gradient = model.get_submodule("backbone.conv1").weight.grad
    assert gradient is not None
    assert gradient.abs().sum() > 0
