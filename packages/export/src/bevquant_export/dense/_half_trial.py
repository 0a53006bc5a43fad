"""A file in half precision, tried on its frames and on the inputs where that fails first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_export.dense._source import Source, integer_model
from bevquant_export.dense._written import QdqFile
from bevquant_export.dense.verify._compare import (
    KnownErrors,
    departing,
    refusal,
    required_of,
    tensors_by_input,
)
from bevquant_export.dense.verify._pieces import Pieces
from bevquant_export.half._bounds import HEAD_ROOM
from bevquant_export.half._intervals import RENAMED
from bevquant_export.half._limits import LARGEST_HALF, Size, size_of
from bevquant_export.half._single import Known, Measure
from bevquant_export.half._types import Typed, half_typed
from bevquant_export.runtime._alike import HALF, StableChoices, alike
from bevquant_export.runtime._session import (
    any_session,
    half_inputs,
    rounded_session,
    with_tensors,
)
from bevquant_graph import flatten, same_constant
from bevquant_int8sim.program import (
    Add,
    Dense,
    FloatCall,
    LayoutCall,
    Matmul,
    MaxPool,
    Ref,
    Resize,
    Step,
    WeightedSum,
    names_in,
)
from bevquant_quantizers import TensorQuantizer, float_ranges

_COMPUTED = (FloatCall, LayoutCall, Dense, Resize, MaxPool, WeightedSum, Add, Matmul)
Recorded = dict[str, tuple[float, bool]]
EXAMPLE, LARGEST = "the example", "the largest calibrated values"


def recorded(
    model: Any, source: Source, states: Mapping[str, Any], names: Mapping[str, str]
) -> Recorded:
    """Tensors of a file to the largest value of any calibration frame, and whether all were whole.

    Inputs are known where `model` itself was calibrated, not a module around its layers. A layer's
    input and output are known where it is one step of the program.
    """
    if not isinstance(model, nn.Module):
        held = integer_model(source.integer)
        model = held.source.graph.model if held is not None and held.source is not None else None
    if model is None:
        return {}
    ranges, found = float_ranges(model), Recorded()
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
        if isinstance(step, _COMPUTED):
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
    """Sizes of a float32 file's tensors while it runs on frames."""
    import onnx

    every = copy.deepcopy(proto)
    held = {port.name for port in every.graph.output}
    inferred = onnx.shape_inference.infer_shapes(proto, check_type=True)
    made = {port.name for port in (*proto.graph.input, *inferred.graph.value_info)}
    # Arrangements of the same values would take most of the memory.
    renamed = {
        node.output[0]: node.input[0]
        for node in proto.graph.node
        if node.op_type in RENAMED and node.input[0] in made
    }

    def source(name: str) -> str:
        while name in renamed:
            name = renamed[name]
        return name

    sources = {name: source(name) for name in names}
    wanted = set(sources.values())
    every.graph.output.extend(
        v for v in inferred.graph.value_info if v.name in wanted and v.name not in held
    )
    running, _ = any_session(every, "plain", at_once=1)
    taken = {port.name for port in running.get_inputs()}
    ports = [port.name for port in every.graph.output]
    found: dict[str, Size] = {}
    for frame in frames:
        values = running.run(ports, {n: v for n, v in frame.items() if n in taken})
        for name, value in [*frame.items(), *zip(ports, values, strict=True)]:
            if name in wanted and value.dtype.kind in "fiu":
                found[name] = size_of(value).joined(found.get(name))
    return {name: found[of] for name, of in sources.items() if of in found}


def hard_inputs(
    args: Any, names: list[str], known: Mapping[str, tuple[float, bool]]
) -> Iterator[tuple[str, Any]]:
    """Inputs on which half precision fails first, each with its name.

    The example itself, all zeros, every other row zero (padding, empty pillars), and the example
    scaled to the largest calibration frame (`known`).
    """

    def changed(change: Any) -> Any:
        def of(name: str, value: Tensor) -> Tensor:
            return change(name, value.detach()) if value.is_floating_point() else value

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


def tried(
    proto: Any,
    known: Known,
    measure: Callable[[frozenset[str]], Mapping[str, Size]],
    apart: Callable[[Typed], Collection[str]],
) -> Typed:
    """Types without differences: first with float16 layers in front, then with float32 ones."""
    asked: Measure = lambda names: measure(frozenset(names))  # noqa: E731
    typed, keep = half_typed(proto, known, asked), set[str]()
    for whole in (False, True):
        found = apart(typed) if typed.halves else ()
        if not found:
            break
        keep |= set(found)
        typed = half_typed(proto, known, asked, keep, whole=whole)
    return typed


def arrays(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}


