"""Two runs side by side, one value ahead: comparing them keeps no more than that value."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class _Stopped(BaseException):
    """Ends the leader's thread; not an Exception, so that nothing on the way catches it."""


class Leader(Generic[Result]):
    """A run in a thread of its own that waits whenever its values are not requested.

    The run calls `hand_out`; the other side calls `take` with a name. Only one of the two runs at a
    time, so they use the cores like one run. Made by `lead`.
    """

    def __init__(self, run: Callable[[], Result]) -> None:
        self._run = run
        self._go, self._ready = threading.Semaphore(0), threading.Semaphore(0)
        self._handed: dict[Hashable, deque[Tensor]] = {}
        self._done = self._stop = False
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="float model", daemon=True)

    def hand_out(self, name: Hashable, value: Tensor) -> None:
        """Offer a value from within the run, and wait for the next request."""
        self._handed.setdefault(name, deque()).append(value)
        self._pause()

    def take(self, name: Hashable) -> Tensor:
        """Return the next value with this name; the run continues until there is one.

        Raises:
            LookupError: The run ended without it.
        """
        if not self.reach(name):
            raise LookupError(f"the float model never reached {name}")
        return self._handed[name].popleft()

    def reach(self, name: Hashable) -> bool:
        """Continue the run until a value is available; return whether there is one."""
        while not self._handed.get(name):
            if self._done:
                return False
            self._step()
        return True

    def result(self) -> Result:
        """Return the result of the run after its end."""
        while not self._done:
            self._step()
        return self._result[0]

    def start(self) -> None:
        """Start the thread in its waiting state."""
        self._thread.start()

    def close(self) -> None:
        """Stop the run."""
        self._stop = True
        self._go.release()
        self._thread.join()
        self._handed.clear()

    def _step(self) -> None:
        self._go.release()
        self._ready.acquire()
        if self._error is not None:
            raise self._error

    def _pause(self) -> None:
        self._ready.release()
        self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._stop:
            raise _Stopped

    def _work(self) -> None:
        try:
            self._wait()
            with torch.no_grad():  # a thread has its own gradient mode
                self._result.append(self._run())
        except _Stopped:
            return
        except BaseException as error:  # raised again where it is waited for
            self._error = error
        self._done = True
        self._ready.release()


@contextmanager
def lead(run: Callable[[], Result]) -> Iterator[Leader[Result]]:
    """A `Leader` for the length of a block; its thread ends with the block.

    Args:
        run: Runs in the leader's thread, without gradients.

    Example:
        >>> import torch
        >>> def count():
        ...     for number in range(3):
        ...         leader.hand_out("number", torch.tensor(number))
        ...     return "end"
        >>> with lead(count) as leader:
        ...     print([int(leader.take("number")) for _ in range(2)], leader.result())
        [0, 1] end
    """
    leader = Leader(run)
    leader.start()
    try:
        yield leader
    finally:
        leader.close()
