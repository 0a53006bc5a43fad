"""Files as rows, and manifest.json: what lies in the folder, by digest."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevfusion_quant.export._pieces import quantizers_on
from bevfusion_quant.results import ExportedFile, FileLayer, FilePort
from bevfusion_quant.run import sha256, versions, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bevfusion_quant.export._write import Written
    from bevfusion_quant.results import ExportedSet

__all__ = ["MANIFEST", "MANIFEST_FORMAT", "MANIFEST_VERSION", "exported_file", "write_manifest"]

MANIFEST = "manifest.json"
MANIFEST_FORMAT, MANIFEST_VERSION = "bevfusion-quant export", 1
_TOOLS = ("bevquant-export", "bevquant-hybrid", "onnx", "onnxruntime", "onnxscript")


def exported_file(written: Written, layers: tuple[FileLayer, ...]) -> ExportedFile:
    """One row of the set, read back from the file that was written."""
    import onnx

    from bevquant_export import find_target, lint_onnx

    proto = onnx.load(written.path)
    opset = next(o.version for o in proto.opset_import if o.domain in ("", "ai.onnx"))
    kind = written.piece.kind
    engine = find_target(written.linted)
    quantized = bool(kind == "int8" or quantizers_on(written.piece.fake_module))
    return ExportedFile(
        name=written.path.name,
        kind=kind,
        runs_on=engine.title,
        build="; ".join(engine.commands(written.path, quantized=quantized)),
        size=written.path.stat().st_size,
        sha256=sha256(written.path),
        companions={p.name: sha256(p) for p in _companions(written)},
        opset=opset,
        inputs=tuple(map(_port, proto.graph.input)),
        outputs=tuple(map(_port, proto.graph.output)),
        ranges={} if kind == "float" else _ranges(written),
        voxel_bound=written.voxel_bound,
        runs_in_float=written.runs_in_float,
        notes=written.notes,
        findings=tuple(map(str, lint_onnx(written.path, written.linted))),
        layers=layers,
        unverified=engine.unverified,
    )


def write_manifest(
    made: ExportedSet, *, command: str, run: str, frames: Sequence[str], settings: Mapping[str, Any]
) -> Path:
    """Write manifest.json beside the files.

    Args:
        made: The set.
        command: The command line that repeats it.
        run: The run that was exported.
        frames: Names of the frames that it was checked and bounded on.
        settings: What else decides the result.
    """
    content = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "target": made.target,
        "run": run,
        "command": command,
        "settings": settings,
        "versions": versions(*_TOOLS),
        "frames": list(frames),
        "verified": not made.failures,
        "failures": made.failures,
        "files": [_entry(file) for file in made.files],
        "chain": {"frame": made.frame, "stages": made.stages, "boxes": made.agreement},
    }
    return write_json(made.folder / MANIFEST, content)


def _entry(file: ExportedFile) -> dict[str, Any]:
    """The row with its layers in short: how many are right, and those that are not equal."""
    entry = asdict(file)
    layers = entry.pop("layers")
    entry["checked"] = {
        "tensors": len(layers),
        "wrong": sum(not layer["is_right"] for layer in layers),
        "different": [
            {key: layer[key] for key in ("path", "op", "elements", "different", "ties", "largest")}
            for layer in layers
            if layer["largest"]
        ],
    }
    return entry


def _port(port: Any) -> FilePort:
    import onnx

    tensor = port.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    shape = tuple(d.dim_param or d.dim_value for d in tensor.shape.dim)
    return FilePort(port.name, str(dtype), shape)


def _companions(written: Written) -> list[Path]:
    settings = getattr(written.made, "settings", None)
    return [] if settings is None else [settings]


def _ranges(written: Written) -> dict[str, float]:
    """Activations' ranges, by the path of the first quantizer that has each."""
    return {
        path: float(q.amax)
        for path, q in quantizers_on(written.piece.fake_module).items()
        if q.axis is None and q.amax is not None and not path.endswith("_weight_quantizer")
    }
