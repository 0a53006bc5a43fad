"""Join the other processes for the length of a run, hear of their end at once, leave with a word.

A process that is killed says nothing, but the system closes its connections: each has one with the
first.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from bevfusion_quant._errors import InputError, VerificationError
from bevfusion_quant.ranks._ranks import RankError, Ranks, current_ranks, use_line
from bevquant_quantizers.documents import parse_json

# A machine that vanishes closes nothing: it is asked after a minute, and given up a minute later.
_IDLE, _INTERVAL, _TRIES = 60, 15, 4
# A process that waits for a dead one without noticing ends by itself.
_GRACE = 120.0
_EXIT_CODE = 2


class Ending(NamedTuple):
    """How a rank ended before its time.

    Attributes:
        rank: Which one.
        text: What it said; None where it died without a word.
    """

    rank: int
    text: str | None

    def message(self, world: int, goes_on: str) -> str:
        """What to tell the user; `goes_on` says how."""
        who = f"rank {self.rank} of {world}"
        if self.text is not None:
            return f"{who}: {self.text}"
        return (
            f"{who} has died, killed or out of memory or with its machine: nothing was written to "
            f"the run; {goes_on}"
        )

    def spoken_by(self, world: int) -> int:
        """The rank that prints the message; the first has printed its own words itself."""
        if self.rank:
            return 0
        return 1 if self.text is None else world


class _Said(msgspec.Struct):
    rank: int
    done: bool
    text: str | None


class _Hello(msgspec.Struct):
    rank: int
    token: str


class Line:
    """Connections between the first rank and the others, open as long as the run.

    Args:
        rank: This process.
        world: How many there are.
        store: torch.distributed's store, where the first rank leaves its port.
        address: Host of the first rank.

    Attributes:
        ending: The first early end of another rank that this one has heard of.
        goes_on: What to do after a death.
    """

    def __init__(self, rank: int, world: int, store: Any, address: str) -> None:
        self.ending: Ending | None = None
        self.goes_on = "run the same command again"
        self._rank, self._world = rank, world
        self._heard, self._closed = threading.Event(), False
        self._lock = threading.Lock()
        self._peers: dict[int, socket.socket] = {}
        if rank == 0:
            self._listen(store)
        else:
            port, token = store.get("bevfusion-quant/line").decode().split()
            peer = socket.create_connection((address, int(port)), timeout=60)
            peer.settimeout(None)
            self._peers[0] = peer
            _keep_alive(peer)
            _send(peer, {"token": token, "rank": rank})
            self._start(self._read, 0, peer, peer.makefile("rb"))

    def wait(self, seconds: float) -> Ending | None:
        """Another rank's end, as soon as it is heard of."""
        self._heard.wait(seconds)
        return self.ending

    def close(self, text: str | None = None) -> None:
        """Say that this rank is done, or with what words it stops before its time."""
        with self._lock:
            self._closed = True
            peers = list(self._peers.values())
        for peer in peers:
            _send(peer, {"rank": self._rank, "done": text is None, "text": text})
            with suppress(OSError):
                peer.shutdown(socket.SHUT_WR)

    def _listen(self, store: Any) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        token = secrets.token_hex(16)
        store.set("bevfusion-quant/line", f"{server.getsockname()[1]} {token}")
        self._start(self._accept, server, token)

    def _accept(self, server: socket.socket, token: str) -> None:
        with server:
            while len(self._peers) < self._world - 1:
                peer, _ = server.accept()
                reader = peer.makefile("rb")
                peer.settimeout(10)
                with suppress(OSError, ValueError, TypeError):
                    hello = parse_json(reader.readline(200), _Hello, where="a rank's greeting")
                    if secrets.compare_digest(hello.token, token):
                        peer.settimeout(None)
                        _keep_alive(peer)
                        with self._lock:
                            self._peers[hello.rank] = peer
                        self._start(self._read, hello.rank, peer, reader)
                        continue
                reader.close()
                peer.close()

    def _read(self, rank: int, peer: socket.socket, reader: Any) -> None:
        ended = False
        with peer, reader, suppress(OSError, ValueError):
            for line in reader:
                said = parse_json(line, _Said, where="a rank's line", what="message")
                if said.done:
                    ended = True
                    continue
                ended |= said.rank == rank
                self._learn(Ending(said.rank, said.text))
        if not ended:
            self._learn(Ending(rank, None))

    def _learn(self, ending: Ending) -> None:
        with self._lock:
            if self.ending is not None or self._closed:
                return
            self.ending = ending
            peers = dict(self._peers)
        self._heard.set()
        if self._rank == 0:
            for rank, peer in peers.items():
                if rank != ending.rank:
                    _send(peer, {"rank": ending.rank, "done": False, "text": ending.text})
        late = threading.Timer(_GRACE, self._leave)
        late.daemon = True
        late.start()

    def _leave(self) -> None:
        if self._closed or self.ending is None:
            return
        if self._rank == self.ending.spoken_by(self._world):
            text = self.ending.message(self._world, self.goes_on)
            print(f"bevfusion-quant: {text}", file=sys.stderr, flush=True)
        os._exit(_EXIT_CODE)

    def _start(self, work: Any, *arguments: Any) -> None:
        threading.Thread(target=work, args=arguments, name="ranks", daemon=True).start()


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):
        peer.sendall(json.dumps(message).encode() + b"\n")


def _keep_alive(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_KEEPIDLE"):  # Linux
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _TRIES)


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
