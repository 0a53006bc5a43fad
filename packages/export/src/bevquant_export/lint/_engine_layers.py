"""Layers of an engine from ``trtexec --exportLayerInfo``, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bevquant_export.lint._predict import LayerPrediction
from bevquant_export.lint._rule import quoted

_MOST_BYTES = 256 * 2**20
_WORDS = {"int8": "int8", "half": "fp16", "fp16": "fp16", "float": "float32", "fp32": "float32"}


@dataclass(frozen=True)
class EngineLayer:
    """One layer of an engine.

    Attributes:
        name: The engine's name: often several nodes, joined by ``+``.
        kind: Type of layer; empty where only names were exported.
        reads: Types of its inputs, ``"int8"``, ``"fp16"``, ``"float32"`` or as in the file.
        makes: Types of its outputs.
        nodes: Nodes that the engine names as its origin.
    """

    name: str
    kind: str
    reads: tuple[str, ...]
    makes: tuple[str, ...]
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
