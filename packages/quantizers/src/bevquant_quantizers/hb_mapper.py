"""hb_mapper's settings beside a file that has its ranges, and the marches it compiles for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from bevquant_graph import file_path
from bevquant_quantizers.documents import write_whole
from bevquant_quantizers.plugins import installed, load

__all__ = ["marches", "write_config"]

_TEMPLATE = """\
model_parameters:
  onnx_model: "{onnx}"
  march: "{march}"
  output_model_file_prefix: "{prefix}"
input_parameters:
  input_type_rt: "featuremap"
  input_type_train: "featuremap"
  input_layout_train: "NCHW"
  input_layout_rt: "NCHW"
  norm_type: "no_preprocess"
calibration_parameters:
  calibration_type: "load"
{run_on_cpu}compiler_parameters:
  compile_mode: "latency"
  debug: false
  optimize_level: "O3"
"""


def marches() -> tuple[str, ...]:
    """Names of the marches that hb_mapper compiles for, as `bevquant_hybrid` has them in its table.

    An entry point ``hb_mapper`` of the group ``bevquant.marches`` is a function that returns them.
    Empty where no package has one: hb_mapper itself then says what it does not know.

    Raises:
        ImportError: The entry point cannot be loaded.

    Example:
        >>> found = marches()
        >>> not found or "bayes" in found
        True
    """
    for entry in installed("bevquant.marches", own="bevquant_hybrid"):
        if entry.name == "hb_mapper":
            return tuple(load(entry, "the marches of hb_mapper")())
    return ()


def write_config(onnx_file: str | os.PathLike[str], march: str, run_on_cpu: Sequence[str]) -> Path:
    """Write ``<file>.yaml``, which ``hb_mapper makertbin`` needs next to an ONNX file.

    Ranges are those of the file (``calibration_type: "load"``), inputs are floats in NCHW order.

    Args:
        onnx_file: The file; its name without suffix is that of the settings and of the binary.
        march: As hb_mapper calls it, such as ``"bayes"``.
        run_on_cpu: Names of nodes that a BPU could run but shall not.

    Returns:
        The path of the settings.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> print(write_config(folder / "qat.onnx", "bayes", ["Conv_32"]).read_text()[:42])
        model_parameters:
          onnx_model: "qat.onnx"
    """
    path = file_path(onnx_file, "ONNX file")
    nodes = f'  run_on_cpu: "{";".join(run_on_cpu)}"\n' if run_on_cpu else ""
    text = _TEMPLATE.format(onnx=path.name, march=march, prefix=path.stem, run_on_cpu=nodes)
    return write_whole(path.with_suffix(".yaml"), text, parents=True)
