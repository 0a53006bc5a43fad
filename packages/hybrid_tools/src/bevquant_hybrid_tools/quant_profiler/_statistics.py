"""Extremes, mean and variance of what operators compute."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevquant_hybrid_tools.quant_profiler._tables import (
    curves_page,
    grid_table,
    write_histograms,
    write_text,
)

__all__ = ["Statistic", "profile_featuremap"]

_HEADER = (
    *("Module Index", "Module Name", "Module Type", "Input/Output/Attr"),
    *("Min", "Max", "Mean", "Var", "Scale", "Dtype"),
)


@dataclass(frozen=True)
class Statistic:
    """Numbers of one tensor.

    Attributes:
        index: Place of the operator's call in the run.
        name: The operator, with its method and how often it had been called: ``cat[cat](1)``.
        kind: Its class.
        attr: Which of its tensors.
        min: Smallest value.
        max: Largest value.
        mean: Mean.
        var: Unbiased variance; NaN for a single value.
        scale: One scale, one per channel, or None.
        dtype: Quantized or float type.
        finite: Whether there is neither NaN nor an infinite value.
    """

    index: int
    name: str
    kind: str
    attr: str
    min: float
    max: float
    mean: float
    var: float
    scale: tuple[float, ...] | None
    dtype: str
    finite: bool

    @property
    def reach(self) -> float:
        """The largest size of a value; infinite where one is not finite."""
        return max(abs(self.min), abs(self.max)) if self.finite else math.inf


def profile_featuremap(
    featuremap: Iterable[Mapping[str, Any]],
    with_tensorboard: bool = False,
    tensorboard_dir: str | os.PathLike[str] | None = None,
    print_per_channel_scale: bool = False,
    show_per_channel: bool = False,
    out_dir: str | os.PathLike[str] | None = None,
    file_name: str | None = None,
) -> list[Statistic]:
    """Write the statistics of `get_raw_features` as text and as a picture.

    ``statistic.txt`` holds a table in the order of execution and one by falling size of the values,
    and, where there are any, one of the tensors with NaN or infinite values, which is printed too.
    ``statistic.html`` shows extremes and means of the outputs.

    Args:
        featuremap: What `get_raw_features` returned.
        with_tensorboard: Write histograms for TensorBoard too.
        tensorboard_dir: Where; None for its own choice.
        print_per_channel_scale: Print scales per channel, else the cell is empty.
        show_per_channel: One histogram per channel.
        out_dir: Folder of the files; None for the current one.
        file_name: Their name instead of ``statistic``.

    Returns:
        The numbers, in the order of `featuremap`.

    Raises:
        ImportError: `with_tensorboard` and TensorBoard is not installed.
    """
    features = list(featuremap)
    places: dict[tuple[str, int], int] = {}
    statistics = []
    for feature in features:
        key = (feature["module_name"], feature.get("repeat", 0))
        statistics.append(_statistic(places.setdefault(key, len(places)), feature))
    table = _table(statistics, print_per_channel_scale)
    ordered = sorted(statistics, key=lambda s: s.reach, reverse=True)
    text = f"{table}\n\nStatistics with quant range in descending order...\n"
    text += f"{_table(ordered, print_per_channel_scale)}\n"
    broken = [s for s in statistics if not s.finite]
    if broken:
        warning = "Please check these OPs: there are NaN or inf values..\n"
        warning += _table(broken, print_per_channel_scale)
        text += f"\n{warning}\n"
        print(warning)
    name = file_name or "statistic"
    write_text(out_dir, f"{name.removesuffix('.txt')}.txt", text)
    outputs = [s for s in statistics if s.attr.startswith("output")]
    curves = {what: [getattr(s, what) for s in outputs] for what in ("min", "max", "mean")}
    page = curves_page("Statistics of outputs", [f"{s.index} {s.name}" for s in outputs], curves)
    write_text(out_dir, f"{name.removesuffix('.txt')}.html", page)
    if with_tensorboard:
        titles = [f"{s.index}:{s.name}:{s.attr}" for s in statistics]
        tensors = [(f["data"], f["ch_axis"]) for f in features]
        write_histograms(titles, tensors, tensorboard_dir, show_per_channel)
    return statistics


def _statistic(index: int, feature: Mapping[str, Any]) -> Statistic:
    method, repeat = feature.get("ff_method"), feature.get("repeat", 0)
    name = feature["module_name"] + (f"[{method}]" if method else "")
    data: Tensor = feature["data"].detach().double()
    scale: Tensor | None = feature["scale"]
    count = data.numel()
    low, high = torch.aminmax(data) if count else (torch.tensor(math.nan),) * 2
    return Statistic(
        index,
        name + (f"({repeat})" if repeat else ""),
        str(feature.get("module_type", "")),
        feature["attr"],
        low.item(),
        high.item(),
        data.mean().item() if count else math.nan,
        data.var().item() if count > 1 else math.nan,
        None if scale is None else tuple(scale.reshape(-1).tolist()),
        feature.get("dtype", str(feature["data"].dtype)),
        bool(data.isfinite().all()),
    )


def _table(statistics: list[Statistic], per_channel: bool) -> str:
    rows = []
    for s in statistics:
        numbers = [f"{value:.7f}" for value in (s.min, s.max, s.mean, s.var)]
        scales = s.scale if s.scale is not None and (len(s.scale) == 1 or per_channel) else ()
        scale = ", ".join(f"{value:.7f}" for value in scales)
        rows.append([str(s.index), s.name, s.kind, s.attr, *numbers, scale, s.dtype])
    return grid_table(_HEADER, rows)
