"""The set of files: names, inputs and outputs, and their tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from bevfusion.model import BEVFusion, Detector


class DepthPart(nn.Module):
    """The view transform up to the pooling: context and depth distribution of each pixel."""

    def __init__(self, transform: Any) -> None:
        super().__init__()
        self.dtransform, self.depthnet = transform.dtransform, transform.depthnet
        self.bins, self.channels = transform.bins, transform.channels
        self.quant_concat: nn.Module | None = getattr(transform, "quant_concat", None)

    def forward(self, features: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        """Maps [cameras, …] and depth images [cameras, 1, height, width]."""
        both = [self.dtransform(depth), features]
        x = torch.cat(both, 1) if self.quant_concat is None else self.quant_concat(both)
        x = self.depthnet(x)
        context = x[:, self.bins : self.bins + self.channels]
        # Channels last, as CUDA-BEVFusion's pooling reads them.
        return context.permute(0, 2, 3, 1), x[:, : self.bins].softmax(1)


class HeldPart(nn.Module):
    """Modules in sequence under their paths in the model, after which nodes are named.

    Args:
        modules: By path. The first one takes the inputs, each other one the output before it.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.paths = tuple(modules)
        for path, module in modules.items():
            self._hold(path, module)

    @classmethod
    def of(cls, model: nn.Module, *paths: str) -> Self:
        """The modules of a model at these paths."""
        return cls({path: model.get_submodule(path) for path in paths})

    def _hold(self, path: str, module: nn.Module) -> None:
        *outer, name = path.split(".")
        place: nn.Module = self
        for part in outer:
            if not hasattr(place, part):
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        """The output of the last module."""
        for path in self.paths:
            inputs = (self.get_submodule(path)(*inputs),)
        return inputs[0]


class ReadPart(HeldPart):
    """A part and the next file's quantizer of its map.

    Quantizing a second time changes nothing, so that file's values are the same with and without
    it.
    """

    def __init__(self, held: HeldPart, path: str, quantizer: nn.Module) -> None:
        super().__init__({p: held.get_submodule(p) for p in held.paths} | {path: quantizer})


class FeaturesPart(HeldPart):
    """Images, [cameras, 3, height, width], to the map that the view transform lifts."""

    def __init__(self, model: BEVFusion) -> None:
        modules = {f"encoders.camera.{name}": model.camera[name] for name in ("backbone", "neck")}
        super().__init__(modules)

    def forward(self, img: Tensor) -> Any:
        """The finest map of the neck."""
        return super().forward(img)[0]


class CameraPart(FeaturesPart):
    """Pooled features of images and depth images, [1, cameras, channels, height, width]."""

    def __init__(self, model: BEVFusion) -> None:
        super().__init__(model)
        self._hold(_VIEW_PATH, DepthPart(model.camera["vtransform"]))

    def forward(self, img: Tensor, depth: Tensor) -> Any:  # type: ignore[override]
        """Context and depth distribution."""
        features = super().forward(img.flatten(0, 1))
        return self.get_submodule(_VIEW_PATH)(features, depth.flatten(0, 1))


class _TopQueries(nn.Module):
    """`QueryPicker` as one TopK. ONNX puts the lower of two equal positions first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, scores: Tensor) -> Tensor:
        return scores.flatten(1).topk(self.count, dim=1).indices


class BoxesPart(nn.Module):
    """The head with its scores multiplied out: σ(heatmap) · heatmap at the query, in its class."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        # A copy: the model's own head keeps its choice of queries.
        head = copy.deepcopy(head)
        head.query_picker = _TopQueries(head.config.num_queries)
        self.heads = nn.ModuleDict({"object": head})
        self.classes = head.config.num_classes

    def forward(self, middle: Tensor) -> tuple[Tensor, ...]:
        """Score, rot, dim, reg (centre), height and vel, each [1, …, queries]."""
        found = self.heads["object"](middle)
        one_hot = nn.functional.one_hot(found["query_labels"], self.classes).transpose(1, 2)
        score = found["heatmap"].sigmoid() * found["query_heatmap_score"] * one_hot.to(middle.dtype)
        return score, found["rot"], found["dim"], found["center"], found["height"], found["vel"]


