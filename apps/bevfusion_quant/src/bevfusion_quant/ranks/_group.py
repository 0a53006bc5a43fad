"""Join the other processes for the length of a run, and leave them with a word."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

from bevfusion_quant._errors import InputError, VerificationError
from bevfusion_quant.ranks._launcher import Place, launched_place
from bevfusion_quant.ranks._line import Line
from bevfusion_quant.ranks._ranks import RankError, Ranks, current_ranks, use_line

__all__ = ["launched"]

# Until all have started. Later a rank may wait as long as another computes: the line tells of one
# that has died, and no clock is needed.
_START, _WAIT = timedelta(minutes=10), timedelta(days=7)
# A broken connection is noticed at once, and its reason a moment later. The launcher's signal comes
# after the death that it answers; Ctrl-C comes to all, and there is no news.
_NEWS, _NEWS_OF_ALL = 5.0, 1.0


@contextmanager
def launched() -> Iterator[Ranks]:
    """The processes that the launcher has started, joined for the length of a block.

    gloo joins them, and nccl besides where every process has a GPU of its own. Without a launcher
    it is this process alone.

    Raises:
        InputError: The environment contradicts itself, or not all processes come.
        RankError: A rank has ended before its time; raised on all others. Its own error is told to
            the first rank, which speaks for all; the others raise one that does not speak.
    """
    place = launched_place(os.environ)
    if place is None:
        yield Ranks()
        return
    import torch.distributed as dist

    line = _join(place)
    try:
        yield current_ranks()
    except BaseException as error:
        told = _ending(error, current_ranks(), line)
        if told is error:
            raise
        raise told from error
    else:
        line.close()
    finally:
        use_line(None)
        with suppress(Exception):  # connections to the dead
            dist.destroy_process_group()


def _join(place: Place) -> Line:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    has_gpu = torch.cuda.device_count() > place.local_rank and dist.is_nccl_available()
    where = f"tcp://{place.address}:{place.port}?rank={place.rank}&world_size={place.world}"
    try:
        store, rank, world = next(rendezvous(where, timeout=_START))
        store.set_timeout(_START)
        store.set(f"bevfusion-quant/gpu/{rank}", str(int(has_gpu)))
        have = [store.get(f"bevfusion-quant/gpu/{other}") == b"1" for other in range(world)]
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if all(have) else "gloo",
            store=PrefixStore("bevfusion-quant", store),
            rank=rank,
            world_size=world,
            timeout=_WAIT,
        )
        line = Line(rank, world, store, place.address)
    except (RuntimeError, OSError) as error:
        raise InputError(
            f"rank {place.rank} of {place.world} does not reach the others at {place.address}:"
            f"{place.port}: {str(error).splitlines()[0]}: start all ranks, within "
            f"{_START.seconds // 60} minutes, where they reach that host and port"
        ) from error
    use_line(line, place.local_rank if all(have) else None)
    return line


def _ending(error: BaseException, ranks: Ranks, line: Line) -> BaseException:
    """What a rank raises: another's end where that is the cause, else its own error, told."""
    if threading.current_thread() is threading.main_thread():
        # The launcher ends all ranks as soon as one has ended: not while we find out which.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupted = isinstance(error, KeyboardInterrupt)
    if interrupted or isinstance(error, RuntimeError | RankError):
        ending = line.ending or line.wait(_NEWS_OF_ALL if interrupted else _NEWS)
        if ending is not None:
            line.close(f"ended with rank {ending.rank}")
            return ranks.told(ending)
    line.close("interrupted" if interrupted else str(error) or type(error).__name__)
    expected = interrupted or isinstance(error, ValueError | OSError | VerificationError)
    return error if ranks.first or not expected else RankError(str(error), speaks=False)
