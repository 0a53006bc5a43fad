"""A float file in half precision, tried on its frames and on inputs where it fails first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from bevquant_export.dense._alike import HALF, alike
from bevquant_export.dense._bounds import HEAD_ROOM
from bevquant_export.dense._half import Typed, half_inputs
from bevquant_export.dense._half_limits import LARGEST_HALF
from bevquant_export.dense._half_tried import arrays, tried
from bevquant_export.dense._recorded import hard_inputs, measured
from bevquant_export.dense._runnable import any_session, rounded_session

Frame = Mapping[str, Any]


def typed_floats(
    proto: Any,
    inputs: Mapping[str, Tensor],
    frames: Sequence[Mapping[str, Tensor]],
    *,
    verify: bool,
) -> Typed:
    """A float file in half precision, but for what departs from float32 with it.

    Without frames any value of float16 is expected of an input.

    Args:
        proto: The file, all floats float32.
        inputs: Its inputs to the example.
        frames: More of them.
        verify: Whether the file is run.
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
