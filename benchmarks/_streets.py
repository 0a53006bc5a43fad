"""Shipped detectors on generated streets: mAP less float by condition; estimated sensitivity.

Ranges come from clear streets alone, which are not judged. The interval of a condition is the
bootstrap's of its streets, paired: one draw for all models. No street is in two conditions, so the
mean over n conditions (strata) has the half-width √Σh²/n, h those of the conditions.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from bev_data.metrics import Bootstrap
from bev_scenes import CONDITIONS, street_frame
from bevfusion.evaluation import accumulate_models, accuracy_accumulator
from bevfusion.model import trained_weights
from bevfusion.quantization import measure_sensitivity
from bevfusion_quant.frames import FrameBatches
from bevfusion_quant.integer import lowered
from bevfusion_quant.options import PtqConfig
from bevfusion_quant.ptq import run_ptq
from bevfusion_quant.saved_run import LoadedRun, load_run

RUNS: dict[str, dict[str, Any]] = {"W8A8": {}, "W8A8 unsigned": {"unsigned": True}}


def streets(first: int, count: int, conditions: str = "clear") -> list[Any]:
    """Frames of consecutive seeds."""
    seeds = range(first, first + count)
    return [street_frame(s, size="tiny", cameras="tiny", conditions=conditions) for s in seeds]


def made_run(folder: Path, name: str, **settings: Any) -> LoadedRun:
    """The run of this name, made if the folder has none."""
    if not (folder / name).exists():
        config = PtqConfig(config="tiny", branch="all", **settings)
        run_ptq(streets(5000, 16), config, runs=folder, name=name)
    return load_run(folder / name)


def compare_ranks(folder: Path) -> None:
    """Print Spearman's ρ of estimated and measured SQNR of each group of layers alone."""
    print("\nsensitivity on two streets: groups of layers, SQNR, ρ of estimate, CPU seconds")
    pillars = {"model": "centerpoint-pillars", "cameras": ()}
    shipped: dict[str, dict[str, Any]] = {
        "W8A8": {"weights": trained_weights("tiny")},
        "pillars": {**pillars, "weights": trained_weights("centerpoint-pillars-tiny")},
    }
    for name, settings in shipped.items():
        run = made_run(folder, name, **settings)
        model = run.quantized_model
        batches = FrameBatches(streets(100, 2), run.sizes, model)
        tables, seconds = [], []
        for estimate in (False, True):
            start = time.process_time()
            tables.append(
                measure_sensitivity(model, batches, run.sizes, without=False, estimate=estimate)
            )
            seconds.append(time.process_time() - start)
        scores = [row.alone["int8"] for row in tables[0]]
        print(
            f"{name:10} {len(scores)} groups of {min(scores):.0f} to {max(scores):.0f} dB, "
            f"ρ = {tables[0].rank_correlation(tables[1]):.3f}; {seconds[0]:.1f} measured, "
            f"{seconds[1]:.1f} estimated",
            flush=True,
        )


def compare_streets(folder: Path, first: int, count: int, conditions: list[str]) -> None:
    """Print a row for each condition, and the mean over all.

    Args:
        folder: Where the runs are, or will be.
        first: First seed.
        count: Streets of each condition; the next condition has the next ones.
        conditions: Names of `bev_scenes.CONDITIONS`; all by default.
    """
    weights = trained_weights("tiny")
    runs = {name: made_run(folder, name, weights=weights, **how) for name, how in RUNS.items()}
    float_model = next(iter(runs.values())).float_model
    sizes = next(iter(runs.values())).sizes
    models: dict[str, Any] = {"float": float_model}
    example = FrameBatches(streets(5000, 1), sizes, float_model)[0]
    for name, run in runs.items():
        models[f"{name}, fake"] = run.quantized_model
        models[f"{name}, integers"] = lowered(run.quantized_model, example, "auto")
    print(f"\n{count} streets each, from {first} on; points of mAP less float, 95 % intervals")
    heads = [f"{name:>32}" for name in list(models)[1:]]
    print(f"{'':12} {'labels':>7} {'float':>7} {''.join(heads)} {'CPU s':>7}")
    gaps: dict[str, list[tuple[float, float]]] = {name: [] for name in list(models)[1:]}
    for place, condition in enumerate(conditions or CONDITIONS):
        start = time.process_time()
        batches = FrameBatches(streets(first + place * count, count, condition), sizes, float_model)
        accumulator = accuracy_accumulator(sizes, batches, Bootstrap())
        for _ in accumulate_models("streets", models, float_model, batches, accumulator):
            pass
        scored = accumulator.result()
        assert scored is not None
        exact, *others = scored.models
        cells = []
        for entry in others:
            apart = entry.difference
            assert apart is not None
            assert apart.interval is not None
            low, high = apart.interval.low, apart.interval.high
            text = f"{100 * apart.mean_ap:+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
            cells.append(f"{text:>32}")
            gaps[entry.model].append((100 * apart.mean_ap, 50 * (high - low)))
        whole = 100 * (exact.metrics.mean_ap or math.nan)
        print(
            f"{condition:12} {exact.metrics.labels:7,} {whole:7.2f} {''.join(cells)} "
            f"{time.process_time() - start:7.0f}",
            flush=True,
        )
    cells = []
    for found in gaps.values():
        mean = math.fsum(gap for gap, _ in found) / len(found)
        half = math.sqrt(math.fsum(width**2 for _, width in found)) / len(found)
        text = f"{mean:+.2f} ± {half:.2f}"
        cells.append(f"{text:>32}")
    print(f"{'all':12} {'':7} {'':7} {''.join(cells)}")
