"""A calibrated sparse encoder as a file for the plugin, checked against the model; files joined."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from torch import nn

from bevquant_export._differences import TensorDifference
from bevquant_export._size_guards import note_guards
from bevquant_export.lint._read import load_model
from bevquant_export.sparse._between import follow
from bevquant_export.sparse._compare import frame_of
from bevquant_export.sparse._graph import Conv
from bevquant_export.sparse._half_precision import with_half_constants
from bevquant_export.sparse._make_graph import sparse_graph
from bevquant_export.sparse._verify import refuse_departures, with_note
from bevquant_export.targets.autoware._emit import GraphWriter
from bevquant_export.targets.autoware._plugin import AutowareFile
from bevquant_export.targets.autoware._reference import compare_autoware_onnx
from bevquant_graph import file_path, reported_by
from bevquant_int8sim import simulate
from bevquant_quantizers import quantization_disabled, write_whole

if TYPE_CHECKING:
    from onnx import ModelProto


def join_autoware_onnx(
    first: str | os.PathLike[str],
    tails: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
) -> None:
    """Write an encoder's file and its tails as one file.

    Args:
        first: From `export_autoware_onnx`.
        tails: Files with one input each, in order; their outputs become those of the whole.
        path: The file; it appears whole or not at all.

    Raises:
        ValueError: Two files do not fit each other.
    """
    proto = joined(load_model(first), [Path(tail) for tail in tails])
    write_whole(path, proto.SerializeToString(deterministic=True))


def behind_encoder(path: str | os.PathLike[str], name: str) -> ModelProto:
    """Part of a joined file downstream of the encoder's output `name`, in standard operators."""
    import onnx

    model = load_model(path)
    places = {output: place for place, n in enumerate(model.graph.node) for output in n.output}
    if name not in places:
        raise ValueError(f"{Path(path).name}: no node makes {name!r}, the encoder's output")
    del model.graph.node[: places[name] + 1], model.graph.input[:]
    half = onnx.TensorProto.FLOAT16
    model.graph.input.append(onnx.helper.make_tensor_value_info(name, half, None))
    used = {tensor for node in model.graph.node for tensor in node.input}
    kept = [tensor for tensor in model.graph.initializer if tensor.name in used]
    del model.graph.initializer[:], model.graph.value_info[:]
    model.graph.initializer.extend(kept)
    return model


def joined(first: ModelProto, tails: Sequence[Path]) -> ModelProto:
    """`first` and the tails that read its output, all at their latest operator set.

    Names of a tail that are taken get a prefix. A float16 output that a float32 input reads is
    cast.
    """
    import onnx

    model = first
    for number, path in enumerate(tails, start=1):
        tail = load_model(path)
        version = max(_opset(model), _opset(tail))
        model, tail = _raised(model, version), _raised(tail, version)
        given = [value.name for value in tail.graph.input]
        if len(given) != 1 or len(model.graph.output) != 1:
            raise ValueError(
                f"{path.name} has {len(given)} inputs and what comes before it "
                f"{len(model.graph.output)} outputs; files one behind the other have one each"
            )
        prefix = f"part{number}/"
        renamed = onnx.compose.add_prefix(tail, prefix, rename_outputs=False, rename_edges=True)
        _outputs_back(renamed, tail, prefix)
        entry = _fitted(model, renamed, path)
        renamed.ir_version = model.ir_version = max(model.ir_version, renamed.ir_version)
        props = {p.key: p.value for p in model.metadata_props}
        del model.metadata_props[:], renamed.metadata_props[:]  # verified before
        model = onnx.compose.merge_models(
            model, renamed, [(entry, renamed.graph.input[0].name)], name="model"
        )
        domains = {o.domain.replace("ai.onnx", ""): o.version for o in model.opset_import}
        del model.opset_import[:]
        model.opset_import.extend(onnx.helper.make_opsetid(d, v) for d, v in domains.items())
        model.producer_name = "bevquant_export"
        del model.metadata_props[:]
        onnx.helper.set_model_props(model, props)
    return model


