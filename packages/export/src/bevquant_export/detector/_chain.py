r"""The files of a detector in sequence, compared with the integer model that was not split.

The tensor at the split has one range in three places. In the whole model the last sparse layer
computes the integers,

.. math:: q = \operatorname{clamp}(\operatorname{round}(\text{acc} \cdot s_x s_w / s_y)).

The sparse file returns :math:`x = \text{acc} \cdot s_x s_w` in floats (libspconv in half
precision), and the dense file begins with QuantizeLinear of the scale :math:`s_y`, which computes
:math:`\operatorname{round}(x / s_y)`. Both integers are equal, except where the exact value is
closer to the middle of two steps than the float's precision; there they differ by one step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bevquant_export._differences import TensorDifference
from bevquant_export.dense import QdqFile
from bevquant_export.detector._parts import Parts
from bevquant_export.half._single import CHOICES
from bevquant_export.lint import Finding
from bevquant_export.lint._read import load_model
from bevquant_export.sparse import SparseExport
from bevquant_graph import Graph, HtmlTable, arguments, op_spec, same_constant
from bevquant_int8sim import IntegerModel, dequantize, quantize
from bevquant_int8sim.program import float_gaps
from bevquant_quantizers.documents import text_table

_HALF, _FLOAT = 2.0**-11, 2.0**-21  # what rounding to a float may move a value by, of itself
_SMALLEST_HALF = 2.0**-25  # half a step of the smallest float16
_LEAST_DB = 10.0  # of what one file makes run as a whole: single steps grow on the way, not to that


MapCheck = TensorDifference  # former name of a map's check


@dataclass(frozen=True)
class OutputCheck:
    """Check of one output of the dense file, computed from the maps of the sparse file.

    Attributes:
        name: Name of the output.
        sqnr_db: SQNR in dB relative to the whole integer model; infinite for equal values.
        fake_sqnr_db: SQNR of the fake-quantized model relative to the integer model on the same
            frame: the effect of another rounding, as a scale for `sqnr_db`.
        is_chosen: Whether a choice by value (TopK, a comparison) is upstream. One step can then
            select another cell, and SQNR has no meaning.
    """

    name: str
    sqnr_db: float
    fake_sqnr_db: float
    is_chosen: bool

    def __str__(self) -> str:
        said, fake = (
            "equal" if math.isinf(db) else f"{db:.1f} dB"
            for db in (self.sqnr_db, self.fake_sqnr_db)
        )
        return f"{said} (fake {fake})" + ", chosen" * self.is_chosen


@dataclass(frozen=True)
class FrameCheck:
    """Check of one frame that ran through the files.

    Attributes:
        frame: ``"example"`` or ``"batches[0]"``.
        layers: Layers of the sparse file: differing integers and number of values.
        maps: Each map between the files, by `name`: the values that the first QuantizeLinear of the
            dense file rounds to another integer than the whole model. All are `ties`, one step off.
        tensors: Tensors of the dense file, each computed from the model's own inputs of that
            operation: differing integers and number of values. Differences other than ties between
            two steps are refused.
        outputs: Check of each output; empty where no runtime for the dense file is installed.
        not_run: Why the frame did not run; empty where it did.
    """

    frame: str
    layers: tuple[int, int] = (0, 0)
    maps: tuple[TensorDifference, ...] = ()
    tensors: tuple[int, int] = (0, 0)
    outputs: tuple[OutputCheck, ...] = ()
    not_run: str = ""

    def rows(self) -> dict[str, str]:
        """Results in words."""
        if self.not_run:
            return {"not run": self.not_run}
        found = {}
        for name, (different, elements) in (("sparse", self.layers), ("dense", self.tensors)):
            if elements:
                found[f"{name}.onnx, other integers"] = f"{different:,} of {elements:,}"
        for m in self.maps:
            found[f"{m.name}, a step off"] = f"{m.different:,} of {m.elements:,}"
        return found | {output.name: str(output) for output in self.outputs}


@dataclass(eq=False)
class _MapForms:
    """A map in the whole model."""

    # Forms of its consumers, to the values that they read
    forms: dict[Any, Tensor] = field(default_factory=dict)

    def integers(self) -> Any:
        """The single form of all consumers; None where some read floats, or a ReLU of it."""
        (required, *others) = self.forms
        plain = not others and required.plain and not isinstance(required.form, str)
        return required.form if plain else None

    def as_float(self) -> Tensor:
        """Floats from which every consumer computes the same values as in the whole model."""
        for required, value in self.forms.items():
            if isinstance(required.form, str):
                return value
        required, value = next(iter(self.forms.items()))
        return dequantize(value, required.form.scale)


class WholeRun:
    """The model that was not split and returns a dict, run on a frame."""

    def __init__(self, whole: IntegerModel, parts: Parts, inputs: Any) -> None:
        source = whole.source
        assert source is not None
        nodes = {node.name: node for node in source.graph.operations}
        self.maps = {name: _MapForms() for name in parts.maps}  # its values at the split
        wanted: dict[str, tuple[_MapForms, Any]] = {}
        for name, of_whole in parts.maps.items():
            node: Any = nodes[of_whole.name]
            while node not in source.held and op_spec(node.target).kind == "identity":
                node = node.args[0]
            for required, value in source.held.get(node, {}).items():
                wanted[value] = self.maps[name], required

        def see(step: Any, given: Any, made: Any) -> None:
            for name, value in zip(step.outputs, made, strict=False):
                if name in wanted:
                    forms_of, required = wanted[name]
                    forms_of.forms[required] = value

        # Results by name, of the integer and of the fake-quantized model.
        self.returned = by_name(whole.run(inputs, record=False, observe=see)[0])
        args, kwargs = arguments(inputs)
        self.fake = by_name(source.graph.replay(*args, **kwargs))

    def check_map(self, name: str, given: Tensor, *, half: bool) -> TensorDifference:
        """Compare a map of the sparse file with the whole model's; refuse more than rounding.

        `half` says whether it was rounded to half precision.
        """
        share = _HALF + _FLOAT if half else _FLOAT
        different = 0
        for required, wanted in self.maps[name].forms.items():
            value = given.double()
            if required.relu:
                value = value.clamp(0, required.ceiling)
            if isinstance(required.form, str):
                apart, unit = (value - wanted.double()).abs(), 1.0
                explained = share * value.abs() + (_SMALLEST_HALF if half else 0.0)
                wrong = int((apart > explained).sum())
            else:
                unit = required.form.scale
                form = required.form
                made = quantize(
                    value.float(), unit, bits=form.bits, narrow_range=form.narrow, name=name
                )
                steps = made.double() - wanted.double()
                exact = value / unit
                near = (exact - (made.double() + wanted.double()) / 2).abs()
                explained = share * exact.abs() + (_SMALLEST_HALF / unit if half else 0.0)
                wrong = int((steps.ne(0) & ~((steps.abs() <= 1) & (near <= explained))).sum())
                different = max(different, int(steps.count_nonzero()))
            if wrong:
                raise ValueError(
                    f"export_detector: {name}: {wrong:,} of {given.numel():,} values that the "
                    "sparse file hands on are not what the whole integer model has there, by more "
                    "than rounding explains; nothing was written. verify=False writes the files "
                    "all the same"
                )
        step = float(different > 0)
        return TensorDifference("", "", name, given.numel(), different, step, different)

    def own_maps(self) -> dict[str, Tensor]:
        """Maps from which every consumer computes the same values as in the whole model."""
        return {name: forms_of.as_float() for name, forms_of in self.maps.items()}

    def check_sparse(self, parts: Parts, made: Mapping[str, Any]) -> None:
        """Require that the sparse part returns the whole model's bits."""
        for name, port in parts.of_sparse.items():
            if port not in self.maps:
                wanted, got = (getattr(x, "features", x) for x in (self.returned[name], made[port]))
                _refuse_unequal(name, wanted, got)

    def check_dense(self, parts: Parts, made: Mapping[str, Any]) -> None:
        """Require that the dense part, run on `own_maps`, returns the whole model's bits."""
        if any(len(forms_of.forms) > 1 for forms_of in self.maps.values()):
            return  # floats beside integers, which were rounded from sums: not the same bits
        for name in parts.of_dense:
            _refuse_unequal(name, self.returned[name], made[name])


