"""Maps between the parts of the model: one pair of pictures and one row each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bev_data import InputError
from bevfusion.model import Detector
from bevquant_qnn import PairSums, gap

Map = npt.NDArray[np.float32]
_NOTHING: Map = np.zeros((0, 0), np.float32)
NORM, ERROR = "L2 norm over channels", "L2 norm of quantized − float"

STAGE_TITLES = {
    "neck": "Camera features",
    "camera": "Camera, bird's-eye view",
    "lidar": "LiDAR, bird's-eye view",
    "fuser": "Fused, bird's-eye view",
    "decoder": "Decoder",
    "head": "Heatmap of the head",
}


@dataclass(frozen=True)
class StageRow:
    """Distance of the two models at the end of one stage, pooled over all frames."""

    stage: str
    title: str
    channels: int
    sqnr_db: float | None
    cosine: float | None


@dataclass(frozen=True, eq=False)
class StageMaps:
    """The first frame at the end of one stage, as pictures; NaN in empty cells.

    Bird's-eye maps are float32 [x, y]; camera features [cameras, rows, columns]. Feature maps are
    drawn as their norm over the channels, the difference as the norm of the difference vector; the
    heatmap as the highest class probability, the difference as quantized − float. Empty in a
    process that did not run the first frame.
    """

    row: StageRow
    float_map: Map
    quantized_map: Map
    difference_map: Map
    quantity: str
    difference_quantity: str

    @property
    def is_image(self) -> bool:
        """Whether the maps lie in the images instead of the bird's-eye view."""
        return self.float_map.ndim == 3


class StageProbe:
    """Collects one stage of both models: sums over all frames, pictures of the first.

    Attributes:
        frame_sums: Sums of the current frame.
        draws: Whether the current frame is drawn.
    """

    def __init__(self, stage: str, path: str, *, transposed: bool = False) -> None:
        self.stage, self.path, self._transposed = stage, path, transposed
        self.frame_sums = PairSums()
        self.channels = 0
        self.draws = True
        self._sums = PairSums()
        self._maps: tuple[Map, Map, Map] = (_NOTHING, _NOTHING, _NOTHING)

    def start(self, *, draws: bool) -> None:
        """Reset the sums of the current frame."""
        self.frame_sums, self.draws = PairSums(), draws

    def compare(self, wanted: Tensor, got: Tensor) -> None:
        """Compare one batch, with sums of its own."""
        self.frame_sums.add(wanted, got)
        self.channels = wanted.shape[1]
        if self.draws:
            draw = _probabilities if self.stage == "head" else _norms
            first, second, third = draw(wanted, got, image=self.stage == "neck")
            if self._transposed:
                first, second, third = first.T, second.T, third.T
            self._maps = first, second, third

    def add(self, wanted: Tensor, got: Tensor) -> None:
        """Compare and add one batch, if this process runs all of them."""
        self.compare(wanted, got)
        self.add_sums(self.frame_sums.as_sums(), self.channels)
        self.start(draws=False)

    def add_sums(self, sums: Sequence[float], channels: int) -> None:
        """A frame's sums, in order of frames."""
        self._sums.add_sums(sums)
        self.channels = channels

    def result(self) -> StageMaps:
        """The collected values."""
        row = StageRow(
            self.stage,
            STAGE_TITLES[self.stage],
            self.channels,
            self._sums.sqnr_db,
            self._sums.cosine,
        )
        head = self.stage == "head"
        quantity = "highest class probability" if head else NORM
        return StageMaps(row, *self._maps, quantity, "quantized − float" if head else ERROR)


def stage_probes(model: Detector) -> list[StageProbe]:
    """One probe for every stage that the model has."""
    yx = model.map_axes == "yx"
    return [
        StageProbe(step.output, step.path, transposed=yx)
        for step in model.flow
        if step.output in STAGE_TITLES
    ]


def whole_output(output: Any) -> Tensor:
    """The dense tensor of an output: the map, or the heatmap.

    The heatmaps of several tasks are concatenated. For other outputs it is the first tensor.

    Raises:
        InputError: The output has no tensor.
    """
    if isinstance(output, Mapping) and output:
        heatmaps = [value for name, value in output.items() if name.startswith("heatmap_")]
        if heatmaps:
            return torch.cat(heatmaps, 1)
        named = (output[name] for name in ("dense_heatmap", "heatmap") if name in output)
        return whole_output(next(named, next(iter(output.values()))))
    if isinstance(output, list | tuple) and output:
        return whole_output(output[0])
    values = output if isinstance(output, Tensor) else getattr(output, "features", None)
    if not isinstance(values, Tensor):
        raise InputError(
            f"the model returned {type(output).__name__}: expected tensors, alone or in tuples, "
            "lists and dicts; change its forward, or give a network that ends before"
        )
    return values


def relative_change(wanted: Tensor, got: Tensor) -> float:
    """Max |got − wanted| / max |wanted|, or by 1 where that is 0; infinite for another shape.

    Equal infinities are no change, see `bevquant_qnn.gap`.
    """
    if got.shape != wanted.shape:
        return float("inf")
    _, largest, size = gap(wanted, got)
    return largest / (size or 1.0)


def _norms(wanted: Tensor, got: Tensor, *, image: bool) -> tuple[Map, Map, Map]:
    if not image:
        wanted, got = wanted[:1], got[:1]
    empty = ~((wanted != 0).any(1) | (got != 0).any(1))
    maps = [
        values.float().norm(dim=1).masked_fill(empty, torch.nan).numpy()
        for values in (wanted, got, got - wanted)
    ]
    first, second, third = maps if image else (m[0] for m in maps)
    return first, second, third


def _probabilities(wanted: Tensor, got: Tensor, *, image: bool) -> tuple[Map, Map, Map]:
    first, second = (values[0].float().sigmoid().amax(0).numpy() for values in (wanted, got))
    return first, second, second - first
