"""Other float operations, in the form that torch's exporter gives them.

A call such as ``torch.ops.aten.gather.default(x, 1, index)`` becomes a module of its own, which
torch's exporter writes at operator set 18. onnx's converter lowers that to the file's operator set,
and the nodes are inserted into the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import getitem
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_export.dense._source import Source
from bevquant_export.dense.nodes._graph import FIRST_SHAPE_OF_PART, Graph
from bevquant_export.floats._torch_exporter import OPSET, exported
from bevquant_export.voxels._body import INT32, INT64
from bevquant_int8sim.program import Ref, Step, names_in, replaced

_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_INDEXING = ("getitem", "index", "index_put")
_FIRST_ABSENT_ROI = 13
_LEAST = 11  # before, limits and lengths are attributes too
# What files of operator set 13 rise to where an operator is newer (GridSample): all that 13 has
# means the same there.
_NEWER = {13: 16}
# torch's exporter takes a second for each form, and blocks, profiles and files have many in common.
_known: dict[Any, tuple[Any, int]] = {}
_lock = Lock()
_MOST = 512


def torch_form(
    graph: Graph,
    step: Step,
    read: Callable[[str], str],
    number: Callable[[str], str],
    source: Source,
    constants: Mapping[str, Tensor],
) -> str | list[str]:
    """Nodes of a float step that calls a function or a module of torch: its output, or several.

    `read` gives the tensor of a value of the program, `number` that of a number computed from the
    file's inputs, int64 ``[]``. `constants` of the program become the nodes' own.
    """
    if graph.profile.opset < _LEAST:
        raise ValueError(f"operator set {graph.profile.opset} has no form of it")
    if step.outputs[0] in source.hosts or step.target is None:
        raise ValueError("it is no operator of torch")
    args = source.constants(step.path, (step.args, dict(step.kwargs)), counted=True)
    call = _Call(step, args, constants)
    examples = tuple(_example(source, name) for name in call.names)
    if any(isinstance(x, Tensor) and x.dtype == torch.bfloat16 for x in examples):
        raise ValueError("no CPU runtime computes in bfloat16; cast its input to float32")
    free = tuple(_free(source, name) for name in call.names)
    inputs = [number(name) if name in source.hosts else read(name) for name in call.names]
    # ONNX Runtime has Unique of 64-bit integers alone.
    unique = "unique" in step.called and examples[0].dtype == torch.int32
    wide = call.names[:1] if unique else call.places
    for i, name in enumerate(call.names):
        if name in wide and getattr(examples[i], "dtype", None) == torch.int32:
            examples = (*examples[:i], examples[i].long(), *examples[i + 1 :])
            inputs[i] = graph.node("Cast", step.path, [inputs[i]], to=INT64)
    made = source.shapes[step.outputs[0]]
    count = len(made) if made and isinstance(made[0], tuple) else 1
    key = call.key(examples, free)
    if key is not None:
        key = (key, graph.opset, graph.profile.opset, graph.profile.scatter_sums)
    form = _known.get(key)
    if form is None:
        proto = exported(
            call.eval(), examples, [f"x{i}" for i in range(len(examples))],
            [f"y{i}" for i in range(count)], OPSET,
            dynamic_shapes=(free,) if any(free) else None,
            lowered_to=_NEWER.get(graph.profile.opset, graph.profile.opset),
            scatter_sums=graph.profile.scatter_sums,
        )  # fmt: skip
        form = _at_most(proto, graph.opset)
        _remember(key, form)
    proto, graph.opset = form
    names = _spliced(graph, step.path, proto, inputs)
    if unique:
        names[0] = graph.node("Cast", step.path, [names[0]], to=INT32)
    return names if made and isinstance(made[0], tuple) else names[0]


class _Call(nn.Module):
    """One call, with all arguments except computed tensors inside.

    Attributes:
        names: Values that `forward` takes, in order.
        places: Values that index another one: int64 in ONNX (GatherND, ScatterND).
    """

    def __init__(self, step: Step, given: Any, constants: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._function: Any = step.target
        self._called = step.called
        self._given = given
        self._values: dict[str, str] = {}
        self.names: list[str] = []
        self.places = names_in(step.args[1:2]) if step.called in _INDEXING else []

        def note(ref: Ref) -> Ref:
            if ref.name in constants:
                if ref.name not in self._values:
                    self._values[ref.name] = buffer = f"constant{len(self._values)}"
                    value = constants[ref.name].detach().clone()
                    indexes = ref.name in self.places and value.dtype == torch.int32
                    self.register_buffer(buffer, value.long() if indexes else value)
            elif ref.name not in self.names:
                self.names.append(ref.name)
            return ref

        replaced(given, note)

    def _get_name(self) -> str:
        return self._called

    def key(self, examples: tuple[Any, ...], free: Any) -> Any:
        """Key that calls of one form share; None for a call with its own values."""
        kept = isinstance(self._function, torch._ops.OpOverload) or self._function is getitem
        # A form with values of its own, or of another function, is of this call alone.
        if self._values or not kept:
            return None
        given = replaced(self._given, lambda ref: f"tensor {self.names.index(ref.name)}")
        known: dict[int, str] = {}

        def kind(x: Any, axes: Any) -> Any:
            if not isinstance(x, Tensor):
                return "number"
            # The form holds for any size of a free axis. torch treats 0 and 1 apart, and may
            # relate equal ones.
            sizes = [
                known.setdefault(size, f"size {len(known)}") if axis in axes and size > 1 else size
                for axis, size in enumerate(x.shape)
            ]
            return sizes, x.dtype

        return repr((self._function, given, [*map(kind, examples, free)], free))

    def forward(self, *given: Any) -> Any:
        held = dict(zip(self.names, given, strict=True))
        held |= {name: getattr(self, buffer) for name, buffer in self._values.items()}
        args, kwargs = replaced(self._given, lambda ref: held[ref.name])
        function, args = _of_tensors(self._function, args)
        return function(*args, **kwargs)


def _of_tensors(function: Any, args: Any) -> Any:
    """The operator's form for tensors, and its arguments, where an operand is an open number."""
    name = getattr(function, "_overloadname", "")
    form: Any = getattr(function, "overloadpacket", None)
    form = getattr(form, name.replace("Scalar", "Tensor"), None)
    if form is None or not any(isinstance(a, torch.SymInt) for a in args):
        return function, args
    tensor: Any = torch.scalar_tensor
    return form, [
        tensor(a, dtype=torch.int64)
        if isinstance(a, torch.SymInt) and isinstance(known.type, torch.TensorType)
        else a
        for a, known in zip(args, form._schema.arguments, strict=False)
    ]