def _refuse_unequal(name: str, wanted: Tensor, made: Tensor) -> None:
    if not torch.equal(wanted, made):
        raise ValueError(
            f"export_detector: {name or 'the result'} of a part is not that of the whole integer "
            "model, given the same maps: they have two ranges at the cut; nothing was written. "
            "verify=False writes the files all the same"
        )


def same_frame(graph: Graph, inputs: Any, example: Any) -> bool:
    """Whether two calls have equal values."""
    return same_constant(graph.leaves(inputs), graph.leaves(example))


def counted(rows: Iterable[Any]) -> tuple[int, int]:
    """Differing values, and all values."""
    rows = list(rows)
    return sum(row.different for row in rows), sum(row.elements for row in rows)


def by_name(returned: Any) -> dict[str, Any]:
    """Results of a part of a graph, by name."""
    return returned if isinstance(returned, dict) else {"": returned}


def sqnr_db(wanted: Tensor, made: Tensor) -> float:
    """Power of the expected values over that of the difference; infinite without a difference.

    Equal values that are not finite count as no difference. Others, and tensors of other shapes,
    give minus infinity.
    """
    if wanted.shape != made.shape:
        return -math.inf
    _, noise, _, power = float_gaps(wanted, made)
    if not noise:
        return math.inf
    return 10 * math.log10(power / noise) if power and noise < math.inf else -math.inf


