"""The detector in units that a BPU runs, and the whole of it with others in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.ao.quantization import DeQuantStub, QuantStub

from bevfusion.model import BEVFusion
from bevfusion.quantization import whole_output

Note = Callable[[str, Tensor], None]
"""Takes a value and its name."""
RunGraph = Callable[..., Tensor]
"""Runs a graph: called with it, with what takes every node and its result, and with the inputs."""
UNIT_PREFIXES = {"camera": "encoders.camera.", "bev": ""}
"""Unit → what stands before its modules' paths in the model."""


class CameraUnit(nn.Module):
    """Backbone and neck: images to the feature map that the view transform lifts."""

    def __init__(self, camera: nn.ModuleDict) -> None:
        super().__init__()
        self.quant_images = QuantStub()
        self.backbone = camera["backbone"]
        self.neck = camera["neck"]
        self.dequant_features = DeQuantStub()

    def forward(self, images: Tensor) -> Any:
        """Float [images, 3, height, width] → float [images, channels, rows, columns]."""
        return self.dequant_features(self.neck(self.backbone(self.quant_images(images)))[0])


class FusedUnit(nn.Module):
    """Fuser, and the decoder behind it where that is quantized too."""

    def __init__(self, fuser: nn.Module, decoder: nn.ModuleDict | None) -> None:
        super().__init__()
        self.quant_camera_map, self.quant_lidar_map = QuantStub(), QuantStub()
        self.fuser = fuser
        self.decoder = decoder
        self.dequant_map = DeQuantStub()

    def forward(self, camera_map: Tensor, lidar_map: Tensor) -> Any:
        """Two bird's-eye-view maps → one."""
        x = self.fuser(self.quant_camera_map(camera_map), self.quant_lidar_map(lidar_map))
        if self.decoder is not None:
            x = self.decoder["neck"](self.decoder["backbone"](x))
        return self.dequant_map(x)


class DecoderUnit(nn.Module):
    """SECOND and SECONDFPN."""

    def __init__(self, decoder: nn.ModuleDict) -> None:
        super().__init__()
        self.quant_fused_map = QuantStub()
        self.decoder = decoder
        self.dequant_map = DeQuantStub()

    def forward(self, fused_map: Tensor) -> Any:
        """The fused map → the decoded one."""
        x = self.quant_fused_map(fused_map)
        return self.dequant_map(self.decoder["neck"](self.decoder["backbone"](x)))


def bpu_units(model: BEVFusion, parts: Iterable[str]) -> dict[str, nn.Module]:
    """The units in which a BPU runs parts of the model, "camera", "bev" or both.

    Args:
        model: In float; the units' layers are its own.
        parts: What runs on the BPU: any of "camera", "fuser" and "decoder".
    """
    chosen = set(parts)
    units: dict[str, nn.Module] = {}
    if "camera" in chosen:
        units["camera"] = CameraUnit(model.camera)
    if "fuser" in chosen:
        assert model.fuser is not None
        units["bev"] = FusedUnit(model.fuser, model.decoder if "decoder" in chosen else None)
    elif "decoder" in chosen:
        assert model.decoder is not None
        units["bev"] = DecoderUnit(model.decoder)
    return {name: unit.eval() for name, unit in units.items()}


FUSED_LAYER = "fuser.0"  # whose result is the fused map, wherever it runs


def _nothing(name: str, value: Tensor) -> None:
    """Take no note."""


class SplitModel(nn.Module):
    """`BEVFusion` with some parts replaced by graphs, whatever these compute in.

    Args:
        model: Runs the other parts, in float.
        graphs: By unit: "camera" (images → feature map), "bev" (maps → map).
        parts: What the graphs replace: any of "camera", "fuser", "decoder".
        run: Runs a graph, such as `bevquant_hybrid_tools.forms.run_noting`.
    """

    def __init__(
        self,
        model: BEVFusion,
        graphs: Mapping[str, fx.GraphModule],
        parts: Sequence[str],
        run: RunGraph,
    ) -> None:
        super().__init__()
        self.model = model
        self._run_graph = run
        self.parts = tuple(parts)
        self.graphs = nn.ModuleDict(dict(graphs))

    def forward(
        self,
        features: Tensor | None,
        coords: Tensor | None,
        batch_size: int,
        images: Tensor | None = None,
        depth: Tensor | None = None,
        cells: Tensor | None = None,
        *,
        note: Note = _nothing,
    ) -> Any:
        """Run a `Batch`.

        Args:
            features: As `BEVFusion` takes them, like all but `note`.
            coords: Of the voxels.
            batch_size: Number of frames.
            images: Of the cameras.
            depth: In metres.
            cells: Of the frustum points.
            note: Called with every result on the way: of an operator under "unit/node", of a
                stage under its name.
        """
        model = self.model
        maps = []
        if "camera" in model.encoders:
            assert images is not None
            camera = model.camera
            flat = images.flatten(0, 1)
            x: Any
            if "camera" in self.parts:
                x = self._run("camera", note, flat)
            else:
                x = camera["neck"](camera["backbone"](flat))[0]
            note("neck", x)
            maps.append(camera["vtransform"](x.unflatten(0, (batch_size, -1)), depth, cells))
            note("camera", maps[-1])
        if "lidar" in model.encoders:
            maps.append(model.lidar["backbone"](features, coords, batch_size))
            note("lidar", maps[-1])
        x = self._decoded(maps, note)
        if model.heads is None:
            return x
        outputs = model.heads["object"](x)
        note("head", whole_output(outputs))
        return outputs

    def _decoded(self, maps: list[Tensor], note: Note) -> Tensor:
        """Fuser and decoder, as far as they are there, in float or as a graph."""
        model, parts = self.model, self.parts
        x = maps[0]
        if "fuser" in parts:
            x = self._run("bev", note, *maps)
        elif model.fuser is not None:
            x = model.fuser(*maps)
            note("fuser", x)
        if model.decoder is None:
            return x
        if "decoder" not in parts:
            x = model.decoder["neck"](model.decoder["backbone"](x))
        elif "fuser" not in parts:
            x = self._run("bev", note, x)
        note("decoder", x)
        return x

    def _run(self, unit: str, note: Note, *inputs: Tensor) -> Tensor:
        def tell(node: fx.Node, value: Any) -> None:
            if isinstance(value, Tensor):
                note(f"{unit}/{node.name}", value)
            if node.target == FUSED_LAYER:
                note("fuser", value)

        return self._run_graph(self.graphs[unit], tell, *inputs)
