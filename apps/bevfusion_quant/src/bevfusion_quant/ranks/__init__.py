"""One run in several processes, started by torchrun, Slurm or Kubernetes: the bits of one process.

Frames are dealt out, what was measured on each comes back to every rank in order of frames, and
sums are taken in that order. The first rank alone writes and prints.
"""

from bevfusion_quant.ranks._group import Place, launched, launched_place
from bevfusion_quant.ranks._ranks import Line, RankError, Ranks, current_ranks
from bevfusion_quant.ranks._shards import Record, Shards, in_order, pack, unpack

__all__ = [
    "Line",
    "Place",
    "RankError",
    "Ranks",
    "Record",
    "Shards",
    "current_ranks",
    "in_order",
    "launched",
    "launched_place",
    "pack",
    "unpack",
]
