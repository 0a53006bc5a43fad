"""visualize_model and visualize_partition: pictures of a model's layers and their placement."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import fx, nn

from bevquant_hybrid.compilation import forward_arguments, march_of, model_name, require_module
from bevquant_hybrid.operators import (
    OperatorCall,
    is_identity,
    load_support_table,
    runs_on_cpu,
    tensors_in,
    trace_calls,
)
from bevquant_hybrid.partition import Plan, partition
from bevquant_hybrid.quantization.quantize_fx import fuse_fx
from bevquant_hybrid_tools.drawing import DrawnNode, draw_partition
from bevquant_quantizers.documents import write_whole


def show_picture(path: Path) -> None:
    """Show an SVG file in the notebook or the desktop's viewer; print its path."""
    if _in_notebook():
        notebook: Any = importlib.import_module("IPython.display")
        notebook.display(notebook.SVG(filename=str(path)))
        return
    command = _viewer()
    if command:
        # A viewer may run until its window is closed.
        threading.Thread(None, _open, "viewer", ([*command, str(path)],), daemon=True).start()
    print(f"the picture is {path}")


def _in_notebook() -> bool:
    """Whether a notebook's kernel runs this; a terminal's IPython shows no pictures."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


def _viewer() -> list[str]:
    """The desktop's command that opens files, or nothing without a desktop."""
    if sys.platform == "darwin":
        return ["open"]
    found = shutil.which("xdg-open")
    screen = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return [found] if found and screen else []


def _open(command: list[str]) -> None:
    nothing = subprocess.DEVNULL
    try:
        subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, check=False)
    except OSError:
        pass  # the path was printed: the user can open it


def visualize_model(
    module: nn.Module,
    example_inputs: Any,
    march: str | None = None,
    save_path: str | os.PathLike[str] | None = None,
    show: bool = True,
) -> None:
    """Draw the layers of a model as an SVG picture: operators, shapes, integers and floats.

    Args:
        module: Float with stubs, prepared, converted, or converted and traced.
        example_inputs: One tensor, or a tuple or list of the forward's arguments.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"``; that of the process by default.
        save_path: File to write, ``.svg``; folders are created.
        show: Show the picture in a notebook, or else open it with the desktop's viewer and print
            its path. It never waits. Without a display nothing opens.

    Raises:
        TypeError: Inputs of the wrong type.
        ValueError: An unknown march, no march is set, or a file name without ``.svg``.
        RuntimeError: The model does not run on the inputs.

    Example:
        >>> import torch
        >>> from bevquant_hybrid.quantization import QuantStub
        >>> model = nn.Sequential(QuantStub(scale=1 / 128), nn.Conv2d(3, 8, 3))
        >>> folder = tempfile.mkdtemp()
        >>> visualize_model(model, torch.ones(1, 3, 8, 8), "bayes", f"{folder}/net.svg", show=False)
        >>> Path(f"{folder}/net.svg").read_text(encoding="utf-8")[:5]
        '<svg '
    """
    caller = "visualize_model"
    require_module(caller, module)
    title = load_support_table().march(march_of(march, caller)).title
    name = model_name(caller, module)
    arguments = forward_arguments(module, example_inputs, caller)
    count = sum(1 for _ in tensors_in(arguments))
    nodes = _nodes_of(trace_calls(module, arguments), count)
    _give_out(draw_partition(nodes, title=f"{name} for {title}"), name, save_path, show)


def visualize_partition(
    model: nn.Module,
    example_inputs: Any = None,
    march: str | None = None,
    hybrid_dict: Mapping[str, Iterable[Any]] | None = None,
    save_path: str | os.PathLike[str] | None = None,
    show: bool = True,
) -> Plan:
    """Draw the BPU and CPU parts of a hybrid model, with the boundaries between them.

    Args:
        model: A float model, which is traced and fused as in prepare; or the result of `fuse_fx`,
            `prepare_calibration_fx`, `prepare_qat_fx` or `convert_fx`.
        example_inputs: One tensor, or a tuple or list of arguments, for the shapes.
        march: ``"bernoulli2"``, ``"bayes"`` or ``"bayes-e"``; that of the process by default.
        hybrid_dict: Further operators on the CPU, as in `prepare_qat_fx`; not for a prepared
            model.
        save_path: As in `visualize_model`.
        show: As in `visualize_model`.

    Returns:
        The drawn plan.

    Raises:
        ValueError: The model cannot be traced, an argument has an unknown value, or no march is
            set.

    Example:
        >>> from bevquant_hybrid.quantization import QuantStub
        >>> model = nn.Sequential(QuantStub(), nn.Conv2d(3, 8, 3), nn.PReLU())
        >>> plan = visualize_partition(model, march="bayes", show=False)
        >>> [(segment.place, segment.nodes) for segment in plan.segments]
        [('BPU', ('_1',)), ('CPU', ('_2',))]
    """
    caller = "visualize_partition"
    require_module(caller, model)
    target = march_of(march, caller)
    name = model_name(caller, model)
    graph = model if isinstance(model, fx.GraphModule) else fuse_fx(model)
    plan = partition(graph, target, hybrid_dict, example_inputs=example_inputs)
    title = load_support_table().march(target).title
    _give_out(plan.draw(title=f"{name}: BPU and CPU for {title}"), name, save_path, show)
    return plan


