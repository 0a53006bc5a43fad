"""hb_mapper, which turns ONNX files of hybrid models into binaries: settings and calls."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from bevquant_quantizers.documents import write_whole

__all__ = ["makertbin", "write_config"]

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


def write_config(onnx_file: str | os.PathLike[str], march: str, run_on_cpu: Sequence[str]) -> Path:
    """Write the settings that ``hb_mapper makertbin`` needs next to an ONNX file.

    Args:
        onnx_file: The file; its name without suffix is that of the settings and of the binary.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"``.
        run_on_cpu: Names of nodes that a BPU could run but shall not.

    Returns:
        The path of the YAML file.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> print(write_config(folder / "qat.onnx", "bayes", ["Conv_32"]).read_text()[:42])
        model_parameters:
          onnx_model: "qat.onnx"
    """
    path = Path(onnx_file)
    nodes = f'  run_on_cpu: "{";".join(run_on_cpu)}"\n' if run_on_cpu else ""
    text = _TEMPLATE.format(onnx=path.name, march=march, prefix=path.stem, run_on_cpu=nodes)
    return write_whole(path.with_suffix(".yaml"), text, parents=True)


def makertbin(config: str | os.PathLike[str]) -> None:
    """Run ``hb_mapper makertbin`` on settings, in their folder.

    Args:
        config: The YAML file that `write_config` wrote.

    Raises:
        FileNotFoundError: There is no hb_mapper on the PATH, or no such file.
        RuntimeError: It failed; the message ends with what it printed last.
    """
    path = Path(config).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"makertbin: no settings at {path}; write_config makes them")
    program = shutil.which("hb_mapper")
    if program is None:
        raise FileNotFoundError(
            "makertbin: hb_mapper is not on the PATH; it comes with the vendor's toolchain. The "
            f"same elsewhere: hb_mapper makertbin -c {path.name} --model-type onnx"
        )
    command = [program, "makertbin", "-c", path.name, "--model-type", "onnx"]
    run = subprocess.run(command, cwd=path.parent, capture_output=True, text=True, check=False)
    if run.returncode:
        last = "\n".join((run.stdout + run.stderr).splitlines()[-20:])
        raise RuntimeError(f"hb_mapper makertbin failed with {run.returncode}:\n{last}")
