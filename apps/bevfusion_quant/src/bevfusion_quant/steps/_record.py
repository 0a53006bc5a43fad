"""What fusion, quantization and calibration did, as plain data; the quantized model on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bevfusion_quant.frames import PoorData, finding_lines
from bevfusion_quant.run import sha256

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion
    from bevquant_fusion import FusionResult
    from bevquant_qnn import QuantizeResult, RoundingResult
    from bevquant_quantizers import CalibrationReport

MODEL_FILES = ("weights.safetensors", "ranges.json")
"""What `save_model` writes in any case."""

FLOAT_FILE = "float_weights.safetensors"
"""The float model's own weights, where the quantized model has others."""


def fusion_record(result: FusionResult) -> dict[str, Any]:
    """Which BatchNorms were folded into what, and which not and why."""
    return {"fused": plain(result.fused), "skipped": plain(result.skipped)}


def quantization_record(result: QuantizeResult) -> dict[str, Any]:
    """Which modules were quantized, which quantizers are shared, what was passed over and why."""
    return {
        "quantized": plain(result.quantized),
        "shared": plain(result.shared),
        "skipped": plain(result.skipped),
    }


def calibration_record(report: CalibrationReport, findings: Sequence[PoorData]) -> Any:
    """The calibration report, quantizer by quantizer, and what was found with names of frames."""
    record = plain(report)
    for quantizer in record["quantizers"]:
        del quantizer["findings"]
    return {**record, "findings": plain(findings)}


def calibration_warnings(
    report: CalibrationReport, findings: Sequence[PoorData]
) -> tuple[str, ...]:
    """What the calibration found suspicious, each line naming its quantizer."""
    named = [f"{q.name}: {text}" for q in report.quantizers for text in q.warnings]
    return (*report.warnings, *named, *finding_lines(findings))


def rounding_record(result: RoundingResult) -> dict[str, Any]:
    """Each layer's relative output error, rounded to the nearest and now; what was left and why."""
    return {
        "layers": [
            {"path": layer.path, "nearest": layer.nearest, "error": layer.error}
            for layer in result.layers
        ],
        "skipped": [{"path": path, "reason": reason} for path, reason in result.skipped],
    }


def plain(value: Any) -> Any:
    """Anything the packages report, as what JSON knows; NaN and Inf become null."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def save_model(
    folder: Path, model: BEVFusion, float_model: BEVFusion | None = None
) -> dict[str, str]:
    """Write weights.safetensors (folded weights and ranges) and ranges.json (ranges alone).

    Args:
        folder: Where to.
        model: The quantized model.
        float_model: What it was made from. Where its weights are others than the quantized
            model's, which rounding or training changed, they go to float_weights.safetensors.

    Returns:
        The sha256 of each, by name: what `load_run` knows them by.
    """
    from bevquant_quantizers import save_ranges
    from bevquant_quantizers.documents import write_tensors

    save_ranges(model, folder / "ranges.json")
    held = model.state_dict()
    contents = {"weights.safetensors": held}
    own = {} if float_model is None else float_model.state_dict()
    changed = {name: t for name, t in own.items() if not torch.equal(t, held[name])}
    if changed:
        contents[FLOAT_FILE] = changed
    for name, state in contents.items():
        write_tensors(folder / name, state, {"format": "pt"})
    return {name: sha256(folder / name) for name in ("ranges.json", *contents)}