def refuse_other(frame: str, port: str, wanted: Tensor, made: Tensor) -> None:
    """Refuse an output that differs from the dense part's integers on the same maps."""
    db = sqnr_db(wanted, made)
    if db < _LEAST_DB:
        raise ValueError(
            f"export_detector: {port} of the dense file, run as one on {frame}, is not what its "
            f"integer model makes of the same maps ({db:.1f} dB); nothing was written. "
            "verify=False writes the files all the same"
        )


def chosen_outputs(file: Path) -> frozenset[str]:
    """Outputs of a file that depend on a choice by value."""
    graph = load_model(file, external_data=False).graph
    behind: set[str] = set()
    for node in graph.node:
        if node.op_type in CHOICES or behind.intersection(node.input):
            behind.update(node.output)
    return frozenset(port.name for port in graph.output if port.name in behind)


@dataclass(frozen=True)
class DetectorMap:
    """A map that the sparse file computes and the dense file reads, under one name.

    Attributes:
        name: Output of the sparse file, and input of the dense file where that reads the map.
        shape: ``[frames, channels, …]`` of the example.
        amax: Range of the map. The first QuantizeLinear of the dense file has the scale amax/127.
            None where the dense file reads the map in float.
        made_by: Producer in the forward: operation, module, file and line.
    """

    name: str
    shape: tuple[int, ...]
    amax: float | None
    made_by: str


@dataclass(frozen=True)
class DetectorExport(HtmlTable):
    """Result of `export_detector`: the files and the checks that they passed.

    Attributes:
        folder: Folder of the files.
        target: Engine of the dense file.
        sparse: ``sparse.onnx`` and its layers; None for a model without voxels.
        dense: ``dense.onnx``; None where the model computes nothing on dense tensors.
        maps: Tensors that the sparse file passes to the dense file.
        outputs: Name of each tensor the model returns, with the file and output that holds it.
        left_out: Returned tensors that no file computes: inputs that are returned unchanged,
            coordinates.
        findings: Findings of the linter for both files.
        checks: One entry per frame that ran through both files; empty with ``verify=False``.
    """

    folder: Path
    target: str
    sparse: SparseExport | None
    dense: QdqFile | None
    maps: tuple[DetectorMap, ...] = ()
    outputs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    checks: tuple[FrameCheck, ...] = ()

    def __str__(self) -> str:
        files = [str(file) for file in (self.sparse, self.dense) if file is not None]
        parts = ["\n".join([*files, *(f"lint: {finding}" for finding in self.findings)])]
        if self.maps:
            heads = ("handed on", "shape", "range", "made by")
            parts.append(text_table([heads, *map(_row, self.maps)]))
        rows = [(name or "result", port, file) for name, (file, port) in self.outputs.items()]
        rows += [(name, "-", "in no file") for name in self.left_out]
        parts.append(text_table([("returned", "output", "file"), *rows]))
        return "\n\n".join([*parts, self._found()])

    def _found(self) -> str:
        """Results of the frames, one column each."""
        if not self.checks:
            return "not run one behind the other: whether they make what the model makes is unknown"
        columns = [check.rows() for check in self.checks]
        names = dict.fromkeys(name for column in columns for name in column)
        heads = ("one behind the other", *(check.frame for check in self.checks))
        rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
        table = text_table([heads, *rows])
        outputs = any(check.outputs for check in self.checks)
        note = "\ndB: SQNR of the outputs against the integer model that was not cut; "
        note += "fake: that of the fake-quantized model"
        return table + note * outputs


def _row(handed_on: DetectorMap) -> tuple[str, ...]:
    range_ = "float" if handed_on.amax is None else f"{handed_on.amax:.4g}"
    return handed_on.name, str(list(handed_on.shape)), range_, handed_on.made_by
