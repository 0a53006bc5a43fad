"""ResNet and neck: names and shapes of mit-bevfusion's checkpoint, numbers of a plain reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, max_pool2d

from bevfusion.model import CONFIGS
from bevfusion.model.camera import DepthLSSTransform, GeneralizedLSSFPN, ResNet

Shapes = dict[str, tuple[int, ...]]


def norm_shapes(name: str, channels: int) -> Shapes:
    tensors = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{t}": (channels,) for t in tensors} | {f"{name}.num_batches_tracked": ()}


def resnet50_shapes() -> Shapes:
    """The tables of He et al. 2015 for 50 layers, under torchvision's names, without `fc`."""
    shapes: Shapes = {"conv1.weight": (64, 3, 7, 7), **norm_shapes("bn1", 64)}
    channels = 64
    for stage, (blocks, width) in enumerate([(3, 64), (4, 128), (6, 256), (3, 512)], start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            for number, shape in enumerate(
                [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)], start=1
            ):
                shapes[f"{name}.conv{number}.weight"] = shape
                shapes |= norm_shapes(f"{name}.bn{number}", shape[0])
            if block == 0:
                shapes[f"{name}.downsample.0.weight"] = (4 * width, channels, 1, 1)
                shapes |= norm_shapes(f"{name}.downsample.1", 4 * width)
            channels = 4 * width
    return shapes


def neck_shapes() -> Shapes:
    """in_channels 512, 1024, 2048, out_channels 256: the coarsest level has no convolutions."""
    shapes: Shapes = {}
    for level, inputs in enumerate([512 + 256, 1024 + 2048]):
        for name, shape in [
            ("lateral_convs", (256, inputs, 1, 1)),
            ("fpn_convs", (256, 256, 3, 3)),
        ]:
            shapes[f"{name}.{level}.conv.weight"] = shape
            shapes |= norm_shapes(f"{name}.{level}.bn", 256)
    return shapes


def view_transform_shapes() -> Shapes:
    """118 depth bins (1 m to 60 m in steps of 0.5 m), 80 channels, 32×88 pixels."""
    shapes: Shapes = {"dx": (3,), "bx": (3,), "nx": (3,), "frustum": (118, 32, 88, 3)}
    convs: Shapes = {
        "dtransform.0": (8, 1, 1, 1),
        "dtransform.3": (32, 8, 5, 5),
        "dtransform.6": (64, 32, 5, 5),
        "depthnet.0": (256, 256 + 64, 3, 3),
        "depthnet.3": (256, 256, 3, 3),
        "depthnet.6": (118 + 80, 256, 1, 1),
        "downsample.0": (80, 80, 3, 3),
        "downsample.3": (80, 80, 3, 3),
        "downsample.6": (80, 80, 3, 3),
    }
    for name, shape in convs.items():
        shapes[f"{name}.weight"] = shape
        part, number = name.split(".")
        if part != "downsample":
            shapes[f"{name}.bias"] = shape[:1]
        if name != "depthnet.6":
            shapes |= norm_shapes(f"{part}.{int(number) + 1}", shape[0])
    return shapes


def shapes_of(module: nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def test_names_and_shapes_are_those_of_the_checkpoint() -> None:
    config = CONFIGS["nuscenes"].camera
    backbone = ResNet(config.depths, config.width)
    assert shapes_of(backbone) == resnet50_shapes()
    assert len(resnet50_shapes()) == 318
    assert sum(p.numel() for p in backbone.parameters()) == 25_557_032 - 2_049_000  # less fc
    neck = GeneralizedLSSFPN(backbone.out_channels, config.neck_channels)
    assert shapes_of(neck) == neck_shapes()
    transform = DepthLSSTransform(config)
    assert shapes_of(transform) == view_transform_shapes()
    torch.testing.assert_close(transform.dx.data, torch.tensor([0.3, 0.3, 20.0]))
    torch.testing.assert_close(transform.bx.data, torch.tensor([-53.85, -53.85, 0.0]))
    assert transform.nx.dtype == torch.int64
    assert transform.nx.tolist() == [360, 360, 1]
    assert transform.frustum[0, 0, 0].tolist() == [0, 0, 1]
    assert transform.frustum[-1, -1, -1].tolist() == [703, 255, 59.5]


def settle(module: nn.Module) -> None:
    """Weights and statistics that keep values near one and no branch silent."""
    generator = torch.Generator().manual_seed(0)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            for tensor, low, high in [
                (part.weight.data, 0.5, 1.5),
                (part.bias.data, -0.2, 0.4),
                (part.running_mean, -0.1, 0.1),
                (part.running_var, 0.5, 2.0),
            ]:
                assert tensor is not None
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)
    module.double().eval()


