"""A sparse file run on the example inputs before it gets its name."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from bevquant_export.sparse._compare import LayerDifference, compared
from bevquant_export.sparse._load import SparseOnnxModel
from bevquant_export.sparse._read_proto import graph_of_bytes
from bevquant_export.targets._cpu import cpu_at_hand
from bevquant_int8sim import IntegerModel

__all__ = ["refuse_departures", "runtime", "verified", "with_note"]

_FLOAT = 1e-3  # of the largest value: float32 sums of another order
_SHARE, _STEPS = 0.01, 3  # of int8 behind such sums
_KEY = "verified"


def runtime(dialect: str) -> str:
    """What runs a file of a dialect here: onnxruntime, or our own kernels."""
    portable = dialect == "portable" and find_spec("onnxruntime") is not None
    return "onnxruntime" if portable else "bevquant"


def verified(
    content: bytes, integers: IntegerModel, inputs: Any, *, dialect: str, reversed_axes: bool
) -> tuple[str, tuple[LayerDifference, ...]]:
    """Run the file on `inputs`; what ran it, and the differences of its layers.

    Raises:
        ValueError: A layer makes other numbers than the integer model; its node is named.
    """
    graph = graph_of_bytes(content)
    # Such weights saturate where the CPU sums pairs in 16 bits.
    elsewhere = graph.weights == "int8" and cpu_at_hand() == "any"
    ran = "bevquant" if elsewhere else runtime(dialect)
    backend = "onnxruntime" if ran == "onnxruntime" else "auto"
    file = SparseOnnxModel(graph, backend=backend)
    rows = compared(file, integers, inputs, reversed_axes=reversed_axes)
    refuse_departures(rows, f"export_sparse_onnx: when {ran} runs the file, ")
    return ran, rows


def refuse_departures(rows: Iterable[LayerDifference], caller: str) -> None:
    """Raise at the first layer that is other than rounding explains.

    Integers are equal up to the first layer whose float32 sums came out otherwise (within
    1/1000 of its largest value); behind that, one value in a hundred may be up to 3 steps off.

    Raises:
        ValueError: The node, its module and the difference are named.
    """
    floats_differ = False
    for row in rows:
        if row.form == "int8":
            allowed = _SHARE * row.elements if floats_differ else 0
            wrong = row.different > allowed or (row.different and row.largest > _STEPS)
            what = (
                f"{row.different:,} of {row.elements:,} integers differ, by up to {row.largest:g}"
            )
        else:
            # Behind integers that are a step off, floats are too.
            bound = (0.1 if floats_differ else _FLOAT) * row.size
            wrong = not row.largest <= bound
            what = f"values differ by up to {row.largest:.3g} where the largest is {row.size:.3g}"
            floats_differ = floats_differ or row.different > 0
        if wrong:
            raise ValueError(
                f"{caller}{row.node} ({row.path or 'the result'}) departs from the integer model: "
                f"{what}; nothing was written. verify=False writes it all the same"
            )


def with_note(content: bytes, ran: str) -> bytes:
    """The file with what verified it in its metadata."""
    import onnx

    model = onnx.load_model_from_string(content)
    model.metadata_props.add(key=_KEY, value=ran)
    noted: bytes = model.SerializeToString(deterministic=True)
    return noted
