"""hb_mapper, which turns ONNX files of hybrid models into binaries: settings and calls."""

from __future__ import annotations

import os
import shutil
import subprocess

from bevquant_graph import file_path
from bevquant_hybrid.operators import load_support_table
from bevquant_quantizers.hb_mapper import write_config

__all__ = ["makertbin", "marches", "write_config"]


def marches() -> tuple[str, ...]:
    """The marches that hb_mapper compiles for, from the support table.

    Example:
        >>> marches()
        ('bernoulli2', 'bayes', 'bayes-e')
    """
    found = load_support_table().marches.values()
    return tuple(march.name for march in found if march.hb_mapper)


def makertbin(config: str | os.PathLike[str]) -> None:
    """Run ``hb_mapper makertbin`` on settings, in their folder.

    Args:
        config: The YAML file that `write_config` wrote.

    Raises:
        FileNotFoundError: hb_mapper is not on the PATH, or the file does not exist.
        RuntimeError: It failed; the message ends with its last output.
    """
    path = file_path(config, "YAML file").resolve()
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