def typed_file(
    file: QdqFile,
    proto: Any,
    source: Source,
    args: Any,
    known: Known,
    *,
    verify: bool,
    sums: bool,
    errors: KnownErrors,
) -> Typed:
    """A QDQ file in half precision, except for parts that then differ from the integer model.

    Rounding errors on the example are added to `errors`.
    """
    required = required_of(file, source.integer, args)
    notes, given = list[str](), dict[str, Any]()
    for name, inputs in hard_inputs(required, list(file.inputs), known):
        values = flatten(inputs)[0]
        if not any(same_constant(values, flatten(other)[0]) for other in given.values()):
            given[name] = inputs

    def refused(name: str) -> bool:
        if why := refusal(source.integer, given[name]):
            notes.append(f"half precision is not tried on {name}: the model refuses it: {why}")
            del given[name]
        return bool(why)

    if LARGEST in given:  # which is measured before it is tried
        refused(LARGEST)
    frames = [
        arrays(tensors_by_input(file, given[name])) for name in (EXAMPLE, LARGEST) if name in given
    ]
    passed, choices = {name: set[bytes]() for name in given}, StableChoices()

    @cache
    def measure(names: frozenset[str]) -> Mapping[str, Size]:
        return measured(proto, frames, names)

    def apart(typed: Typed) -> set[str]:
        found = set[str]()
        pieces = Pieces(file, typed.proto.SerializeToString(), source.integer.program)
        for name, inputs in list(given.items()):
            # The file that is written is verified on the example, where all must be explained.
            least = 0.0 if name == EXAMPLE else HALF
            try:
                found |= departing(
                    pieces, source.integer, inputs, integer_sums=sums, inputs=name,
                    choices=choices, known=errors if name == EXAMPLE else None, found=found,
                    passed=passed[name], least=least,
                )  # fmt: skip
            except Exception:
                if name == EXAMPLE or not refused(name):
                    raise
        return found

    typed = tried(proto, known, measure, apart if verify else lambda typed: ())
    return replace(typed, reasons=(*typed.reasons, *notes))


Frame = Mapping[str, Any]


def typed_floats(
    proto: Any,
    inputs: Mapping[str, Tensor],
    frames: Sequence[Mapping[str, Tensor]],
    *,
    verify: bool,
) -> Typed:
    """A float file in half precision, without the parts that depart from float32.

    Without frames, beside the example, an input may have any value of float16. With `verify`, the
    file is run.
    """
    names = [v.name for v in (*proto.graph.input, *proto.graph.output)]
    seen = [arrays(inputs), *map(arrays, frames)]
    makers = {name for node in proto.graph.node for name in node.output}
    sizes = measured(proto, seen, {*names, *makers})
    # A binding of float16 holds any value, which is halved for the head room.
    known = dict.fromkeys(inputs, (LARGEST_HALF / HEAD_ROOM, False))
    if frames:
        known = {n: (s.largest if s.finite else np.inf, s.whole) for n, s in sizes.items()}
    plain, notes = any_session(proto, "plain", at_once=1)[0], []
    for name, inputs_tried in hard_inputs(dict(inputs), list(inputs), known if frames else {}):
        frame = arrays(inputs_tried)
        try:
            _run(plain, proto, frame)
        except RuntimeError as error:  # onnxruntime's, such as a place outside of a table
            notes.append(f"half precision is not tried on {name}: the file refuses it: {error}")
        else:
            seen.append(frame)

    def apart(typed: Typed) -> set[str]:
        rounded = rounded_session(typed.proto) or any_session(typed.proto, "plain", at_once=1)[0]
        return {name for frame in seen for name in _apart(plain, rounded, typed.proto, frame)}

    typed = tried(proto, known, lambda names: sizes, apart if verify else lambda typed: ())
    return replace(typed, reasons=(*typed.reasons, *notes))


def _run(running: Any, proto: Any, frame: Frame) -> list[Any]:
    taken = {port.name for port in running.get_inputs()}  # one that is not read is no input
    given = {name: value for name, value in frame.items() if name in taken}
    with np.errstate(all="ignore"):
        made: list[Any] = running.run([port.name for port in proto.graph.output], given)
    return made


def _apart(plain: Any, rounded: Any, proto: Any, frame: Frame) -> list[str]:
    """Outputs of a file in half precision that are others than those in float32."""
    halves = half_inputs(proto)
    given = {n: v.astype(np.float16) if n in halves else v for n, v in frame.items()}
    same = {n: v.astype(np.float32) if n in halves else v for n, v in given.items()}
    names = [port.name for port in proto.graph.output]
    made = _run(plain, proto, same), _run(rounded, proto, given)
    pairs = zip(names, *made, strict=True)
    return [
        name for name, want, got in pairs
        if want.dtype.kind == "f" and not alike(want, got.astype(np.float32), HALF)
    ]  # fmt: skip
