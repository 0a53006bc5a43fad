"""Random models of each kind, and a table of how their stages end.

    PYTHONPATH=tests python -m random_models [--count 20] [--seed 0] [--kind dense] [--targets 2]

A stage ends as ok, refused (a ValueError that the project raises), RAW (any other error) or SILENT
(a wrong result). For RAW and SILENT the seed and the fewest steps are printed.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence

import torch

from random_models.flow import KINDS, OUTCOMES, Found, run, smallest, targets_of


def chosen(kind: str, seed: int, count: int) -> list[str]:
    """The targets of a seed's model: some at a time, all in turn."""
    names = targets_of(kind)
    return [names[(seed * count + i) % len(names)] for i in range(min(count, len(names)))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the models; 1 where a stage ended as RAW or SILENT."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20, help="models of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--kind", choices=KINDS, action="append", help="all by default")
    parser.add_argument("--targets", type=int, default=2, help="files of each model; 0: none")
    parser.add_argument("--shrink", action="store_true", help="look for the fewest steps")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    counts: Counter[tuple[str, str, str]] = Counter()
    for kind in options.kind or KINDS:
        for seed in range(options.seed, options.seed + options.count):
            targets = chosen(kind, seed, options.targets)
            for found in run(kind, seed, targets):
                counts[kind, found.stage, found.outcome] += 1
                if found.outcome not in ("ok", "refused"):
                    _say(kind, seed, targets, found, options.shrink)
                elif found.outcome == "refused":
                    print(f"{kind} {seed} {found.stage} refused: {found.text[:300]}", flush=True)
    print(table(counts))
    return int(any(outcome in ("RAW", "SILENT") for _, _, outcome in counts))


def _say(kind: str, seed: int, targets: Sequence[str], found: Found, shrink: bool) -> None:
    print(f"{found.outcome} {kind} {seed} {found.stage}: {found.text[:400]}", flush=True)
    if shrink:
        skipped, steps = smallest(kind, seed, targets, found)
        print(f"    run({kind!r}, {seed}, {list(targets)}, {skipped}): {steps}", flush=True)


def table(counts: Counter[tuple[str, str, str]]) -> str:
    """How often each stage of each kind ended how."""
    rows = [("kind", "stage", *OUTCOMES)]
    for kind, stage in dict.fromkeys((kind, stage) for kind, stage, _ in counts):
        rows.append((kind, stage, *(str(counts[kind, stage, o]) for o in OUTCOMES)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )
