"""From the nodes of a sparse encoder to a graph of the plugin's operators."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from bevquant_export.sparse._compare import LayerDifference
from bevquant_export.sparse._export import sparse_graph
from bevquant_export.sparse._graph import Add, Conv, Graph, Move, Node, Relu, Scatter
from bevquant_export.sparse._verify import with_note
from bevquant_export.targets.autoware._join import joined
from bevquant_quantizers import quantization_disabled, write_whole

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = [
    "DOMAIN", "MOST_VOXELS", "SLOTS", "AutowareFile", "export_autoware_onnx", "geometry_of",
    "quantized_weight",
]  # fmt: skip

DOMAIN = "autoware"
MOST_VOXELS = 256_000  # compiled into the plugin, as the rows that a pair generation may make
SLOTS = ("out_indices", "pair_fwd", "pair_mask", "mask_argsort")
_OPSET, _IR_VERSION = 17, 8
_MASK_IMPLICIT_GEMM = 1
_BITS_OF_A_MASK = 32
_ORDERS = {"xyz": (2, 1, 0), "zyx": (0, 1, 2), "yxz": (1, 2, 0)}
_PRECISIONS = ("int8", "fp16")
Sizes = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class AutowareFile:
    """A file for Autoware's plugin.

    Attributes:
        path: The file.
        precision: ``"int8"`` or ``"fp16"``.
        fused: Whether bias and ReLU are inside the convolutions.
        layers: Node to the module that it comes from and ``"int8"`` or ``"fp16"``.
        pair_generations: How many the file has, and in how many a layer each would be done.
        voxel_bound: Most voxels of any layer on the frames that were shown, with head room.
        permutation: Column of ``coors`` (z, y, x) that each column of the encoder comes from.
        graph: What was written, before its operators were chosen; what a comparison runs.
        outputs: Names of what the encoder makes.
        tensors: Tensor of `graph` to its name in the file.
        coords: Tensor of `graph` to the tensor of the file that has its voxels.
        differences: From `compare_autoware_onnx` on the example inputs; empty where `verify` was
            off.
    """

    path: Path
    precision: str
    fused: bool
    layers: Mapping[str, tuple[str, str]]
    pair_generations: tuple[int, int]
    voxel_bound: int
    permutation: Sizes
    outputs: tuple[str, ...]
    graph: Graph
    tensors: Mapping[str, str]
    coords: Mapping[str, str]
    differences: tuple[LayerDifference, ...] = ()


def export_autoware_onnx(
    model: nn.Module,
    example_inputs: Any,
    path: str | os.PathLike[str],
    *,
    precision: str = "int8",
    model_order: str = "xyz",
    batches: Iterable[Any] = (),
    head_room: float = 1.5,
    points_per_voxel: int = 10,
    fused: bool = True,
    do_sort: bool = False,
    rulebook_inputs: bool = False,
    tails: Sequence[str | os.PathLike[str]] = (),
    output_names: Sequence[str] = ("lidar_bev",),
    verify: bool = True,
) -> AutowareFile:
    r"""Write a sparse encoder for Autoware's TensorRT plugin, from points of voxels on.

    The operators are ``GetIndicePairsImplicitGemm`` and ``ImplicitGemm`` of the domain
    ``autoware`` (autoware_tensorrt_plugins), features are float16 between layers. In int8 a layer
    computes

    .. math:: q = \operatorname{clamp}(\operatorname{roundf}(x_{16} \cdot (1/s_x)), -128, 127),
              \quad y = \operatorname{fp16}\bigl(\operatorname{act}(a\, s_x s_w + b)\bigr)

    with a the int32 sum of q and of the filter's integers, which the plugin makes of fp16(q_w·s_w)
    again; ties go away from zero. That they survive is computed here, in the plugin's arithmetic.
    Sums of residual blocks are ``Add`` in float16: no operand is quantized for them. One pair
    generation serves all layers of one set of voxels and one geometry.

    Args:
        model: Calibrated, in evaluation mode, batch norms folded; as `export_sparse_onnx` takes
            it. It is not changed.
        example_inputs: Features, coordinates and the batch size, 1; run once.
        path: The file; it appears whole or not at all.
        precision: ``"int8"``: every layer whose input and weight are quantized, the others in
            float16; the plugin's revision must have the attribute ``precision``. ``"fp16"``: every
            layer, from the float weights.
        model_order: Order of the model's coordinate columns: ``"xyz"`` (mit-bevfusion), ``"zyx"``
            (mmdetection3d) or ``"yxz"`` (Autoware's BEVFusion); ``coors`` come as z, y, x.
        batches: Further inputs, whose voxels are counted.
        head_room: Voxels of a layer may be this many times those of the frames.
        points_per_voxel: Second axis of ``voxels``; their mean is what the encoder reads.
        fused: Bias and ReLU inside ``ImplicitGemm`` (six inputs, ``act_type``). False for plugins
            before these: they have an ``Add`` and a ``Relu`` of their own; fp16 only.
        do_sort: Sort the pairs by their masks, which takes longer than it saves on most frames.
        rulebook_inputs: The pairs of strided convolutions are inputs
            ``rulebook/<indice_key>/<slot>``, for a node that computes them beforehand, with the
            metadata ``rulebook_stages`` and ``rulebook_coors_permutation`` that it reads.
        tails: Files of what follows the encoder, one behind the other, each with one input; they
            become part of this one. Their outputs are the file's.
        output_names: Of the encoder; used where there are no tails.
        verify: Hold the integer model against `model`, and the file, run by the definition of the
            plugin's operators, against the integer model, on `example_inputs` before the file gets
            its name. The metadata say so (``verified``).

    Raises:
        TypeError: `model` is no module.
        ValueError: Something has no form for the plugin: an inverse convolution, a kernel of more
            than 32 offsets, a batch of several frames, more than 256,000 voxels, weights whose
            integers float16 does not carry; or the file computes something else than the model.
            The module is named; nothing is written.

    Example:
        >>> def write(encoder, frames):
        ...     return export_autoware_onnx(encoder, frames[0], "bevfusion_lidar.onnx",
        ...                                 batches=frames, rulebook_inputs=True)
    """
    _check(model, precision, model_order, fused, points_per_voxel)
    example = tuple(example_inputs)
    if len(example) == 3 and int(example[2]) != 1:
        raise ValueError(
            f"export_autoware_onnx: a batch of {example[2]} frames; the node gives one: export "
            "with one frame at a time"
        )
    order = "xyz" if model_order == "yxz" else model_order
    if precision == "fp16":
        model = copy.deepcopy(model)
        with quantization_disabled(model):
            _, graph = sparse_graph(model, example_inputs, batches, order, head_room, verify=verify)
    else:
        _, graph = sparse_graph(model, example_inputs, batches, order, head_room, verify=verify)
    writer = _Writer(
        graph,
        permutation=_ORDERS[model_order],
        points=points_per_voxel,
        fused=fused,
        do_sort=do_sort,
        rulebook_inputs=rulebook_inputs,
    )
    proto = writer.model(list(output_names))
    proto = joined(proto, [Path(tail) for tail in tails])
    target = Path(path)
    if not target.parent.is_dir():
        raise ValueError(f"export_autoware_onnx: there is no folder {target.parent}; make it first")
    content = proto.SerializeToString(deterministic=True)
    file = AutowareFile(
        path=target,
        precision=precision,
        fused=fused,
        layers=writer.layers,
        pair_generations=(writer.generations, sum(isinstance(n, Conv) for n in graph.nodes)),
        voxel_bound=max(n.output_bound for n in graph.nodes if isinstance(n, Conv)),
        permutation=writer.permutation,
        outputs=tuple(output_names),
        graph=graph,
        tensors=writer.names,
        coords=writer.coords,
    )
    if verify:
        file = replace(file, differences=_verified(file, content, example))
    write_whole(target, with_note(content, "onnx reference" if verify else "no"))
    return file


def _verified(
    file: AutowareFile, content: bytes, inputs: tuple[Any, ...]
) -> tuple[LayerDifference, ...]:
    """What `compare_autoware_onnx` finds in the file before it has its name.

    Raises:
        ValueError: One value of one layer differs; its node is named.
    """
    from bevquant_export.targets.autoware._reference import compare_autoware_onnx

    with TemporaryDirectory() as folder:
        unnamed = replace(file, path=write_whole(Path(folder) / file.path.name, content))
        rows = compare_autoware_onnx(unnamed, inputs)
    for row in rows:
        if row.different:
            raise ValueError(
                f"export_autoware_onnx: when the file is run by the definition of the plugin's "
                f"operators, {row.node} ({row.path or 'the result'}) departs from the integer "
                f"model: {row.different:,} of {row.elements:,} values differ, by up to "
                f"{row.largest:g}; nothing was written. verify=False writes it all the same"
            )
    return rows


def _check(model: object, precision: str, order: str, fused: bool, points: int) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"export_autoware_onnx: expected a module, got {type(model).__name__}")
    if precision not in _PRECISIONS:
        raise ValueError(
            f"export_autoware_onnx: precision={precision!r}: expected 'int8' or 'fp16'"
        )
    if order not in _ORDERS:
        raise ValueError(
            f"export_autoware_onnx: model_order={order!r}: expected one of {', '.join(_ORDERS)}"
        )
    if precision == "int8" and not fused:
        raise ValueError(
            "export_autoware_onnx: fused=False with precision='int8': a plugin that has int8 has "
            "bias and activation inside too; leave fused=True"
        )
    if points < 1:
        raise ValueError(f"export_autoware_onnx: points_per_voxel={points}: expected 1 or more")


def geometry_of(conv: Conv) -> dict[str, Any]:
    """What pairs follow from, as attributes; of one form where the results are equal.

    A submanifold convolution moves nothing, so its stride is 1 and its padding what keeps the
    grid; so does a 1×1×1 convolution of stride 1.
    """
    ones = (1, 1, 1)
    still = conv.kernel_size == conv.stride == ones and not any(conv.padding)
    subm = conv.subm or still
    padding = tuple(d * (k // 2) for k, d in zip(conv.kernel_size, conv.dilation, strict=True))
    return {
        "spatial_shape": list(conv.input_spatial_shape),
        "ksize": list(conv.kernel_size),
        "stride": list(ones if subm else conv.stride),
        "padding": list(padding if subm else conv.padding),
        "dilation": list(conv.dilation),
        "out_padding": [0, 0, 0],
        "subm": int(subm),
    }


def quantized_weight(
    half: np.ndarray[Any, Any], channel_scale: np.ndarray[Any, Any], input_scale: float
) -> np.ndarray[Any, Any]:
    """Integers that the plugin makes of float16 filters: roundf(w · (1/s_w)), in float32.

    s_w is ``channel_scale / input_scale``, as the plugin computes it back.
    """
    one = np.float32(1)
    scale = channel_scale.astype(np.float32) / np.float32(input_scale)
    inverse = (one / scale).reshape(-1, *[1] * (half.ndim - 1))
    value = half.astype(np.float32) * inverse
    whole = np.trunc(value)
    rounded = whole + (np.abs(value - whole) >= np.float32(0.5)) * np.sign(value)
    integers: np.ndarray[Any, Any] = np.clip(rounded, -128, 127).astype(np.int8)
    return integers


@dataclass
class _Writer:
    """Nodes and constants of one file.

    Attributes:
        names: Tensor of the graph to its name in the file.
        coords: Tensor of the graph to the tensor of its voxels.
        known: Voxels and geometry to the tensors of a pair generation.
    """

    graph: Graph
    permutation: Sizes
    points: int
    fused: bool
    do_sort: bool
    rulebook_inputs: bool
    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)
    coords: dict[str, str] = field(default_factory=dict)
    layers: dict[str, tuple[str, str]] = field(default_factory=dict)
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
        said = {"bevquant_voxel_bounds": json.dumps(bounds), "rulebook_coors_permutation": columns}
        if self.rulebook_inputs:
            said["rulebook_stages"] = json.dumps(self.stages, separators=(",", ":"))
        helper.set_model_props(proto, said)
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
        elif isinstance(node, Add):
            made = self._unique(f"{node.path or node.name}.sum")
            self.names[node.y] = self._node("Add", [self.names[node.x], self.names[node.other]],
                                            [made])  # fmt: skip
            self.coords[node.y] = self.coords[node.x]
        elif isinstance(node, Relu):
            made = self._unique(f"{node.path or node.name}.relu")
            self.names[node.y] = self._node("Relu", [self.names[node.x]], [made])
            self.coords[node.y] = self.coords[node.x]
        elif isinstance(node, Scatter):
            self._scatter(node)
        else:
            self._move(node)

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
        subm = geometry_of(node)["subm"]
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

        voxels, geometry = self.coords[node.x], geometry_of(node)
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

    def _move(self, node: Move) -> None:
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

        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(
            value.shape), name))  # fmt: skip
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


def _scales(node: Conv) -> tuple[float, np.ndarray[Any, Any]]:
    """``input_scale`` and ``channel_scale`` in float32; the weight's integers survive both.

    Raises:
        ValueError: They do not; the module is named.
    """
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
