"""Names and shapes of mit-bevfusion's camera+lidar detectors, `bevfusion-det.pth`.

Written from the public configurations (configs/nuscenes/det/transfusion/secfpn/camera+lidar,
resnet50 and swint_v0p075 with ConvFuser) and the module code they name (mmdet's ResNet and
SwinTransformer, GeneralizedLSSFPN,
DepthLSSTransform, SparseEncoder, ConvFuser, SECOND, SECONDFPN, TransFusionHead), not from this
package.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["mit_shapes", "mit_state_dict"]

Entry = tuple[str, tuple[int, ...]]


def norm(path: str, channels: int) -> Iterator[Entry]:
    for leaf in ("weight", "bias", "running_mean", "running_var"):
        yield f"{path}.{leaf}", (channels,)
    yield f"{path}.num_batches_tracked", ()


def conv(path: str, *shape: int, bias: bool = False) -> Iterator[Entry]:
    yield f"{path}.weight", shape
    if bias:
        yield f"{path}.bias", (shape[0],)


def resnet50(root: str) -> Iterator[Entry]:
    yield from conv(f"{root}.conv1", 64, 3, 7, 7)
    yield from norm(f"{root}.bn1", 64)
    inputs = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            path = f"{root}.layer{stage}.{block}"
            yield from conv(f"{path}.conv1", width, inputs, 1, 1)
            yield from norm(f"{path}.bn1", width)
            yield from conv(f"{path}.conv2", width, width, 3, 3)
            yield from norm(f"{path}.bn2", width)
            yield from conv(f"{path}.conv3", 4 * width, width, 1, 1)
            yield from norm(f"{path}.bn3", 4 * width)
            if block == 0:
                yield from conv(f"{path}.downsample.0", 4 * width, inputs, 1, 1)
                yield from norm(f"{path}.downsample.1", 4 * width)
            inputs = 4 * width


def swint(root: str) -> Iterator[Entry]:
    yield from conv(f"{root}.patch_embed.projection", 96, 3, 4, 4, bias=True)
    yield from conv(f"{root}.patch_embed.norm", 96, bias=True)
    for stage, blocks in enumerate((2, 2, 6, 2)):
        width, heads = 96 << stage, 3 << stage
        for block in range(blocks):
            path = f"{root}.stages.{stage}.blocks.{block}"
            yield from conv(f"{path}.norm1", width, bias=True)
            yield f"{path}.attn.w_msa.relative_position_bias_table", (13 * 13, heads)
            yield f"{path}.attn.w_msa.relative_position_index", (49, 49)
            yield from conv(f"{path}.attn.w_msa.qkv", 3 * width, width, bias=True)
            yield from conv(f"{path}.attn.w_msa.proj", width, width, bias=True)
            yield from conv(f"{path}.norm2", width, bias=True)
            yield from conv(f"{path}.ffn.layers.0.0", 4 * width, width, bias=True)
            yield from conv(f"{path}.ffn.layers.1", width, 4 * width, bias=True)
        if stage < 3:
            yield from conv(f"{root}.stages.{stage}.downsample.norm", 4 * width, bias=True)
            yield from conv(f"{root}.stages.{stage}.downsample.reduction", 2 * width, 4 * width)
        if stage > 0:
            yield from conv(f"{root}.norm{stage}", width, bias=True)


BACKBONES = {"resnet50": (resnet50, (512, 1024, 2048)), "swint": (swint, (192, 384, 768))}


def camera(root: str, backbone: str) -> Iterator[Entry]:
    entries, (fine, middle, coarse) = BACKBONES[backbone]
    yield from entries(f"{root}.backbone")
    for level, inputs in enumerate((fine + 256, middle + coarse)):
        for name, shape in (("lateral", (256, inputs, 1, 1)), ("fpn", (256, 256, 3, 3))):
            yield from conv(f"{root}.neck.{name}_convs.{level}.conv", *shape)
            yield from norm(f"{root}.neck.{name}_convs.{level}.bn", 256)
    view = f"{root}.vtransform"
    for name in ("dx", "bx", "nx"):
        yield f"{view}.{name}", (3,)
    yield f"{view}.frustum", (118, 32, 88, 3)
    for index, shape in ((0, (8, 1, 1, 1)), (3, (32, 8, 5, 5)), (6, (64, 32, 5, 5))):
        yield from conv(f"{view}.dtransform.{index}", *shape, bias=True)
        yield from norm(f"{view}.dtransform.{index + 1}", shape[0])
    for index, inputs in ((0, 256 + 64), (3, 256)):
        yield from conv(f"{view}.depthnet.{index}", 256, inputs, 3, 3, bias=True)
        yield from norm(f"{view}.depthnet.{index + 1}", 256)
    yield from conv(f"{view}.depthnet.6", 118 + 80, 256, 1, 1, bias=True)
    for index in (0, 3, 6):
        yield from conv(f"{view}.downsample.{index}", 80, 80, 3, 3)
        yield from norm(f"{view}.downsample.{index + 1}", 80)


def lidar(root: str) -> Iterator[Entry]:
    """Sparse weights are [k1, k2, k3, in, out]."""
    yield from conv(f"{root}.conv_input.0", 3, 3, 3, 5, 16)
    yield from norm(f"{root}.conv_input.1", 16)
    width = 16
    for stage, wider in enumerate((32, 64, 128, None), start=1):
        path = f"{root}.encoder_layers.encoder_layer{stage}"
        for block in (0, 1):
            for half in (1, 2):
                yield from conv(f"{path}.{block}.conv{half}", 3, 3, 3, width, width)
                yield from norm(f"{path}.{block}.bn{half}", width)
        if wider is not None:
            yield from conv(f"{path}.2.0", 3, 3, 3, width, wider)
            yield from norm(f"{path}.2.1", wider)
            width = wider
    yield from conv(f"{root}.conv_out.0", 1, 1, 3, 128, 128)
    yield from norm(f"{root}.conv_out.1", 128)


def decoder(root: str) -> Iterator[Entry]:
    inputs = 256
    for stage, width in enumerate((128, 256)):
        for layer in range(6):
            path = f"{root}.backbone.blocks.{stage}"
            yield from conv(f"{path}.{3 * layer}", width, inputs, 3, 3)
            yield from norm(f"{path}.{3 * layer + 1}", width)
            inputs = width
    yield from conv(f"{root}.neck.deblocks.0.0", 256, 128, 1, 1)
    yield from conv(f"{root}.neck.deblocks.1.0", 256, 256, 2, 2)
    for level in (0, 1):
        yield from norm(f"{root}.neck.deblocks.{level}.1", 256)


def head(root: str) -> Iterator[Entry]:
    yield from conv(f"{root}.shared_conv", 128, 512, 3, 3, bias=True)
    yield from conv(f"{root}.heatmap_head.0.conv", 128, 128, 3, 3)
    yield from norm(f"{root}.heatmap_head.0.bn", 128)
    yield from conv(f"{root}.heatmap_head.1", 10, 128, 3, 3, bias=True)
    yield from conv(f"{root}.class_encoding", 128, 10, 1, bias=True)
    layer = f"{root}.decoder.0"
    for attention in ("self_attn", "multihead_attn"):
        yield f"{layer}.{attention}.in_proj_weight", (3 * 128, 128)
        yield f"{layer}.{attention}.in_proj_bias", (3 * 128,)
        yield from conv(f"{layer}.{attention}.out_proj", 128, 128, bias=True)
    yield from conv(f"{layer}.linear1", 256, 128, bias=True)
    yield from conv(f"{layer}.linear2", 128, 256, bias=True)
    for index in (1, 2, 3):
        yield from conv(f"{layer}.norm{index}", 128, bias=True)
    for which in ("self", "cross"):
        embedding = f"{layer}.{which}_posembed.position_embedding_head"
        yield from conv(f"{embedding}.0", 128, 2, 1, bias=True)
        yield from norm(f"{embedding}.1", 128)
        yield from conv(f"{embedding}.3", 128, 128, 1, bias=True)
    outputs = {"center": 2, "height": 1, "dim": 3, "rot": 2, "vel": 2, "heatmap": 10}
    for name, channels in outputs.items():
        branch = f"{root}.prediction_heads.0.{name}"
        yield from conv(f"{branch}.0.conv", 64, 128, 1)
        yield from norm(f"{branch}.0.bn", 64)
        yield from conv(f"{branch}.1", channels, 64, 1, bias=True)


def window_index() -> Tensor:
    """The index of a 7×7 window, entry by entry: 13 · (rows apart + 6) + columns apart + 6."""
    places = [(row, column) for row in range(7) for column in range(7)]
    return torch.tensor([[13 * (a - c + 6) + b - d + 6 for c, d in places] for a, b in places])


def mit_shapes(backbone: str = "resnet50") -> dict[str, tuple[int, ...]]:
    """Shape of every entry by name."""
    return {
        **dict(camera("encoders.camera", backbone)),
        **dict(lidar("encoders.lidar.backbone")),
        **dict(conv("fuser.0", 256, 80 + 256, 3, 3)),
        **dict(norm("fuser.1", 256)),
        **dict(decoder("decoder")),
        **dict(head("heads.object")),
    }


def mit_state_dict(backbone: str = "resnet50") -> dict[str, Tensor]:
    """A state dict of these shapes: entry i holds the value i / 1000 throughout, and no memory.

    The view transform's geometry and the windows' index hold what the configuration gives.
    """
    state = {
        name: torch.tensor(index / 1000).expand(shape)
        for index, (name, shape) in enumerate(mit_shapes(backbone).items())
    }
    for name in state:
        if name.endswith("num_batches_tracked"):
            state[name] = torch.tensor(7)
        if name.endswith("relative_position_index"):
            state[name] = window_index()
    view = "encoders.camera.vtransform"
    state[f"{view}.dx"] = torch.tensor([0.3, 0.3, 20.0])
    state[f"{view}.bx"] = torch.tensor([-53.85, -53.85, 0.0])
    state[f"{view}.nx"] = torch.tensor([360, 360, 1])
    columns, rows = torch.linspace(0, 703, 88), torch.linspace(0, 255, 32)
    depths = torch.arange(1.0, 60.0, 0.5)
    frustum = torch.empty(118, 32, 88, 3)
    frustum[..., 0] = columns
    frustum[..., 1] = rows[:, None]
    frustum[..., 2] = depths[:, None, None]
    state[f"{view}.frustum"] = frustum
    return state
