"""Type in which TensorRT will run each layer of a file, and the layers of an engine beside it.

From its documentation of explicit quantization: a layer between a DequantizeLinear and a
QuantizeLinear runs in int8 or FP8 if it has such a kernel; a ReLU and a residual sum after a
convolution are fused into it; the pairs vanish. Layers without pairs run in the type of the file
(version 11) or in the type that the flags allow (version 10 with ``--fp16 --int8``). The engine's
own layers are those of ``trtexec --exportLayerInfo``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bevquant_export.lint._attention import Attention, find_attentions
from bevquant_export.lint._graph import Finding, Graph, Node, graphs_of, quoted
from bevquant_export.lint._model import FP4_QUANTIZE
from bevquant_export.lint._read import read_model
from bevquant_export.lint._shapes import Value, inferred_shapes
from bevquant_export.lint._tensors import Pairs, Step

_WEIGHTED = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_ACTIVATIONS = ("Relu", "Clip", "LeakyRelu")
# Have int8 kernels, or move bytes.
_INT8 = set(
    "MaxPool AveragePool GlobalAveragePool Resize Concat Add Reshape Transpose Slice Flatten "
    "DepthToSpace Squeeze Unsqueeze Identity Split Pad Expand Tile".split()
)
_ALONE = {"QuantizeLinear", "DequantizeLinear", "Constant", "Cast", FP4_QUANTIZE}
_QUANTIZED = ("int8", "fp8", "fp4")
_TYPES = {1: "float32", 10: "fp16"}


@dataclass(frozen=True)
class LayerPrediction:
    """Prediction for one node.

    Attributes:
        name: Name of the node.
        op: Its operator.
        runs: ``"int8"``, ``"fp8"``, ``"fp4"``, ``"fp16"`` or ``"float32"``.
        reason: Why.
        into: The node whose kernel it is fused into; empty for a kernel of its own.
        reformats: Places where the engine must convert between types.
    """

    name: str
    op: str
    runs: str
    reason: str
    into: str = ""
    reformats: tuple[str, ...] = ()


def predict_layers(path: Path, target: str) -> tuple[LayerPrediction, ...]:
    """Predict every node of a file's main graph except pairs, constants and casts.

    Args:
        path: The file.
        target: ``"tensorrt10"``, ``"tensorrt"`` or ``"tensorrt11"``.

    Raises:
        ValueError: Another target, or not an ONNX file.
        OSError: As `lint_onnx`.
    """
    if not target.startswith("tensorrt"):
        raise ValueError(f"predict_layers: target {target!r}; expected a TensorRT")
    model = read_model(path)
    if isinstance(model, Finding):
        raise ValueError(f"predict_layers: {path.name}: {model.reason}")
    graphs = [item for item in graphs_of(model) if isinstance(item, Graph)]
    pairs = Pairs(graphs[0], path.parent)
    shapes = inferred_shapes(model, graphs, path.parent)
    return tuple(_Prediction(pairs, shapes, typed=target == "tensorrt11").run())


class _Prediction:
    def __init__(self, pairs: Pairs, shapes: Mapping[str, Value], *, typed: bool) -> None:
        self.pairs, self.shapes = pairs, shapes
        self.graph = pairs.graph
        self.attentions: dict[Node, Attention] = {}  # by each of their nodes
        for found in find_attentions(self.graph):
            members = (found.first, *found.between, found.second)
            self.attentions |= dict.fromkeys(members, found)
        self.typed = typed
        self.types = _float_types(self.graph)
        self.runs: dict[str, str] = {}  # by the first output
        self.into: dict[str, str] = {}

    def run(self) -> Iterator[LayerPrediction]:
        for node in self.graph.nodes:
            if node.op in _ALONE or not node.outputs:
                continue
            runs, reason, into = self._judged(node)
            self.runs[node.outputs[0]] = runs
            self.into[node.outputs[0]] = into
            yield LayerPrediction(
                node.name, node.op, runs, reason, into, tuple(self._reformats(node, runs))
            )

    def _judged(self, node: Node) -> tuple[str, str, str]:
        """Type, reason, and the node that it is fused into."""
        float_type = self._float_type(node)
        attention = self.attentions.get(node)
        if attention is not None:
            return self._attention(attention, node)
        if node.op == "MatMul" and not self._has_weight(node):
            return (*self._product(node, float_type), "")
        if node.op in _WEIGHTED:
            return (*self._weighted(node, float_type), "")
        if node.op in _ACTIVATIONS:
            before = self.graph.producers.get(node.input(0))
            alone = before is not None and len(self.graph.users(before)) == 1
            if before is not None and alone and before.op in (*_WEIGHTED, "Add", "Relu"):
                host = self.into.get(before.outputs[0], "") or before.name
                runs = self.runs.get(before.outputs[0], float_type)
                return runs, f"it becomes part of {quoted(host)}", host
        if node.op == "Add":
            found = self._sum(node)
            if found is not None:
                return found
        if node.op in _INT8 or node.op in _ACTIVATIONS:
            return (*self._between(node, float_type), "")
        return float_type, f"{quoted(node.op)} has no int8 kernel", ""

    def _attention(self, attention: Attention, node: Node) -> tuple[str, str, str]:
        """A node of an attention, which is one kernel if nothing stands against it."""
        runs, _ = self._product(attention.first, self._float_type(attention.first))
        why = attention.obstacle(self.pairs, self.shapes, runs)
        first = attention.first.name
        if not why:
            into = "" if node is attention.first else first
            last = quoted(attention.second.name)
            return runs, f"the attention from {quoted(first)} to {last} can be one kernel", into
        if node not in (attention.first, attention.second):
            return self._float_type(node), f"the attention is not one kernel: {why}", ""
        runs, reason = self._product(node, self._float_type(node))
        return runs, f"{reason}; the attention is not one kernel: {why}", ""

    def _has_weight(self, node: Node) -> bool:
        """Whether an operand of a product is a constant, or the pair of one."""
        steps = [self.pairs.dequantized(name) for name in node.inputs]
        return any(self.graph.constant(name) is not None for name in node.inputs) or any(
            step is not None and step.constant is not None for step in steps
        )

    def _product(self, node: Node, float_type: str) -> tuple[str, str]:
        """A product of two activations."""
        one, other = (self.pairs.dequantized(node.input(slot)) for slot in (0, 1))
        if one is None or other is None:
            return float_type, "it multiplies two activations, and one or both have no pair"
        if _kind(one) != _kind(other):
            return float_type, f"one operand is {_kind(one)} and the other {_kind(other)}"
        return _kind(one), "it multiplies two activations with pairs"

    def _weighted(self, node: Node, float_type: str) -> tuple[str, str]:
        data, weight = (self.pairs.dequantized(node.input(slot)) for slot in (0, 1))
        if data is not None and weight is not None and data.block and weight.block:
            return "fp4", f"data and weight are FP4 in blocks of {weight.block}"
        if weight is None or weight.constant is None:
            return float_type, "its weight has no pair: its quantizer is off"
        if data is None:
            maker = self.graph.producers.get(node.input(0))
            of = f", made by {quoted(maker.name)}," if maker is not None else ""
            return float_type, f"what it reads{of} has no pair: quantize it"
        if data.per_channel:
            return float_type, "its data have a scale per channel: calibrate per tensor"
        if node.op == "ConvTranspose" and weight.per_channel:
            return float_type, "a transposed convolution's weight wants one scale"
        runs, other = _kind(data), _kind(weight)
        if runs != other:
            return float_type, f"its data are {runs} and its weight is {other}"
        if weight.float8 and weight.per_channel:
            return float_type, "its FP8 weight has a scale per channel: calibrate it per tensor"
        ends = f"and gives {runs}" if self._ends_in_pair(node) else f"and gives {float_type}"
        return runs, f"data and weight have pairs, {ends}"

    def _ends_in_pair(self, node: Node) -> bool:
        """Whether all consumers of a node, past activations and sums, are quantized."""
        users = self.graph.users(node)
        if not users or node.outputs[0] in self.graph.given_away:
            return False
        return all(
            user.op == "QuantizeLinear"
            or (user.op in (*_ACTIVATIONS, "Add") and self._ends_in_pair(user))
            for user in users
        )

    def _sum(self, node: Node) -> tuple[str, str, str] | None:
        """A sum fused into the convolution that computes one of its operands."""
        for slot, other in ((0, 1), (1, 0)):
            maker = self.graph.producers.get(node.input(slot))
            if maker is None or not self.pairs.is_quantized(maker, "Conv", "ConvTranspose"):
                continue
            if len(self.graph.users(maker)) > 1:
                continue
            if self.pairs.dequantized(node.input(other)) is None:
                float_type = self._float_type(node)
                return float_type, "the other operand has no pair: quantize the residual", ""
            runs = self.runs.get(maker.outputs[0], "int8")
            return runs, f"it becomes part of {quoted(maker.name)}", maker.name
        return None

    def _between(self, node: Node, float_type: str) -> tuple[str, str]:
        steps: list[Step] = []
        for name in node.inputs:
            if not name or self.graph.constant(name) is not None:
                continue
            step = self.pairs.dequantized(name)
            if step is None:
                return float_type, "what it reads has no pair"
            steps.append(step)
        after = self.pairs.quantizers(node)
        if not steps or not after or len(after) < len(self.graph.users(node)):
            return float_type, "what it makes has no pair"
        if node.op == "Concat" and any(not step.same(steps[0]) for step in steps[1:]):
            return float_type, "its operands have several scales: share one quantizer"
        if any(step.float8 for step in (*steps, *after)):
            return float_type, "FP8 kernels multiply matrices and convolve"
        return "int8", "it stands between pairs"

    def _float_type(self, node: Node) -> str:
        """The type of its float outputs."""
        if not self.typed:
            return "fp16"
        return _TYPES.get(self.types.get(node.outputs[0], 1), "float32")

    def _reformats(self, node: Node, runs: str) -> Iterator[str]:
        for name in dict.fromkeys(node.inputs):
            maker = self.graph.producers.get(name) if name else None
            if maker is not None and maker.op == "Cast":
                yield f"{quoted(maker.name)} in front"
            elif maker is not None and maker.op == "DequantizeLinear" and runs not in _QUANTIZED:
                if (
                    self.pairs.dequantized(name) is not None
                    and self.graph.constant(maker.input(0)) is None
                ):
                    yield f"{quoted(maker.name)} to {runs} in front"
            elif maker is None and name in self.graph.inputs and runs in _QUANTIZED:
                yield f"input {quoted(name)} to {runs}"


def _kind(step: Step) -> str:
    return "fp8" if step.float8 else "int8"


def _float_types(graph: Graph) -> dict[str, int]:
    """Element types of tensors, followed from inputs, constants and casts."""
    types = {port.name: port.type.tensor_type.elem_type for port in graph.proto.input}
    types |= {tensor.name: tensor.data_type for tensor in graph.tensors}
    for node in graph.nodes:
        made = next((types[name] for name in node.inputs if types.get(name) in _TYPES), 1)
        if node.op == "Cast":
            made = node.integer("to", 1)
        elif node.op == "DequantizeLinear":
            made = types.get(node.input(1), 1)
        for name in node.outputs:
            types[name] = made
    return types


_MOST_BYTES = 256 * 2**20
_WORDS = {word: word for word in ("int8", "fp16", "fp8", "fp4")}
_WORDS |= {"half": "fp16", "float": "float32", "fp32": "float32"}


@dataclass(frozen=True)
class EngineLayer:
    """One layer of an engine."""

    # The engine's name: often several nodes, joined by ``+``.
    name: str
    # Type of layer; empty where only names were exported.
    kind: str
    # Types of its inputs, ``"int8"``, ``"fp16"``, ``"float32"`` or as in the file.
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    # Nodes that the engine names as its origin.
    nodes: str

    @property
    def runs(self) -> str:
        """Type of the computation: that of the first input; empty where unknown."""
        return self.reads[0] if self.reads else ""


@dataclass(frozen=True)
class LayerMatch:
    """A prediction, and the engine's layer with that node; None without one."""

    predicted: LayerPrediction
    layer: EngineLayer | None

    @property
    def agrees(self) -> bool | None:
        """Whether the engine runs the predicted type; None where the engine does not state it."""
        if self.layer is None or not self.layer.runs:
            return None
        return self.layer.runs == self.predicted.runs


