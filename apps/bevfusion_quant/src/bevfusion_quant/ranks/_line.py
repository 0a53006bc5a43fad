"""How the ranks hear of each other's end at once: a connection of each with the first.

A process that is killed says nothing, but the system closes its connections.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

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