class Reference:
    """The network written out as a list of operations on a state dict."""

    def __init__(self, module: nn.Module) -> None:
        self.state = module.state_dict()

    def conv_bn(self, x: Tensor, conv: str, bn: str, stride: int = 1) -> Tensor:
        weight = self.state[f"{conv}.weight"]
        y = conv2d(x, weight, None, stride, padding=weight.shape[-1] // 2)
        mean, var, gain, bias = (
            self.state[f"{bn}.{t}"] for t in ("running_mean", "running_var", "weight", "bias")
        )
        return batch_norm(y, mean, var, gain, bias, eps=1e-5)

    def resnet(self, x: Tensor, depths: tuple[int, ...]) -> list[Tensor]:
        x = max_pool2d(self.conv_bn(x, "conv1", "bn1", 2).relu(), 3, 2, 1)
        outputs = []
        for stage, blocks in enumerate(depths, start=1):
            for block in range(blocks):
                name = f"layer{stage}.{block}"
                stride = 2 if stage > 1 and block == 0 else 1
                y = self.conv_bn(x, f"{name}.conv1", f"{name}.bn1").relu()
                y = self.conv_bn(y, f"{name}.conv2", f"{name}.bn2", stride).relu()
                y = self.conv_bn(y, f"{name}.conv3", f"{name}.bn3")
                if block == 0:
                    x = self.conv_bn(x, f"{name}.downsample.0", f"{name}.downsample.1", stride)
                x = (x + y).relu()
            outputs.append(x)
        return outputs[1:]

    def neck(self, inputs: list[Tensor]) -> list[Tensor]:
        fine, middle, coarse = inputs
        results: list[Tensor] = []
        x = coarse
        for level, finer in ((1, middle), (0, fine)):
            x = torch.cat([finer, enlarge(x, finer.shape[2], finer.shape[3])], 1)
            for name in (f"lateral_convs.{level}", f"fpn_convs.{level}"):
                x = self.conv_bn(x, f"{name}.conv", f"{name}.bn").relu()
            results.insert(0, x)
        return results


def enlarge(x: Tensor, height: int, width: int) -> Tensor:
    """Bilinear between pixel centres: row i of the result looks at (i + ½) · h / height − ½."""

    def weights(size: int, target: int) -> Tensor:
        matrix = torch.zeros(target, size, dtype=x.dtype)
        for i in range(target):
            at = min(max((i + 0.5) * size / target - 0.5, 0.0), size - 1.0)
            low = min(int(at), max(size - 2, 0))
            matrix[i, low] += 1.0 - (at - low)
            matrix[i, min(low + 1, size - 1)] += at - low
        return matrix

    return weights(x.shape[2], height) @ x @ weights(x.shape[3], width).T


@pytest.mark.parametrize("size", [(64, 96), (40, 104)])
def test_numbers_are_those_of_the_written_out_network(size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    depths = (2, 1, 1, 2)
    backbone = ResNet(depths, 4)
    neck = GeneralizedLSSFPN(backbone.out_channels, 6)
    settle(backbone)
    settle(neck)
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    with torch.no_grad():
        maps = backbone(x)
        wanted = Reference(backbone).resnet(x, depths)
        for got, other in zip(maps, wanted, strict=True):
            torch.testing.assert_close(got, other, rtol=1e-10, atol=1e-10)
        assert maps[0].shape == (2, 32, -(-size[0] // 8), -(-size[1] // 8))
        for got, other in zip(neck(maps), Reference(neck).neck(wanted), strict=True):
            torch.testing.assert_close(got, other, rtol=1e-10, atol=1e-10)
            assert got.std() > 0.05


def test_more_levels_than_three() -> None:
    neck = GeneralizedLSSFPN((2, 3, 4, 5), 6).eval()
    outputs = neck(
        [
            torch.zeros(1, c, 16 // s, 16 // s)
            for c, s in zip((2, 3, 4, 5), (1, 2, 4, 8), strict=True)
        ]
    )
    assert [tuple(y.shape) for y in outputs] == [(1, 6, 16, 16), (1, 6, 8, 8), (1, 6, 4, 4)]
    assert neck.lateral_convs[2].conv.in_channels == 4 + 5
    assert neck.lateral_convs[0].conv.in_channels == 2 + 6
