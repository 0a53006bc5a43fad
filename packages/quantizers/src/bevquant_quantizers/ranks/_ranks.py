"""Processes of one run: exchange of results, and detection of a process that died.

A killed process sends no message, but the system closes its connections: each has one with the
first process.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np

from bevquant_quantizers.documents import DocumentError, parse_json

if TYPE_CHECKING:
    from torch import Tensor

# A machine that vanishes closes nothing: it is asked after a minute, and given up a minute later.
_IDLE, _INTERVAL, _TRIES = 60, 15, 4
# A process that waits for a dead one without noticing ends by itself.
_GRACE = 120.0
_EXIT_CODE = 2


class Ending(NamedTuple):
    """Early end of a rank."""

    rank: int
    # Its message; None if it died without one.
    text: str | None

    def message(self, world: int, goes_on: str) -> str:
        """The message for the user; `goes_on` is its remedy."""
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


class _Message(msgspec.Struct):
    rank: int
    done: bool
    text: str | None


class _Hello(msgspec.Struct):
    rank: int
    token: str


class Line:
    """Connections between the first rank and the others, open for the whole run.

    Args:
        rank: This process.
        world: Number of processes.
        store: torch.distributed's store, where the first rank publishes its port.
        address: Host of the first rank.
        program: Prefix of printed lines.

    Attributes:
        ending: The first known early end of another rank.
        goes_on: Remedy after a death.
    """

    def __init__(self, rank: int, world: int, store: Any, address: str, program: str = "") -> None:
        self.ending: Ending | None = None
        self.goes_on = "run the same command again"
        self._rank, self._world, self._program = rank, world, program
        self._heard, self._closed = threading.Event(), False
        self._lock = threading.Lock()
        self._peers: dict[int, socket.socket] = {}
        if rank == 0:
            self._listen(store)
        else:
            port, token = store.get("bevquant/line").decode().split()
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
        """Report that this rank is done, or the message with which it stops early."""
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
        store.set("bevquant/line", f"{server.getsockname()[1]} {token}")
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
                parsed = parse_json(line, _Message, where="a rank's line", what="message")
                if parsed.done:
                    ended = True
                    continue
                ended |= parsed.rank == rank
                self._learn(Ending(parsed.rank, parsed.text))
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
            print(f"{self._program}: {text}".removeprefix(": "), file=sys.stderr, flush=True)
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


Value = TypeVar("Value", bytes, "np.ndarray[Any, Any]", "Tensor")


class LaunchError(ValueError):
    """The processes differ in environment, connection or program."""


class RankError(Exception):
    """The run ends because a rank ended early.

    Args:
        message: The rank, and the remedy.
        speaks: Whether this rank prints the message.
    """

    def __init__(self, message: str, *, speaks: bool = True) -> None:
        super().__init__(message)
        self.speaks = speaks


@dataclass(frozen=True)
class Ranks:
    """The processes of one run; `Ranks()` is a single process.

    All processes call `gather` and `agree` at the same points, in the same order.

    Args:
        rank: This process, from 0.
        world: Number of processes.
        line: Reports the end of another process; None without detection.
        gpu: This process's own GPU, if all processes have one and nccl joins them.

    Example:
        >>> Ranks(rank=1, world=3).mine(8)
        range(1, 8, 3)
        >>> Ranks().gather({1: b"b", 0: b"a"})
        {0: b'a', 1: b'b'}
    """

    rank: int = 0
    world: int = 1
    line: Line | None = None
    gpu: int | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.world == 1

    def mine(self, count: int) -> range:
        """Which of `count` items this process takes: every `world`-th, from `rank` on."""
        return range(self.rank, count, self.world)

    def check(self) -> None:
        """Stop where another process has ended.

        Raises:
            RankError: It has.
        """
        ending = None if self.line is None else self.line.ending
        if ending is not None:
            raise self.error_of(ending)

    def error_of(self, ending: Ending) -> RankError:
        """The message of the one rank that speaks: the first, or the next where it has died."""
        goes_on = "" if self.line is None else self.line.goes_on
        return RankError(
            ending.message(self.world, goes_on), speaks=self.rank == ending.spoken_by(self.world)
        )

    def goes_on(self, how: str) -> None:
        """Set the remedy of the message about a rank that dies from now on."""
        if self.line is not None:
            self.line.goes_on = how

    def gather(self, own: Mapping[int, Value], *, by_gpu: bool = False) -> dict[int, Value]:
        """Everybody's items, on every rank, in order of index, bit for bit.

        Nothing is pickled: bytes and numbers travel. Arrays and tensors keep type and shape;
        tensors come back on the CPU.

        Args:
            own: This process's items by index, such as those of `mine`; it may have none.
            by_gpu: Send them from GPU to GPU, where each process has one.

        Raises:
            RankError: Another process has ended.
            RuntimeError: The connection broke.
        """
        self.check()
        everything: dict[int, Value] = dict(own)
        if not self.alone:
            device = "cpu" if self.gpu is None or not by_gpu else f"cuda:{self.gpu}"
            for rank, message in enumerate(_exchange(_packed(own), self.world, device)):
                if rank != self.rank:
                    everything.update(_unpacked(message))
        return {index: everything[index] for index in sorted(everything)}

    def agree(self, what: str, text: str) -> None:
        """Check that all ranks have the same value.

        Args:
            what: Its name in the message, a plural.
            text: This process's value, such as a digest.

        Raises:
            LaunchError: The values differ.
        """
        texts = self.gather({self.rank: text.encode()})
        apart = [rank for rank, other in texts.items() if other != texts[0]]
        if apart:
            raise LaunchError(
                f"{what} of rank {apart[0]} differ from rank 0: give every rank the same "
                "command, files, library versions and kind of machine"
            )


_LINE: Line | None = None
_GPU: int | None = None


def use_line(line: Line | None, gpu: int | None = None) -> None:
    """Let `current_ranks` know the line of this process's group, and its GPU."""
    global _LINE, _GPU
    _LINE, _GPU = line, gpu


