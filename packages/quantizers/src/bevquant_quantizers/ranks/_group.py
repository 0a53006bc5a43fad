"""Join the other processes for the length of a run, and leave them with a word."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple

from ._ranks import LaunchError, Line, RankError, Ranks, current_ranks, use_line

# Slurm gives no port; jobs on one machine must not share it.
_PORTS = (20000, 10000)


class Place(NamedTuple):
    """One process of several.

    Attributes:
        rank: Its number, from 0.
        world: How many there are.
        local_rank: Its number on its own machine.
        address: Host of rank 0.
        port: Where the processes find each other there.
    """

    rank: int
    world: int
    local_rank: int
    address: str
    port: int


def launched_place(environment: Mapping[str, str], program: str = "") -> Place | None:
    """Rank of this process; None for a single process.

    torchrun and Kubernetes' PyTorchJob set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. srun sets
    SLURM_PROCID and SLURM_STEP_NUM_TASKS; its processes meet on the step's first machine. A batch
    script outside srun is one process.

    Args:
        environment: `os.environ`.
        program: As for `launched`.

    Raises:
        LaunchError: Invalid or contradicting numbers, or no address.

    Example:
        >>> slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1",
        ...          "SLURM_STEP_NODELIST": "gpu[07-10]", "SLURM_JOB_ID": "41"}
        >>> launched_place(slurm)
        Place(rank=3, world=8, local_rank=1, address='gpu07', port=20041)
        >>> launched_place({}) is None
        True
    """
    if "RANK" in environment or "WORLD_SIZE" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        module = program.replace("-", "_") or "your_module"
        launcher = f"torchrun --nproc-per-node 2 -m -- {module} …"
    elif "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        launcher = f"srun {program or 'your_program'} …"
    else:
        return None
    given = {name: environment[name] for name in names if name in environment}
    stated = ", ".join(f"{name}={value}" for name, value in given.items())
    try:
        rank, world = int(given[names[0]]), int(given[names[1]])
        local_rank = int(given.get(names[2], 0))
    except (KeyError, ValueError):
        rank, world, local_rank = -1, 0, 0
    if not 0 <= rank < world:
        raise LaunchError(
            f"the environment has {stated}: expected {names[0]} from 0 to {names[1]} − 1; start "
            f"with {launcher}, or unset them for one process"
        )
    if world == 1:
        return None
    return Place(rank, world, local_rank, *_meeting_point(environment, launcher))


def _meeting_point(environment: Mapping[str, str], launcher: str) -> tuple[str, int]:
    address, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        address = address or _first_host(environment.get("SLURM_STEP_NODELIST", ""))
        first, count = _PORTS
        port = port or str(first + int(environment.get("SLURM_JOB_ID", "0")) % count)
    if not address or port is None or not port.isdigit():
        raise LaunchError(
            f"the environment has MASTER_ADDR={address or ''}, MASTER_PORT={port or ''}: expected "
            f"the host of rank 0 and a free port there; start with {launcher}"
        )
    return address, int(port)


def _first_host(nodes: str) -> str:
    """The first of Slurm's list, such as `gpu[07-10,12],cpu1`."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?", nodes)
    return "" if found is None else found[1] + (found[2] or "")


# Until all have started. Later a rank may wait as long as another computes: the line tells of one
# that has died, and no clock is needed.
_START, _WAIT = timedelta(minutes=10), timedelta(days=7)
# A broken connection is noticed at once, and its reason a moment later. The launcher's signal comes
# after the death that it answers; Ctrl-C comes to all, and there is no news.
_NEWS, _NEWS_OF_ALL = 5.0, 1.0


@contextmanager
def launched(
    program: str = "", expected: tuple[type[Exception], ...] = (ValueError, OSError)
) -> Iterator[Ranks]:
    """The processes of the launcher, joined for the length of a block.

    gloo joins them, and nccl too if every process has a GPU of its own. Without a launcher it is
    this process alone.

    Args:
        program: The command, for messages; the module of torchrun's `-m` has its name with _ for -.
        expected: Errors that are no fault of the program: of several ranks that end with one, only
            the first prints it.

    Raises:
        LaunchError: The environment contradicts itself, or a process does not come.
        RankError: A rank ended early; raised on all others. Its own error goes to the first rank,
            which prints it for all.
    """
    place = launched_place(os.environ, program)
    if place is None:
        yield Ranks()
        return
    import torch.distributed as dist

    line = _join(place, program)
    try:
        yield current_ranks()
    except BaseException as error:
        stated = _ending(error, current_ranks(), line, expected)
        if stated is error:
            raise
        raise stated from error
    else:
        line.close()
    finally:
        use_line(None)
        with suppress(Exception):  # connections to the dead
            dist.destroy_process_group()


def _join(place: Place, program: str) -> Line:
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    has_gpu = torch.cuda.device_count() > place.local_rank and dist.is_nccl_available()
    where = f"tcp://{place.address}:{place.port}?rank={place.rank}&world_size={place.world}"
    try:
        store, rank, world = next(rendezvous(where, timeout=_START))
        store.set_timeout(_START)
        store.set(f"bevquant/gpu/{rank}", str(int(has_gpu)))
        have = [store.get(f"bevquant/gpu/{other}") == b"1" for other in range(world)]
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if all(have) else "gloo",
            store=PrefixStore("bevquant", store),
            rank=rank,
            world_size=world,
            timeout=_WAIT,
        )
        line = Line(rank, world, store, place.address, program)
    except (RuntimeError, OSError) as error:
        raise LaunchError(
            f"rank {place.rank} of {place.world} does not reach the others at {place.address}:"
            f"{place.port}: {str(error).splitlines()[0]}: start all ranks, within "
            f"{_START.seconds // 60} minutes, where they reach that host and port"
        ) from error
    use_line(line, place.local_rank if all(have) else None)
    return line


def _ending(
    error: BaseException, ranks: Ranks, line: Line, expected: tuple[type[Exception], ...]
) -> BaseException:
    """The error that a rank raises: another rank's end if that is the cause, else its own."""
    if threading.current_thread() is threading.main_thread():
        # The launcher ends all ranks as soon as one has ended: not while we find out which.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    interrupted = isinstance(error, KeyboardInterrupt)
    if interrupted or isinstance(error, RuntimeError | RankError):
        ending = line.ending or line.wait(_NEWS_OF_ALL if interrupted else _NEWS)
        if ending is not None:
            line.close(f"ended with rank {ending.rank}")
            return ranks.error_of(ending)
    line.close("interrupted" if interrupted else str(error) or type(error).__name__)
    silent = not ranks.first and (interrupted or isinstance(error, expected))
    return RankError(str(error), speaks=False) if silent else error
