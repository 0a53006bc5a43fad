"""ONNX files of BEVFusion: time and size of writing them, speed of running them in onnxruntime.

    python benchmarks/export.py [files] [dense] [sparse] [--config tiny] [--rounds N]

with `--weight-bits 7` for weights that are int8 in files for any CPU too.

Without names all tables are printed, for one street frame and random weights:

- files: seconds to write each file of the set, and its bytes, for TensorRT with libspconv and for
  onnxruntime.
- dense: onnxruntime and OpenVINO on the quantized files against onnxruntime on the same parts in
  float32, all optimisations on, at 1 and 2 threads: files for any CPU, files for the CPU at hand,
  OpenVINO's own in float32 (its types, not bfloat16) and on its file.
- sparse: the portable sparse file in onnxruntime against the integer simulator and against spconv's
  own CPU convolutions in float32, batch norms folded in all of them. spconv runs on one thread,
  where its results are right, and at torch's own number, which is what a user gets.

Runs are interleaved; times are medians, ratios of medians are what to read. Needs the app with its
`export` extra and spconv.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a peer's threads sleep through others' turns
import numpy as np
import onnxruntime
import torch
from _int8_timing import Runs, interleave
from _machine import print_machine
from torch import nn

from bev_scenes import street_frame
from bevfusion.deployment import Piece, nvidia_pieces, walk, write_piece
from bevfusion.model import CONFIGS, build_model, random_weights
from bevfusion.model._encoder import SparseEncoder
from bevfusion_quant.ptq import (
    FrameBatches,
    calibrate_branch,
    example_batch,
    fuse_branch,
    quantize_branch,
)
from bevquant_export import cpu_at_hand
from bevquant_int8sim import simulate

LIDAR = "lidar.backbone.xyz"
TARGETS = ("tensorrt", "onnxruntime")
Inputs = dict[str, tuple[Any, ...]]


def pieces_of(config: str, weight_bits: int) -> tuple[dict[str, list[Piece]], Inputs]:
    """The parts of a calibrated model as each target has them, and what goes into each."""
    sizes = CONFIGS[config]
    model = build_model(sizes)
    batches = FrameBatches([street_frame(0, size=config, cameras=config)], sizes, model)
    random_weights(model, *batches[0], seed=0)
    example = example_batch(sizes)
    fused = fuse_branch(model, example).model
    quantized = quantize_branch(fused, example, "all", method="max", weight_bits=weight_bits).model
    calibrate_branch(quantized, batches, method="max")
    pieces = {target: nvidia_pieces(fused, quantized, target) for target in TARGETS}
    known = {piece.file.name: piece for piece in pieces[TARGETS[0]]}
    files = [piece.file for piece in known.values()]
    inputs, _ = walk(files, lambda f, args: known[f.name].fake(args), batches[0], quantized)
    return pieces, inputs


def write(
    piece: Piece, inputs: Inputs, folder: Path, target: str, cpu: str = "any"
) -> tuple[Path, float]:
    """The file, and the seconds that it took."""
    args = inputs[piece.file.name]
    frames = [args] if piece.file.name == LIDAR else []
    folder.mkdir(exist_ok=True)
    start = time.perf_counter()
    written = write_piece(piece, args, frames, folder, target, cpu=cpu)
    return written.path, time.perf_counter() - start


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    # Its threads, too, sleep through others' turns.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def runs_of(path: Path, piece: Piece, args: tuple[Any, ...], threads: int) -> Callable[[], Any]:
    running = session(path, threads)
    taken = {port.name for port in running.get_inputs()}
    given = {name: a for name, a in named_inputs(piece, args) if name in taken}
    return lambda: running.run(None, given)


def named_inputs(piece: Piece, args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """The sparse encoder's file takes the batch size too."""
    values = (a.numpy() if isinstance(a, torch.Tensor) else np.array([a]) for a in args)
    return list(zip((*piece.file.inputs, "batch_size"), values, strict=False))


def files_table(pieces: dict[str, list[Piece]], inputs: Inputs, folder: Path) -> None:
    print("| file | TensorRT, libspconv: s | MB | onnxruntime: s | MB |\n|---|---:|---:|---:|---:|")
    totals = [0.0] * 4
    for both in zip(*pieces.values(), strict=True):
        row = []
        for target, piece in zip(pieces, both, strict=True):
            path, seconds = write(piece, inputs, folder, target)
            row += [seconds, path.stat().st_size / 1e6]
        totals = [a + b for a, b in zip(totals, row, strict=True)]
        print(
            f"| {both[0].file.name} | {row[0]:.2f} | {row[1]:.2f} | {row[2]:.2f} | {row[3]:.2f} |"
        )
    print("| together | " + " | ".join(f"{value:.2f}" for value in totals) + " |\n")


def openvino_runs(
    path: Path, piece: Piece, args: tuple[Any, ...], threads: int
) -> Callable[[], Any]:
    import openvino

    core = openvino.Core()
    settings = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
    }
    model = core.read_model(path)
    taken = {port.any_name for port in model.inputs}
    given = {name: a for name, a in named_inputs(piece, args) if name in taken}
    model.reshape({name: list(value.shape) for name, value in given.items()})
    request = core.compile_model(model, "CPU", settings).create_infer_request()
    return lambda: request.infer(given)


