"""From the nodes of a sparse encoder to a graph of the plugin's operators."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bevquant_export.sparse._graph import Add, Conv, Graph, LayoutOp, Node, Relu, Scatter
from bevquant_export.targets.autoware._plugin import DOMAIN, MOST_VOXELS, SLOTS, quantized_weight

if TYPE_CHECKING:
    from onnx import ModelProto

_OPSET, _IR_VERSION = 17, 8
_MASK_IMPLICIT_GEMM = 1
_BITS_OF_A_MASK = 32


@dataclass
class GraphWriter:
    """Nodes and constants of one file."""

    graph: Graph
    permutation: tuple[int, ...]
    points: int
    fused: bool
    do_sort: bool
    rulebook_inputs: bool
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    # Tensor of the graph to its name in the file
    names: dict[str, str] = field(default_factory=dict)
    # Tensor of the graph to the tensor of its voxels
    coords: dict[str, str] = field(default_factory=dict)
    layers: dict[str, tuple[str, str]] = field(default_factory=dict)
    # Voxels and geometry to the tensors of a pair generation
    known: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    generations: int = 0
    _taken: set[str] = field(default_factory=set)

    def model(self, outputs: list[str]) -> ModelProto:
        """The file."""
        from onnx import TensorProto, helper

        self._entry()
        for node in self.graph.nodes:
            self._write(node)
        if len(outputs) != len(self.graph.outputs):
            raise ValueError(
                f"export_autoware_onnx: {len(outputs)} output names for "
                f"{len(self.graph.outputs)} outputs of the encoder"
            )
        half, results = TensorProto.FLOAT16, []
        for name, tensor in zip(outputs, self.graph.outputs, strict=True):
            self._node("Identity", [self.names[tensor]], [name])
            shape: list[Any] = list(self.graph.shapes[tensor])
            if tensor in self.coords:
                shape = ["voxels_out", shape[-1]]
            results.append(helper.make_tensor_value_info(name, half, shape))
        whole = helper.make_graph(
            self.nodes, "encoder", self.inputs, results, self.constants, value_info=self.values
        )
        proto = helper.make_model(
            whole,
            producer_name="bevquant_export",
            opset_imports=[helper.make_opsetid("", _OPSET), helper.make_opsetid(DOMAIN, 1)],
            ir_version=_IR_VERSION,
        )
        bounds = {n.path: n.output_bound for n in self.graph.nodes if isinstance(n, Conv)}
        columns = ",".join(map(str, self.permutation))
        properties = {
            "bevquant_voxel_bounds": json.dumps(bounds),
            "rulebook_coors_permutation": columns,
        }
        if self.rulebook_inputs:
            properties["rulebook_stages"] = json.dumps(self.stages, separators=(",", ":"))
        helper.set_model_props(proto, properties)
        return proto

    def _entry(self) -> None:
        """Mean of each voxel's points, and coordinates in the encoder's order behind a batch."""
        from onnx import TensorProto, helper

        channels = self.graph.channels
        info = helper.make_tensor_value_info
        self.inputs += [
            info("voxels", TensorProto.FLOAT, ["voxels_num", self.points, channels]),
            info("coors", TensorProto.INT32, ["voxels_num", 3]),
            info("num_points_per_voxel", TensorProto.INT32, ["voxels_num"]),
        ]
        one = self._constant("encoder.one", np.array([1], np.int64))
        total = self._node("ReduceSum", ["voxels", one], ["voxels.sum"], keepdims=0)
        count = self._node(
            "Cast", ["num_points_per_voxel"], ["voxels.points"], to=TensorProto.FLOAT
        )
        column = self._node("Unsqueeze", [count, one], ["voxels.count"])
        mean = self._node("Div", [total, column], ["voxels.mean"])
        self._value(mean, TensorProto.FLOAT, ["voxels_num", channels])
        self.names[self.graph.input] = self._node(
            "Cast", [mean], ["voxels.features"], to=TensorProto.FLOAT16
        )
        order = self._constant("encoder.coors_permutation", np.array(self.permutation, np.int64))
        spatial = self._node("Gather", ["coors", order], ["coors.spatial"], axis=1)
        first = self._constant("encoder.first", np.array([0], np.int64))
        zero = self._constant("encoder.zero", np.array(0, np.int32))
        any_column = self._node("Gather", ["coors", first], ["coors.first"], axis=1)
        batch = self._node("Mul", [any_column, zero], ["coors.batch"])
        indices = self._node("Concat", [batch, spatial], ["coors.indices"], axis=1)
        self._value(indices, TensorProto.INT32, ["voxels_num", 4])
        self.coords[self.graph.input] = indices

    def _write(self, node: Node) -> None:
        if isinstance(node, Conv):
            self._conv(node)
        elif isinstance(node, Add | Relu):
            made = f"{node.path or node.name}.{'sum' if isinstance(node, Add) else 'relu'}"
            read = [self.names[name] for name in node.inputs]
            self.names[node.y] = self._node(type(node).__name__, read, [self._unique(made)])
            self.coords[node.y] = self.coords[node.x]
        elif isinstance(node, Scatter):
            self._scatter(node)
        elif isinstance(node, LayoutOp):
            self._layout_op(node)

    def _conv(self, node: Conv) -> None:
        from onnx import TensorProto

        if node.inverse:
            raise ValueError(
                f"export_autoware_onnx: {node.path} is an inverse convolution, whose pairs the "
                "plugin does not make; leave the decoder of the encoder out, or write it for "
                "libspconv or portable"
            )
        if math.prod(node.kernel_size) > _BITS_OF_A_MASK:
            raise ValueError(
                f"export_autoware_onnx: {node.path} has {math.prod(node.kernel_size)} offsets, and "
                f"a mask of the plugin {_BITS_OF_A_MASK} bits: use a smaller kernel, or two layers"
            )
        if node.output_bound > MOST_VOXELS:
            raise ValueError(
                f"export_autoware_onnx: {node.path} may make {node.output_bound:,} voxels, and the "
                f"plugin holds {MOST_VOXELS:,}, compiled in: less head_room, a coarser grid or a "
                "shorter range"
            )
        _, pair_fwd, pair_mask, argsort = self._pairs(node)
        base = self._unique(node.path or node.name)
        half = node.weight.numpy()
        weight = self._constant(f"{base}.weight", half)
        relu = node.activation == "ReLU"
        subm = _geometry(node)["subm"]
        inputs = [self.names[node.x], weight, pair_fwd, pair_mask, argsort]
        attributes: dict[str, Any] = {
            "act_alpha": 0.0, "act_beta": 0.0, "is_subm": subm, "is_train": 0,
            "output_add_scale": 0.0, "output_scale": 1.0, "act_type": int(relu and self.fused),
        }  # fmt: skip
        bias = node.bias.numpy()
        if node.precision == "int8":
            scale, channel_scale = _scales(node)
            inputs += [
                self._constant(f"{base}.channel_scale", channel_scale),
                self._constant(f"{base}.bias_scaled", bias.astype(np.float32)),
            ]
            attributes |= {"precision": 1, "input_scale": scale}
        elif self.fused:
            inputs.append(self._constant(f"{base}.bias", bias))
            attributes |= {"precision": 0, "input_scale": 1.0}
        if not self.fused:
            del attributes["act_type"]
        made = f"{base}.features"
        self._node("ImplicitGemm", inputs, [made], f"{base}.ImplicitGemm", DOMAIN, **attributes)
        self._value(made, TensorProto.FLOAT16, [None, node.out_channels])
        if not self.fused:
            bias_name = self._constant(f"{base}.bias", bias)
            made = self._node("Add", [made, bias_name], [f"{base}.biased"])
            made = self._node("Relu", [made], [f"{base}.relu"]) if relu else made
        self.names[node.y] = made
        self.layers[f"{base}.ImplicitGemm"] = (node.path, node.precision)

    def _pairs(self, node: Conv) -> tuple[str, ...]:
        """Tensors of the pairs of a convolution: made once for its voxels and geometry."""
        from onnx import TensorProto, helper

        voxels, geometry = self.coords[node.x], _geometry(node)
        key = voxels, json.dumps(geometry)
        if key not in self.known:
            subm = geometry["subm"]
            volume = math.prod(geometry["ksize"])
            name = node.rulebook or node.path
            rows: Any = self._rows(voxels) if subm else f"{name}_num"
            shapes: list[list[Any]] = [[rows, 4], [volume, rows], [rows, 1], [rows]]
            if self.rulebook_inputs and not subm:
                made = self._stage(node, geometry)
                info = helper.make_tensor_value_info
                pairs = zip(made, shapes, strict=True)
                self.inputs += [info(n, TensorProto.INT32, s) for n, s in pairs]
            else:
                base = self._unique(f"pairs/{name}")
                made = tuple(f"{base}/{slot}" for slot in SLOTS)
                attributes = {
                    **geometry, "batch_size": 1, "algo": _MASK_IMPLICIT_GEMM, "transpose": 0,
                    "is_train": 1 - subm, "do_sort": int(self.do_sort),
                }  # fmt: skip
                self._node(
                    "GetIndicePairsImplicitGemm", [voxels], [*made, f"{base}/num_act_out"], base,
                    DOMAIN, **attributes,
                )  # fmt: skip
                for tensor, shape in zip(made, shapes, strict=True):
                    self._value(tensor, TensorProto.INT32, shape)
                self.generations += 1
            self.known[key] = made
        made = self.known[key]
        self.coords[node.y] = voxels if geometry["subm"] else made[0]
        return made

    def _rows(self, voxels: str) -> Any:
        shapes = {v.name: v.type.tensor_type.shape.dim[0] for v in (*self.inputs, *self.values)}
        return shapes[voxels].dim_param if voxels in shapes else None

    def _stage(self, node: Conv, geometry: dict[str, Any]) -> tuple[str, ...]:
        base = f"rulebook/{node.rulebook}"
        if not node.rulebook or any(stage["onnx_base"] == base for stage in self.stages):
            raise ValueError(
                f"export_autoware_onnx: {node.path} has indice_key={node.rulebook!r}; with "
                "rulebook_inputs every strided convolution needs a key of its own, after which "
                "its inputs are named"
            )
        fields = ("ksize", "stride", "padding", "dilation", "spatial_shape")
        self.stages.append({"onnx_base": base, **{name: geometry[name] for name in fields}})
        return tuple(f"{base}/{slot}" for slot in SLOTS)

    def _scatter(self, node: Scatter) -> None:
        from onnx import TensorProto

        base = self._unique(f"{node.path or node.name}.dense")
        batch, channels, *grid = node.output_shape
        zero = self._constant(f"{base}.zero", np.zeros((), np.float16))
        shape = self._constant(f"{base}.shape", np.array([batch, *grid, channels], np.int64))
        empty = self._node("Expand", [zero, shape], [f"{base}.empty"])
        places = self._node("Cast", [self.coords[node.x]], [f"{base}.places"], to=TensorProto.INT64)
        filled = self._node("ScatterND", [empty, places, self.names[node.x]], [f"{base}.filled"])
        self.names[node.y] = self._node("Transpose", [filled], [base], perm=[0, 4, 1, 2, 3])

    def _layout_op(self, node: LayoutOp) -> None:
        made = self._unique(f"{node.path or node.name}.{node.op.lower()}")
        x = self.names[node.x]
        if node.op == "Transpose":
            self.names[node.y] = self._node("Transpose", [x], [made], perm=list(node.dims))
            return
        shape = self._constant(f"{made}.shape", np.array([1, *node.dims[1:]], np.int64))
        self.names[node.y] = self._node("Reshape", [x, shape], [made])

    def _node(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str = "",
        domain: str = "",
        **attributes: Any,
    ) -> str:
        from onnx import helper

        named = name or f"{outputs[0]}.{op}"
        self.nodes.append(
            helper.make_node(op, list(inputs), list(outputs), named, domain=domain, **attributes)
        )
        return outputs[0]

    def _constant(self, name: str, value: np.ndarray[Any, Any]) -> str:
        from onnx import numpy_helper

        array = np.ascontiguousarray(value).reshape(value.shape)
        self.constants.append(numpy_helper.from_array(array, name))
        return name

    def _value(self, name: str, kind: int, shape: list[Any]) -> None:
        from onnx import helper

        self.values.append(helper.make_tensor_value_info(name, kind, shape))

    def _unique(self, name: str) -> str:
        count = 2
        found = name or "layer"
        while found in self._taken:
            found, count = f"{name}.{count}", count + 1
        self._taken.add(found)
        return found


def _geometry(conv: Conv) -> dict[str, Any]:
    """Attributes that decide the pairs; equal results have one form.

    A submanifold convolution keeps its voxels, so its stride is 1 and its padding keeps the grid.
    The same holds for a 1×1×1 convolution of stride 1.
    """
    subm = conv.keeps_voxels
    padding = tuple(d * (k // 2) for k, d in zip(conv.kernel_size, conv.dilation, strict=True))
    return {
        "spatial_shape": list(conv.input_spatial_shape),
        "ksize": list(conv.kernel_size),
        "stride": list((1, 1, 1) if subm else conv.stride),
        "padding": list(padding if subm else conv.padding),
        "dilation": list(conv.dilation),
        "out_padding": [0, 0, 0],
        "subm": int(subm),
    }


def _scales(node: Conv) -> tuple[float, np.ndarray[Any, Any]]:
    """``input_scale`` and ``channel_scale`` in float32; the weight's integers survive both."""
    scale = float(np.float32(float(node.input_range or 0.0) / 127))
    weight_scale = np.array(node.weight_ranges, np.float64) / 127
    channel_scale = (scale * weight_scale).astype(np.float32)
    if not (np.isfinite(channel_scale).all() and (channel_scale > np.finfo(np.float32).tiny).all()):
        raise ValueError(
            f"export_autoware_onnx: {node.path}: the product of its input's and a weight's step "
            "leaves float32; calibrate again, or scale the layers around it"
        )
    half = node.weight.numpy()
    wanted = np.rint(half.astype(np.float64) / weight_scale.reshape(-1, 1, 1, 1, 1))
    lost = quantized_weight(half, channel_scale, scale) != wanted
    if lost.any():
        channel = int(np.argwhere(lost)[0, 0])
        raise ValueError(
            f"export_autoware_onnx: {node.path}.weight: channel {channel} has steps of "
            f"{weight_scale[channel]:g}, and the plugin, which reads it as float16, makes other "
            "integers of it; scale the layers around it, or disable() its quantizers"
        )
    return scale, channel_scale
