"""What a launcher says in the environment: which of how many processes this is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from bevfusion_quant._errors import InputError

__all__ = ["Place", "launched_place"]

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


def launched_place(environment: Mapping[str, str]) -> Place | None:
    """The place of this process; None where it is the only one.

    torchrun, and Kubernetes' PyTorchJob, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. What
    srun starts is told by SLURM_PROCID and SLURM_STEP_NUM_TASKS, and meets on the step's first
    machine; a batch script outside srun is one process.

    Args:
        environment: `os.environ`.

    Raises:
        InputError: Numbers that are none, or do not fit each other, or no address.

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
        launcher = "torchrun --nproc-per-node 2 -m -- bevfusion_quant …"
    elif "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
        launcher = "srun bevfusion-quant …"
    else:
        return None
    given = {name: environment[name] for name in names if name in environment}
    told = ", ".join(f"{name}={value}" for name, value in given.items())
    try:
        rank, world = int(given[names[0]]), int(given[names[1]])
        local_rank = int(given.get(names[2], 0))
    except (KeyError, ValueError):
        rank, world, local_rank = -1, 0, 0
    if not 0 <= rank < world:
        raise InputError(
            f"the environment has {told}: expected {names[0]} from 0 to {names[1]} − 1; start with "
            f"{launcher}, or unset them for one process"
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
        raise InputError(
            f"the environment has MASTER_ADDR={address or ''}, MASTER_PORT={port or ''}: expected "
            f"the host of rank 0 and a free port there; start with {launcher}"
        )
    return address, int(port)


def _first_host(nodes: str) -> str:
    """The first of Slurm's list, such as `gpu[07-10,12],cpu1`."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\])?", nodes)
    return "" if found is None else found[1] + (found[2] or "")
