"""The parts of the model as files hold them, as modules of their own."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion

__all__ = [
    "BoxesPart", "CameraPart", "DecodedPart", "DepthPart", "FeaturesPart", "FusedPart", "HeldPart",
    "PackedBoxesPart", "SparsePart",
]  # fmt: skip


class DepthPart(nn.Module):
    """The view transform up to the pooling: context and depth distribution of each pixel.

    The context comes channels last, [cameras, rows, columns, channels], as CUDA-BEVFusion's pooling
    reads it.
    """

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
        return context.permute(0, 2, 3, 1), x[:, : self.bins].softmax(1)


class CameraPart(nn.Module):
    """Images and depth images, [1, cameras, channels, height, width], to what is pooled."""

    def __init__(self, model: BEVFusion) -> None:
        super().__init__()
        camera = model.camera
        parts = {"backbone": camera["backbone"], "neck": camera["neck"]}
        parts["vtransform"] = DepthPart(camera["vtransform"])
        self.encoders = nn.ModuleDict({"camera": nn.ModuleDict(parts)})

    def forward(self, img: Tensor, depth: Tensor) -> Any:
        """Context and depth distribution."""
        camera: Any = self.encoders["camera"]
        x = camera["neck"](camera["backbone"](img.flatten(0, 1)))[0]
        return camera["vtransform"](x, depth.flatten(0, 1))


class FeaturesPart(nn.Module):
    """Images, [cameras, 3, height, width], to the map that the view transform lifts."""

    def __init__(self, model: BEVFusion) -> None:
        super().__init__()
        camera = model.camera
        parts = {"backbone": camera["backbone"], "neck": camera["neck"]}
        self.encoders = nn.ModuleDict({"camera": nn.ModuleDict(parts)})

    def forward(self, img: Tensor) -> Any:
        """The finest map of the neck."""
        camera: Any = self.encoders["camera"]
        return camera["neck"](camera["backbone"](img))[0]


class HeldPart(nn.Module):
    """A module under the path that it has in the model, after which nodes are named."""

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__()
        self.path = path
        *outer, name = path.split(".")
        place: nn.Module = self
        for part in outer:
            place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.add_module(name, module)

    def forward(self, *inputs: Any) -> Any:
        """What the module makes."""
        return self.get_submodule(self.path)(*inputs)


class SparsePart(HeldPart):
    """The sparse encoder."""

    def forward(self, features: Tensor, coords: Tensor, batch_size: int) -> Any:
        """Voxels to the bird's-eye view."""
        return self.get_submodule(self.path)(features, coords, batch_size)


class FusedPart(nn.Module):
    """Two maps to one: fuser, and decoder unless it is a file of its own."""

    def __init__(self, model: BEVFusion, *, decoder: bool = True) -> None:
        super().__init__()
        self.fuser, self.decoder = model.fuser, model.decoder if decoder else None

    def forward(self, camera: Tensor, lidar: Tensor) -> Any:
        """Maps [1, channels, x, y]."""
        assert self.fuser is not None
        x = self.fuser(camera, lidar)
        return x if self.decoder is None else _decoded(self.decoder, x)


class DecodedPart(nn.Module):
    """The decoder alone."""

    def __init__(self, model: BEVFusion) -> None:
        super().__init__()
        self.decoder = model.decoder

    def forward(self, fused: Tensor) -> Any:
        """A map [1, channels, x, y]."""
        return _decoded(self.decoder, fused)


def _decoded(decoder: Any, x: Tensor) -> Any:
    return decoder["neck"](decoder["backbone"](x))


class _TopQueries(nn.Module):
    """`QueryPicker` as one TopK, of which ONNX says that the lower of two equal ones is first."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, scores: Tensor) -> Tensor:
        return scores.flatten(1).topk(self.count, dim=1).indices


class BoxesPart(nn.Module):
    """The head with its scores multiplied out: σ(heatmap) · heatmap at the query, in its class."""

    def __init__(self, head: Any) -> None:
        super().__init__()
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


class PackedBoxesPart(BoxesPart):
    """The head as Autoware's node reads it: one frame; boxes, scores and classes apart."""

    def forward(self, middle: Tensor) -> tuple[Tensor, ...]:
        """Centre, height, dim, rot and vel [10, queries], score [queries] and class [queries]."""
        score, rot, dim, center, height, vel = super().forward(middle)
        best, label = score[0].max(0)
        return torch.cat([part[0] for part in (center, height, dim, rot, vel)]), best, label
