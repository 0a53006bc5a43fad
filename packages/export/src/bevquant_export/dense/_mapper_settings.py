"""hb_mapper's settings next to an ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bevquant_quantizers import write_whole

MARCHES = ("bernoulli2", "bayes", "bayes-e")


def write_settings(onnx_file: Path, march: str, run_on_cpu: Sequence[str]) -> Path:
    """Write ``<file>.yaml``: ranges are those of the file, inputs are floats in NCHW order.

    Args:
        onnx_file: The file, named in the settings.
        march: One of `MARCHES`.
        run_on_cpu: Nodes that stay in float although their inputs are quantized.
    """
    names = [f'  run_on_cpu: "{";".join(run_on_cpu)}"'] if run_on_cpu else []
    lines = [
        "model_parameters:",
        f'  onnx_model: "{onnx_file.name}"',
        f'  march: "{march}"',
        f'  output_model_file_prefix: "{onnx_file.stem}"',
        "input_parameters:",
        '  input_type_rt: "featuremap"',
        '  input_type_train: "featuremap"',
        '  input_layout_train: "NCHW"',
        '  input_layout_rt: "NCHW"',
        '  norm_type: "no_preprocess"',
        "calibration_parameters:",
        '  calibration_type: "load"',
        *names,
        "compiler_parameters:",
        '  compile_mode: "latency"',
        "  debug: false",
        '  optimize_level: "O3"',
    ]
    path = onnx_file.with_suffix(".yaml")
    write_whole(path, ("\n".join(lines) + "\n").encode())
    return path