def current_ranks() -> Ranks:
    """The processes of torch.distributed, where it is initialised; else this process alone."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    return Ranks(dist.get_rank(), dist.get_world_size(), _LINE, _GPU)


def _packed(own: Mapping[int, Any]) -> bytes:
    """A line of JSON that describes the items, then their bytes."""
    described, parts = [], []
    for index, value in own.items():
        if isinstance(value, bytes):
            kind, array = "bytes", np.frombuffer(value, np.uint8)
        elif isinstance(value, np.ndarray):
            kind, array = "array", value
        else:
            kind, array = "tensor", value.detach().cpu().numpy()
        described.append([index, kind, array.dtype.str, array.shape, array.nbytes])
        parts.append(array.tobytes())
    return b"".join([json.dumps(described).encode(), b"\n", *parts])


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Dtype = Annotated[str, msgspec.Meta(pattern=r"^[<>|=]?[biufcSU]\d+$")]  # numpy evaluates others
_Described = list[tuple[int, Literal["bytes", "array", "tensor"], _Dtype, list[_Count], _Count]]


def _unpacked(message: bytes) -> dict[int, Any]:
    import torch

    head, _, body = message.partition(b"\n")
    found: dict[int, Any] = {}
    start = 0
    for index, kind, dtype, shape, size in parse_json(head, _Described, where="a rank's message"):
        data = body[start : start + size]
        start += size
        try:
            array = np.frombuffer(bytearray(data), dtype).reshape(shape)
            values = torch.from_numpy(array) if kind == "tensor" else array
            found[index] = data if kind == "bytes" else values
        except (TypeError, ValueError) as error:
            raise DocumentError(f"a rank's message does not hold item {index}: {error}") from error
    return found


def _exchange(message: bytes, world: int, device: str) -> list[bytes]:
    """Every rank's message, in order of ranks; messages of any length."""
    import torch
    import torch.distributed as dist

    # By gloo, or by nccl if the device is a GPU: tensors of one length.
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(message)], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
    received = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(received, padded.to(device))
    return [
        data[: int(size)].cpu().numpy().tobytes()
        for data, size in zip(received, sizes, strict=True)
    ]
