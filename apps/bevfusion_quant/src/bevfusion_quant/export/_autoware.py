"""The whole LiDAR detector as the one file that Autoware's node reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bevfusion_quant.export._check import TOLERANCE
from bevfusion_quant.export._files import AUTOWARE_BOXES, HEAD, LIDAR
from bevfusion_quant.results import FileLayer

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion
    from bevfusion_quant.export._write import Written

__all__ = ["WHOLE", "join_for_autoware", "whole_layers"]

WHOLE = "bevfusion_lidar"


def join_for_autoware(
    written: Mapping[str, Written], model: BEVFusion, inputs: Mapping[str, tuple[Any, ...]]
) -> list[Written]:
    """Encoder, decoder and packed head in one file; nothing for an encoder alone."""
    if HEAD not in written:
        return []
    from bevquant_export import export_float_onnx
    from bevquant_export.targets.autoware import join_autoware_onnx

    encoder = written[LIDAR]
    path = encoder.path.with_name(f"{WHOLE}.onnx")
    head = path.with_name(f"{AUTOWARE_BOXES.name}.onnx")
    try:
        export_float_onnx(
            AUTOWARE_BOXES.module(model), inputs[HEAD], head, tolerance=None,
            input_names=list(AUTOWARE_BOXES.inputs), output_names=list(AUTOWARE_BOXES.outputs),
        )  # fmt: skip
        join_autoware_onnx(encoder.path, [written["decoder"].path, head], path)
    finally:
        head.unlink(missing_ok=True)
    file = replace(encoder.piece.file, name=WHOLE, outputs=AUTOWARE_BOXES.outputs)
    parts = ("encoder", "decoder", "head")
    notes = (*encoder.notes, f"{', '.join(parts)} in one file, as the node reads it")
    return [replace(encoder, path=path, piece=replace(encoder.piece, file=file), notes=notes)]


def whole_layers(written: Written, args: tuple[Any, ...]) -> tuple[FileLayer, ...]:
    """Boxes of the whole file against its parts, in onnxruntime, on the map of its encoder."""
    from bevfusion_quant.export._check import open_session, session_of
    from bevquant_export.targets.autoware import behind_encoder, run_on_frame

    parts = {name: written.path.with_name(f"{name}.onnx") for name in (LIDAR, "decoder", HEAD)}
    (name,) = written.made.outputs
    lidar = run_on_frame(parts[LIDAR], args, written.made.permutation)[name]
    made = _named(session_of(behind_encoder(written.path, name)), {name: lidar.numpy()})
    middle = _named(
        open_session(parts["decoder"], optimised=False), {"lidar": lidar.float().numpy()}
    )
    found = _named(open_session(parts[HEAD], optimised=False), {"middle": middle["middle"].numpy()})
    score, label = found["score"][0].max(0)
    boxes = [found[name][0] for name in ("reg", "height", "dim", "rot", "vel")]
    wanted = {"bbox_pred": torch.cat(boxes), "score": score, "label_pred": label}
    rows = []
    for name, want in wanted.items():
        largest = float((made[name].double() - want.double()).abs().max())
        largest /= float(want.abs().max()) or 1.0
        row = FileLayer(
            written.path.name, name, "float", "float", want.numel(), None, largest,
            f"{TOLERANCE:g} of the largest value", largest <= TOLERANCE,
        )  # fmt: skip
        rows.append(row)
    return tuple(rows)


def _named(session: Any, feeds: dict[str, Any]) -> dict[str, Tensor]:
    names = [port.name for port in session.get_outputs()]
    return dict(zip(names, map(torch.from_numpy, session.run(None, feeds)), strict=True))
