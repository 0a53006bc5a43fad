"""Two other camera backbones in the model: windowed attention, and layers that aggregate by concat.

Neither has an attribute that a hand-written list would look for.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from model_batches import model_batch
from torch import Tensor, nn

from bevfusion.model import (
    CONFIGS,
    SECOND,
    SECONDFPN,
    Batch,
    BEVFusion,
    DecoderConfig,
    random_weights,
)
from bevfusion.model.camera import DepthLSSTransform, GeneralizedLSSFPN
from bevquant_fusion import FusionResult, fuse_model
from bevquant_qnn import QuantizeResult, quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate

# Images whose coarsest map divides into windows.
TINY = CONFIGS["tiny"]
TINY = dataclasses.replace(TINY, camera=dataclasses.replace(TINY.camera, image_size=(128, 256)))
WINDOW = 2


def windows(x: Tensor) -> Tensor:
    """Float [n, h, w, c] to [n · windows, WINDOW², c]."""
    n, h, w, c = x.shape
    x = x.view(n, h // WINDOW, WINDOW, w // WINDOW, WINDOW, c).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(-1, WINDOW * WINDOW, c)


class WindowAttention(nn.Module):
    """Attention inside windows, moved by half a window in every second block (Liu et al. 2021)."""

    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift
        self.query, self.pair = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.back = nn.Linear(width, width)
        self.table = nn.Parameter(torch.zeros(heads, WINDOW**2, WINDOW**2))

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        moved = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        # Keys and values are laid out anew: a copy of what the queries read.
        q, kv = self.query(windows(moved)), self.pair(windows(moved))
        q = q.view(-1, WINDOW**2, self.heads, c // self.heads).transpose(1, 2)
        k, v = kv.view(-1, WINDOW**2, 2, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        weight = (q @ k.transpose(-1, -2) / (c // self.heads) ** 0.5 + self.table).softmax(-1)
        y = self.back((weight @ v).transpose(1, 2).reshape(-1, WINDOW**2, c))
        y = y.view(n, h // WINDOW, w // WINDOW, WINDOW, WINDOW, c).permute(0, 1, 3, 2, 4, 5)
        return torch.roll(y.reshape(n, h, w, c), (self.shift, self.shift), (1, 2))


class SwinBlock(nn.Module):
    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.before, self.attend = nn.LayerNorm(width), WindowAttention(width, heads, shift)
        self.between = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        return x + self.feed(self.between(x))


class PatchMerging(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduce = (
            nn.LayerNorm(4 * width),
            nn.Linear(4 * width, 2 * width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduce(self.norm(torch.cat(corners, -1)))


class Swin(nn.Module):
    """Maps at stride 8, 16 and 32, each normalised, the residual stream going on as it is."""

    out_channels = (32, 64, 128)

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.merges = nn.ModuleList(PatchMerging(16 * 2**i) for i in range(3))
        self.stages = nn.ModuleList(
            nn.Sequential(SwinBlock(w, 4, 0), SwinBlock(w, 4, 1)) for w in self.out_channels
        )
        self.norms = nn.ModuleList(nn.LayerNorm(w) for w in self.out_channels)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.patches(x).permute(0, 2, 3, 1)
        maps = []
        for merge, stage, norm in zip(self.merges, self.stages, self.norms, strict=True):
            x = stage(merge(x))
            maps.append(norm(x).permute(0, 3, 1, 2).contiguous())
        return tuple(maps)


def unit(wide_in: int, wide_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(wide_in, wide_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(wide_out), nn.ReLU(inplace=True))


class Aggregate(nn.Module):
    """VoVNet's module (Lee et al. 2019): every layer's output is concatenated once, at the end."""

    def __init__(self, wide_in: int, inner: int, wide_out: int, layers: int) -> None:
        super().__init__()
        widths = [wide_in] + [inner] * layers
        self.chain = nn.ModuleList(unit(width, inner, 3) for width in widths[:-1])
        self.mix = unit(sum(widths), wide_out, 1)
        self.pool, self.gate = nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide_out, wide_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [x]
        for layer in self.chain:
            x = layer(x)
            kept.append(x)
        x = self.mix(torch.cat(kept, dim=1))
        return x * F.hardsigmoid(self.gate(self.pool(x)))


class VoVNet(nn.Module):
    out_channels = (24, 32, 40)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 8, 3, 2), unit(8, 16, 3, 2))
        self.shrink = nn.MaxPool2d(3, 2, padding=1)
        widths = (16, *self.out_channels)
        self.body = nn.ModuleList(
            Aggregate(widths[i], 8, widths[i + 1], layers=3) for i in range(3)
        )
        self.halves = nn.ModuleList(nn.MaxPool2d(3, 2, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.body[0](self.shrink(self.stem(x)))
        maps = [x]
        for half, module in zip(self.halves, list(self.body)[1:], strict=True):
            x = module(half(x))
            maps.append(x)
        return maps


def detector(backbone: nn.Module) -> BEVFusion:
    """Camera and decoder around another backbone."""
    camera = {
        "backbone": backbone,
        "neck": GeneralizedLSSFPN(backbone.out_channels, TINY.camera.neck_channels),
        "vtransform": DepthLSSTransform(TINY.camera),
    }
    sizes = DecoderConfig(16, (1, 1), (16, 24), upsample_channels=(16, 16))
    decoder = {"backbone": SECOND(sizes, 16), "neck": SECONDFPN(sizes)}
    return BEVFusion(camera=camera, decoder=decoder).eval()


def prepared(backbone: nn.Module) -> tuple[FusionResult, QuantizeResult, Batch, Tensor]:
    torch.manual_seed(0)
    model = detector(backbone)
    batch = model_batch(model, TINY)
    random_weights(model, *batch)
    fusion = fuse_model(model, batch)
    wanted = neck_map(fusion.model, batch)
    return fusion, quantize_model(fusion.model, example_inputs=batch), batch, wanted


@pytest.fixture(scope="module")
def swin() -> tuple[FusionResult, QuantizeResult, Batch, Tensor]:
    return prepared(Swin())


@pytest.fixture(scope="module")
def vovnet() -> tuple[FusionResult, QuantizeResult, Batch, Tensor]:
    return prepared(VoVNet())


def group(result: QuantizeResult, path: str) -> set[str]:
    """Paths below encoders.camera of the modules that hold the quantizer of the layer at `path`."""
    camera = result.model.get_submodule("encoders.camera")
    own = camera.get_submodule(path)._input_quantizer
    return {
        owner
        for owner, module in camera.named_modules(remove_duplicate=False)
        if any(child is own for child in module._modules.values())
    }


def check_close(case: tuple[FusionResult, QuantizeResult, Batch, Tensor]) -> None:
    """The neck's finest map, before what comes after it adds its own noise."""
    _, result, batch, wanted = case
    calibrate(result.model, [batch], forward=lambda m, b: m(*b), method="max")
    got = neck_map(result.model, batch)
    noise = float((got - wanted).square().mean() / wanted.square().mean())
    assert 1e-6 < noise < 0.05


