"""The whole model where dense units run as traced graphs, and every value on the way is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx, nn

from bevfusion_quant.measure import whole_output

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion

Note = Callable[[str, Tensor], None]
FUSED_LAYER = "fuser.0"  # whose result is the fused map, wherever it runs


def _nothing(name: str, value: Tensor) -> None:
    """Take no note."""


class SplitModel(nn.Module):
    """`BEVFusion` with some parts replaced by graphs, whatever these compute in.

    Args:
        model: Runs the other parts, in float.
        graphs: By unit: "camera" (images → feature map), "bev" (maps → map).
        parts: What the graphs replace: any of "camera", "fuser", "decoder".
    """

    def __init__(
        self, model: BEVFusion, graphs: Mapping[str, fx.GraphModule], parts: Sequence[str]
    ) -> None:
        super().__init__()
        self.model = model
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

        result: Tensor = _Telling(self.graphs[unit], tell).run(*inputs)
        return result


class _Telling(fx.Interpreter):
    """Runs a graph and tells each node's result."""

    def __init__(self, graph: Any, tell: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(graph)
        self._tell = tell

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op in ("call_module", "call_method", "call_function"):
            self._tell(n, result)
        return result
