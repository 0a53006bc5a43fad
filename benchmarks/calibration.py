"""Calibration and fake quantization: bevquant_quantizers against its peers, in one run.

    python benchmarks/calibration.py [rounds]

Peers: pytorch-quantization 2.1.3, nvidia-modelopt, torch's own ops; those that are not installed
are named and left out. Searches are timed in CPU seconds, one thread each; collection and fake
quantization by the clock, median and fastest of interleaved runs. Ratios are to
pytorch-quantization; whether the results are equal stands beside them. Nothing is asserted.
OpenMP's threads sleep while they wait (as the app has it), or those of one contender would hold a
core through the turn of the next.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
import torch
from _machine import print_machine
from torch import Tensor

from bevquant_quantizers import TensorQuantizer, fake_quantize
from bevquant_quantizers._abs_histogram import abs_histogram
from bevquant_quantizers.calib import HistogramCalibrator, calibrate_weights
from bevquant_quantizers.calib._entropy import entropy_amax
from bevquant_quantizers.calib._mse import mse_amax
from bevquant_quantizers.calib._search import percentile_amax
from bevquant_quantizers.tensor_quant import QuantDescriptor

BACKENDS = ["numba", "numpy"] if importlib.util.find_spec("numba") else ["numpy"]
VALUES = 1_000_000
Runs = Mapping[str, Callable[[], Any]]
Times = dict[str, tuple[float, float]]
Histogram = tuple[np.ndarray, np.ndarray, float]


def timed(runs: Runs, rounds: int, clock: Callable[[], float] = time.perf_counter) -> Times:
    """Seconds of each one's median and fastest run, taken in turns: others slow all alike."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # kernels are compiled, buffers are warm
    for _ in range(rounds):
        for name, run in runs.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def against(bar: tuple[float, float] | None, times: tuple[float, float]) -> list[str]:
    """Ratios of the medians and of the fastest runs."""
    return [f"{b / t:.2f}x" for b, t in zip(bar, times, strict=True)] if bar else ["-", "-"]


