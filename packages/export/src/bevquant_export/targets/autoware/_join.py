"""Files one behind the other as one file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevquant_export.lint._read import load_model
from bevquant_quantizers import write_whole

if TYPE_CHECKING:
    from onnx import ModelProto


def join_autoware_onnx(
    first: str | os.PathLike[str],
    tails: Sequence[str | os.PathLike[str]],
    path: str | os.PathLike[str],
) -> None:
    """Write an encoder's file and what follows it as one file.

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
    """What of a joined file reads the encoder's output `name`: a model of standard operators."""
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
    """`first` and what reads its output, all at the latest operator set among them.

    Names of a tail that are taken get a prefix. A float16 output that a float32 input reads is
    cast.

    Raises:
        ValueError: A file has not one input, or what comes does not fit it.
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
        del model.metadata_props[:], renamed.metadata_props[:]  # parts were verified by others
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
