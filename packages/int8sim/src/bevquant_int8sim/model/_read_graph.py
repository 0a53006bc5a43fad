"""Converts a captured graph to operations; layers are recognised."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from bevquant_graph import OPAQUE, REQUIRE, Graph, OpSpec, fixed_sizes, op_spec
from bevquant_int8sim.model._coords import dense, pooled
from bevquant_int8sim.model._float8 import Float8Layer, blocks_round, float8_round
from bevquant_int8sim.model._float_sparse import FloatSparseConv, OpaqueCall
from bevquant_int8sim.model._form import ACCUMULATORS, FLOAT, Form, Integers
from bevquant_int8sim.model._graph_values import GraphValues, is_coords, nested
from bevquant_int8sim.model._grid_operations import grid_call, require, sample_call
from bevquant_int8sim.model._operation import CAST, Operation, Operations
from bevquant_int8sim.model._quantized_layer import Layer, quantized_layer
from bevquant_int8sim.model._quantizers import (
    float8_of,
    float8_scale,
    integers_of,
    is_active,
    unsupported,
)
from bevquant_int8sim.model._step import Method, Ref
from bevquant_quantizers import TensorQuantizer
from bevquant_sparse import WeightLayout, permute_weight

_LAST = 2**63 - 1  # the end of a slice without one
_HOLD_INTEGERS = {torch.float16, torch.float32, torch.float64}  # bfloat16 rounds quantized values


def read_graph(graph: Graph) -> Operations:
    """The operations of `graph`."""
    return _Reader(graph).run()


class _Reader(GraphValues):
    """Reads one node after the other; `_read_<kind>` an operator of that kind in the table."""

    def run(self) -> Operations:
        self._float8: dict[str, tuple[float, str]] = {}  # FP8 tensors to scale and format
        self._inputs()
        for node in self.graph.operations:
            spec = op_spec(node.target)
            # Constants become operations, and coordinates steps, where something reads them.
            if not (node in self._constants or spec.kind == "rulebook" or is_coords(node)):
                self._refs[node] = self._visit(node, spec)
        leaves = [self._ref(value) for value in self.graph.outputs]
        result = nested(self.graph.result, leaves, self._sparse_output)  # may add coordinates
        return Operations(
            operations=tuple(self.operations),
            signature=nested(
                self.graph.inputs, self._leaves, lambda tree: self._leaves[tree.features.index]
            ),
            sparse_inputs=self.sparse_inputs,
            result=result,
            hosts=frozenset(self._hosts),
            nodes=self.nodes,
            guards=self.guards,
            members=self.graph.members,
        )

    def _visit(self, node: fx.Node, spec: OpSpec) -> Any:
        if node.target is OPAQUE:
            return self._opaque(node)
        if node.target is REQUIRE:
            where = self.graph.required(node)
            return self._host(node, "require", (self._ref(node.args[0]), where), require)
        read = getattr(self, f"_read_{spec.kind}", None)
        made = None if read is None else read(node, spec)
        return self._any(node, spec) if made is None else made

    def _read_identity(self, node: fx.Node, spec: OpSpec) -> Any:
        return self._ref(node.args[0])

    def _read_quantize(self, node: fx.Node, spec: OpSpec) -> Any:
        path = self.graph.path(node)
        module = self.graph.module(node)
        x = self._ref(node.args[0])
        if not isinstance(module, TensorQuantizer) or not is_active(module):
            return None
        reason = unsupported(module)
        if reason:
            return self._float(node, (x,), {}, reason, module=module, what="TensorQuantizer")
        form = float8_of(module)
        if form is not None:
            scale = float8_scale(module, form, path)
            # Rounded to this form already, by another quantizer of the same range.
            if self._float8.get(x.name) == (scale, form.name):
                return x
            args: tuple[Any, ...] = (x, scale, form.name)
            function: Any = float8_round
            if form.block:
                args, function = (*args, module.block_axis), blocks_round
            made = self._float(node, args, {}, "", function=function, what="quantize")
            self._float8[made.name] = scale, form.name
            return made
        integers = integers_of(module, path)
        if self.natural[x.name] == integers:
            return x
        return self._tensor(node, "quantizer", args=(x,), natural=integers)

    def _read_layer(self, node: fx.Node, spec: OpSpec) -> Any:
        layer = self._layer_of(node)
        x = self._ref(node.args[0])
        layer = self._reading(layer, x)
        if isinstance(layer, Float8Layer):
            return self._float(node, (x,), {}, "", module=layer, what=layer.op)
        pad = self._made.get(x.name) if self._is_tensor(x) else None
        if isinstance(layer, Layer) and pad is not None and pad.what == "pad":
            # By padding_mode="circular": values of the input's quantizer, moved in float.
            if self._is_input_of(pad.args[0], layer.input):
                x = self._tensor(node.args[0], "quantizer", args=(x,), natural=layer.input)  # type: ignore[arg-type]
        if not isinstance(layer, str) and self._is_input_of(x, layer.input):
            return self._tensor(
                node, "layer", args=(x,), what=type(self.graph.module(node)).__name__,
                layer=layer, natural=ACCUMULATORS,
            )  # fmt: skip
        reason = "" if isinstance(layer, str) else "it is called with further arguments"
        return self._any(node, spec, self._why_float(node, layer) or reason)

    def _why_float(self, node: fx.Node, layer: Any) -> str:
        """Why a layer does not run in integers, if the layer or the type of its input says it."""
        if isinstance(layer, str):
            return layer
        x: Any = node.args[0]
        while x.meta["val"].dtype != torch.bfloat16:
            if not op_spec(x.target).casts:  # sparse kernels have one in front
                return ""
            x = x.args[0]
        return (
            "its input is bfloat16, which does not hold the quantized values; leave "
            "torch.autocast, or call model.float() before it is quantized and calibrated"
        )

    def _layer_of(self, node: fx.Node) -> Any:
        """The integer layer that a product is, or why it stays float."""
        module = self.graph.module(node)
        if "_input_quantizer" in module._modules and "_weight_quantizer" in module._modules:
            return quantized_layer(module, self.graph.path(node), node)
        return ""

    def _reading(self, layer: Any, x: Any) -> Any:
        """The layer; of FP8 the reason why it stays float where another tensor reaches it."""
        known = self._float8.get(x.name) if self._is_tensor(x) else None
        if isinstance(layer, Float8Layer) and known != (layer.input_scale, layer.form):
            return "its input is not the result of its quantizer"
        return layer

    def _is_input_of(self, x: Any, form: Integers) -> bool:
        return self._is_tensor(x) and self.natural[x.name] == form

    def _read_relu(self, node: fx.Node, spec: OpSpec) -> Any:
        ceiling: float | None = {"relu6": 6.0}.get(spec.name)
        if spec.name == "hardtanh":
            low, high = (*node.args[1:], *((-1.0, 1.0)[len(node.args) - 1 :]))[:2]
            if low != 0 or not isinstance(high, int | float) or high <= 0:
                return None
            ceiling = float(high)
        x = self._ref(node.args[0])
        return self._tensor(
            node, "relu", args=(x,), what="relu", natural=self.natural[x.name], ceiling=ceiling
        )

    def _read_norm(self, node: fx.Node, spec: OpSpec) -> Any:
        """Nothing, of a norm that was folded and is still called: it hands its input on."""
        x: Any = node.args[0]
        if node.target is not torch.ops.aten.batch_norm.default or node.args[5]:
            return None
        value = x.meta["val"]
        try:
            known = [self._constant_value(setting) for setting in node.args[1:]]
        except KeyError:
            return None
        channels = known[2].numel() if isinstance(known[2], Tensor) else 0
        # An exact identity returns these.
        probe = torch.arange(-2, 3, dtype=value.dtype)[:, None].expand(-1, channels)
        with torch.no_grad():
            same = torch.equal(torch.ops.aten.batch_norm(probe, *known), probe)
        return self._ref(x) if channels and same else None

    def _read_add(self, node: fx.Node, spec: OpSpec) -> Any:
        """A sum in integers, if every operand is made of integers."""
        args = self._resolved(node.args)
        if node.kwargs or len(args) != 2 or not all(self._is_tensor(a) for a in args):
            return None
        forms = [self.natural[a.name] for a in args]
        plain = [
            form != ACCUMULATORS or self._made[a.name].layer is not None
            for a, form in zip(args, forms, strict=True)
        ]
        if FLOAT in forms or not all(plain):
            return None
        return self._tensor(node, "add", args=args, what="add", natural=ACCUMULATORS)

    def _read_max_pool(self, node: fx.Node, spec: OpSpec) -> Any:
        name = spec.name.removesuffix("_with_indices")
        value = node.args[0].meta.get("val")  # type: ignore[union-attr]
        axes = int(name.removeprefix("max_pool")[0])
        if isinstance(value, Tensor) and value.dim() != axes + 2:
            return None  # without a batch
        if name != spec.name and any(user.args[1:] != (0,) for user in node.users):
            return None  # places of the largest are read, too
        return self._grid(node, name, node.args[1:], node.kwargs)

    def _read_avg_pool(self, node: fx.Node, spec: OpSpec) -> Any:
        return self._grid(node, spec.name, node.args[1:], node.kwargs)

    def _read_resize(self, node: fx.Node, spec: OpSpec) -> Any:
        if not str(node.target).endswith(".vec"):
            return None
        bilinear = spec.name.endswith("bilinear2d")
        given = list(node.args[1:]) + [None] * 3
        size, corners, factors = (*given[:3],) if bilinear else (given[0], None, given[1])
        settings = {"size": size, "scale_factor": factors, "align_corners": corners}
        if size is not None:
            settings["scale_factor"] = None
        mode = "bilinear" if bilinear else "nearest"
        return self._grid(node, "interpolate", (), settings | {"mode": mode})

    def _grid(self, node: fx.Node, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Pooling or resizing; None where the operand has no integers to do it on."""
        x = self._ref(node.args[0])
        call = grid_call(name, (x, *self._resolved(args)), self._resolved(dict(kwargs)))
        if call is None or not self._is_tensor(x):
            return None
        what, settings = call
        natural = self.natural[x.name]
        if what == "avg_pool":
            if not isinstance(natural, Integers):
                return None
            return self._tensor(
                node, "weighted_sum", args=(x,), kwargs=settings, what=what, natural=ACCUMULATORS
            )
        linear = settings.get("mode") == "bilinear"
        made = self._move(node, x, (x,), what, kwargs=settings, linear=linear)
        return (made,) if "_with_indices" in str(node.target) else made

    def _read_sample(self, node: fx.Node, spec: OpSpec) -> Any:
        """Samples of integers, at positions that stay floats."""
        x, *places = self._resolved(node.args)
        natural = self.natural[x.name] if self._is_tensor(x) else FLOAT
        what, settings = sample_call(spec.name, places)
        if what == "" or node.kwargs or not isinstance(natural, Integers):
            return None
        if natural.bits > 8:
            reason = f"it samples int8, and its values have {natural.bits} bits"
            return self._any(node, spec, reason)
        places = places[:1] if what == "grid_sample" else places
        return self._tensor(
            node, "weighted_sum", args=(x, *places), kwargs=settings, what=what,
            natural=ACCUMULATORS,
        )  # fmt: skip

    def _read_matmul(self, node: fx.Node, spec: OpSpec) -> Any:
        """A product of two tensors of integers."""
        if node.kwargs:
            return None
        equation, factors = "", list(self._resolved(node.args))
        if isinstance(factors[0], str):
            equation, factors = factors[0], list(factors[1])
        if len(factors) != 2 or not all(map(self._is_tensor, factors)):
            return None
        if all(x.name in self._float8 for x in factors):
            return self._any(node, spec, "products of two FP8 tensors are computed in float32")
        if not all(isinstance(self.natural[x.name], Integers) for x in factors):
            return None
        return self._tensor(node, "matmul", args=tuple(factors), what=equation)

    def _read_concat(self, node: fx.Node, spec: OpSpec) -> Any:
        args = self._resolved(node.args)
        parts = args[0]
        if not all(self._is_tensor(ref) for ref in parts):
            return None
        forms = {self.natural[ref.name] for ref in parts}
        natural = _settled(forms.pop()) if len(forms) == 1 else FLOAT
        return self._tensor(
            node, "layout", args=args, kwargs=self._resolved(node.kwargs), what=spec.name,
            function=node.target, moved=tuple(ref.name for ref in parts), natural=natural,
        )  # fmt: skip

    def _read_layout_op(self, node: fx.Node, spec: OpSpec) -> Any:
        args, kwargs = self._resolved(node.args), self._resolved(node.kwargs)
        x = args[0]
        if isinstance(x, tuple):  # of an operation with several results, of which one is followed
            return x[args[1]] if args[1] < len(x) else None
        if not self._is_tensor(x):
            return None
        what, function, args = _python_call(node, spec.name, args)
        if what == "":
            return x
        if what == "pad" and ((len(args) > 2 and args[2] != "constant") or any(args[3:])):
            return None
        return self._move(node, x, args, what, function=function, kwargs=kwargs)

    def _read_size(self, node: fx.Node, spec: OpSpec) -> Any:
        x, *axis = self._resolved(node.args)
        return self._host(node, "size", (x, *axis), Method("size"))

    def _any(self, node: fx.Node, spec: OpSpec, reason: str = "") -> Any:
        """A number, or an operation in float."""
        args, kwargs = self._resolved(node.args), self._resolved(node.kwargs)
        target: Any = node.target
        value = node.meta.get("val")
        if not isinstance(value, Tensor | tuple | list):
            return self._host(node, spec.name, args, target)
        if target is operator.getitem:
            return self._move(node, args[0], args, "getitem", function=target)
        floats = not isinstance(value, Tensor) or value.is_floating_point()
        module = self.graph.module(node)
        what = _class_of(module) or spec.name
        if spec.casts and isinstance(value, Tensor):
            before = node.all_input_nodes[0].meta["val"]
            if before.dtype == value.dtype:
                return args[0]
            held = self._is_tensor(args[0]) and self.natural[args[0].name] != FLOAT
            if held and {before.dtype, value.dtype} <= _HOLD_INTEGERS:
                return self._move(node, args[0], args, CAST, function=target, kwargs=kwargs)
            # A cast is no operation that lacks a form, so no reason is reported.
            reason = " "
        quantizer = module._modules.get("_input_quantizer")
        if what == "mul" and getattr(quantizer, "channel_factors", None) is not None:
            reason = "its input's channels have ranges of their own: x·f, then one range for all"
        if floats and not reason:
            known = spec.kind == "sample" and sample_call(spec.name, args[1:])[0]
            why = "reads no int8 values" if known else "has no integer form"
            reason = f"{what} {why}"
        return self._float(node, args, kwargs, reason.strip(), function=target, what=spec.name)

    def _opaque(self, node: fx.Node) -> Any:
        entry, call = self.graph.opaque_of(node)
        given = self._resolved(node.args[0])
        reason = f"not followed: {entry.reason}"
        if any(isinstance(m, TensorQuantizer) for m in call.module.modules()):
            reason += "; the quantized layers in it run in float on fake-quantized values"
        module = OpaqueCall(call.module, call.inputs, entry.path, fixed_sizes(node))
        return self._keep(
            node,
            Operation(
                "float", entry.path, self._unique(entry.path.replace(".", "_")), tuple(given), {},
                what=type(call.module).__name__, module=module, reason=reason,
            ),
        )  # fmt: skip

    # Sparse tensors

    def _read_sparse_layer(self, node: fx.Node, spec: OpSpec) -> Any:
        module = self.graph.module(node)
        layer = self._layer_of(node)
        geometry, coords, out = self._walk(node.args[3])
        x = self._ref(node.args[0])
        made = self._name(node)
        behind = f"{made}.sites"
        layer = self._reading(layer, x)
        if isinstance(layer, Float8Layer):
            result = self._float(
                node, (x, Ref(coords)), {}, "", module=layer, what=layer.op, output=made,
                coords=behind,
            )  # fmt: skip
        elif not isinstance(layer, str) and self._is_input_of(x, layer.input):
            result = self._tensor(
                node, "layer", made, args=(x, Ref(coords)), what=type(module).__name__,
                layer=layer, natural=ACCUMULATORS, coords=behind,
            )  # fmt: skip
        else:
            weight, bias = (self._constant_value(value) for value in node.args[1:3])
            layouts = WeightLayout[str(node.args[5])], WeightLayout.VCK
            # Copies, as the model may be trained on.
            weight = permute_weight(weight, *layouts, kernel_size=geometry.kernel_size).clone()
            bias = None if bias is None else bias.clone()
            step = FloatSparseConv(weight, bias, geometry, self._key(node))
            reason = self._why_float(node, layer) or "it is not quantized"
            result = self._float(
                node, (x, Ref(coords)), {}, reason, module=step, what=type(module).__name__,
                output=made, coords=behind,
            )  # fmt: skip
        self._hosts.add(behind)
        self._coords[out] = behind
        return result

    def _read_sparse_pool(self, node: fx.Node, spec: OpSpec) -> Any:
        geometry, coords, out = self._walk(node.args[1])
        self._coords_at(out, None, None)
        x = self._ref(node.args[0])
        kind = spec.name.rpartition(":")[2]
        args = (x, Ref(coords), kind, self._key(node), *geometry.numbers())
        what = f"sparse_{kind}"
        if spec.values:
            return self._move(node, x, args, what, function=pooled)
        reason = f"{kind} over voxels has no integer form"
        return self._float(node, args, {}, reason, function=pooled, what=what)

    def _read_to_dense(self, node: fx.Node, spec: OpSpec) -> Any:
        features, indices, shape, batch_size = node.args[:4]
        x = self._ref(features)
        coords = self._coords_at(indices, shape, batch_size)
        parts = [self._coords_part(coords, p) for p in ("indices", "spatial_shape", "batch_size")]
        return self._move(node, x, (x, *parts), "to_dense", function=dense)

    def _move(self, node: fx.Node, x: Ref, args: Any, what: str, **settings: Any) -> Ref:
        """A layout operator: the values of `x` elsewhere, in the form that `x` comes about in."""
        natural = _settled(self.natural[x.name])
        return self._tensor(
            node, "layout", args=args, what=what, moved=(x.name,), natural=natural, **settings
        )


def _settled(natural: Form) -> Form:
    return FLOAT if natural == ACCUMULATORS else natural


def _class_of(module: nn.Module) -> str:
    """Class of the module that is this operation alone; empty for a forward of the author's."""
    library = type(module).__module__.startswith("torch.nn")
    return type(module).__name__ if library and next(module.children(), None) is None else ""


def _python_call(
    node: fx.Node, name: str, args: tuple[Any, ...]
) -> tuple[str, Any, tuple[Any, ...]]:
    """(what, function, arguments) of a move as Python would call it; "" for none at all."""
    if name == "slice":
        defaults: tuple[Any, ...] = (0, None, None, 1)
        x, axis, start, stop, stride = (*args, *defaults[len(args) - 1 :])
        whole = (start in (None, 0)) and stop in (None, _LAST) and stride == 1
        if whole:
            return "", None, args
        axis %= node.meta["val"].dim()
        part = slice(start, None if stop == _LAST else stop, stride)
        before: list[Any] = [slice(None)] * int(axis)
        return "getitem", operator.getitem, (x, (*before, part))
    if name == "index":
        parts = tuple(slice(None) if part is None else part for part in args[1])
        return "getitem", operator.getitem, (args[0], parts)
    return name, node.target, args
