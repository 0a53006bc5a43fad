"""Names that other projects give the entries of a state dict, as rules to the names used here.

A naming is a list of rules, which are applied one after the other. BEVFusion has mit-bevfusion's
names here, CenterPoint mmdetection3d's. Besides names, projects differ in:

- the box. mmdetection3d before 1.0, det3d and mit-bevfusion hold width, length, height and a yaw a;
  mmdetection3d since 1.0 and OpenPCDet length, width, height and the yaw b = −a − π/2, so that
  sin b = −cos a and cos b = −sin a. OpenPCDet's `rot` is cosine, sine. The last layers of `dim` and
  `rot` are linear: exchanged rows, negated ones where need be, are the same function.
- biases of convolutions that a batch norm follows: subtracted from the running mean, they are the
  same function in evaluation.
- mmdetection3d's and OpenPCDet's BEVFusion predict the z of a box's centre, mit-bevfusion that of
  its top: see `HeadConfig.height`.
- the axes of the grid. OpenPCDet's BEVFusion has z, y, x, mit-bevfusion x, y, z: kernels with
  exchanged axes are the same function of exchanged maps.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import pad as torch_pad


class Rule(NamedTuple):
    """One row of a table."""

    # A regular expression, searched for in the name.
    pattern: str
    # As for `re.sub`; {2-1} is the number in group 2, less 1. None: the entry is not used.
    replacement: str | None
    # Conversion of the values: a key of `CONVERSIONS`.
    convert: str = ""

    def __str__(self) -> str:
        return f"{self.pattern} -> {self.replacement or '(not used)'}"


_OTHER_TRANSFUSION_BOX = (
    Rule(r"(\.prediction_heads\.\d\.dim\.1\.)", r"\1", "width and length exchanged"),
    Rule(r"(\.prediction_heads\.\d\.rot\.1\.)", r"\1", "yaw turned"),
)

MMDET3D_BEVFUSION = (
    Rule(r"^img_backbone\.", "encoders.camera.backbone."),
    Rule(r"^img_neck\.", "encoders.camera.neck."),
    Rule(r"^view_transform\.", "encoders.camera.vtransform."),
    Rule(r"^pts_middle_encoder\.", "encoders.lidar.backbone."),
    Rule(r"^fusion_layer\.", "fuser."),
    Rule(r"^pts_backbone\.", "decoder.backbone."),
    Rule(r"^pts_neck\.", "decoder.neck."),
    Rule(r"^bbox_head\.", "heads.object."),
    Rule(r"\.self_attn\.attn\.", ".self_attn."),
    Rule(r"\.cross_attn\.attn\.", ".multihead_attn."),
    Rule(r"(\.decoder\.\d)\.ffn\.layers\.0\.0\.", r"\1.linear1."),
    Rule(r"(\.decoder\.\d)\.ffn\.layers\.1\.", r"\1.linear2."),
    Rule(r"\.norms\.(\d)\.", ".norm{1+1}."),
    *_OTHER_TRANSFUSION_BOX,
)

_OTHER_BOX = (
    Rule(r"(\.task_heads\.\d+\.dim\.1\.)", r"\1", "width and length exchanged"),
    Rule(r"(\.task_heads\.\d+\.rot\.1\.)", r"\1", "yaw turned"),
)

DET3D = (
    Rule(r"^reader\.(pfn_layers\.0\.linear\.)", r"pts_voxel_encoder.\1", "column for z added"),
    Rule(r"^reader\.", "pts_voxel_encoder."),
    Rule(r"^backbone\.conv1\.", "pts_middle_encoder.encoder_layers.encoder_layer1."),
    Rule(
        r"^backbone\.conv([234])\.([01])\.",
        r"pts_middle_encoder.encoder_layers.encoder_layer{1-1}.2.\2.",
    ),
    Rule(
        r"^backbone\.conv([234])\.([34])\.",
        r"pts_middle_encoder.encoder_layers.encoder_layer\1.{2-3}.",
    ),
    Rule(r"^backbone\.extra_conv\.", "pts_middle_encoder.conv_out."),
    Rule(r"^backbone\.", "pts_middle_encoder."),
    Rule(r"^neck\.blocks\.(\d)\.(\d+)\.", r"pts_backbone.blocks.\1.{2-1}."),
    Rule(r"^neck\.deblocks\.", "pts_neck.deblocks."),
    Rule(r"^bbox_head\.shared_conv\.0\.", "pts_bbox_head.shared_conv.conv."),
    Rule(r"^bbox_head\.shared_conv\.1\.", "pts_bbox_head.shared_conv.bn."),
    Rule(r"^bbox_head\.tasks\.", "pts_bbox_head.task_heads."),
    Rule(r"(\.task_heads\.\d+)\.hm\.", r"\1.heatmap."),
    Rule(r"(\.task_heads\.\d+\.\w+)\.1\.", r"\1.0.bn."),
    Rule(r"(\.task_heads\.\d+\.\w+)\.0\.(weight|bias)$", r"\1.0.conv.\2"),
    Rule(r"(\.task_heads\.\d+\.\w+)\.3\.", r"\1.1."),
    *_OTHER_BOX,
)

_OPENPCDET = (
    Rule(r"^global_step$", None),
    Rule(r"^vfe\.", "pts_voxel_encoder."),
    Rule(r"^backbone_3d\.", "pts_middle_encoder."),
    Rule(r"^backbone_2d\.blocks\.(\d)\.(\d+)\.", r"pts_backbone.blocks.\1.{2-1}."),
    Rule(r"^backbone_2d\.(deblocks\.\d\.0\.)", r"pts_neck.\1", "1×1 deconvolution"),
    Rule(r"^backbone_2d\.deblocks\.", "pts_neck.deblocks."),
    Rule(r"^dense_head\.shared_conv\.0\.", "pts_bbox_head.shared_conv.conv."),
    Rule(r"^dense_head\.shared_conv\.1\.", "pts_bbox_head.shared_conv.bn."),
    Rule(r"^dense_head\.heads_list\.", "pts_bbox_head.task_heads."),
    Rule(r"(\.task_heads\.\d+)\.center\.", r"\1.reg."),
    Rule(r"(\.task_heads\.\d+)\.center_z\.", r"\1.height."),
    Rule(r"(\.task_heads\.\d+)\.hm\.", r"\1.heatmap."),
    Rule(r"(\.task_heads\.\d+\.\w+\.\d)\.0\.", r"\1.conv."),
    Rule(r"(\.task_heads\.\d+\.\w+\.\d)\.1\.", r"\1.bn."),
    Rule(r"(\.task_heads\.\d+\.rot\.1\.)", r"\1", "sine and cosine exchanged"),
    Rule(r"^dense_head\.", "pts_bbox_head."),
)

# VoxelNeXt has the stages 5 and 6.
_OPENPCDET_STAGES = (
    Rule(r"^backbone_3d\.conv1\.", "pts_middle_encoder.encoder_layers.encoder_layer1."),
    Rule(
        r"^backbone_3d\.conv([2-6])\.0\.", "pts_middle_encoder.encoder_layers.encoder_layer{1-1}.2."
    ),
    Rule(
        r"^backbone_3d\.conv([2-6])\.([12])\.",
        r"pts_middle_encoder.encoder_layers.encoder_layer\1.{2-1}.",
    ),
)

OPENPCDET = (*_OPENPCDET_STAGES, *_OPENPCDET)

_TURNED = "axes of the grid exchanged"
OPENPCDET_BEVFUSION = (
    Rule(r"^global_step$", None),
    Rule(r"^image_backbone\.", "encoders.camera.backbone."),
    Rule(r"^neck\.", "encoders.camera.neck."),
    Rule(r"^vtransform\.", "encoders.camera.vtransform."),
    *_OPENPCDET_STAGES,
    Rule(r"^(backbone_3d|pts_middle_encoder)\.", "encoders.lidar.backbone.", _TURNED),
    Rule(r"^fuser\.conv\.", "fuser.", _TURNED),
    Rule(r"^backbone_2d\.blocks\.(\d)\.(\d+)\.", r"decoder.backbone.blocks.\1.{2-1}.", _TURNED),
    Rule(r"^backbone_2d\.deblocks\.", "decoder.neck.deblocks.", _TURNED),
    Rule(r"^dense_head\.decoder\.", "heads.object.decoder.0."),
    Rule(r"^dense_head\.prediction_head\.", "heads.object.prediction_heads.0."),
    Rule(r"^dense_head\.", "heads.object.", _TURNED),
    Rule(r"(\.prediction_heads\.0\.\w+\.0)\.0\.", r"\1.conv."),
    Rule(r"(\.prediction_heads\.0\.\w+\.0)\.1\.", r"\1.bn."),
    *_OTHER_TRANSFUSION_BOX,
)

# Of one sensor: SECOND, PointPillars.
MMDET3D_VOXELNET = (
    Rule(
        r"^voxel_encoder\.(pfn_layers\.0\.linear\.)", r"pts_voxel_encoder.\1",
        "columns of PillarFeatureNet(legacy=True), its default",
    ),
    Rule(r"^(voxel_encoder|middle_encoder|backbone|neck|bbox_head)\.", r"pts_\1."),
)  # fmt: skip

OPENPCDET_PLAIN = (
    Rule(r"^backbone_3d\.conv([1-4])\.", r"pts_middle_encoder.encoder_layers.encoder_layer\1."),
    *_OPENPCDET,
)

NAMINGS: dict[str, tuple[Rule, ...]] = {
    "own": (),
    "mmdet3d-bevfusion": MMDET3D_BEVFUSION,
    "openpcdet": OPENPCDET,
    "openpcdet-plain": OPENPCDET_PLAIN,
    "openpcdet-bevfusion": OPENPCDET_BEVFUSION,
    "det3d": DET3D,
    "mmdet3d-voxelnet": MMDET3D_VOXELNET,
    "mmdet3d-0": _OTHER_BOX,
}
"""Rules by the name of the naming.