def neck_map(model: nn.Module, batch: Batch) -> Tensor:
    maps: list[Tensor] = []
    neck = model.get_submodule("encoders.camera.neck")
    hook = neck.register_forward_hook(lambda *call: maps.append(call[2][0]))
    with torch.no_grad():
        model(*batch)
    hook.remove()
    return maps[0]


def test_swin_shares_what_its_layers_and_the_neck_read(swin) -> None:
    _, result, _, _ = swin
    for stage in range(3):
        for block in (0, 1):
            attend = f"backbone.stages.{stage}.{block}.attend"
            assert group(result, f"{attend}.query") == {f"{attend}.query", f"{attend}.pair"}
            feed = f"backbone.stages.{stage}.{block}.feed.0"
            assert group(result, feed) == {feed}
    for level, concat in ((1, "quant_concat"), (0, "quant_concat_1")):
        lateral = f"neck.lateral_convs.{level}.conv"
        assert group(result, lateral) == {lateral, f"neck.{concat}"}


def test_swin_says_what_stays_float(swin) -> None:
    fusion, result, _, _ = swin
    assert fusion.skipped == ()
    notes: dict[str, str] = {}
    for item in result.skipped:
        notes[item.path] = notes.get(item.path, "") + item.reason
    block = "encoders.camera.backbone.stages.1.0"
    assert "a matrix product" in notes[f"{block}.attend"]
    assert "softmax" in notes[f"{block}.attend"]
    assert "own parameters" in notes[f"{block}.attend"]
    assert "LayerNorm" in notes[f"{block}.before"]
    assert "LayerNorm" in notes["encoders.camera.backbone.merges.0.norm"]
    assert "left float" in notes[block]
    taken = {item.path: item.kind for item in result.quantized}
    assert taken[f"{block}.attend.query"] == "QuantLinear"
    assert taken["encoders.camera.backbone.merges.2.reduce"] == "QuantLinear"
    # What is concatenated before a norm is read by no quantized layer: no range for it.
    assert not any(path.startswith("encoders.camera.backbone.merges.0.quant") for path in taken)


def test_swin_stays_close_when_calibrated(swin) -> None:
    check_close(swin)


def test_vovnet_shares_along_each_aggregation_and_with_the_neck(vovnet) -> None:
    fusion, result, _, _ = vovnet
    assert fusion.skipped == ()
    for index in range(3):
        path = f"backbone.body.{index}"
        inside = {f"{path}.quant_concat", f"{path}.mix.0"}
        inside |= {f"{path}.chain.{layer}.0" for layer in range(3)}
        assert group(result, f"{path}.mix.0") == inside
        assert group(result, f"{path}.pool") == {f"{path}.pool"}
    assert group(result, "neck.lateral_convs.0.conv") == {
        "backbone.halves.0",
        "neck.quant_concat_1",
        "neck.lateral_convs.0.conv",
    }
    assert group(result, "neck.lateral_convs.1.conv") == {
        "backbone.halves.1",
        "neck.quant_concat",
        "neck.lateral_convs.1.conv",
    }


def test_vovnet_says_that_its_gates_stay_float(vovnet) -> None:
    _, result, _, _ = vovnet
    gates = [i.reason for i in result.skipped if i.path == "encoders.camera.backbone.body.1"]
    assert any("hardsigmoid" in reason and "mul" in reason for reason in gates)
    layers = [item for item in result.quantized if item.kind.startswith("QuantConv")]
    convs = [m for m in result.model.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)]
    assert len(layers) == len(convs)
    assert isinstance(result.model.get_submodule("decoder.neck.deblocks.1.0"), nn.ConvTranspose2d)
    assert any(isinstance(m, TensorQuantizer) for m in result.model.modules())


def test_vovnet_stays_close_when_calibrated(vovnet) -> None:
    check_close(vovnet)
