"""Where each operator of a hybrid model runs once it is deployed."""

from __future__ import annotations

import os
from collections import Counter

from torch import nn
from torch.fx import GraphModule, Node

from bevquant_hybrid._fx._graph_module import ObservedGraphModule, QuantizedGraphModule
from bevquant_hybrid.march import require_march
from bevquant_hybrid.partition import partition
from bevquant_hybrid.utils.quant_profiler._files import write_text
from bevquant_hybrid.utils.quant_profiler._tables import simple_table

__all__ = ["check_deploy_device"]

_LISTED = ("operator", "quantize", "dequantize")  # kinds of the plan's nodes


def check_deploy_device(
    model: GraphModule,
    print_tabulate: bool = True,
    out_dir: str | os.PathLike[str] | None = None,
) -> dict[str, tuple[str, str]]:
    """Say for each operator of a hybrid model whether it runs on the BPU or on the CPU.

    It reads the prepared graph with `bevquant_hybrid.partition`. Stubs and the boundaries that
    prepare put in count as CPU; views and Identity are where their input is and are not listed.
    What the mapper has no BPU form of is listed as CPU also in a model that was not prepared as
    hybrid, whose graph has no boundary there. The table is also written to ``deploy_device.txt``.

    Args:
        model: Result of `prepare_qat_fx` or `prepare_calibration_fx`, or of `convert_fx`.
        print_tabulate: Print the table.
        out_dir: Folder of the file; None for the current one.

    Returns:
        By name, in the order of execution, ``("BPU" or "CPU", "module", "function" or "method")``.
        Modules go by their names (with ``(i)`` where they are called again), functions and methods
        by their nodes'.

    Raises:
        RuntimeError: No march is set.
        TypeError: Another model.
    """
    if not isinstance(model, ObservedGraphModule | QuantizedGraphModule):
        raise TypeError(
            "check_deploy_device: expected a model from prepare_qat_fx or convert_fx, got "
            f"{type(model).__name__}"
        )
    plan = partition(model, require_march("check_deploy_device"))
    nodes = {node.name: node for node in model.graph.nodes}
    modules = dict(model.named_modules(remove_duplicate=False))
    repeats: Counter[str] = Counter()
    devices: dict[str, tuple[str, str]] = {}
    for planned in plan.nodes:
        if planned.kind not in _LISTED or planned.inserted or not planned.place:
            continue
        name, form = _row(nodes[planned.name], modules)
        # A boundary module stands before each input of its node; it is one row.
        if name in devices and planned.kind != "dequantize":
            repeats[name] += 1
            name = f"{name}({repeats[name]})"
        devices[name] = (planned.place, form)
    rows = [[name, *device] for name, device in devices.items()]
    table = simple_table(["name", "deploy device", "type"], rows)
    write_text(out_dir, "deploy_device.txt", f"{table}\n")
    if print_tabulate:
        print(table)
    return devices


def _row(node: Node, modules: dict[str, nn.Module]) -> tuple[str, str]:
    """Name and form of a node; what is fused into an addition is the call of a method."""
    if node.op == "call_function":
        return node.name, "function"
    if node.op == "call_method" or getattr(modules[str(node.target)], "adds", False):
        return node.name, "method"
    return str(node.target), "module"