def _give_out(
    picture: str, name: str, save_path: str | os.PathLike[str] | None, show: bool
) -> None:
    """Write the picture and show it, as requested."""
    if save_path is not None:
        path = Path(save_path)
        if path.suffix.lower() != ".svg":
            raise ValueError(f"save_path={str(path)!r}: pictures are SVG files; end it in .svg")
        path = write_whole(path, picture, parents=True)
    elif show:
        path = write_whole(Path(tempfile.mkdtemp(prefix="bevquant_")) / f"{name}.svg", picture)
    if show:
        show_picture(path)


def _nodes_of(calls: Sequence[OperatorCall], count: int) -> list[DrawnNode]:
    """Nodes of a picture: inputs, calls and the output."""
    nodes: list[DrawnNode] = []
    stands_for: dict[str, tuple[str, ...]] = {}
    outside = [call.path for call in calls if "" in call.inputs]
    apart = len(outside) == count  # otherwise inputs cannot be assigned to calls
    read: set[str] = set()
    for call in calls:
        sources: list[str] = []
        for source in dict.fromkeys(call.inputs):
            if source in stands_for:
                sources += stands_for[source]
            elif source == "":
                number = outside.index(call.path) if apart and count > 1 else 0
                sources.append(_input_name(number, count if apart else 1, calls))
                _add_input(nodes, sources[-1], call)
        if is_identity(call.operator):  # nothing of it is left on a BPU
            stands_for[call.path] = tuple(sources)
            continue
        stands_for[call.path] = (call.path,)
        read.update(sources)
        nodes.append(_node(call, tuple(dict.fromkeys(sources))))
    last = tuple(n.name for n in nodes if n.name not in read)
    taken = {node.name for node in nodes}
    end = next(n for n in ("output", "outputs", "_output_") if n not in taken)
    return [*nodes, DrawnNode(end, inputs=last)]


def _input_name(number: int, count: int, calls: Sequence[OperatorCall]) -> str:
    name = "input" if count == 1 else f"input {number}"
    return f"{name} " if any(call.path == name for call in calls) else name


def _add_input(nodes: list[DrawnNode], name: str, call: OperatorCall) -> None:
    if all(node.name != name for node in nodes):
        shape = call.input_shapes[call.inputs.index("")]
        nodes.append(DrawnNode(name, detail=_shape(shape)))


def _node(call: OperatorCall, sources: tuple[str, ...]) -> DrawnNode:
    operator = call.operator.rpartition(".")[2]
    boundary = {"QuantStub": "quantize", "DeQuantStub": "dequantize"}.get(operator, "")
    place = "" if boundary else "CPU" if runs_on_cpu(call) else "BPU"
    settings = [f"{key}={value}" for key, value in call.attributes.items()]
    shapes = " + ".join(_shape(shape) for shape in call.input_shapes)
    types = ", ".join(dict.fromkeys(call.input_dtypes))
    note = [f"{shapes} {types} → {_shape(call.output_shape)} {call.output_dtype}"]
    if call.weight_count:
        note.append(f"{call.weight_count:,} weights, {call.bias_count:,} biases")
    note += [", ".join(settings)] if settings else []
    detail = _shape(call.output_shape)
    if call.output_dtype not in ("qint8", "float32"):
        detail += f" {call.output_dtype}"
    floats = call.output_dtype == "float32"
    return DrawnNode(call.path, operator, place, sources, boundary, detail, "\n".join(note), floats)


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))
