"""Result of an export: a file and its layers."""

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
    """One convolution or addition of a sparse file.

    Attributes:
        name: Name of the node.
        path: Module that it was exported from.
        precision: ``"int8"`` or ``"fp16"``.
        output_precision: Precision of the output tensor.
        input_range: amax of the input; None for fp16 additions.
        output_bound: Largest number of output voxels; None for additions.
    """

    name: str
    path: str
    precision: str
    output_precision: str
    input_range: float | None
    output_bound: int | None


@dataclass(frozen=True)
class SparseExport(HtmlTable):
    """Result of `export_sparse_onnx`.

    Attributes:
        path: The file.
        layers: Layers in order.
        verified: Runtime that ran the file on the example before it got its name, as in the
            metadata; ``"no"`` with ``verify=False``.
        differences: Result of that run per layer, as from `compare_sparse_onnx`.
        integer_model: Integer model that the file was written from and compared with; None for a
            file made by `lower_to_portable`.
        returned: Result of `integer_model` for the example from the verification; None without
            verification.
        begins_behind: Operations that the model runs on the voxel features before the first layer
            of the file. The file does not contain them; its inputs are their results.
        features: Name of the features input: ``"0"`` for libspconv, ``"features"`` for portable
            files. Portable files that begin after leading operations use the last operation's name,
            as in ``"sigmoid_features"``.
        figures: Size of the file, CPUs where it is exact, and the time with ``measure=True``.
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
