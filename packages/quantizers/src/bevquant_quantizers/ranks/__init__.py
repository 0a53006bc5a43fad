"""One run in several processes, started by torchrun, Slurm or Kubernetes: the bits of one process.

Items (frames, batches) are distributed. Their results return to every rank in order of items, and
sums are taken in that order. Only the first rank writes and prints. If a rank dies, all end with
one message, and finished items are not run again.

Example:
    >>> import numpy as np
    >>> with launched() as ranks:  # alone here, and one of many under torchrun
    ...     squares = [
    ...         int(record["square"])
    ...         for _, record in in_order("squares", 4, lambda i: {"square": np.array(i * i)})
    ...     ]
    ...     if ranks.first:
    ...         print(squares)
    [0, 1, 4, 9]
"""

from ._group import Place, launched, launched_place
from ._ranks import LaunchError, Line, RankError, Ranks, current_ranks
from ._shards import Record, Shards, in_order, pack, tensors_in_order, unpack

__all__ = [
    "LaunchError",
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
    "tensors_in_order",
    "unpack",
]
