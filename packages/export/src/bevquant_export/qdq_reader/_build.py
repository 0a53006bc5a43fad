"""From an ONNX graph to a torch module: one submodule per node, under the node's name.

Q/DQ pairs become `AffineQuantizer`s, products with constant weights become quantized modules,
everything else calls its function of `OPERATORS`. `bevquant_int8sim.simulate` lowers the module.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from operator import getitem
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from bevquant_export.qdq_reader._constants import (
    FLOAT8,
    OWN,
    STORED,
    Grid,
    NodeError,
    Operator,
    Stored,
    as_float32,
    attributes_of,
    constant_of,
    dequantized,
    identifier,
    quantized,
    raw,
    refusal,
    stored,
    value_of,
    where_of,
)
from bevquant_export.qdq_reader._layers import cropped, layer_of, pad_windows
from bevquant_export.qdq_reader._operators import OPERATORS, VALUES_KEPT, of_sizes, tensor
from bevquant_export.runtime._session import reference_evaluator

_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
# Operands that a function reads as numbers; other constants of floats are buffers.
_NUMBERS = {"Clip": (1, 2), "Resize": (1, 2), "Pad": (2,), "Range": (0, 1, 2)}
_SEVERAL = ("Split", "TopK")
_NON_NEGATIVE = frozenset("Relu Sigmoid Softmax Abs Exp HardSigmoid ReduceL2".split())
# Non-negative where what they read is.
_KEEP_SIGN = VALUES_KEPT | frozenset(
    "Concat AveragePool GlobalAveragePool GlobalMaxPool Resize ReduceMax ReduceMean Gather".split()
)


class Builder:
    """Builds the module of a graph of opset 13 to 26 without functions.

    `activations` are names of tensors to the Relu or Clip that makes them in the float file, see
    `_activated`; None where that is unknown. `grids` are input names to the grids that quantize
    them.
    """

    def __init__(self, proto: Any, activations: dict[str, Any] | None = None) -> None:
        from onnx import numpy_helper

        self.proto, self.graph = proto, fx.Graph()
        self.activations = activations
        self.root = nn.Module()
        self.constants: dict[str, Any] = {
            entry.name: as_float32(numpy_helper.to_array(entry))
            for entry in proto.graph.initializer
        }
        self.nodes: dict[str, fx.Node] = {}
        self.on_grid: dict[str, Grid] = {}  # floats that lie on a grid of one scale
        self.integers: dict[str, Grid] = {}  # what QuantizeLinear gives, held as floats
        self.grids: dict[str, Grid] = {}
        # Of the sizes of inputs, each with the batch that the file fixes, or 0.
        self.checks: list[tuple[Operator, int]] = []
        self.non_negative: set[str] = set()
        self.sizes: set[str] = set()  # computed of sizes alone, which functions hold as arrays
        self.makers = {name: node.op_type for node in proto.graph.node for name in node.output}
        self.origins = {name: name for name in self.constants}
        self._unnamed: Counter[str] = Counter()
        self._users = Counter(name for node in proto.graph.node for name in node.input)
        self._users.update(output.name for output in proto.graph.output)

    def build(self) -> fx.GraphModule:
        """The module."""
        for name, argument in self.arguments.items():
            self.nodes[name] = self.graph.placeholder(argument)
        for entry in self.inputs:
            self._fix_sizes(entry)
        merged: set[int] = set()
        for number, node in enumerate(self.proto.graph.node):
            if number not in merged:
                self._node(node, number, merged)
        made = [self._result(output.name) for output in self.proto.graph.output]
        self.graph.output(made[0] if len(made) == 1 else tuple(made))
        self.module = fx.GraphModule(self.root, self.graph, "OnnxModel").eval()
        return self.module

    @property
    def inputs(self) -> list[Any]:
        """Inputs that are no initializers."""
        return [e for e in self.proto.graph.input if e.name not in self.constants]

    @property
    def arguments(self) -> dict[str, str]:
        """Input names to arguments of the module."""
        found: dict[str, str] = {}
        for entry in self.inputs:
            argument = identifier(entry.name)
            while argument in found.values():
                argument += "_"
            found[entry.name] = argument
        return found

    def _fix_sizes(self, entry: Any) -> None:
        """Refuse other sizes than the file's, whose constants belong to them; not yet batches."""
        sizes = [max(dim.dim_value, 0) for dim in entry.type.tensor_type.shape.dim]
        if any(sizes):
            settings = {"sizes": [0, *sizes[1:]]}
            check = Operator(of_sizes, [0], settings, f"input {entry.name!r}")
            name = self._name(entry.name, "sizes")
            self.nodes[entry.name] = self._call(name, check, [entry.name])
            self.checks.append((check, sizes[0]))

    def fix_batch(self) -> None:
        """Refuse other batches than the file's, too."""
        for check, batch in self.checks:
            check.settings["sizes"][0] = batch

    def _node(self, node: Any, number: int, merged: set[int]) -> None:
        op, where = node.op_type, where_of(node, number)
        if not node.name:  # a layer's name is its weight's, which is the same in the float file
            weight = self.origins.get(node.input[1]) if op in _LAYERS else None
            node.name = f"{op}_{weight or self._unnamed[op]}"
            self._unnamed[op] += 1
        attributes = attributes_of(node)
        known = node.domain in ("", "ai.onnx") and (op in OPERATORS or op in OWN)
        if not known and not (node.domain == "com.microsoft" and op in (_QUANTIZE, _DEQUANTIZE)):
            raise ValueError(refusal(node, where))
        missing = [n for n in node.input if n and n not in self.nodes and n not in self.constants]
        if missing:
            raise ValueError(
                f"{where}: its input {missing[0]!r} is made by no node before it; expected nodes "
                "in order of execution, without subgraphs. Write the file again"
            )
        try:
            if op == "Constant":
                self.constants[node.output[0]] = constant_of(attributes)
            elif op in (_QUANTIZE, _DEQUANTIZE):
                (self._quantize if op == _QUANTIZE else self._dequantize)(node, attributes)
            else:
                if op in _LAYERS and self._layer(node, attributes, merged):
                    return
                if not (self._folded(node, attributes) or self._clipped(node)):
                    self._operator(node, attributes, where)
        except NodeError:
            raise
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{where}: {error}") from error

    # Quantization

    def _grid(self, node: Any, attributes: dict[str, Any], dtype: str) -> Grid:
        names = [*node.input[1:], ""]
        scale = self.constants.get(names[0])
        if scale is None or (names[1] and names[1] not in self.constants):
            raise ValueError(
                "its scale or zero point is computed; expected constants. Use static quantization, "
                "with ranges from calibration"
            )
        zero = self.constants.get(names[1], np.zeros((), np.uint8))
        dtype, scale = dtype or str(zero.dtype), np.asarray(scale, np.float32)
        scale = scale.reshape(()) if scale.size == 1 else scale
        zero = np.broadcast_to(zero.astype(np.float32).squeeze(), scale.shape).copy()
        grid = Grid(scale, zero, dtype, attributes.get("axis", 1), attributes.get("block_size", 0))
        if dtype not in STORED.keys() | FLOAT8.keys():
            known = ", ".join([*STORED, *FLOAT8])
            raise ValueError(f"its numbers are {dtype}; expected {known}")
        if dtype in FLOAT8 and not attributes.get("saturate", 1):
            raise ValueError("saturate=0 makes NaN of large values; expected saturate=1")
        if not (scale > 0).all() or not np.isfinite(scale).all():
            raise ValueError(f"its smallest scale is {scale.min()}; expected positive numbers")
        return grid

    def _quantize(self, node: Any, attributes: dict[str, Any]) -> None:
        from onnx import helper

        dtype = ""
        if attributes.get("output_dtype"):
            dtype = str(helper.tensor_dtype_to_np_dtype(attributes["output_dtype"]))
        grid = self._grid(node, attributes, dtype)
        x, y = node.input[0], node.output[0]
        if x in self.constants:
            self.origins[y] = self.origins.get(x, x)
            self.constants[y] = stored(value_of(self.constants[x]), grid)
            self.integers[y] = grid
            return
        if x in {entry.name for entry in self.inputs}:
            self.grids.setdefault(x, grid)
        if x in self.sizes:
            self.nodes[x] = self._call(self._name(x, "tensor"), Operator(tensor, [0], {}, x), [x])
        read = self._activated(x, grid)
        quantizer = grid.quantizer(self._rank(x))
        self.nodes[y] = self._call(self._name(x, "quantizer"), quantizer, [read])
        self.integers[y] = grid

    def _activated(self, x: str, grid: Grid) -> str:
        """The tensor to quantize, behind the ReLU or Clip that a tool left out."""
        # ONNX Runtime leaves out one that the quantizer's bounds stand for. The integers are the
        # same with it, and the float model is the one that was quantized.
        op, slots = "Relu", list[Any]([0])
        if self.activations is not None:
            op, slots = self.activations.get(x, ("", slots))
        # Where the float file is unknown, no negative integers are the sign of a ReLU.
        elif not grid.non_negative:
            op = ""
        if not op or x in self.non_negative or self.makers.get(x, "Relu") in ("Relu", "Clip"):
            return x
        bounds = grid.within(*(slots[1:] if op == "Clip" else [np.zeros(()), None]))
        if bounds is None:
            raise ValueError(
                f"its numbers reach further than the {op} of the float file in front of it, which "
                "is left out (ONNX Runtime 1.32 does that). Quantize again with extra_options="
                "{'QDQKeepRemovableActivations': True}, or load the file alone, as it is"
            )
        if op == "Clip":
            slots = [0, *bounds]
        name = self._name(x, op.lower())
        module = Operator(OPERATORS[op], slots, {}, name)
        self.nodes[name] = self._call(name, module, [x])
        return name

    def _dequantize(self, node: Any, attributes: dict[str, Any]) -> None:
        x, y = node.input[0], node.output[0]
        made, read = self.integers.get(x), self.constants.get(x)
        if made is not None:
            grid = replace(self._grid(node, attributes, made.dtype), clip=made.clip)
            if not made.same(grid):
                raise ValueError(
                    f"it has another scale, zero point or axis than the QuantizeLinear of {x!r}; "
                    "expected the same. Quantize again"
                )
        else:
            dtype = self._input_type(x) if read is None else str(read.dtype)
            grid = self._grid(node, attributes, dtype)
        if read is not None:
            self.origins[y] = self.origins.get(x, x).removesuffix("_quantized")
            kind = np.int32 if grid.float_bits is None else np.float32
            self.constants[y] = Stored(read.astype(kind), grid)
            return
        self.nodes[y] = self.nodes[x]
        if made is None:  # integers that the model is given
            if not grid.single:
                raise ValueError("its input has a scale per channel; expected one scale")
            floats = Operator(dequantized, [0, *grid.tensors], {}, y)
            self.nodes[y] = self._call(self._name(x, "dequantized"), floats, [x])
            self.nodes[y] = self._call(self._name(x, "quantizer"), grid.quantizer(0), [y])
        if grid.single:
            self.on_grid[y] = grid
        if grid.non_negative:
            self.non_negative.add(y)

    def _clipped(self, node: Any) -> bool:
        """A Clip of stored integers: a ReLU from the zero point on, else a quantizer's bounds."""
        x, y = node.input[0], node.output[0]
        grid = self.integers.get(x)
        if node.op_type != "Clip" or grid is None or not grid.single:
            return False
        names, (low, high) = [*node.input[1:], "", ""], grid.bounds
        low = max(low, int(self.constants[names[0]].item())) if names[0] else low
        high = min(high, int(self.constants[names[1]].item())) if names[1] else high
        zero = int(grid.zero.item())
        self.integers[y] = grid
        if low == zero:
            top = None if high == grid.bounds[1] else (high - zero) * grid.scale.astype(np.float64)
            function = Operator(OPERATORS["Clip"], [0, np.zeros(()), top], {}, y)
            self.nodes[y] = self._call(self._name(node.name), function, [x])
        else:
            limited = replace(grid, clip=(low, high))
            self.nodes[y] = self._call(self._name(y, "quantizer"), limited.quantizer(0), [x])
            self.integers[y] = limited
        return True

    def _rank(self, name: str) -> int:
        """Number of axes of a tensor, where the file says it; a scale per channel needs it."""
        for entry in (*self.proto.graph.value_info, *self.proto.graph.input):
            if entry.name == name:
                return len(entry.type.tensor_type.shape.dim)
        return 0

    def _input_type(self, name: str) -> str:
        from onnx import helper

        for entry in self.proto.graph.input:
            if entry.name == name:
                kind = entry.type.tensor_type.elem_type
                return str(np.dtype(helper.tensor_dtype_to_np_dtype(kind)))
        raise ValueError(
            f"its input {name!r} comes from no QuantizeLinear; expected a pair of both, a constant "
            "or an input of the model. Integer operators are not read: write the QDQ format"
        )

    # Layers

    def _layer(self, node: Any, attributes: dict[str, Any], merged: set[int]) -> bool:
        """Add a product with a constant weight; False where it is none."""
        x, weight, *rest = node.input
        value, output = self.constants.get(weight), node.output[0]
        bias = self.constants.get(rest[0]) if rest and rest[0] else None
        if x in self.constants or value is None or (rest and rest[0] and bias is None):
            return False
        if node.op_type == "MatMul" and raw(value).ndim == 2:
            bias, output = self._added_bias(node, raw(value).shape[-1], merged)
        layer = layer_of(node.op_type, attributes, value, bias)
        if layer is None:
            return False
        grid = self.on_grid.get(x)
        if layer.pads:
            padding = Operator(pad_windows, [0], layer.pads, node.name)
            padded = self._name(node.name, "pad")
            self.nodes[padded] = self._call(padded, padding, [x])
            x = padded
        first, *rest = layer.modules(grid)
        name = self._name(node.name)
        self.nodes[output] = self._call(name, first, [x])
        for module in rest:
            more = self._name(name, "rest")
            self.nodes[more] = self._call(more, module, [x])
            total = Operator(torch.add, [0, 1], {}, name)
            self.nodes[output] = self._call(self._name(name, "sum"), total, [output, more])
        if any(layer.crop):
            cut = Operator(cropped, [0], {"crop": layer.crop}, node.name)
            self.nodes[output] = self._call(self._name(name, "crop"), cut, [output])
        return True

    def _added_bias(self, node: Any, channels: int, merged: set[int]) -> tuple[Any, str]:
        """The bias that an Add behind a MatMul adds, and the name of its result."""
        output = node.output[0]
        if self._users[output] != 1:
            return None, output
        for number, other in enumerate(self.proto.graph.node):
            if other.op_type == "Add" and output in other.input:
                name = next(n for n in other.input if n != output)
                bias = self.constants.get(name)
                if bias is None or raw(bias).shape != (channels,):
                    break
                merged.add(number)
                return bias, other.output[0]
        return None, output

    # Everything else

    def _folded(self, node: Any, attributes: dict[str, Any]) -> bool:
        """Compute a node of constants alone; False where it reads a value."""
        if any(name and name not in self.constants for name in node.input) or not node.input:
            return False
        values = [self.constants[name] if name else None for name in node.input]
        if node.op_type == "Transpose" and isinstance(values[0], Stored):
            self.origins[node.output[0]] = self.origins.get(node.input[0], "")
            turned = values[0].transposed(list(attributes["perm"]))
            if turned is not None:
                self.constants[node.output[0]] = turned
                return True
        from onnx import helper

        infos = [helper.make_empty_tensor_value_info(n) for n in node.input if n]
        outputs = [helper.make_empty_tensor_value_info(n) for n in node.output if n]
        graph = helper.make_graph([node], "constant", infos, outputs)
        model = helper.make_model(graph, opset_imports=self.proto.opset_import)
        given = {n: value_of(v) for n, v in zip(node.input, values, strict=True) if n}
        # In float32 as all floats, also those of a Cast to float16.
        made = [as_float32(np.asarray(v)) for v in reference_evaluator(model).run(None, given)]
        if node.input[0] in self.integers:
            self.integers[node.output[0]] = self.integers[node.input[0]]
        self.constants.update(zip((o.name for o in outputs), made, strict=True))
        return True

    def _operator(self, node: Any, attributes: dict[str, Any], where: str) -> None:
        op = node.op_type
        if op not in OPERATORS:
            raise ValueError("its weight is computed; expected a constant")
        slots: list[Any] = []
        read: list[str] = []
        of_sizes = op in ("Shape", "Size") or self.sizes.issuperset(
            n for n in node.input if n and n not in self.constants
        )
        for number, name in enumerate(node.input):
            value = self.constants.get(name)
            if not name:
                slots.append(None)
            elif value is None:
                slots.append(len(read))
                read.append(name)
            elif op == "Add" and isinstance(value, Stored) and value.grid.single:
                slots.append(len(read))
                read.append(self._quantized_constant(name, value))
            else:
                found = value_of(value)
                number_like = of_sizes or number in _NUMBERS.get(op, ()) or found.dtype.kind != "f"
                slots.append(found if number_like else torch.from_numpy(found.copy()))
        outputs = [name for name in node.output if name]
        settings = dict(attributes)
        if op == "Split":
            settings["outputs"] = len(node.output)
        made = self._call(
            self._name(node.name), Operator(OPERATORS[op], slots, settings, where), read
        )
        if op in _SEVERAL:
            for number, name in enumerate(node.output):
                if name:
                    self.nodes[name] = self.graph.call_function(getitem, (made, number))
        elif len([n for n in outputs if self._users[n]]) > 1 or not outputs:
            raise ValueError(f"{len(outputs)} outputs are read; expected the first one alone")
        else:
            self.nodes[outputs[0]] = made
        if of_sizes:
            self.sizes.update(outputs)
        if op in _NON_NEGATIVE or (op in _KEEP_SIGN and self.non_negative.issuperset(read)):
            self.non_negative.update(outputs)
        if read:
            self._keep_grid(op, settings, read, outputs, len(slots))

    def _keep_grid(
        self, op: str, settings: dict[str, Any], read: list[str], outputs: list[str], inputs: int
    ) -> None:
        """Mark results as values of integers if their inputs are."""
        keeps = op in VALUES_KEPT or (op == "Resize" and settings.get("mode") in (None, "nearest"))
        kept, first = self.integers.get(read[0]), self.on_grid.get(read[0])
        if kept is not None:
            if not keeps or not kept.single or (op == "Relu" and kept.zero.any()):
                raise ValueError(
                    "it computes with stored integers; expected DequantizeLinear before it"
                )
            self.integers.update(dict.fromkeys(outputs, kept))
        if first is not None and op == "Concat" and len(read) == inputs:
            keeps = all(n in self.on_grid and first.same(self.on_grid[n]) for n in read)
        if first is not None and keeps:
            self.on_grid.update(dict.fromkeys(outputs, first))

    def _quantized_constant(self, name: str, value: Stored) -> str:
        """An operand of a sum as integers: its floats, and a quantizer behind them."""
        floats = Operator(OPERATORS["Identity"], [torch.from_numpy(value.value.copy())], {}, name)
        made = self._name(self.origins[name])
        self.nodes[made] = self._call(made, floats, [])
        found = self._name(name, "quantizer")
        self.nodes[found] = self._call(found, value.grid.quantizer(0), [made])
        return found

    def _result(self, name: str) -> fx.Node:
        if name not in self.nodes:
            raise ValueError(
                f"the output {name!r} is a constant or made by no node; expected a value computed "
                "from the inputs. Remove it from the file's outputs"
            )
        grid, node = self.integers.get(name), self.nodes[name]
        if grid is None:
            return node
        kind = {"dtype": getattr(torch, grid.dtype)}
        module = Operator(quantized, [0, *grid.tensors], kind, f"the output {name!r}")
        return self._call(self._name(name, "integers"), module, [name])

    # Names

    def _call(self, name: str, module: nn.Module, read: list[str]) -> fx.Node:
        self.root.add_module(name, module)
        return self.graph.call_module(name, tuple(self.nodes[n] for n in read))

    def _name(self, *parts: str) -> str:
        name = stem = "_".join(map(identifier, parts))
        number = 0
        while hasattr(self.root, name):
            number += 1
            name = f"{stem}_{number}"
        return name