def read_engine_layers(path: Path) -> tuple[EngineLayer, ...]:
    """Read the JSON that ``trtexec --exportLayerInfo=layers.json`` writes.

    It has types only if the engine was built with ``--profilingVerbosity=detailed``; otherwise it
    is a list of names.

    Raises:
        ValueError: The file is not such JSON; the message has the reason.
        OSError: It cannot be read.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path.name}: above 256 MiB, no list of layers")
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: no JSON ({error})") from error
    layers = content.get("Layers") if isinstance(content, dict) else content
    if not isinstance(layers, list):
        raise ValueError(
            f'{path.name}: no list "Layers"; expected what trtexec --exportLayerInfo writes'
        )
    return tuple(_layer(item, place, path) for place, item in enumerate(layers))


def _layer(item: Any, place: int, path: Path) -> EngineLayer:
    if isinstance(item, str):
        return EngineLayer(item, "", (), (), item)
    if not isinstance(item, dict) or not isinstance(item.get("Name"), str):
        raise ValueError(f"{path.name}: layer {place} has no name")
    reads, makes = (tuple(_types(item.get(key))) for key in ("Inputs", "Outputs"))
    kind, nodes = item.get("LayerType"), item.get("Metadata")
    return EngineLayer(
        item["Name"],
        kind if isinstance(kind, str) else "",
        reads,
        makes,
        f"{item['Name']} {nodes if isinstance(nodes, str) else ''}",
    )


def _types(ports: Any) -> Iterator[str]:
    for port in ports if isinstance(ports, list) else ():
        text = port.get("Format/Datatype") if isinstance(port, dict) else None
        if isinstance(text, str):
            words = text.lower().replace("-", " ").split()
            yield next((_WORDS[word] for word in reversed(words) if word in _WORDS), text)


def nothing_compared(matches: Sequence[LayerMatch], layers: Sequence[EngineLayer]) -> str | None:
    """Reason and remedy where an engine's layers cannot be compared; else None."""
    if any(match.agrees is not None for match in matches):
        return None
    if not layers:
        return "the list has no layer; export it of the engine that was built from this file"
    if not any(match.layer is not None for match in matches):
        shown = ", ".join(quoted(layer.name) for layer in layers[:2])
        return (
            f"none of the file's layers is among the engine's {len(layers)} ({shown}"
            f"{', …' if len(layers) > 2 else ''}); export the list of the engine that was built "
            "from this file (trtexec --onnx=FILE --profilingVerbosity=detailed "
            "--exportLayerInfo=LAYERS.json)"
        )
    return (
        "the engine's layers have names alone, without types; build the engine with "
        "--profilingVerbosity=detailed and export the list again (--exportLayerInfo=LAYERS.json)"
    )


def match_layers(
    predicted: Sequence[LayerPrediction], layers: Sequence[EngineLayer]
) -> tuple[LayerMatch, ...]:
    """Find each predicted node among the engine's layers, by its name.

    A fused node is found in the layer of its host node, or by its own name. Of several layers that
    name a node, reformatting layers are ignored.
    """
    by_node: dict[str, EngineLayer] = {}
    for layer in sorted(layers, key=lambda found: "reformat" in found.name.lower()):
        for name in _names(layer.nodes):
            by_node.setdefault(name, layer)
    return tuple(
        LayerMatch(item, by_node.get(item.name) or by_node.get(item.into)) for item in predicted
    )


def _names(text: str) -> Iterator[str]:
    """Nodes in a layer's name and metadata: ``[ONNX Layer: conv1.Conv]``, ``a + b``."""
    for part in text.replace("[", "\n").replace("]", "\n").replace("\x1e", "\n").splitlines():
        for word in part.replace("ONNX Layer:", "").replace(" + ", "\n").splitlines():
            for name in (word.strip(), *word.split()):
                if name:
                    yield name.strip(" ,|")
