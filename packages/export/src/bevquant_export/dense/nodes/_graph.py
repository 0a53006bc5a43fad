"""Nodes and constants of a file, named after their modules."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bevquant_export._errors import QdqError
from bevquant_export.dense.nodes._profile import Profile
from bevquant_export.lint._model import VOXELS
from bevquant_export.voxels._emit import OPEN
from bevquant_int8sim.program import Integers

if TYPE_CHECKING:
    from bevquant_export.voxels._emit import Settings

FIRST_SHAPE_OF_PART = 15  # operator set whose Shape has a start and an end
_AXES_AS_INPUT = {"ReduceSum": 13}  # from that operator set on; of other reductions 18

# Operators whose result a runtime holds in the integers of their input.
_KEEP = set(
    "MaxPool Reshape Transpose Slice Resize DepthToSpace Expand Tile Pad Clip Relu Concat".split()
)

Array = NDArray[Any]


@dataclass(frozen=True)
class TensorState:
    """A tensor of the file."""

    # Its float values; the output of a DequantizeLinear where it is quantized.
    name: str
    # Its integers; empty for float values and for tensors that keep their input's pair.
    integers: str = ""
    form: Integers | None = None
    # Lower bound of the integers, where known, without zero point.
    low: int | None = None
    # Integers of a linear layer's result with two axes, where only a Reshape follows: not read, but
    # compared.
    flat: str = ""
    # Scale and format of an FP8 tensor, the output of its DequantizeLinear; else None.
    float8: tuple[float, str] | None = None


class Graph:
    """A graph under construction.

    `opset` is the least operator set; the file has the profile's, or a later one that an operator
    needs.
    """

    def __init__(self, profile: Profile, opset: int = 0) -> None:
        self.profile, self.opset = profile, max(opset, profile.opset)
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self.notes: list[str] = []
        self.on_cpu: list[Any] = []
        self.typed: dict[str, int] = {}  # results of plugins, whose types ONNX does not infer
        self.functions: set[str] = set()  # of voxels, called somewhere
        self._taken: set[str] = set()
        self._dequantized: set[str] = set()
        self._shared: dict[tuple[Any, ...], str] = {}

    def unique(self, name: str) -> str:
        """`name`, with a number appended from its second use on."""
        found, number = name, 1
        while found in self._taken:
            number += 1
            found = f"{name}_{number}"
        self._taken.add(found)
        return found

    def node(self, operator: str, path: str, inputs: list[str], **attributes: Any) -> str:
        """Add a node of the module at `path`; returns the name of its output."""
        from onnx import helper

        reduces = operator.startswith("Reduce") and "axes" in attributes
        if reduces and self.opset >= _AXES_AS_INPUT.get(operator, 18):
            inputs = [*inputs, self.numbers(attributes.pop("axes"))]
        name = self.unique(f"{path}.{operator}" if path else operator)
        output = f"{name}.out"
        self.nodes.append(helper.make_node(operator, inputs, [output], name=name, **attributes))
        # A Concat is quantized where all of its inputs are; others are as their first one.
        read = inputs if operator == "Concat" else inputs[:1]
        if operator in _KEEP and self._dequantized.issuperset(read):
            self._dequantized.add(output)
        return output

    def call(
        self,
        function: str,
        inputs: Sequence[str],
        name: str,
        settings: Settings | None = None,
        *,
        made: int = 1,
    ) -> list[str]:
        """Call a voxel function, which becomes part of the file; returns its outputs."""
        from onnx import helper

        given = dict[str, Any](settings or {})
        tensors = [key for key, value in given.items() if isinstance(value, str)]
        if tensors:
            function, inputs = function + OPEN, [*inputs, *(given.pop(key) for key in tensors)]
        self.functions.add(function)
        name = self.unique(name)
        outputs = [f"{name}.out{i}" for i in range(made)]
        self.nodes.append(
            helper.make_node(function, inputs, outputs, name=name, domain=VOXELS, **given)
        )
        return outputs

    def copied(self, node: Any, path: str, inputs: list[str]) -> list[str]:
        """Add a copy of a node of another graph; returns its outputs."""
        from onnx import NodeProto

        name = self.unique(f"{path}.{node.op_type}" if path else node.op_type)
        made = [
            output and (f"{name}.out{place}" if place else f"{name}.out")
            for place, output in enumerate(node.output)
        ]
        self.nodes.append(
            NodeProto(
                op_type=node.op_type, name=name, input=inputs, output=made, attribute=node.attribute
            )
        )
        return made

    def constant(self, name: str, value: Any, dtype: Any = np.float32) -> str:
        """Add a constant; one of the same name and content is used again."""
        # `ascontiguousarray` gives scalars an axis.
        array = np.ascontiguousarray(np.asarray(value, dtype)).reshape(np.shape(value))
        key = (name, array.dtype.str, array.shape, hashlib.sha256(array.tobytes()).digest())
        if key not in self._shared:
            self._shared[key] = found = self.unique(name)
            self.constants[found] = array
        return self._shared[key]

    def numbers(self, values: Any) -> str:
        """int64 constants, such as sizes, named after themselves."""
        array = np.asarray(values, np.int64)
        text = "_".join(str(v) for v in array.reshape(-1).tolist())
        return self.constant(f"int64_{text}", array, np.int64)

    # Quantization

    def finished(
        self, path: str, state: TensorState | str, form: Any,
        clamps: tuple[bool, float | None] = (False, None), *, kept: bool = False, block: int = 0,
    ) -> TensorState:  # fmt: skip
        """Stored form of a step's result, an operator's result or a tensor in another form.

        With `kept` the result is on the form's grid already, and gets no pair. `block` is the side
        of the pixel blocks that the channels still have to become.
        """
        state = TensorState(state) if isinstance(state, str) else state
        if block and not (isinstance(form, Integers) and self.profile.clips(form)):
            state, block = TensorState(self.pixels(path, state.name, block)), 0
        relu, ceiling = clamps
        if not isinstance(form, Integers):
            return TensorState(self._limited(path, state.name, ceiling)) if relu else state
        if self.profile.clips(form):
            top = None if ceiling is None else int(ceiling)
            least = 0 if relu or form.unsigned else form.low if form.narrow else None
            same = state.form in (None, form)
            known = state.low if same or state.low == 0 else None  # 0 is 0 in every scale
            # A Clip that repeats a range is left out.
            low = None if known is not None and least is not None and known >= least else least
            if form.unsigned:  # the type itself clips at both ends
                low, top = None, None if top == form.high else top
            if state.form == form:
                if low is None and top is None:
                    return state
                made = self.dequantized(
                    path, self.clipped(path, state.integers, low, top, form), form
                )
            else:
                made = self.quantized(path, state.name, form, low, top, block=block)
            bounds = [bound for bound in (known, least) if bound is not None]
            return replace(made, low=max(bounds, default=None))
        if state.form == form and not relu:
            return state
        if form.narrow and not relu:
            self._note_narrow(path, form)
        name = state.name
        if relu:
            name = self._limited(path, name, None if ceiling is None else ceiling * form.scale)
        return TensorState(name, form=form) if kept else self.quantized(path, name, form)

    def _limited(self, path: str, name: str, ceiling: float | None) -> str:
        if ceiling is None:
            return self.node("Relu", path, [name])
        limits = [
            self.constant("zero", 0.0),
            self.constant(f"{path}.ceiling" if path else "ceiling", ceiling),
        ]
        return self.node("Clip", path, [name, *limits])

    def _note_narrow(self, path: str, form: Integers) -> None:
        note = (
            f"{path or 'the model'}: its quantizer leaves −{1 - form.low} out (narrow_range), "
            "QuantizeLinear does not: a value below the range comes out one step lower"
        )
        if note not in self.notes:
            self.notes.append(note)

    def quantized(
        self, path: str, name: str, form: Integers, low: int | None = None, high: int | None = None,
        *, block: int = 0,
    ) -> TensorState:  # fmt: skip
        """QuantizeLinear and DequantizeLinear after `held`.

        Integers are clipped where requested, and `block`² channels become pixels.
        """
        q = self.node("QuantizeLinear", path, [name, *self._scale(path, form)])
        q = self.clipped(path, q, low, high, form)
        return self.dequantized(path, self.pixels(path, q, block) if block else q, form)

    def pixels(self, path: str, name: str, block: int) -> str:
        """Channels as pixels of square blocks, the block's pixels innermost among channels."""
        return self.node("DepthToSpace", path, [name], blocksize=block, mode="CRD")

    def dequantized(self, path: str, q: str, form: Integers) -> TensorState:
        """DequantizeLinear after integers."""
        self._check(path, form)
        made = self.node("DequantizeLinear", path, [q, *self._scale(path, form)])
        self._dequantized.add(made)
        return TensorState(made, q, form)

    def is_quantized(self, name: str) -> bool:
        """Whether a DequantizeLinear is upstream, behind pooling and layout operators."""
        return name in self._dequantized

    def float_operand(self, path: str, name: str) -> str:
        """The tensor as the operand of a layer with float weights."""
        if not self.profile.integer_relu or not self._dequantized:
            return name
        # Between a DequantizeLinear and a QuantizeLinear, onnxruntime quantizes these weights
        # itself, with one scale, and moves the DequantizeLinear over pooling and the like to get
        # there. A Clip to the whole range of float32 prevents it.
        lowest = self.constant("lowest_float32", np.finfo(np.float32).min)
        return self.node("Clip", path, [name, lowest])

    def float_average_operand(self, path: str, name: str) -> str:
        """The tensor as the operand of an average that is read in float."""
        # OpenVINO averages the integers in front of a DequantizeLinear once for all consumers.
        # Where one of them quantizes the average, the others may get it rounded.
        held = self.profile.runner == "openvino" and self.is_quantized(name)
        return self.held_off(path, name) if held else name

    def held_off(self, path: str, name: str) -> str:
        """The tensor separated from its producer, for runtimes that fuse too much."""
        # A Max with the lowest number has no integer form in OpenVINO, and ONNX Runtime moves no
        # FP8 pair over it.
        lowest = self.constant("lowest_float32", np.finfo(np.float32).min)
        return self.node("Max", path, [name, lowest])

    def clipped(self, path: str, q: str, low: int | None, high: int | None, form: Integers) -> str:
        """Integers of activations clipped to two bounds, given without zero point."""
        if low is None and high is None:
            return q
        dtype, zero = self.profile.stored(form)
        limits = [
            "" if limit is None else self.constant(f"{np.dtype(dtype)}_{limit + zero}",
                                                   limit + zero, dtype)
            for limit in (low, high)
        ]  # fmt: skip
        return self.node("Clip", path, [q, *limits] if limits[1] else [q, limits[0]])

    def zeros(self, dtype: Any, zero: int, shape: tuple[int, ...]) -> str:
        """Zero points."""
        text = "_".join(["zero_point", str(np.dtype(dtype)), *map(str, shape)])
        return self.constant(text, np.full(shape, zero), dtype)

    def _scale(self, path: str, form: Integers) -> list[str]:
        shape = () if self.profile.axis else (1,)
        scale = np.full(shape, form.scale)
        name = f"{path}.scale" if path else "scale"
        zero = self.zeros(*self.profile.stored(form), shape)
        return [self.constant(name, scale), zero]

    def _check(self, path: str, form: Integers) -> None:
        where = path or "the model"
        if form.unsigned and not self.profile.unsigned:
            raise QdqError(
                f"{where}: its activations are unsigned, 0…255, and {self.profile.name} has signed "
                "ones alone; quantize with QuantConfig(unsigned=False) and calibrate, or write the "
                "file for onnxruntime or openvino"
            )
        bits = (form.high - form.low).bit_length()
        if bits not in ((8, 16) if self.profile.int16 else (8,)):
            more = " or 16" if self.profile.int16 else " (16 with profile='onnxruntime')"
            raise QdqError(
                f"{where}: its activations have {bits} bits; expected 8{more}. "
                "Give its quantizer num_bits=8, or disable() it to leave the layer float"
            )
        if not form.full and not form.unsigned:
            raise QdqError(
                f"{where}: its integers are {form.low}…{form.high} around a zero "
                "point (AffineQuantizer); expected −128…127 without one. Quantize the float model "
                "with quantize_model and calibrate"
            )
        if not form.scale > float(np.finfo(np.float32).tiny) or not np.isfinite(
            np.float32(form.scale)
        ):
            raise QdqError(f"{where}: scale {form.scale:g} is no normal float32; calibrate again")