def _at_most(proto: Any, opset: int) -> tuple[Any, int]:
    """The model in an operator set, or in the next one that has its operators."""
    try:
        return _lowered(proto, opset), opset
    except ValueError:
        newer = _NEWER.get(opset)
        if newer is None:
            raise
    return _lowered(proto, newer), newer


def _remember(key: Any, form: tuple[Any, int]) -> None:
    """Keep a form for the next call with this key, in any file; the oldest one is dropped."""
    if key is not None:
        with _lock:
            _known[key] = form
            while len(_known) > _MOST:
                del _known[next(iter(_known))]


def _example(source: Source, name: str) -> Any:
    if name in source.hosts:
        number = source.hosts[name]
        if type(number) is not int:
            raise ValueError(
                f"it counts with {number!r}, which the forward takes out of a tensor; files hold "
                "integers of that kind alone: use the tensor itself, without .item() or tolist()"
            )
        return number
    return torch.zeros(source.shapes[name], dtype=source.dtype(name))


def _free(source: Source, name: str) -> Any:
    """Axes whose size varies between frames; numbers do not."""
    dynamic = torch.export.Dim.DYNAMIC
    if name in source.hosts:
        return dynamic
    named = enumerate(source.named(name))
    return {axis: dynamic for axis, size in named if isinstance(size, str)}


def _lowered(proto: Any, opset: int) -> Any:
    """The model in an operator set, checked."""
    import onnx
    from onnx.checker import ValidationError
    from onnx.shape_inference import InferenceError
    from onnx.version_converter import ConvertError, convert_version

    if any(node.domain not in ("", "ai.onnx") for node in proto.graph.node):
        raise ValueError("torch's form of it has operators beside ONNX's own")
    # Attributes of types GRAPH and GRAPHS.
    if any(a.type in (5, 10) for node in proto.graph.node for a in node.attribute):
        raise ValueError("torch's form of it holds graphs inside of nodes")
    if opset < OPSET:
        _drop_part_numbers(proto.graph)
    _scalar_axes(proto.graph)
    del proto.graph.value_info[:]
    if opset < FIRST_SHAPE_OF_PART:
        _slice_shapes(proto.graph)
    # Where onnx's converter does not know an operator, the nodes are tried in the set as they are,
    # but for axes and lengths as attributes, and attributes that only state the older behaviour.
    same = onnx.ModelProto()
    same.CopyFrom(proto)
    for entry in same.opset_import:
        entry.version = opset if entry.domain in ("", "ai.onnx") else entry.version
    _without_news(same.graph, opset)
    convert: Any = convert_version
    for make in (lambda: convert(proto, opset), lambda: same):
        try:
            made = make()
            onnx.checker.check_model(made, full_check=True)
        except (ConvertError, RuntimeError, ValidationError, InferenceError):
            continue
        return made
    raise ValueError(
        f"torch's form of it, {', '.join(sorted({n.op_type for n in proto.graph.node}))} of "
        f"operator set {OPSET}, is none of operator set {opset}"
    )


