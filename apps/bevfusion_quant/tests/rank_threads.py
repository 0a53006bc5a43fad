"""Ranks that are threads of one process, exchanging through memory what processes send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from bevfusion_quant.ranks import Ranks


class Together:
    """Runs one function as every rank of a world at once.

    Attributes:
        on_the_way: What becomes of a message between two ranks.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on_the_way: Callable[[bytes], bytes] = bytes
        self._own = threading.local()
        monkeypatch.setattr("bevfusion_quant.ranks._ranks._exchange", self._exchange)

    def __call__(self, world: int, work: Callable[[Ranks], Any]) -> list[Any]:
        """What each rank answers, or the exception that ended it; one that fails ends all."""
        self._sent: dict[int, dict[int, bytes]] = {}
        self._news, self._failed = threading.Condition(), False
        answers: list[Any] = [None] * world

        def run(rank: int) -> None:
            self._own.rank, self._own.times = rank, 0
            try:
                answers[rank] = work(Ranks(rank, world))
            except Exception as error:
                answers[rank] = error
                with self._news:
                    self._failed = True
                    self._news.notify_all()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return answers

    def _exchange(self, message: bytes, world: int, device: str) -> list[bytes]:
        assert device == "cpu"
        self._own.times += 1
        sent = self._sent.setdefault(self._own.times, {})
        with self._news:
            sent[self._own.rank] = self.on_the_way(message)
            self._news.notify_all()
            self._news.wait_for(lambda: len(sent) == world or self._failed, timeout=20)
        if len(sent) < world:
            raise RuntimeError("connection closed by peer")
        return [sent[rank] for rank in range(world)]