| name | of |
|---|---|
| `own` | mit-bevfusion's BEVFusion; CenterPoint of mmdetection3d since 1.0 |
| `mmdet3d-bevfusion` | BEVFusion of mmdetection3d's `projects` |
| `openpcdet` | OpenPCDet's CenterPoint, with VoxelResBackBone8x or pillars; stages of VoxelNeXt |
| `openpcdet-plain` | the same with VoxelBackBone8x, as SECOND has it |
| `openpcdet-bevfusion` | OpenPCDet's BEVFusion, whose maps have the axes y, x |
| `det3d` | tianweiy/CenterPoint |
| `mmdet3d-voxelnet` | mmdetection3d's SECOND and PointPillars (VoxelNet), but for anchor heads |
| `mmdet3d-0` | CenterPoint of mmdetection3d before 1.0, with the names of `own` and other boxes |
"""

# A convolution and its batch norm, in the names used here.
NORM_BEHIND = (r"\.conv(\d?)\.bias$", r".bn\1.running_mean")


def _exchanged(tensor: Tensor, module: nn.Module) -> Tensor:
    return tensor[[1, 0, *range(2, len(tensor))]]


def _padded(tensor: Tensor, module: nn.Module) -> Tensor:
    """A column for the offset from a pillar's centre in z, which det3d's pillars do not know."""
    # Added in any case: a weight with one more is misshapen then, as it must be, for that one is of
    # the point's distance.
    return torch_pad(tensor, (0, 1)) if tensor.ndim == 2 else tensor


def _conv_of_deconv(tensor: Tensor, module: nn.Module) -> Tensor:
    """A 1×1 deconvolution of stride 1, [in, out, 1, 1], as a convolution, [out, in, 1, 1]."""
    # OpenPCDet writes a convolution where its option USE_CONV_FOR_NO_STRIDE is set; with as many
    # channels in as out the shape does not say so, and its default is taken.
    weight = module.weight
    if tensor.ndim != 4 or tensor.shape[2:] != (1, 1) or getattr(module, "transposed", True):
        return tensor
    transposed = tensor.transpose(0, 1)
    return transposed if isinstance(weight, Tensor) and transposed.shape == weight.shape else tensor


def _turned(tensor: Tensor, module: nn.Module) -> Tensor:
    """A kernel of z, y, x (or y, x) as one of x, y, z (or x, y); other entries stay."""
    if tensor.ndim == 4 and tensor.shape[2:] != (1, 1):
        return tensor.transpose(2, 3)
    if tensor.ndim != 5:
        return tensor
    conv: Any = module
    sides, (into, out) = tuple(reversed(conv.kernel_size)), (conv.in_channels, conv.out_channels)
    # The layout, which is the file's, tells where the three axes are.
    for first, shape in (
        (1, (out, *sides, into)),
        (0, (*sides, into, out)),
        (2, (out, into, *sides)),
    ):
        if tuple(tensor.shape) == shape:
            return tensor.transpose(first, first + 2)
    return tensor


def _without_alias(tensor: Tensor, module: nn.Module) -> Tensor:
    """With `legacy=True` the first columns repeat the offsets from the pillar's centre."""
    moved = tensor.clone()
    moved[:, -3:] += moved[:, :3]
    moved[:, :3] = 0
    return moved