def _opset(model: ModelProto) -> int:
    return int(next(o.version for o in model.opset_import if o.domain in ("", "ai.onnx")))


def _raised(model: ModelProto, version: int) -> ModelProto:
    """At that operator set; a graph with a plugin's operators has none that changed since 17."""
    import onnx

    if _opset(model) == version:
        return model
    if any(node.domain for node in model.graph.node):
        raised = onnx.ModelProto()
        raised.CopyFrom(model)
        for imported in raised.opset_import:
            if imported.domain in ("", "ai.onnx"):
                imported.version = version
        return raised
    converted: ModelProto = onnx.version_converter.convert_version(model, version)
    return converted


def _outputs_back(renamed: ModelProto, tail: ModelProto, prefix: str) -> None:
    """Outputs of the whole file keep their names."""
    outputs = {f"{prefix}{value.name}": value.name for value in tail.graph.output}
    for node in renamed.graph.node:
        for names in (node.input, node.output):
            names[:] = [outputs.get(name, name) for name in names]
    for value in renamed.graph.output:
        value.name = outputs.get(value.name, value.name)


def _fitted(model: ModelProto, tail: ModelProto, path: Path) -> str:
    """Name of the output that the tail's input reads, cast to its type."""
    from onnx import TensorProto, helper

    made: Any = model.graph.output[0]
    wanted = tail.graph.input[0].type.tensor_type
    shapes = [[d.dim_value for d in value.shape.dim] for value in (made.type.tensor_type, wanted)]
    if len(shapes[0]) != len(shapes[1]) or any(
        a != b for a, b in zip(*shapes, strict=True) if a and b
    ):
        raise ValueError(f"{path.name} reads {shapes[1]}, and what comes before it is {shapes[0]}")
    if made.type.tensor_type.elem_type == wanted.elem_type:
        return str(made.name)
    if wanted.elem_type != TensorProto.FLOAT:
        raise ValueError(f"{path.name} reads tensors of type {wanted.elem_type}; expected float32")
    name = f"{made.name}.float32"
    model.graph.node.append(
        helper.make_node("Cast", [made.name], [name], f"{name}.Cast", to=TensorProto.FLOAT)
    )
    made.name = name
    made.type.tensor_type.elem_type = TensorProto.FLOAT
    return name


_ORDERS = {"xyz": (2, 1, 0), "zyx": (0, 1, 2), "yxz": (1, 2, 0)}
_PRECISIONS = ("int8", "fp16")


