"""The fp32 SparseEncoder of mit-bevfusion on a real nuScenes frame: bevquant_sparse against spconv.

    python benchmarks/sparse_conv.py [rounds]

Needs spconv (the `cpu` extra), numba for the faster half, and the frame `nvidia_scn` under
`BEVQUANT_DATA` or `../shared/data`. Runs of the peers are interleaved; times are medians. BN is
applied after each convolution ("unfolded") or folded into its weights, on both sides alike;
spconv's CPU forward refuses a bias, so its folded shift is an addition.
"""

from __future__ import annotations

import importlib.util
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _machine import print_machine
from torch import Tensor, nn

from bevquant_sparse import Rulebook, build_rulebook, conv_forward, to_dense

GRID = (1440, 1440, 41)
CHANNELS = (16, 32, 64, 128)
DOWN_PADDING = (1, 1, (1, 1, 0))
HAS_NUMBA = importlib.util.find_spec("numba") is not None


def skip(reason: str) -> None:
    print(f"skipped: {reason}")
    sys.exit(0)


# --- the frame ---


def load_frame() -> tuple[Tensor, Tensor]:
    root = os.environ.get("BEVQUANT_DATA")
    folder = Path(root) if root else Path(__file__).resolve().parents[2] / "shared" / "data"
    frame = folder / "nvidia_scn"
    names = ("in_features.torch.fp16.tensor", "in_indices_xyz.torch.int32.tensor")
    if not all((frame / name).is_file() for name in names):
        skip(f"no nvidia_scn frame in {folder}; set BEVQUANT_DATA to the folder that has it")
    features, indices = (read_tensor(frame / name) for name in names)
    return features.float(), indices.int()


def read_tensor(path: Path) -> Tensor:
    """int32 magic, rank, dtype (1 int32, 2 float16), shape, then the values; little-endian."""
    raw = path.read_bytes()
    _, rank, kind = np.frombuffer(raw, "<i4", 3)
    shape = np.frombuffer(raw, "<i4", rank, 12)
    values = np.frombuffer(raw, {1: "<i4", 2: "<f2"}[int(kind)], offset=12 + 4 * rank)
    return torch.from_numpy(values.reshape(shape).copy())


# --- the encoder, of spconv's own modules ---

Engine = Callable[[Any, Any, Tensor | None], Any]


class Unit(nn.Module):
    """A sparse convolution and its BN, which `fold` turns into a scaled weight and a shift."""

    def __init__(self, conv: Any) -> None:
        super().__init__()
        self.conv = conv
        self.bn = nn.BatchNorm1d(conv.out_channels, eps=1e-3)
        self.shift: Tensor | None = None
        with torch.no_grad():
            self.bn.running_mean.normal_(0, 0.1)
            self.bn.running_var.uniform_(0.2, 0.5)
            self.bn.weight.uniform_(0.8, 1.2)
            self.bn.bias.normal_(0, 0.1)

    def fold(self) -> None:
        """Scale the weight, keep the shift; the BN is no longer used."""
        scale = self.bn.weight / torch.sqrt(self.bn.running_var + self.bn.eps)
        self.conv.weight = nn.Parameter(self.conv.weight * scale.view(-1, 1, 1, 1, 1))
        self.shift = nn.Parameter(self.bn.bias - self.bn.running_mean * scale)

    def forward(self, x: Any, engine: Engine) -> Any:
        """Convolve with ``engine`` and normalise."""
        y = engine(self.conv, x, self.shift)
        return y if self.shift is not None else y.replace_feature(self.bn(y.features))


def relu(x: Any) -> Any:
    return x.replace_feature(torch.relu_(x.features))


class Encoder(nn.Module):
    """conv_input, four stages of two residual blocks and three strided convolutions, conv_out."""

    def __init__(self, spconv: Any) -> None:
        super().__init__()
        same = dict(bias=False, padding=1)
        units = [Unit(spconv.SubMConv3d(5, 16, 3, indice_key="subm1", **same))]
        for stage, width in enumerate(CHANNELS, 1):
            units += [
                Unit(spconv.SubMConv3d(width, width, 3, indice_key=f"subm{stage}", **same))
                for _ in range(4)
            ]
            if stage < len(CHANNELS):
                units.append(
                    Unit(
                        spconv.SparseConv3d(
                            width, CHANNELS[stage], 3, 2, DOWN_PADDING[stage - 1],
                            bias=False, indice_key=f"spconv{stage}",
                        )
                    )
                )  # fmt: skip
        units.append(
            Unit(spconv.SparseConv3d(128, 128, (1, 1, 3), (1, 1, 2), 0, bias=False, indice_key="o"))
        )
        self.units = nn.ModuleList(units)

    def forward(self, x: Any, engine: Engine) -> Any:
        """Run every unit with ``engine``."""
        units: Iterator[nn.Module] = iter(self.units)
        x = relu(next(units)(x, engine))
        for stage in range(len(CHANNELS)):
            for _ in range(2):
                y = relu(next(units)(x, engine))
                y = next(units)(y, engine)
                x = relu(y.replace_feature(y.features + x.features))
            if stage < len(CHANNELS) - 1:
                x = relu(next(units)(x, engine))
        return relu(next(units)(x, engine))


