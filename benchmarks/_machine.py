"""What a benchmark ran on: the CPU, what it can do, and its peaks as measured in the same run.

Figures of two machines can be read side by side only against what each of them can do at best.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["print_machine"]

# What kernels choose by.
_FLAGS = "avx2 avx_vnni avx512f avx512_vnni avx512_bf16 amx_int8 amx_bf16".split()
_SIDE = 1024  # of the matrices whose product tells the peak of float32
_COPY = 1 << 26  # floats, far beyond any cache


def print_machine(*, peaks: bool = True) -> None:
    """The CPU, its instructions, how its CPUs share cores, the load; then peaks, GMAC/s."""
    model, flags = _cpu()
    found = ", ".join(flag for flag in _FLAGS if flag in flags) or "none of " + ", ".join(_FLAGS)
    print(f"CPU: {model}; {found}")
    print(f"{os.cpu_count()} CPUs, {_cores(flags)}; load average {os.getloadavg()[0]:.1f}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    if peaks:
        print("peaks: " + "; ".join(f"{name} {value}" for name, value in _peaks()))
    print()


def _cpu() -> tuple[str, set[str]]:
    """Its name, with family and model, which tell apart what carries one name; its flags."""
    file = Path("/proc/cpuinfo")
    if not file.exists():
        return platform.processor() or platform.machine(), set()
    first = file.read_text().split("\n\n")[0]
    lines = (line.partition(":") for line in first.splitlines())
    told = {key.strip(): value.strip() for key, _, value in lines}
    name = told.get("model name", platform.machine())
    if "cpu family" in told:
        name += f" (family {told['cpu family']}, model {told.get('model', '?')})"
    return name, set(told.get("flags", "").split())


def _cores(flags: set[str]) -> str:
    """How many cores the CPUs are, as far as the system tells: a hypervisor may tell otherwise."""
    folder = Path("/sys/devices/system/cpu")
    shared = {p.read_text().strip() for p in folder.glob("cpu[0-9]*/topology/thread_siblings_list")}
    told = f"on {len(shared)} cores" if shared else "cores unknown"
    return told + (" by what a hypervisor says" if "hypervisor" in flags else "")


def _peaks() -> list[tuple[str, str]]:
    from bevquant_int8sim import backend_report

    found = []
    for status in backend_report():
        if status.available and status.name != "torch":
            from _int8_timing import peak

            run = peak(status.name)
            found.append((f"int8 {status.name}", f"{run() / _best(run):.0f} GMAC/s"))
    a, b = torch.rand(2, _SIDE, _SIDE).unbind()
    product = _SIDE**3 / _best(lambda: a @ b) / 1e9
    found.append(("float32 matrix product", f"{product:.0f} GMAC/s"))
    source, target = torch.zeros(2, _COPY).unbind()
    moved = 2 * source.numel() * source.element_size() / _best(lambda: target.copy_(source)) / 1e9
    return [*found, ("copying memory", f"{moved:.0f} GB/s")]


def _best(run: Callable[[], object]) -> float:
    """Seconds of the second fastest of twenty runs: what the machine can do when it is let."""
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[1]
