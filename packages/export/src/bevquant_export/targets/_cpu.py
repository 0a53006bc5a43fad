"""Which integers a CPU multiplies without saturating."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What a file may be written for: CPUs that sum four products of uint8 and int8 exactly (x86 with
# VNNI or AMX, ARM with dot products), or any.
CPUS = ("vnni", "any")
CPU_KEY = "bevquant.cpu"  # metadata of a file that is for some CPUs alone
_DEPTH, _COLUMNS = 64, 16
_PAIR = (2**15 - 1) // (2 * 255)  # the largest weight of which no pair saturates: 64


@cache
def cpu_at_hand() -> str:
    """``"vnni"`` where ONNX Runtime multiplies uint8 by int8 exactly on this CPU, else ``"any"``.

    x86 without VNNI sums pairs of products in int16, which saturates: 2·255·127 is beyond 32,767.
    It is asked for, not guessed from the CPU's name; without onnxruntime the answer is ``"any"``.

    Example:
        >>> cpu_at_hand() in CPUS
        True
    """
    try:
        import onnxruntime
    except ImportError:
        return "any"
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        _product().SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    x = np.full((4, _DEPTH), 255, np.uint8)
    w = np.full((_DEPTH, _COLUMNS), 127, np.int8)
    (made,) = session.run(None, {"x": x, "w": w})
    return "vnni" if bool((made == 255 * 127 * _DEPTH).all()) else "any"


def weights_for(cpu: str) -> str:
    """The type of stored weights for a CPU: ``"int8"``, or ``"uint8"``, which saturates nowhere.

    Raises:
        ValueError: Another CPU than those of `CPUS`.
    """
    if cpu not in CPUS:
        raise ValueError(f"cpu={cpu!r}: expected one of {', '.join(map(repr, CPUS))}")
    return "int8" if cpu == "vnni" else "uint8"


def exact_everywhere(integers: NDArray[Any]) -> bool:
    """Whether int8 weights saturate on no CPU: 2·255·64 is within int16, as seven bits always are.

    Example:
        >>> exact_everywhere(np.array([-64, 64])), exact_everywhere(np.array([65]))
        (True, False)
    """
    return not integers.size or int(np.abs(integers.astype(np.int64)).max()) <= _PAIR


def stored_weights(integers: NDArray[Any], weights: str) -> tuple[NDArray[Any], int]:
    """Integer weights as a file stores them for a CPU, and their zero point.

    Args:
        integers: From -128 to 127.
        weights: From `weights_for`. What is `exact_everywhere` is int8 for any CPU too, which
            multiplies twice as many at a time, but for ``"all uint8"``, as files once had them.
    """
    if weights == "int8" or (weights != "all uint8" and exact_everywhere(integers)):
        return integers.astype(np.int8), 0
    return (integers.astype(np.int16) + 128).astype(np.uint8), 128


def cpu_of(model: Any) -> str:
    """Which CPUs a model says that it is for; ``"any"`` where it says nothing."""
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