@reported_by("export_autoware_onnx")
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
    output_names: Sequence[str] = (),
    verify: bool = True,
) -> AutowareFile:
    r"""Write a sparse encoder for Autoware's TensorRT plugin, from points of voxels on.

    The operators are ``GetIndicePairsImplicitGemm`` and ``ImplicitGemm`` of the domain
    ``autoware`` (autoware_tensorrt_plugins), features are float16 between layers. In int8 a layer
    computes

    .. math:: q = \operatorname{clamp}(\operatorname{roundf}(x_{16} \cdot (1/s_x)), -128, 127),
              \quad y = \operatorname{fp16}\bigl(\operatorname{act}(a\, s_x s_w + b)\bigr)

    with a the int32 sum of q and of the filter's integers, which the plugin makes of fp16(q_w·s_w)
    again; ties go away from zero. The export checks in the plugin's arithmetic that they survive.
    Sums of residual blocks are ``Add`` in float16: no operand is quantized for them. One pair
    generation serves all layers of one set of voxels and one geometry.

    Args:
        model: Calibrated, in evaluation mode, batch norms folded; as `export_sparse_onnx` takes
            it. It is not changed.
        example_inputs: One frame, as the model takes it; run once.
        path: The file; it appears whole or not at all.
        precision: ``"int8"``: every layer whose input and weight are quantized, the others in
            float16; the plugin's revision must have the attribute ``precision``. ``"fp16"``: every
            layer, from the float weights.
        model_order: Order of the model's coordinate columns: ``"xyz"`` (mit-bevfusion), ``"zyx"``
            (mmdetection3d) or ``"yxz"`` (Autoware's BEVFusion); ``coors`` come as z, y, x.
        batches: Further inputs, whose voxels are counted.
        head_room: Voxels of a layer may be this many times those of the frames.
        points_per_voxel: Second axis of ``voxels``; the encoder reads their mean.
        fused: Bias and ReLU inside ``ImplicitGemm`` (six inputs, ``act_type``). False for plugins
            before these: they have an ``Add`` and a ``Relu`` of their own; fp16 only.
        do_sort: Sort the pairs by their masks. On most frames sorting takes longer than it saves.
        rulebook_inputs: The pairs of strided convolutions are inputs
            ``rulebook/<indice_key>/<slot>``, for a node that computes them beforehand, with the
            metadata ``rulebook_stages`` and ``rulebook_coors_permutation`` that it reads.
        tails: Files of the layers downstream of the encoder, in sequence, each with one input. They
            become part of this file, and their outputs are the file's.
        output_names: Names of the encoder's outputs, used without tails. Default: ``lidar_bev``, or
            ``lidar_bev_0``, … of several.
        verify: On `example_inputs`, compare the integer model with `model`, and the file, run by
            the definition of the plugin's operators, with the integer model, before the file gets
            its name. The metadata record it (``verified``).

    Raises:
        TypeError: `model` is not a module.
        ValueError: A layer has no form for the plugin: an inverse convolution, a kernel of more
            than 32 offsets, a batch of several frames, more than 256,000 voxels, weights whose
            integers float16 does not carry; or the file computes other values than the model.
            The module is named; nothing is written.

    Example:
        >>> def write(encoder, frames):
        ...     return export_autoware_onnx(encoder, frames[0], "bevfusion_lidar.onnx",
        ...                                 batches=frames, rulebook_inputs=True)
    """
    _check(model, precision, model_order, fused, points_per_voxel)
    order = "xyz" if model_order == "yxz" else model_order
    if precision == "fp16":
        model = copy.deepcopy(model)
    with quantization_disabled(model) if precision == "fp16" else nullcontext():
        rounded = with_half_constants(model)
        integers = simulate(rounded, example_inputs, verify=verify)
        graph = sparse_graph(
            rounded, integers, example_inputs, batches, order, head_room, fewer_axes=False
        )
    frame = frame_of(integers, example_inputs)
    if frame[2] != 1:
        raise ValueError(
            f"export_autoware_onnx: a batch of {frame[2]} frames; the node gives one: export "
            "with one frame at a time"
        )
    before = follow(integers).before
    if before:
        raise ValueError(
            f"export_autoware_onnx: {before[-1]} makes the features of the voxels, which the node "
            "gives; export the part of the model behind it, a module of its own"
        )
    writer = GraphWriter(
        graph,
        permutation=_ORDERS[model_order],
        points=points_per_voxel,
        fused=fused,
        do_sort=do_sort,
        rulebook_inputs=rulebook_inputs,
    )
    count = len(graph.outputs)
    numbered = ["lidar_bev"] if count == 1 else [f"lidar_bev_{i}" for i in range(count)]
    names = list(output_names) or numbered
    proto = writer.model(names)
    proto = joined(proto, [Path(tail) for tail in tails])
    note_guards(proto, graph.guards)
    target = file_path(path, "ONNX file")
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
        outputs=tuple(names),
        graph=graph,
        tensors=writer.names,
        coords=writer.coords,
    )
    if verify:
        file = replace(file, differences=_verified(file, content, frame))
    write_whole(target, with_note(content, "onnx reference" if verify else "no"))
    return file


def _verified(
    file: AutowareFile, content: bytes, inputs: tuple[Any, ...]
) -> tuple[TensorDifference, ...]:
    """Differences by `compare_autoware_onnx`, before the file gets its name."""
    with TemporaryDirectory() as folder:
        unnamed = replace(file, path=write_whole(Path(folder) / file.path.name, content))
        rows = compare_autoware_onnx(unnamed, inputs)
    caller = (
        "export_autoware_onnx: when the file is run by the definition of the plugin's operators, "
    )
    refuse_departures(rows, caller, same_arithmetic=True)
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
