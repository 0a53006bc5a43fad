"""Integer kernels and models against float and integer peers.

    python benchmarks/int8sim.py [table …] [--rounds N]

Without names all tables are printed:

- encoder: the LiDAR encoder on a real frame against spconv. Needs spconv (the `cpu` extra) and the
  frame `nvidia_scn` under `BEVQUANT_DATA` or `../shared/data`.
- dense: BEV decoder and ResNet-50 against onnxruntime and torch. Needs onnx, onnxruntime and the
  app.
- sample: deformable attention at BEVFormer's sizes against float32 in torch.
- memory: peak memory of the encoder on that frame.
- scale: time and memory of the encoder from 10,000 to 1,000,000 voxels and for batches.
- jit: compiling into an empty cache, and the next process.
- cuda: the encoder on a GPU against spconv's half precision, where there is one.

All need numba. Runs of the peers are interleaved; times are medians and bests. Nets have random
weights and ranges taken from one float pass.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import warnings
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a peer's threads sleep through others' turns
import _int8_cuda
import _int8_dense
import _int8_encoder
import _int8_jit
import _int8_memory
import _int8_sample
import _int8_scale
import torch
from _machine import print_machine

from bevquant_int8sim import backend_report


def encoder_tables(rounds: int, plain: bool) -> None:
    _int8_encoder.print_table(rounds)
    if not plain:
        _int8_encoder.print_other_cpu(rounds)


def missing(*modules: str) -> str:
    """Which of these are not installed."""
    return ", ".join(m for m in modules if importlib.util.find_spec(m) is None)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="table")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    rounds: int = options.rounds
    known: dict[str, tuple[str, Callable[[], None]]] = {
        "encoder": (missing("spconv"), lambda: encoder_tables(rounds, options.plain)),
        "dense": (
            missing("onnx", "onnxruntime", "bevfusion_quant"),
            lambda: _int8_dense.print_tables(rounds),
        ),
        "sample": ("", lambda: _int8_sample.print_table(rounds)),
        "memory": ("", _int8_memory.print_table),
        "scale": ("", lambda: _int8_scale.print_table(rounds)),
        "jit": ("", _int8_jit.print_table),
        "cuda": (missing("spconv"), lambda: _int8_cuda.print_table(rounds)),
    }
    unknown = [name for name in options.tables if name not in known]
    if unknown:
        parser.error(f"unknown tables {', '.join(unknown)}: expected {', '.join(known)}")
    warnings.simplefilter("ignore")
    if not options.plain:
        print_machine()
    for status in backend_report():
        print(f"{status.name}: {status.detail}")
    print()
    for name in options.tables or known:
        lacking, show = known[name]
        if lacking:
            print(f"{name} skipped: {lacking} not installed\n")
        else:
            show()


if __name__ == "__main__":
    with torch.no_grad():
        main()