CONVERSIONS: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "width and length exchanged": _exchanged,
    "sine and cosine exchanged": _exchanged,
    "yaw turned": lambda tensor, module: -_exchanged(tensor, module),
    "column for z added": _padded,
    "1×1 deconvolution": _conv_of_deconv,
    _TURNED: _turned,
    MMDET3D_VOXELNET[0].convert: _without_alias,
}
"""What is done with values: from the file's tensor and the module that takes it to its own."""


@dataclass
class Renamed:
    """A state dict under the names used here."""

    names: str
    # The name in the file of each entry.
    source: dict[str, str] = field(default_factory=dict)
    # By the names used here.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    # Entries of the file that are of no use here.
    dropped: list[str] = field(default_factory=list)
    # Each rule that a name matched, and how many did.
    rules: Counter[str] = field(default_factory=Counter)
    # By the names used here.
    conversions: dict[str, str] = field(default_factory=dict)


def rename(state: Mapping[str, Tensor], names: str, prefix: str = "") -> Renamed:
    """Give the entries of a state dict the names used here; values stay as they are.

    Args:
        state: Tensors by name.
        names: A key of `NAMINGS`.
        prefix: Prefix of the names in the file, such as "model.".

    Example:
        >>> import torch
        >>> state = {"neck.blocks.0.1.weight": torch.ones(1)}
        >>> list(rename(state, "det3d").tensors)
        ['pts_backbone.blocks.0.0.weight']
    """
    made = Renamed(names)
    for original, tensor in state.items():
        name, convert = _applied(original.removeprefix(prefix), NAMINGS[names], made.rules)
        if name is None or name in made.tensors:
            made.dropped.append(original)
            continue
        made.tensors[name], made.source[name] = tensor, original
        if convert:
            made.conversions[name] = convert
    return made