class CenterPart(HeldPart):
    """CenterPoint's dense parts: backbone and neck, head, or all."""

    def __init__(self, model: Detector, parts: Iterable[str]) -> None:
        paths = [path for part in parts for path in model.part_paths[part]]
        super().__init__({path: model.get_submodule(path) for path in paths})

    def forward(self, spatial_features: Tensor) -> Any:
        """A map [1, channels, y, x] to the head's maps in their order, or the neck's."""
        x = super().forward(spatial_features)
        return tuple(x.values()) if isinstance(x, dict) else x


LIDAR = "lidar.backbone.xyz"
"""Name of the sparse encoder's file, which takes the batch size too."""
HEAD = "head.bbox"
"""Name of the head's file, whose scores are multiplied out."""
POOLED = "pooled"
"""The tensor between the camera's two files, which `walk` makes: no file holds the pooling."""
PADDED = "padded"
"""Decorated pillars, with zeros up to the most that a frame may have: a file has one size."""
PILLARS = "pillars"
"""The pillars' features, which `walk` scatters to the map: no file holds that."""
_VIEW_PATH = "encoders.camera.vtransform"


@dataclass(frozen=True)
class FilePart:
    """One file of the set.

    Attributes:
        name: Without its ending, as CUDA-BEVFusion has it.
        inputs: Name in the file to the tensor of the pipeline that goes in.
        outputs: Name in the file to the tensor that comes out.
        make: The part of a model that it holds.
        sparse: Whether that is a sparse encoder, which takes the batch size too.
        order: Of a sparse encoder's coordinates, "xyz" or "zyx".
        notes: For its deployment.
        build: How an engine of it is built, where the target's commands do not fit.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    make: Callable[[Any], nn.Module]
    sparse: bool = False
    order: str = "xyz"
    notes: tuple[str, ...] = ()
    build: str = ""

    def module(self, model: Detector) -> nn.Module:
        """The part of `model`; its layers are the model's own."""
        return self.make(model).eval()


_LIFTED = {"camera_feature": "context", "camera_depth_weights": "depth_weights"}
LIFTED = frozenset(_LIFTED.values())
"""What is pooled to the bird's-eye view."""
_CAMERA = FilePart(
    "camera.backbone", {"img": "images", "depth": "depth"}, _LIFTED, CameraPart
)  # fmt: skip
_VIEW = FilePart(
    "camera.vtransform", {"feat_in": POOLED}, {"feat_out": "camera"},
    lambda m: HeldPart.of(m, f"{_VIEW_PATH}.downsample"),
)  # fmt: skip
_LIDAR = FilePart(
    LIDAR, {"features": "features", "coords": "coords"}, {"lidar": "lidar"},
    lambda m: HeldPart.of(m, m.stages["lidar"]), sparse=True,
)  # fmt: skip
DECODER = ("decoder.backbone", "decoder.neck")
_FUSER = FilePart(
    "fuser", {"camera": "camera", "lidar": "lidar"}, {"middle": "middle"},
    lambda m: HeldPart.of(m, "fuser", *(DECODER if "decoder" in m.parts else ())),
)  # fmt: skip
PILLAR_FILE = FilePart(
    "pts_voxel_encoder", {"features": PADDED}, {"pillar_features": PILLARS},
    lambda m: HeldPart.of(m, "pts_voxel_encoder"),
)  # fmt: skip
_HEAD = FilePart(
    HEAD, {"middle": "middle"},
    {name: name for name in ("score", "rot", "dim", "reg", "height", "vel")},
    lambda m: BoxesPart(m.head),
)  # fmt: skip

