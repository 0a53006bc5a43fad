"""Two runs in step: one value ahead, never both at once, and no thread left behind."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from bevquant_qnn import Leader, lead


def number(value: float) -> Tensor:
    return torch.tensor(value)


def test_the_leader_is_one_value_ahead_and_waits() -> None:
    log: list[str] = []

    def run() -> str:
        for name in "abc":
            log.append(f"made {name}")
            leader.hand_out(name, number(1.0))
        return "end"

    with lead(run) as leader:
        assert log == []
        for name in "abc":
            leader.take(name)
            log.append(f"took {name}")
        assert leader.result() == "end"
    assert log == ["made a", "took a", "made b", "took b", "made c", "took c"]


def test_values_asked_for_in_another_order_are_kept() -> None:
    def run() -> None:
        for value, name in enumerate("aab"):
            leader.hand_out(name, number(value))

    with lead(run) as leader:
        assert leader.take("b") == 2
        assert [float(leader.take("a")) for _ in range(2)] == [0, 1]
        with pytest.raises(LookupError, match="never reached a"):
            leader.take("a")


def test_gradients_are_off_in_the_thread_too() -> None:
    weight = torch.ones(1, requires_grad=True)
    with lead(lambda: weight * 2) as leader:
        assert not leader.result().requires_grad


def test_an_error_of_the_leader_is_raised_where_it_is_waited_for() -> None:
    def run() -> None:
        raise ValueError("broken layer")

    with lead(run) as leader, pytest.raises(ValueError, match="broken layer"):
        leader.take("a")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_thread_ends_with_the_block(error: type[BaseException]) -> None:
    reached: list[str] = []
    leaders: list[Leader[None]] = []

    def run() -> None:
        for name in "ab":
            leaders[0].hand_out(name, number(0.0))
            reached.append(name)

    def fail() -> None:
        with lead(run) as leader:
            leaders.append(leader)
            leader.take("a")
            raise error

    before = threading.active_count()
    with pytest.raises(error):
        fail()
    assert threading.active_count() == before
    assert reached == []