def _applied(name: str, rules: Iterable[Rule], used: Counter[str]) -> tuple[str | None, str]:
    convert = ""
    for rule in rules:
        match = re.search(rule.pattern, name)
        if match is None:
            continue
        used[str(rule)] += 1
        if rule.replacement is None:
            return None, ""
        convert = rule.convert or convert
        name = name[: match.start()] + _filled(rule.replacement, match) + name[match.end() :]
    return name, convert


def _filled(replacement: str, match: re.Match[str]) -> str:
    def number(found: re.Match[str]) -> str:
        return str(int(match[int(found[1])]) + int(found[2]))

    return match.expand(re.sub(r"\{(\d)([+-]\d)\}", number, replacement))


def _prefixes(state: Mapping[str, Tensor]) -> Iterator[str]:
    """What more than half of the names begin with, "" first, then one component more each."""
    prefix = ""
    yield prefix
    while True:
        rests = (name.removeprefix(prefix).split(".") for name in state if name.startswith(prefix))
        nexts = Counter(rest[0] + "." for rest in rests if len(rest) > 1)
        [(first, count)] = nexts.most_common(1) or [("", 0)]
        if 2 * count <= len(state):
            return
        prefix += first
        yield prefix


def best_naming(
    state: Mapping[str, Tensor], wanted: Iterable[str], *, old: bool = False
) -> Renamed:
    """The naming and the prefix that find most of a model's entries."""
    goal = {name for name in wanted if not name.endswith("num_batches_tracked")}
    best: tuple[int, Renamed] | None = None
    for depth, prefix in enumerate(_prefixes(state)):
        if depth > 1 and best is not None and best[0]:
            break  # deeper ones, as "ema_model.module.", are rare
        for names in NAMINGS:
            if names == "mmdet3d-0":
                continue  # the names of `own`: the file's version decides
            made = rename(state, names, prefix)
            found = len(goal & made.tensors.keys())
            if best is None or found > best[0]:
                best = found, made
            if names == "own" and found == len(goal):
                break
    assert best is not None
    # `old`: the file is of mmdetection3d before 1.0.
    if old and best[1].names == "own" and any(".task_heads." in name for name in goal):
        name, original = next(iter(best[1].source.items()))
        return rename(state, "mmdet3d-0", original.removesuffix(name))
    return best[1]
