"""Runs that several files of tests look at, each made once."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

from bpu_split import small_frame
from without_pictures import without_pictures

from bevfusion.model import trained_weights
from bevfusion_quant.ptq import PtqConfig, run_ptq

__all__ = ["copied_run"]


def copied_run(made: Path, to: Path, **settings: Any) -> Path:
    """A run on one small street that quantizes the decoder, six groups of layers.

    Args:
        made: The folder of all processes' runs: who asks for one first makes it.
        to: Where its copy is put, which is the caller's own.
        settings: Of `PtqConfig`.
    """
    name = "-".join(f"{key}-{value}" for key, value in settings.items()) or "plain"
    with (made / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / name).exists():
            config = PtqConfig("tiny", "decoder", weights=trained_weights("tiny"), **settings)
            with without_pictures():
                run_ptq([small_frame()], config, runs=made, name=name)
    return Path(shutil.copytree(made / name, to))