# For a BPU the view transform stays on the CPU, and so may the decoder.
_FEATURES = FilePart(
    "camera.backbone", {"img": "flat_images"}, {"features": "neck"}, FeaturesPart
)  # fmt: skip
_DEPTH = FilePart(
    "camera.depth", {"features": "neck", "depth": "flat_depth"}, _LIFTED,
    lambda m: HeldPart({_VIEW_PATH: DepthPart(m.camera["vtransform"])}),
)  # fmt: skip
_FUSED_ALONE = FilePart(
    "fuser", {"camera": "camera", "lidar": "lidar"}, {"fused": "fused"},
    lambda m: HeldPart.of(m, "fuser"),
)  # fmt: skip


def nvidia_files(parts: Iterable[str]) -> tuple[FilePart, ...]:
    """CUDA-BEVFusion's set, as far as a model of these parts has it, in the order of execution.

    A detector of one sensor has its decoder, which elsewhere is in the fuser's file, in one alone.

    Example:
        >>> [(file.name, *file.inputs.values()) for file in nvidia_files(("lidar", "decoder"))]
        [('lidar.backbone.xyz', 'features', 'coords'), ('decoder', 'lidar')]
    """
    parts = tuple(parts)
    wanted = {"camera": (_CAMERA, _VIEW), "lidar": (_LIDAR,), "fuser": (_FUSER,), "head": (_HEAD,)}
    # Without a fuser, the decoder reads the one branch that there is.
    if "fuser" not in parts:
        wanted["decoder"] = (_decoder(reads=parts[0]),)
    return tuple(file for part in parts for file in wanted.get(part, ()))


def centerpoint_files(model: Detector, *, apart: bool = False) -> tuple[FilePart, ...]:
    """CenterPoint's set: an encoder of voxels or pillars, and the dense part downstream.

    The head's outputs are its maps, `reg_0`, …, `heatmap_0`, `reg_1`, …

    Args:
        model: Of any parts.
        apart: Whether decoder and head are separate files.

    Example:
        >>> from bevfusion.centerpoint import PILLAR_CONFIGS, build_centerpoint
        >>> model = build_centerpoint(PILLAR_CONFIGS["waymo"], ("lidar", "decoder"))
        >>> [(file.name, *file.outputs) for file in centerpoint_files(model)]
        [('pts_voxel_encoder', 'pillar_features'), ('rpn_centerhead', 'middle')]
    """
    pillars = model.kind == "centerpoint-pillars"
    encoder = PILLAR_FILE if pillars else replace(_LIDAR, name="centerpoint.scn", order="zyx")
    built = [part for part in ("decoder", "head") if part in model.parts]
    groups = {"rpn": built[:1], "centerhead": built[1:]} if apart else {"rpn_centerhead": built}
    return encoder, *(_dense(model, name, parts) for name, parts in groups.items() if parts)


def _dense(model: Detector, name: str, parts: Iterable[str]) -> FilePart:
    names = model.head.output_names if "head" in parts else ("middle",)
    reads = "lidar" if "decoder" in parts else "middle"
    return FilePart(
        name, {"spatial_features": reads}, {n: n for n in names}, lambda m: CenterPart(m, parts)
    )


def files_of(model: Detector) -> tuple[FilePart, ...]:
    """The set of files for NVIDIA's engines and CPUs of a detector of any kind."""
    return nvidia_files(model.parts) if model.kind == "bevfusion" else centerpoint_files(model)


def _decoder(reads: str) -> FilePart:
    return FilePart(
        "decoder", {reads: reads}, {"middle": "middle"}, lambda m: HeldPart.of(m, *DECODER)
    )


def bpu_files(parts: Iterable[str], on_bpu: Iterable[str]) -> tuple[FilePart, ...]:
    """The set for a BPU: dense parts that run on it are one file each, or one together.

    Args:
        parts: That the model has.
        on_bpu: Those of camera, fuser and decoder that run on the BPU.
    """
    together = len({"fuser", "decoder"} & set(on_bpu)) == 2
    wanted = {
        "camera": (_FEATURES, _DEPTH, _VIEW),
        "lidar": (_LIDAR,),
        "fuser": (_FUSER,) if together else (_FUSED_ALONE, _decoder(reads="fused")),
        "head": (_HEAD,),
    }
    return tuple(file for part in parts for file in wanted.get(part, ()))
