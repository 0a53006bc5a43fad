"""Sizes of the float tensors of a file, and the most critical inputs for half precision."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_export.dense._half import with_tensors
from bevquant_export.dense._half_digits import Size, size_of
from bevquant_export.dense._program_of import integer_model
from bevquant_export.dense._runnable import any_session
from bevquant_export.dense._source import Source
from bevquant_int8sim.program import Ref, Step, names_in
from bevquant_quantizers import TensorQuantizer, float_ranges

_COMPUTED = frozenset("float conv conv_transpose linear resize max_pool avg_pool".split())
Known = dict[str, tuple[float, bool]]
EXAMPLE, LARGEST = "the example", "the largest calibrated values"


def recorded(
    model: Any, source: Source, states: Mapping[str, Any], names: Mapping[str, str]
) -> Known:
    """Tensors of a file to the largest value of any calibration frame, and whether all were whole.

    Inputs are known where `model` itself was calibrated, not a module around its layers. A layer's
    input and output are known where it is one step of the program.

    Args:
        model: Calibrated, or an integer model.
        source: The program.
        states: Value of the program to its tensor in the file.
        names: Input of the program to its name in the file.
    """
    if not isinstance(model, nn.Module):
        held = integer_model(source.integer)
        model = held.source.graph.model if held is not None and held.source is not None else None
    if model is None:
        return {}
    ranges, found = float_ranges(model), Known()
    modules = dict(model.named_modules())

    def note(ref: str, path: str, key: str) -> None:
        seen = ranges.get(path, {}).get(key)
        name = names.get(ref) or getattr(states.get(ref), "name", None)
        if seen is not None and name is not None:
            # A layer's own record may be in front of its ReLU, its reader's is behind it.
            largest, whole = found.get(name, (seen.largest, False))
            found[name] = min(largest, seen.largest), whole or seen.whole

    for ref, path in source.inputs.items():
        note(ref, "", path)
    for step in _alone(source.program.steps, modules):
        note(step.outputs[0], step.path, "output")
        given = [key for key in ranges.get(step.path, {}) if key != "output"]
        first = step.args[0] if step.args else None
        if len(given) == 1 and isinstance(first, Ref):
            note(first.name, step.path, given[0])
    return found


def _alone(steps: Any, modules: Mapping[str, nn.Module]) -> Iterator[Step]:
    """Steps that are the whole computation of a layer without child layers."""
    of_path: dict[str, list[Step]] = {}
    for step in steps:
        if step.op in _COMPUTED or step.op in ("move", "add"):
            of_path.setdefault(step.path, []).append(step)
    for path, found in of_path.items():
        module = modules.get(path)
        if not path or module is None or len(found) > 1 or len(found[0].outputs) > 1:
            continue
        inner = [m for m in module.children() if not isinstance(m, TensorQuantizer)]
        if not inner and names_in(found[0].args):
            yield found[0]


def measured(
    proto: Any, frames: Iterable[Mapping[str, Any]], names: Collection[str]
) -> dict[str, Size]:
    """Sizes of a float32 file's tensors while it runs.

    Args:
        proto: The file.
        frames: Input to its array, for each frame.
        names: Tensors to look at.
    """
    import onnx

    every = copy.deepcopy(proto)
    held = {port.name for port in every.graph.output}
    inferred = onnx.shape_inference.infer_shapes(proto, check_type=True)
    every.graph.output.extend(
        v for v in inferred.graph.value_info if v.name in names and v.name not in held
    )
    running, _ = any_session(every, "plain", at_once=1)
    taken = {port.name for port in running.get_inputs()}
    made = [port.name for port in every.graph.output]
    found: dict[str, Size] = {}
    for frame in frames:
        values = running.run(made, {n: v for n, v in frame.items() if n in taken})
        for name, value in [*frame.items(), *zip(made, values, strict=True)]:
            if name in names and value.dtype.kind in "fiu":
                found[name] = size_of(value).joined(found.get(name))
    return found


def hard_inputs(
    args: Any, names: list[str], known: Mapping[str, tuple[float, bool]]
) -> Iterator[tuple[str, Any]]:
    """Inputs on which half precision fails first, each with its name.

    The example itself, all zeros, every other row zero (padding, empty pillars), and the example
    scaled to the largest calibration frame.

    Args:
        args: The example.
        names: Names of its tensors, in order.
        known: Result of `recorded`.
    """

    def changed(change: Any) -> Any:
        def of(name: str, value: Tensor) -> Tensor:
            return change(name, value) if value.is_floating_point() else value

        return with_tensors(of, names, args)

    def rows(name: str, value: Tensor) -> Tensor:
        value = value.clone()
        value[(..., slice(1, None, 2), slice(None)) if value.dim() > 1 else slice(1, None, 2)] = 0
        return value

    def largest(name: str, value: Tensor) -> Tensor:
        wanted, top = (
            known.get(name, (0.0, False))[0],
            float(value.abs().max()) if len(value) else 0,
        )
        fits = 0 < top < wanted < float("inf")
        return value * (wanted / top) if fits else value

    yield EXAMPLE, args
    yield "zeros", changed(lambda name, value: torch.zeros_like(value))
    yield "rows of zeros", changed(rows)
    yield LARGEST, changed(largest)
