"""ONNX files in QDQ format, of any tool, as integer models; and their float models."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_export.lint._read import load_model, reading
from bevquant_export.qdq_reader._build import Builder
from bevquant_export.qdq_reader._constants import activations
from bevquant_export.runtime._session import upgraded_opset
from bevquant_graph import check_kind, file_path
from bevquant_int8sim import IntegerModel, simulate

_OPSETS = range(13, 27)
_NOISE = 1e-2  # a few integers that floats of another batch round otherwise
_BATCH = 2  # of an open batch size: one frame would be taken for a fixed size
_FLOATS = (1, 10, 11, 16)  # float32, float16, float64, bfloat16


def load_qdq_onnx(
    path: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    float_file: str | os.PathLike[str] | None = None,
    backend: str = "auto",
    rounding: str = "half_even",
    verify: bool = True,
) -> IntegerModel:
    r"""Run an ONNX file with QuantizeLinear and DequantizeLinear in integers and FP8.

    Files of `export_qdq_onnx` and of other tools: ONNX Runtime's ``quantize_static`` in QDQ format,
    ModelOpt, exports of PyTorch's PT2E. Layers multiply the stored integers, of an activation with
    scale s_x and zero point z_x and a weight with s_w and z_w:

    .. math:: y_q = \operatorname{clamp}\Bigl(\operatorname{round}\bigl(
              (\textstyle\sum (x_q - z_x)(w_q - z_w) + b_q)\, \tfrac{s_x s_w}{s_y}\bigr),
              q_\min - z_y, q_\max - z_y\Bigr)

    with exact int32 sums and the file's float32 scales, multiplied in float64. Integers of the
    model are q − z: zero is 0 in every tensor. A runtime that multiplies by a float32 factor may
    round a value v within 2⁻²¹·\|v\| of the border of two steps the other way; one that runs the
    file as it is written also a value within the error of its float32 sums.

    FP8 layers have exact sums of FP8 products (`Float8Layer`) and their bias in float32.

    A float bias of integers is rounded to s_x·s_w. ReLU and Clip from 0 belong to the layer before
    them. Additions, concatenations, pooling and moves are computed in integers, other operators in
    float32 between dequantization and quantization; `IntegerModel.float_fallbacks` lists these.
    Tensors of other float types in the file are computed in float32.

    Args:
        path: Operator sets 11 to 26, with external data beside it or without.
        example_inputs: A tuple of the file's inputs, in their order, or a dict by name; the model
            is called likewise. By default a tuple of random numbers in the range of the input's
            quantizer, a batch of two where the batch size is open.
        float_file: The float file that was quantized, with the same nodes under the same names
            (quantize_static keeps them; give the preprocessed file), for `float_qdq_model`. A ReLU
            or Clip that the tool left out is taken from it.
        backend: Kernels, as of `bevquant_int8sim.simulate`.
        rounding: As of `bevquant_int8sim.simulate`.
        verify: Compare every step with the file's float arithmetic on the example inputs.

    Returns:
        A model of the file's inputs, of its sizes. The batch is open where twice the batch gives
        twice the results, though the file fixes it. The model returns one tensor, or a tuple of the
        file's outputs in order.
        `bevquant_int8sim.compare(float_qdq_model(model), model, batches)` compares it layer by
        layer.

    Raises:
        ValueError: There is no such file, it is no ONNX file or has no QuantizeLinear; an operator,
            attribute or pattern is not supported, and the node is named; a size of an input is open
            beyond the batch and there are no `example_inputs`; the float file lacks a layer or has
            weights of other shapes; or `simulate` refuses the model.

    Example:
        >>> import tempfile, torch
        >>> from bevquant_export import export_qdq_onnx
        >>> from bevquant_int8sim import simulate
        >>> from bevquant_qnn import quantize_model
        >>> from bevquant_quantizers import calibrate
        >>> x = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        >>> quantized = quantize_model(net, example_inputs=x).model
        >>> _ = calibrate(quantized, [x])
        >>> file = export_qdq_onnx(quantized, x, f"{tempfile.mkdtemp()}/net.onnx", "onnxruntime")
        >>> model = load_qdq_onnx(file.path)
        >>> [step.op for step in model.steps]
        ['quantize', 'conv']
    """
    where = f"load_qdq_onnx: {file_path(path, 'ONNX file').name}"
    known = floats = None
    if float_file is not None:
        file_path(float_file, "ONNX file")
        proto = _proto(float_file)
        known, floats = activations(proto), _built(proto, None, float_file)[1]
    builder, module = _built(_proto(path), known, path)
    if not builder.integers:
        raise ValueError(
            f"{where} has no QuantizeLinear; expected a quantized file in QDQ format. "
            "onnxruntime.quantization.quantize_static writes one of a float file"
        )
    module.float_file = float_file
    if float_file is not None:
        _float_layers(module, floats, float_file, "load_qdq_onnx")
    with reading(path, "load_qdq_onnx"):
        example = _example(builder, example_inputs, where)
    with torch.no_grad():
        try:
            # Once as it is: a node's refusal is not lost in a capture's.
            results = module(**example) if isinstance(example, dict) else module(*example)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            raise ValueError(f"{where}: {error}") from error
        fixed = any(batch for _, batch in builder.checks)
        if fixed and not _follows_batch(module, example, results):
            builder.fix_batch()
        return simulate(module, example, backend=backend, rounding=rounding, verify=verify)


def float_qdq_model(model: IntegerModel) -> nn.Module:
    """The float model beside an integer model of `load_qdq_onnx`, for `compare`.

    It is the file without its quantizers. Weights and biases of layers are those of `float_file`
    where `load_qdq_onnx` was given one; other constants are the dequantized ones.

    Args:
        model: From `load_qdq_onnx`, not from `IntegerModel.load`.

    Raises:
        ValueError: `model` was loaded from a folder or made of another model, or the float file
            lacks a layer, or has weights of other shapes.
    """
    check_kind(model, IntegerModel, "what load_qdq_onnx returned")
    source: Any = model.source.graph.model if model.source is not None else None
    if not hasattr(source, "float_file"):
        raise ValueError(
            "float_qdq_model: expected what load_qdq_onnx returned; an integer model that was "
            "saved, or made of a torch model, has no file beside it"
        )
    found: nn.Module = copy.deepcopy(source)
    if source.float_file is None:
        return found
    floats = _built(_proto(source.float_file), None, source.float_file)[1]
    for layer, other, whole in _float_layers(found, floats, source.float_file, "float_qdq_model"):
        layer.weight.data = other.weight if whole else torch.zeros_like(other.weight)
        if layer.bias is not None and other.bias is not None:
            layer.bias.data = other.bias
    return found


def _float_layers(
    module: Any, floats: Any, float_file: str | os.PathLike[str], where: str
) -> list[tuple[Any, Any, bool]]:
    """Layers of a file with those of its float file, and whether each has the whole weight."""
    theirs, layers = dict(floats.named_modules()), []
    for path, layer in module.named_modules():
        if getattr(layer, "weight", None) is None:
            continue
        first = path if path in theirs else path.removesuffix("_rest")
        other: Any = theirs.get(first)
        if other is None or other.weight.shape != layer.weight.shape:
            came = "no such layer" if other is None else f"a weight {list(other.weight.shape)}"
            raise ValueError(
                f"{where}: layer {path} has a weight {list(layer.weight.shape)}, "
                f"{Path(float_file).name} has {came}; give the float file that was "
                "quantized, with its nodes' names"
            )
        layers.append((layer, other, first == path))  # the second part of a weight is apart
    return layers


def _built(proto: Any, known: Any, path: str | os.PathLike[str]) -> tuple[Builder, Any]:
    with reading(path, "load_qdq_onnx"):
        builder = Builder(proto, known)
        try:
            return builder, builder.build()
        except ValueError as error:
            raise ValueError(f"load_qdq_onnx: {Path(path).name}: {error}") from error


def _proto(path: str | os.PathLike[str]) -> Any:
    with reading(path, "load_qdq_onnx"):
        return _normalized(upgraded_opset(load_model(path)), Path(path))


def _normalized(proto: Any, path: Path) -> Any:
    """With functions inlined, of a known operator set."""
    from onnx.inliner import inline_local_functions

    versions = [e.version for e in proto.opset_import if e.domain in ("", "ai.onnx")]
    if not versions or versions[0] not in _OPSETS:
        raise ValueError(
            f"load_qdq_onnx: {path.name} is of operator set {versions}; expected 11 to 26. "
            "Convert it with onnx.version_converter.convert_version(model, 21)"
        )
    proto = inline_local_functions(proto) if proto.functions else proto
    _sort(proto.graph)
    return proto


def _sort(graph: Any) -> None:
    """Put nodes in order of execution, which ONNX Runtime does too."""
    waiting = list(graph.node)
    coming = Counter(name for node in waiting for name in node.output)
    nodes: list[Any] = []
    while waiting:
        later = []
        for node in waiting:
            if any(coming[name] for name in node.input if name):
                later.append(node)
            else:
                nodes.append(node)
                coming.subtract(node.output)
        if len(later) == len(waiting):  # a cycle
            return
        waiting = later
    if any(a is not b for a, b in zip(nodes, graph.node, strict=True)):
        del graph.node[:]
        graph.node.extend(nodes)


def _example(builder: Builder, given: Any, where: str) -> tuple[Any, ...] | dict[str, Any]:
    if isinstance(given, Mapping):
        names = [entry.name for entry in builder.inputs]
        missing = [n for n in names if n not in given]
        if missing:
            raise ValueError(f"{where}: example_inputs have no {missing[0]!r}; expected {names}")
        return {argument: given[n] for n, argument in builder.arguments.items()}
    if given is not None:
        return tuple(given) if isinstance(given, tuple | list) else (given,)
    generator = torch.Generator().manual_seed(0)
    return tuple(_random(entry, builder, generator, where) for entry in builder.inputs)


def _follows_batch(module: nn.Module, example: Any, results: Any) -> bool:
    """Whether the module gives each result twice for twice the inputs."""

    def twice(value: Tensor) -> Tensor:
        return torch.cat([value, value]) if value.ndim else value

    one = results if isinstance(results, tuple) else (results,)
    try:
        if isinstance(example, dict):
            made = module(**{name: twice(value) for name, value in example.items()})
        else:
            made = module(*map(twice, example))
    except (ValueError, TypeError, RuntimeError, IndexError):
        return False
    pairs = zip(map(twice, one), made if isinstance(made, tuple) else (made,), strict=True)
    return all(
        a.shape == b.shape and (a.double() - b.double()).norm() <= _NOISE * a.double().norm()
        for a, b in pairs
    )


def _random(entry: Any, builder: Builder, generator: torch.Generator, where: str) -> Tensor:
    kind = entry.type.tensor_type
    dims = [d.dim_value for d in kind.shape.dim]
    sizes = [_BATCH if not n and i == 0 else n for i, n in enumerate(dims)]
    if not kind.HasField("shape") or not all(n > 0 for n in sizes):
        raise ValueError(
            f"{where}: input {entry.name!r} has sizes {dims}, 0 for open ones; give example_inputs"
        )
    if kind.elem_type not in _FLOATS:
        from onnx import helper

        dtype = torch.from_numpy(helper.tensor_dtype_to_np_dtype(kind.elem_type).type(0).reshape(1))
        return torch.zeros(sizes, dtype=dtype.dtype)
    grid = builder.grids.get(entry.name)
    if grid is None or not grid.single:
        return torch.randn(sizes, generator=generator)
    low, high = ((bound - float(grid.zero)) * float(grid.scale) for bound in grid.bounds)
    return low + (high - low) * torch.rand(sizes, generator=generator)