def spconv_engine(conv: Any, x: Any, shift: Tensor | None) -> Any:
    if not x.features.is_cuda:  # a build for CUDA takes another one by itself, which has no CPU
        from spconv.core import ConvAlgo

        conv.algo = ConvAlgo.Native
    y = conv(x)
    return y if shift is None else y.replace_feature(y.features + shift)


def our_engine(backend: str) -> Engine:
    return lambda conv, x, shift: conv_forward(conv, x, bias=shift, backend=backend)


def dense(y: Any) -> Tensor:
    return to_dense(y.features, y.indices, tuple(y.spatial_shape), y.batch_size)


# --- rulebooks ---


def geometries() -> list[dict[str, Any]]:
    """The encoder's eight rulebooks, each on the outputs of the last strided one."""
    kinds = []
    for padding in (*DOWN_PADDING, None):
        kinds.append(dict(kernel_size=3, stride=1, padding=1, subm=True))
        if padding is not None:
            kinds.append(dict(kernel_size=3, stride=2, padding=padding, subm=False))
    kinds.append(dict(kernel_size=(1, 1, 3), stride=(1, 1, 2), padding=0, subm=False))
    return kinds


def triple(value: Any) -> list[int]:
    return [value] * 3 if isinstance(value, int) else list(value)


def our_rulebooks(indices: Tensor, backend: str) -> list[Rulebook]:
    books, shape = [], GRID
    for kind in geometries():
        book = build_rulebook(indices, shape, batch_size=1, backend=backend, **kind)
        indices, shape = book.out_indices, book.out_shape
        books.append(book)
    return books