def once(run: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds, and the result."""
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def table(title: str, header: list[str], rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    print(f"\n{title}")
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0])]
        print("  ".join(cells + [c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]))


# --- peers ----------------------------------------------------------------------------------------


def load_upstream() -> Any:
    """pytorch_quantization on the CPU: its calls of .cuda() do nothing."""
    if importlib.util.find_spec("pytorch_quantization") is None:
        print("pytorch-quantization is not installed: no ratios to it, and no test of equality")
        return None
    from absl import logging

    logging.set_verbosity(logging.FATAL)
    if not torch.cuda.is_available():
        torch.Tensor.cuda = lambda self, *_, **__: self
    names = ("calib", "nn", "tensor_quant", "calib.histogram")
    calib, nn, tensor_quant, histogram = (
        importlib.import_module(f"pytorch_quantization.{name}") for name in names
    )
    return SimpleNamespace(calib=calib, nn=nn, tensor_quant=tensor_quant, histogram=histogram)


def load_modelopt() -> Any:
    if importlib.util.find_spec("modelopt") is None:
        print("nvidia-modelopt is not installed: left out")
        return None
    try:
        return importlib.import_module("modelopt.torch.quantization.calib.histogram")
    except Exception as error:  # whatever its own dependencies raise
        print(f"nvidia-modelopt cannot be imported ({type(error).__name__}: {error}): left out")
        return None


# --- searches -------------------------------------------------------------------------------------


def histograms(size: int = 500_000) -> dict[str, Histogram]:
    """Counts, edges and largest value, collected as upstream collects them."""
    rng = np.random.default_rng(0)
    values = {
        "relu-like": np.maximum(rng.normal(size=size), 0),
        "gaussian": rng.normal(size=size),
        "heavy tail": rng.standard_t(3, size=size),
        "uniform": rng.uniform(size=size),
    }
    out = {}
    for name, drawn in values.items():
        x = torch.tensor(drawn, dtype=torch.float32).abs()
        counts = torch.histc(x, 2048, 0, x.max()).to(torch.int64).numpy()
        out[name] = counts, torch.linspace(0, x.max(), 2049).numpy(), float(x.max())
    return out


def error_of(amax: float, counts: np.ndarray, edges: np.ndarray, bits: int) -> float:
    """Mean squared error between bin centres and their quantization, from the definition."""
    centers = (edges[1:].astype(np.float64) + edges[:-1]) / 2
    step = amax / (2 ** (bits - 1) - 1)
    levels = np.minimum(np.rint(centers / step), 2 ** (bits - 1) - 1)
    return float((counts * (centers - levels * step) ** 2).sum() / counts.sum())


def search(method: str, histogram: Histogram, backend: str) -> Callable[[], float]:
    counts, edges, largest = histogram
    if method == "entropy":
        return lambda: entropy_amax(counts, edges, 8, False, 1, 128, backend)
    if method == "mse":
        return lambda: mse_amax(counts, edges, 8, False, 1, 128, largest, backend)
    return lambda: percentile_amax(counts, edges, 99.99)


def peer_search(module: Any, method: str, histogram: Histogram) -> Callable[[], Any]:
    peer = getattr(module, f"_compute_amax_{method}")
    arguments = (99.99,) if method == "percentile" else (8, False)
    return lambda: peer(histogram[0].astype(np.int32), histogram[1], *arguments)


def compare_searches(upstream: Any, modelopt: Any, rounds: int) -> None:
    modules = {"up": upstream and upstream.histogram, "opt": modelopt}
    header = ["2048 bins, CPU ms", "pytorch-quantization", "modelopt"]
    header += [cell for b in BACKENDS for cell in (b, "ratio")] + ["amax", "result"]
    for method in ("entropy", "mse", "percentile"):
        rows = []
        for name, histogram in histograms().items():
            peers = {
                key: once(peer_search(module, method, histogram))
                for key, module in modules.items()
                if module is not None
            }
            runs = {backend: search(method, histogram, backend) for backend in BACKENDS}
            times = timed(runs, 5 * rounds, time.process_time)
            found = [run() for run in runs.values()]
            row = [f"{method}, {name}"]
            row += [f"{1e3 * peers[k][0]:.1f}" if k in peers else "-" for k in ("up", "opt")]
            for backend in BACKENDS:
                median, _ = times[backend]
                row.append(f"{1e3 * median:.3f}")
                row.append(f"{peers['up'][0] / median:.0f}x" if "up" in peers else "-")
            row += [f"{found[0]:.6g}", "-"]
            if "up" in peers:
                theirs = float(peers["up"][1])
                row[-1] = "equal" if set(found) == {theirs} else f"differs: {theirs:.6g}"
            rows.append(row)
        table(f"Search: {method}", header, rows)


def compare_errors(upstream: Any, modelopt: Any) -> None:
    """How good the ranges are, by the definition of mse; modelopt passes num_bits as a bias."""
    rows = []
    for name, (counts, edges, largest) in histograms().items():
        for bits in (8, 4):
            found = {"bevquant": mse_amax(counts, edges, bits, False, 1, 128, largest)}
            for key, module in (("pq", upstream and upstream.histogram), ("opt", modelopt)):
                if module is not None:
                    narrow = counts.astype(np.int32)
                    found[key] = float(module._compute_amax_mse(narrow, edges, bits, False))
            errors = {key: error_of(amax, counts, edges, bits) for key, amax in found.items()}
            at_max = error_of(largest, counts, edges, bits)
            row = [f"{name}, {bits} bits", f"{errors['bevquant']:.4e}"]
            for key in ("pq", "opt"):
                row.append(f"{errors[key] / errors['bevquant']:.4f}x" if key in errors else "-")
            rows.append([*row, f"{at_max / errors['bevquant']:.4f}x"])
    table(
        "Error of the range found by mse, relative to bevquant's (1: equal, above: worse)",
        ["", "bevquant mse", "pytorch-quantization", "modelopt", "max"],
        rows,
    )


def compare_weights(upstream: Any) -> None:
    """Mse for each of 32 channels of a convolution: 37.6 s for 256 upstream."""
    layer = torch.nn.Conv2d(64, 32, 3)
    layer.weight_quantizer = TensorQuantizer(QuantDescriptor(axis=0))
    calibrate_weights(layer, "mse")
    ours = min(once(lambda: calibrate_weights(layer, "mse"))[0] for _ in range(5))
    row = ["mse, 32 channels of [32, 64, 3, 3], CPU ms", "-", f"{1e3 * ours:.1f}", "-"]
    if upstream is not None:
        other = upstream.nn.QuantConv2d(64, 32, 3)
        other.weight = layer.weight
        theirs, _ = once(lambda: upstream.calib.calibrate_weights(other, "mse"))
        row[1], row[3] = f"{1e3 * theirs:.0f}", f"{theirs / ours:.0f}x"
    header = ["calibrate_weights", "pytorch-quantization", "bevquant", "ratio"]
    table("Weights, channel by channel", header, [row])


# --- collection -----------------------------------------------------------------------------------


def collector(calibrator: Any, x: Tensor) -> Callable[[], Any]:
    calibrator.collect(x)  # the first tensor sets the width
    return lambda: calibrator.collect(x)


def plain_histogram(x: Tensor) -> Tensor:
    absolute = x.abs()
    return torch.histc(absolute, 2048, 0, float(absolute.max()))


def compare_collection(upstream: Any, rounds: int) -> None:
    x = torch.randn(VALUES, generator=torch.Generator().manual_seed(0))
    largest = float(x.abs().max())
    runs: dict[str, Callable[[], Any]] = {}
    if upstream is not None:
        theirs = upstream.calib.HistogramCalibrator(8, None, False)
        runs["pytorch-quantization, collect"] = collector(theirs, x)
    absolute = x.abs()
    runs["torch.histc alone, |x| and max given"] = lambda: torch.histc(absolute, 2048, 0, largest)
    runs["torch: abs, max, histc"] = lambda: plain_histogram(x)
    for backend in BACKENDS:
        kind = "torch" if backend == "numpy" else backend
        runs[f"bevquant, {kind}"] = lambda kind=kind: abs_histogram(x, 2048, largest, backend=kind)
    ours = HistogramCalibrator(8, None, False)
    runs["bevquant, collect"] = collector(ours, x)
    times = timed(runs, 10 * rounds)
    bars = [times.get(n) for n in ("pytorch-quantization, collect", "torch: abs, max, histc")]
    rows = []
    for name, pair in times.items():
        rows.append([name, *(f"{1e3 * t:.2f}" for t in pair)])
        rows[-1] += [cell for bar in bars for cell in against(bar, pair)]
    table(
        f"Collecting {VALUES:,} float32 values in 2048 bins, {torch.get_num_threads()} threads",
        ["", "median ms", "fastest", "to pytorch-quantization", "fastest", "to torch", "fastest"],
        rows,
    )
    if upstream is not None:
        fresh = HistogramCalibrator(8, None, False)
        fresh.collect(x)
        theirs.reset()
        theirs.collect(x)
        same = torch.equal(fresh._calib_hist, theirs._calib_hist.long())
        print(f"counts {'equal' if same else 'differ from'} pytorch-quantization's")


# --- fake quantization ----------------------------------------------------------------------------


def compare_fake_quant(upstream: Any, rounds: int) -> None:
    shape = (79_745, 64)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    amax = torch.tensor(3.0)
    functions: dict[str, Callable[[Tensor], Tensor]] = {}
    if upstream is not None:
        functions["pytorch-quantization"] = lambda v: upstream.tensor_quant.fake_tensor_quant(
            v, amax, 8, False, True
        )
    functions["torch.fake_quantize_per_tensor_affine"] = lambda v: (
        torch.fake_quantize_per_tensor_affine(v, 3.0 / 127, 0, -127, 127)
    )
    for backend in BACKENDS:
        kind = "torch" if backend == "numpy" else backend
        functions[f"bevquant, {kind}"] = lambda v, kind=kind: fake_quantize(v, amax, backend=kind)
    module = TensorQuantizer(QuantDescriptor(amax=3.0, narrow_range=True))
    functions["bevquant, TensorQuantizer"] = module
    needs = x.clone().requires_grad_()
    gradient = torch.ones(shape)

    def both(function: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(function(needs), needs, gradient)

    bar = next(iter(functions))
    reference = functions[bar](x)
    for title, runs in (
        ("forward", {n: lambda f=f: f(x) for n, f in functions.items()}),
        ("forward and backward", {n: both(f) for n, f in functions.items()}),
    ):
        times = timed(runs, 20 * rounds)
        rows = []
        for name, function in functions.items():
            same = torch.equal(function(x), reference)
            cells = [f"{1e3 * t:.2f}" for t in times[name]] + against(times[bar], times[name])
            rows.append([name, *cells, "equal" if same else "differs in places"])
        table(
            f"Fake quantization of float32 {list(shape)}, 8 bits, per tensor, {title}",
            ["", "median ms", "fastest", "ratio", "fastest", f"output and {bar}'s"],
            rows,
        )


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        upstream, modelopt = load_upstream(), load_modelopt()
        if "numba" not in BACKENDS:
            print("numba is not installed: the kernels in numpy and torch alone are measured")
        names = ("torch", "numpy", "numba", "pytorch-quantization", "nvidia-modelopt")
        found = {name: _version(name) for name in names}
        print(", ".join(f"{name} {version}" for name, version in found.items() if version))
        print_machine(peaks=False)
        compare_searches(upstream, modelopt, rounds)
        compare_errors(upstream, modelopt)
        compare_weights(upstream)
        compare_collection(upstream, rounds)
        compare_fake_quant(upstream, rounds)
    print(f"\n{time.perf_counter() - start:.0f} s")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