def _scalar_axes(graph: Any) -> None:
    """Axes of CumSum as scalars: torch's form of repeat_interleave has ``[1]``, which ONNX refuses.

    ONNX Runtime takes both.
    """
    held = {tensor.name: tensor for tensor in graph.initializer}
    held |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
    for node in graph.node:
        axis = held.get(node.input[1]) if node.op_type == "CumSum" else None
        if axis is not None and list(axis.dims) == [1]:
            scalar = graph.initializer.add()
            scalar.CopyFrom(axis)
            scalar.ClearField("dims")
            scalar.name = node.input[1] = f"{node.output[0]}_axis"


def _drop_part_numbers(graph: Any) -> None:
    """Splits into equal parts without their number, which earlier sets count from the outputs."""
    shapes = {value.name: value.type.tensor_type.shape.dim for value in graph.value_info}
    for node in graph.node:
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type != "Split" or "num_outputs" not in attributes:
            continue
        axis = attributes["axis"].i if "axis" in attributes else 0
        sizes = [shapes[name][axis].dim_value for name in node.output if name in shapes]
        # Set 18 has a smaller last part where the size is no multiple: such nodes keep the number.
        if len(sizes) == len(node.output) and len(set(sizes)) == 1 and sizes[0]:
            node.attribute.remove(attributes["num_outputs"])


def _slice_shapes(graph: Any) -> None:
    """Some of a tensor's sizes as a slice of all."""
    from onnx import helper, numpy_helper

    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        graph.node.append(node)
        if node.op_type != "Shape" or not node.attribute:
            continue
        part = {attribute.name: attribute.i for attribute in node.attribute}
        shape, name = graph.node[-1], node.output[0]
        del shape.attribute[:]
        shape.output[0] = f"{name}_all"
        ends = {"start": part.get("start", 0), "end": part.get("end", np.iinfo(np.int64).max)}
        for key, value in ends.items():
            array = np.array([value], np.int64)
            graph.initializer.append(numpy_helper.from_array(array, f"{name}_{key}"))
        inputs = [shape.output[0], *(f"{name}_{key}" for key in ends)]
        graph.node.append(helper.make_node("Slice", inputs, [name]))


def _without_news(graph: Any, opset: int) -> None:
    """Rewrite nodes of operator set 18 without new behaviour in the form of earlier sets."""
    from onnx import defs, helper, numpy_helper

    values = {tensor.name: tensor for tensor in graph.initializer}
    values |= {n.output[0]: n.attribute[0].t for n in graph.node if n.op_type == "Constant"}
    for node in graph.node:
        if not defs.has(node.op_type, opset, ""):
            continue  # the checker says so
        now, then = (defs.get_schema(node.op_type, number, "") for number in (OPSET, opset))
        while node.op_type == "Resize" and opset < _FIRST_ABSENT_ROI and "" in node.input:
            # Its region and factors may be empty there, but not absent.
            place = list(node.input).index("")
            node.input[place] = f"{node.output[0]}_none{place}"
            array = np.array([], np.float32)
            graph.initializer.append(numpy_helper.from_array(array, node.input[place]))
        for name in ("axes", "split"):
            if name in then.attributes and name not in now.attributes and len(node.input) > 1:
                held = values.get(node.input[1])
                if held is not None:
                    del node.input[1:]
                    numbers = numpy_helper.to_array(held).tolist()
                    node.attribute.append(helper.make_attribute(name, numbers))
        for attribute in [a for a in node.attribute if a.name not in then.attributes]:
            default = now.attributes[attribute.name].default_value
            if attribute == default or _says_nothing(node, attribute, values):
                node.attribute.remove(attribute)


def _says_nothing(node: Any, attribute: Any, values: Mapping[str, Any]) -> bool:
    """Whether a zero in a Reshape's shape would be a size, and there is none."""
    from onnx import numpy_helper

    shape = values.get(node.input[1]) if attribute.name == "allowzero" else None
    return shape is not None and 0 not in numpy_helper.to_array(shape).tolist()


def _spliced(graph: Graph, path: str, proto: Any, inputs: list[str]) -> list[str]:
    """The model's nodes and constants in the graph; the tensors that it returns."""
    from onnx import numpy_helper

    inner = proto.graph
    initial = {tensor.name: tensor for tensor in inner.initializer}
    ports = [port.name for port in inner.input if port.name not in initial]
    if any(node.op_type in _PRODUCTS for node in inner.node):
        inputs = [
            graph.float_operand(path, name) if graph.is_quantized(name) else name for name in inputs
        ]
    held: dict[str, str] = dict(zip(ports, inputs, strict=True))

    def tensor(name: str) -> str:
        if not name:
            return ""
        if name not in held:
            array = numpy_helper.to_array(initial[name])
            held[name] = graph.constant(
                f"{path}.constant" if path else "constant", array, array.dtype
            )
        return held[name]

    for node in inner.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            initial[node.output[0]] = node.attribute[0].t
            continue
        names = graph.copied(node, path, [tensor(name) for name in node.input])
        held.update(zip(node.output, names, strict=True))
    return [tensor(port.name) for port in inner.output]
