"""The detector in units that a BPU runs, the whole of it with others in their place, its files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, fx, nn
from torch.ao.quantization import DeQuantStub, QuantStub

from bevfusion.deployment._check import Figures, join_figures
from bevfusion.deployment._files import LIDAR, FilePart, bpu_files
from bevfusion.deployment._pieces import Piece
from bevfusion.deployment._result import ExportedFile
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


class UnitForms(Protocol):
    """A unit's graphs, such as `bevquant_hybrid_tools.forms.Forms`."""

    @property
    def float_graph(self) -> nn.Module:
        """Fused."""

    @property
    def fake_graph(self) -> nn.Module:
        """Fake-quantized."""

    @property
    def integer_graph(self) -> nn.Module:
        """In integers."""

    @property
    def prefix(self) -> str:
        """What stands before its modules' paths in the model."""


def bpu_pieces(
    folded: BEVFusion, parts: Sequence[str], forms: Mapping[str, UnitForms]
) -> list[Piece]:
    """The files for a BPU and its CPU, in the order of execution.

    Args:
        folded: The float model, batch norms folded.
        parts: What runs on the BPU: any of "camera", "fuser" and "decoder".
        forms: Of the units, by name; see `bpu_units`.
    """
    pieces = []
    for file in bpu_files(folded.parts, parts):
        form = forms.get(_unit(file, parts))
        if form is not None:
            graphs = form.float_graph, form.fake_graph, _as_it_is(form.integer_graph)
            pieces.append(Piece(file, "bpu", *graphs, prefix=form.prefix))
        else:
            module = file.module(folded)
            pieces.append(Piece(file, "sparse" if file.name == LIDAR else "float", module, module))
    return pieces


def _unit(file: FilePart, on_bpu: Sequence[str]) -> str:
    """Name of the unit that a file holds; empty for one of the CPU's."""
    units = {"camera.backbone": ("camera", "camera"), "fuser": ("fuser", "bev"),
             "decoder": ("decoder", "bev")}  # fmt: skip
    part, unit = units.get(file.name, ("", ""))
    return unit if part in on_bpu else ""


def _as_it_is(graph: nn.Module) -> Any:
    return lambda module, args: graph


class UnitLayer(Protocol):
    """A row of comparing the forms, such as `bevquant_hybrid_tools.forms.BpuLayer`."""

    @property
    def layer(self) -> str:
        """Its path in the model."""

    @property
    def fake_sqnr_db(self) -> float | None:
        """Of the fake-quantized result against float."""

    @property
    def integer_sqnr_db(self) -> float | None:
        """Of the integers."""

    @property
    def max_steps(self) -> int:
        """Largest difference of the two, in steps."""


def beside_bpu_layers(
    files: Iterable[ExportedFile], rows: Iterable[UnitLayer], paths: Mapping[str, str]
) -> tuple[ExportedFile, ...]:
    """`beside_layers` of files for a BPU.

    Args:
        files: Written for it.
        rows: What comparing its executions gave.
        paths: Name of what stands for a function in the unit's graph to its path in the model.
    """
    known: dict[tuple[str, str], list[Figures]] = defaultdict(list)
    for row in rows:
        scope, _, name = row.layer.rpartition(".")
        key = (scope, "resize") if name.startswith("interpolate") else (row.layer, "")
        known[key].append((row.fake_sqnr_db, row.integer_sqnr_db, row.max_steps))
    named = [
        replace(file, layers=tuple(replace(v, path=paths.get(v.path, v.path)) for v in file.layers))
        for file in files
    ]
    return join_figures(named, known)
