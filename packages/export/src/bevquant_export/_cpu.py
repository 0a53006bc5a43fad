"""Integer products that a CPU computes without saturation, and the stored weights for it."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# What a file may be written for: CPUs that sum four products of uint8 and int8 exactly (x86 with
# VNNI or AMX, ARM with dot products), or any.
CPUS = ("vnni", "any")
HERE = "here"  # the linter's word for `cpu_at_hand`
CPU_KEY = "bevquant.cpu"  # metadata of a file for a CPU: one of `CPUS`
CPU_VARIABLE = "BEVQUANT_CPU"  # of the environment: one of `CPUS`, in place of a test of this CPU
_DEPTH, _COLUMNS = 64, 16
_PAIR = (2**15 - 1) // (2 * 255)  # the largest weight of which no pair saturates: 64
_EXACT_FLAGS = ("avx512_vnni", "avx_vnni", "amx_int8")


def cpu_at_hand() -> str:
    """Return ``"vnni"`` where this CPU sums products of uint8 and int8 exactly, else ``"any"``.

    x86 without VNNI sums pairs of products in int16, which saturates: 2·255·127 exceeds 32,767.
    ONNX Runtime multiplies such operands once per process, and the sums decide; without onnxruntime
    the CPU's instructions do. The environment variable ``BEVQUANT_CPU`` replaces both.

    Raises:
        ValueError: ``BEVQUANT_CPU`` is neither ``"vnni"`` nor ``"any"``.

    Example:
        >>> cpu_at_hand() in CPUS
        True
    """
    forced = os.environ.get(CPU_VARIABLE)
    if forced and forced not in CPUS:
        raise ValueError(f"{CPU_VARIABLE}={forced}: expected one of {', '.join(CPUS)}, or unset")
    return forced or _tested()


@cache
def _tested() -> str:
    try:
        import onnxruntime
    except ImportError:
        return _by_instructions()
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        _product().SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    x = np.full((4, _DEPTH), 255, np.uint8)
    w = np.full((_DEPTH, _COLUMNS), 127, np.int8)
    (made,) = session.run(None, {"x": x, "w": w})
    return "vnni" if bool((made == 255 * 127 * _DEPTH).all()) else "any"


def _by_instructions() -> str:
    """From torch's list of instructions (torch 2.11 and later); the sums of ARM never saturate."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "vnni"
    found = getattr(torch.cpu, "get_capabilities", dict[str, Any])()
    return "vnni" if any(found.get(flag) for flag in _EXACT_FLAGS) else "any"


def cpu_name() -> str:
    """Name of this CPU, for a line with a time."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def weights_for(cpu: str) -> str:
    """The type of stored weights for a CPU: ``"int8"``, or ``"uint8"``, which never saturates."""
    if cpu not in CPUS:
        raise ValueError(f"cpu={cpu!r}: expected one of {', '.join(map(repr, CPUS))}")
    return "int8" if cpu == "vnni" else "uint8"


def chosen_weights(weights: str, choice: tuple[str, ...] = ("uint8", "int8")) -> str:
    """Stored weights by name: ``"auto"`` is `weights_for` the CPU at hand."""
    if weights not in ("auto", *choice):
        expected = ", ".join(map(repr, ("auto", *choice)))
        raise ValueError(f"weights={weights!r}: expected one of {expected}")
    return weights_for(cpu_at_hand()) if weights == "auto" else weights


def exact_everywhere(integers: NDArray[Any]) -> bool:
    """Whether int8 weights saturate on no CPU: 2·255·64 is within int16, as seven bits always are.

    Example:
        >>> exact_everywhere(np.array([-64, 64])), exact_everywhere(np.array([65]))
        (True, False)
    """
    return not integers.size or int(np.abs(integers.astype(np.int64)).max()) <= _PAIR


def stored_weights(integers: NDArray[Any], weights: str) -> tuple[NDArray[Any], int]:
    """Integer weights in a file's form for a CPU, and their zero point.

    Args:
        integers: From -128 to 127.
        weights: From `weights_for`. Weights that are `exact_everywhere` are int8 for any CPU, which
            is twice as fast, except with ``"all uint8"``, the form of older files.
    """
    if weights == "int8" or (weights != "all uint8" and exact_everywhere(integers)):
        return integers.astype(np.int8), 0
    return (integers.astype(np.int16) + 128).astype(np.uint8), 128


def mark_cpu(model: Any) -> str:
    """Write into a model's metadata on which CPUs it is exact; return that.

    Only int8 weights beyond ±64 can saturate.
    """
    from onnx import TensorProto, numpy_helper

    signed = (t for t in model.graph.initializer if t.data_type == TensorProto.INT8)
    exact = all(exact_everywhere(numpy_helper.to_array(tensor)) for tensor in signed)
    cpu = "any" if exact else "vnni"
    model.metadata_props.add(key=CPU_KEY, value=cpu)
    return cpu


def saturates_here(model: Any) -> bool:
    """Whether a model is for CPUs that sum exactly, and this one does not."""
    return cpu_of(model) == "vnni" and cpu_at_hand() == "any"


def refuse_saturation(model: Any, what: str) -> None:
    """Refuse to run a model whose products saturate here."""
    if saturates_here(model):
        raise ValueError(
            f"{what} is for CPUs that sum products of uint8 and int8 exactly (VNNI, AMX, ARM), and "
            "this CPU does not: its integers would be others in silence. Export it again here, or "
            "anywhere with weights='uint8'"
        )


def cpu_of(model: Any) -> str:
    """CPUs in a model's metadata; ``"any"`` without an entry."""
    values = [entry.value for entry in model.metadata_props if entry.key == CPU_KEY]
    return values[0] if len(values) == 1 and values[0] in CPUS else "any"


def _product() -> Any:
    from onnx import TensorProto, helper

    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["x", "w"], ["y"], "product")],
        "product",
        [
            helper.make_tensor_value_info("x", TensorProto.UINT8, [4, _DEPTH]),
            helper.make_tensor_value_info("w", TensorProto.INT8, [_DEPTH, _COLUMNS]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [4, _COLUMNS])],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7, producer_name="bevquant"
    )
