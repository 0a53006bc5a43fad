"""What was written: a file and its layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevquant_export._figures import Figures
from bevquant_export.dense._written import verdict
from bevquant_export.sparse._graph import Add, Conv, Graph
from bevquant_graph import HtmlTable

if TYPE_CHECKING:
    from bevquant_export.sparse._compare import LayerDifference
    from bevquant_int8sim import IntegerModel


@dataclass(frozen=True)
class SparseLayer:
    """One convolution or addition of a file.

    Attributes:
        name: Its node.
        path: The module it comes from.
        precision: ``"int8"`` or ``"fp16"``.
        output_precision: How its output is held.
        input_range: amax of its input; of additions in fp16 ``None``.
        output_bound: Most voxels of its output; ``None`` for additions.
    """

    name: str
    path: str
    precision: str
    output_precision: str
    input_range: float | None
    output_bound: int | None


@dataclass(frozen=True)
class SparseExport(HtmlTable):
    """What was written.

    Attributes:
        path: The file.
        layers: In order.
        verified: What ran the file on the example inputs before it got its name, as in its
            metadata; ``"no"`` where nothing did.
        differences: What was found, layer by layer, as from `compare_sparse_onnx`.
        integer_model: What it was written from and held against; None where a file was lowered.
        returned: What the integer model returned for the example inputs, when the file was held
            against it; None where it was not.
        begins_behind: What the model computes before the features of its voxels, step by step: the
            file has nothing of it, and takes features and coordinates that this makes.
        features: Name of the features' input: of a portable file "features", or, where it begins
            behind steps, their last one's, as in "sigmoid_features"; of libspconv "0".
        figures: Its size, where it is exact and, with ``measure=True``, its time.
    """

    path: Path
    layers: tuple[SparseLayer, ...]
    verified: str = "no"
    differences: tuple[LayerDifference, ...] = ()
    integer_model: IntegerModel | None = field(default=None, repr=False, compare=False)
    begins_behind: tuple[str, ...] = ()
    features: str = "features"
    returned: Any = field(default=None, repr=False, compare=False)
    figures: Figures | None = None

    def __str__(self) -> str:
        forms = Counter(layer.precision for layer in self.layers)
        layers = " and ".join(f"{count} in {form}" for form, count in forms.items())
        text = verdict(self.verified, (row for row in self.differences if row.form == "int8"))
        floats = [row.largest / (row.size or 1.0) for row in self.differences if row.form != "int8"]
        if floats:
            text += f"; floats differ by at most {max(floats):.2g} of the largest"
        for step in self.begins_behind:
            text += f"\nnot in the file, whose input {self.features!r} is what it makes: {step}"
        figures = f"{self.figures}\n" if self.figures else ""
        return f"{self.path}: layers: {layers}\n{figures}{text}"


def layers_of(graph: Graph) -> tuple[SparseLayer, ...]:
    """Convolutions and additions in order."""
    return tuple(
        SparseLayer(
            name=node.name,
            path=node.path,
            precision=node.precision,
            output_precision=node.output_precision,
            input_range=node.input_range if isinstance(node, Conv) else node.range_x,
            output_bound=node.output_bound if isinstance(node, Conv) else None,
        )
        for node in graph.nodes
        if isinstance(node, Conv | Add)
    )