def dense_table(pieces: list[Piece], inputs: Inputs, folder: Path, rounds: int) -> None:
    cpu = cpu_at_hand()
    has_openvino = importlib.util.find_spec("openvino") is not None
    columns = ["onnxruntime float32", "int8, any CPU", f"int8, {cpu}"]
    columns += ["OpenVINO float32", f"OpenVINO int8, {cpu}"] * has_openvino
    print("| file | threads | " + ", ms | ".join(columns) + ", ms | against float32 |")
    print("|---|---:|" + "---:|" * len(columns) + "---|")
    for piece in pieces:
        if piece.kind != "int8":
            continue
        args = inputs[piece.file.name]
        plain = Piece(piece.file, "float", piece.float_module, piece.float_module)
        single, _ = write(plain, inputs, folder / "float32", "onnxruntime")
        anywhere, _ = write(piece, inputs, folder / "any", "onnxruntime")
        here, _ = write(piece, inputs, folder / "here", "onnxruntime", cpu)
        other, _ = write(piece, inputs, folder / "openvino", "openvino", cpu)
        for threads in (1, 2):
            runs: Runs = {
                name: (1, runs_of(path, piece, args, threads))
                for name, path in zip(columns, (single, anywhere, here), strict=False)
            }
            for name, path in zip(columns[3:], (single, other), strict=False):
                runs[name] = (1, openvino_runs(path, piece, args, threads))
            times = {name: times[0] for name, times in interleave(runs, rounds).items()}
            slow = times[columns[0]]
            ratios = [slow / times[name] for name in columns[1:]]
            row = [f"{times[name]:.1f}" for name in columns]
            row.append(" / ".join(f"{ratio:.2f}" for ratio in ratios))
            print(f"| {piece.file.name} | {threads} | " + " | ".join(row) + " |", flush=True)
    print()


class Shift(nn.Module):
    """What is left of a folded batch norm; spconv's convolutions take no bias on a CPU."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.shift = norm.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features with the shift added."""
        return x + self.shift


def spconv_encoder(config: str) -> nn.Module:
    """The same encoder on spconv's own kernels; random weights take the same time."""
    encoder = SparseEncoder(CONFIGS[config].lidar).eval()
    for path, module in list(encoder.named_modules()):
        if isinstance(module, nn.BatchNorm1d):
            encoder.set_submodule(path, Shift(module))
    return encoder


def sparse_table(
    pieces: list[Piece], inputs: Inputs, folder: Path, rounds: int, config: str
) -> None:
    piece = next(p for p in pieces if p.file.name == LIDAR)
    args = inputs[LIDAR]
    cpu = cpu_at_hand()
    anywhere, _ = write(piece, inputs, folder, "onnxruntime")
    path, _ = write(piece, inputs, folder / "sparse", "onnxruntime", cpu)
    integers = simulate(piece.fake_module, args)
    usual = torch.get_num_threads()
    peer = spconv_encoder(config)
    runs: Runs = {}
    for threads in (1, 2):
        many = f"{threads} thread{'s' * (threads > 1)}"
        runs[f"portable file in onnxruntime, {many}"] = (1, runs_of(path, piece, args, threads))
        if cpu != "any":
            runs[f"portable file for any CPU, {many}"] = (
                1,
                runs_of(anywhere, piece, args, threads),
            )
        runs[f"integer simulator, {many}"] = (threads, lambda: integers(*args))
    runs["spconv float32, 1 thread"] = (1, lambda: peer(*args))
    runs[f"spconv float32, its default ({usual} threads)"] = (usual, lambda: peer(*args))
    times = interleave(runs, rounds)
    base = times["portable file in onnxruntime, 1 thread"][0]
    print(f"{len(args[0]):,} voxels\n\n| run | ms | against the portable file, 1 thread |")
    print("|---|---:|---:|")
    for name, (milliseconds, _) in times.items():
        print(f"| {name} | {milliseconds:.1f} | {base / milliseconds:.2f}× |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", metavar="table")
    parser.add_argument("--config", choices=sorted(CONFIGS), default="nuscenes")
    parser.add_argument("--weight-bits", type=int, choices=(7, 8), default=8)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tables = options.tables or ["files", "dense", "sparse"]
    unknown = set(tables) - {"files", "dense", "sparse"}
    if unknown:
        parser.error(f"unknown tables {', '.join(unknown)}: expected files, dense, sparse")
    warnings.simplefilter("ignore")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    print_machine()
    print(f"{options.config}, weights of {options.weight_bits} bits\n")
    pieces, inputs = pieces_of(options.config, options.weight_bits)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "files" in tables:
            files_table(pieces, inputs, folder)
        if "dense" in tables:
            dense_table(pieces["onnxruntime"], inputs, folder, options.rounds)
        if "sparse" in tables:
            sparse_table(pieces["onnxruntime"], inputs, folder, options.rounds, options.config)


if __name__ == "__main__":
    with torch.no_grad():
        main()