def spconv_rulebooks(indices: Tensor) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    from spconv.core import ConvAlgo
    from spconv.pytorch import ops

    books, shape = [], list(GRID)
    for kind in geometries():
        sizes = [triple(kind[name]) for name in ("kernel_size", "stride", "padding")]
        out, pairs, counts = ops.get_indice_pairs(
            indices, 1, shape, ConvAlgo.Native, *sizes, [1] * 3, [0] * 3, kind["subm"]
        )
        books.append((indices, out, pairs, counts))
        if not kind["subm"]:
            extents = zip(shape, *sizes, strict=True)
            shape = [(size + 2 * p - k) // s + 1 for size, k, s, p in extents]
        indices = out
    return books


def keys(indices: Tensor) -> Tensor:
    _, x, y, z = indices.long().unbind(1)
    return (x * GRID[1] + y) * GRID[2] + z


def pair_set(in_keys: Tensor, out_keys: Tensor, offsets: Tensor) -> Tensor:
    """Sorted (offset, output voxel, input voxel) triples; the key fits in 64 bits."""
    cells = math.prod(GRID)
    assert 27 * cells * 1024 < 2**63
    order = torch.argsort(in_keys, stable=True)
    order = order[torch.argsort((offsets * cells + out_keys)[order], stable=True)]
    return torch.stack([offsets, out_keys, in_keys], 1)[order]


def same_pairs(ours: Rulebook, theirs: tuple[Tensor, Tensor, Tensor, Tensor]) -> bool:
    indices, out, pairs, counts = theirs
    volume = ours.kernel_volume
    in_keys, out_keys = keys(indices), keys(out)
    triples = []
    for offset, count in enumerate(counts.tolist()):
        i, o = pairs[0, offset, :count].long(), pairs[1, offset, :count].long()
        triples.append((in_keys[i], out_keys[o], torch.full_like(i, offset)))
        if ours.subm and count:  # spconv lists one half of the offsets, and not the centre
            mirrored = torch.full_like(i, volume - 1 - offset)
            triples.append((in_keys[o], out_keys[i], mirrored))
    if ours.subm:
        triples.append((in_keys, in_keys, torch.full_like(in_keys, volume // 2)))
    expected = pair_set(*(torch.cat(part) for part in zip(*triples, strict=True)))
    rows, offsets = (ours.neighbours >= 0).nonzero(as_tuple=True)
    got_in = keys(ours.in_indices)[ours.neighbours[rows, offsets].long()]
    return torch.equal(pair_set(got_in, keys(ours.out_indices)[rows], offsets), expected)


# --- measuring ---


def interleave(
    peers: dict[str, tuple[int, Callable[[], Any]]],
    rounds: int,
    look: Callable[[str, Any], None] = lambda name, result: None,
) -> dict[str, tuple[float, float]]:
    """Median and best milliseconds of each peer; all of them once untimed, then in turn.

    ``look`` sees every result, outside the time taken.
    """
    times: dict[str, list[float]] = {name: [] for name in peers}
    usual = torch.get_num_threads()
    try:
        for number in range(rounds + 1):
            for name, (threads, run) in peers.items():
                torch.set_num_threads(threads)
                start = time.perf_counter()
                result = run()
                elapsed = (time.perf_counter() - start) * 1e3
                if number:
                    times[name].append(elapsed)
                look(name, result)
    finally:
        torch.set_num_threads(usual)
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def rulebook_table(indices: Tensor, rounds: int) -> None:
    peers: dict[str, tuple[int, Callable[[], Any]]] = {
        "spconv, 2 threads": (2, lambda: spconv_rulebooks(indices))
    }
    for backend in ("numba", "torch") if HAS_NUMBA else ("torch",):
        peers[f"ours, {backend}"] = (2, lambda b=backend: our_rulebooks(indices, b))
    times = interleave(peers, rounds)
    torch.set_num_threads(1)
    theirs = spconv_rulebooks(indices)
    torch.set_num_threads(2)
    bar = times["spconv, 2 threads"][0]
    print(
        "| eight rulebooks | ms | best | against spconv | pair sets equal to spconv's (1 thread) |"
    )
    print("|---|---:|---:|---:|---:|")
    for name, (ms, best) in times.items():
        equal = "–"
        if name.startswith("ours"):
            books = our_rulebooks(indices, name.split(", ")[1])
            equal = f"{sum(map(same_pairs, books, theirs))} of {len(books)}"
        print(f"| {name} | {ms:.1f} | {best:.1f} | {bar / ms:.2f}× | {equal} |")
    print()


def encoder_table(encoder: Encoder, features: Tensor, indices: Tensor, rounds: int) -> None:
    import spconv.pytorch as spconv

    def start(values: Tensor = features) -> Any:
        return spconv.SparseConvTensor(values, indices, list(GRID), 1)

    def forward(engine: Engine) -> Callable[[], Tensor]:
        return lambda: dense(encoder(start(), engine))

    runs = {"spconv, 1 thread": (1, forward(spconv_engine))}
    runs["spconv, 2 threads"] = (2, forward(spconv_engine))
    for backend in ("numba", "torch") if HAS_NUMBA else ("torch",):
        runs[f"ours, {backend}, 2 threads"] = (2, forward(our_engine(backend)))
    encoder.double()
    exact = dense(encoder(start(features.double()), our_engine("torch")))
    encoder.float()
    largest = float(exact.abs().max())
    first: dict[str, Tensor] = {}
    errors, changed = dict.fromkeys(runs, 0.0), dict.fromkeys(runs, 0)

    def compare(name: str, result: Tensor) -> None:
        errors[name] = max(errors[name], float((result - exact).abs().max()) / largest)
        rows = (result != first.setdefault(name, result)).any(1).sum()
        changed[name] = max(changed[name], int(rows))

    times = interleave(runs, rounds, compare)
    bar = times["spconv, 2 threads"][0]
    print(
        "| encoder | ms | best | against spconv, 2 threads | max error / max | rows that changed |"
    )
    print("|---|---:|---:|---:|---:|---:|")
    for name, (ms, best) in times.items():
        print(
            f"| {name} | {ms:.0f} | {best:.0f} | {bar / ms:.2f}× | {errors[name]:.1e} | "
            f"{changed[name]} |"
        )
    print()


def count_gmac(encoder: Encoder, indices: Tensor) -> float:
    convs = [unit.conv for unit in encoder.units]
    books = our_rulebooks(indices, "auto")
    uses = [5, 1, 4, 1, 4, 1, 4, 1]  # convolutions that share each rulebook
    per_conv = [book for book, count in zip(books, uses, strict=True) for _ in range(count)]
    macs = (
        book.num_pairs * conv.in_channels * conv.out_channels
        for book, conv in zip(per_conv, convs, strict=True)
    )
    return sum(macs) / 1e9


@torch.no_grad()
def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    features, indices = load_frame()
    warnings.simplefilter("ignore")
    if importlib.util.find_spec("spconv") is None:
        skip("spconv is not installed; pip install spconv numba")
    import spconv
    import spconv.pytorch

    torch.manual_seed(0)
    encoder = Encoder(spconv.pytorch).eval()
    numba = "with numba" if HAS_NUMBA else "numba is not installed"
    print(
        f"{len(indices):,} voxels, {count_gmac(encoder, indices):.2f} GMAC, spconv "
        f"{spconv.__version__}, torch {torch.__version__}, {numba}, medians of {rounds} "
        "interleaved runs\n"
    )
    print_machine()
    rulebook_table(indices, rounds)
    print("BN unfolded:\n")
    encoder_table(encoder, features, indices, rounds)
    for unit in encoder.units:
        unit.fold()
    print("BN folded:\n")
    encoder_table(encoder, features, indices, rounds)


if __name__ == "__main__":
    main()
