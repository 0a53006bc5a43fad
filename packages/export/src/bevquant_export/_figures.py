"""Size of a file and, on request, its time beside the same model in float32."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bevquant_export._cpu import cpu_name, cpu_of

# By onnx.TensorProto's numbers.
_EIGHT_BITS = {2: "uint8", 3: "int8", 17: "fp8_e4m3", 19: "fp8_e5m2"}
_HALF = 10
_ROUNDS, _SECONDS = (7, 100), 0.5
_CPUS = {
    "vnni": "exact on CPUs with VNNI, AMX or ARM's dot products, saturates on others",
    "any": "exact on every CPU",
}


@dataclass(frozen=True)
class Timing:
    """Fastest of interleaved runs of a file and of the same model in float32, in one process.

    On one thread, CPU time: other processes do not add to it. On several threads, elapsed time.
    """

    milliseconds: float
    # Time of the model in float32.
    float_milliseconds: float
    threads: int
    cpu: str

    @property
    def ratio(self) -> float:
        """Speed relative to float32."""
        return self.float_milliseconds / self.milliseconds

    def __str__(self) -> str:
        return (
            f"{self.milliseconds:.3g} ms, {self.ratio:.2f} times as fast as float32 "
            f"({self.float_milliseconds:.3g} ms), {self.threads} thread{'s' * (self.threads > 1)}, "
            f"{self.cpu}"
        )


@dataclass(frozen=True)
class Figures:
    """Size and time of a file."""

    size: int
    # Its bytes with the same weights in float32.
    float_size: int
    # Type of its quantized weights, such as ``"int8"``, ``"uint8"`` or ``"fp8_e4m3"``; several are
    # joined; empty without any.
    weights: str = ""
    # CPUs on which it is exact, from its metadata: ``"vnni"`` or ``"any"``; empty for engines that
    # do not run on a CPU.
    cpu: str = ""
    timing: Timing | None = None

    def __str__(self) -> str:
        share = f"{self.size / self.float_size:.0%} of {_megabytes(self.float_size)} in float32"
        if self.size == self.float_size:
            share = "weights stored as floats"
        lines = [f"{_megabytes(self.size)}, {share}"]
        if self.weights and self.cpu:
            lines.insert(0, f"weights {self.weights}: {_CPUS[self.cpu]}")
        return "\n".join([*lines, *([str(self.timing)] if self.timing else [])])


def figures_of(content: bytes, *, on_cpu: bool, timing: Timing | None = None) -> Figures:
    """Read the figures from a file; weights are its constants of two or more axes."""
    from onnx import ModelProto

    proto, more = ModelProto.FromString(content), 0
    kinds: dict[str, None] = {}
    for tensor in proto.graph.initializer:
        elements = math.prod(tensor.dims)
        if len(tensor.dims) > 1 and tensor.data_type in _EIGHT_BITS:
            kinds[_EIGHT_BITS[tensor.data_type]] = None
            more += 3 * elements
        elif tensor.data_type == _HALF:
            more += 2 * elements
    size = len(content)
    weights = " and ".join(sorted(kinds))
    return Figures(size, size + more, weights, cpu_of(proto) if on_cpu else "", timing)


def timed(
    proto: Any, peer: Any, given: Mapping[str, Any], open_session: Callable[..., Any]
) -> Timing:
    """Run two models in turn on the same inputs, by name; `open_session` makes their sessions."""
    runs = []
    for model in (proto, peer):
        running = open_session(model)
        names = [port.name for port in running.get_outputs()]
        taken = {port.name: given[port.name] for port in running.get_inputs()}
        runs.append((running, names, taken))
    seconds: list[list[float]] = [[], []]
    # OpenVINO computes in a thread of its own, so the process's time counts. Windows counts it in
    # steps of 16 ms.
    fine = time.get_clock_info("process_time").resolution < 1e-5
    clock = time.process_time if fine and torch.get_num_threads() == 1 else time.perf_counter
    began = time.perf_counter()
    for number in range(_ROUNDS[1] + 1):
        for place, (running, names, taken) in enumerate(runs):
            start = clock()
            running.run(names, taken)
            if number:  # the first run allocates
                seconds[place].append(clock() - start)
        if number >= _ROUNDS[0] and time.perf_counter() - began > _SECONDS:
            break
    first, second = (1e3 * min(each) for each in seconds)  # others take time from the rest
    return Timing(first, second, torch.get_num_threads(), cpu_name())


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 10_000 else f"{size / 1e3:.1f} kB"
