"""Several ranks give what one gives; what they have finished stays; who ends is heard of."""

from __future__ import annotations

import io
import logging
import queue
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bevquant_quantizers import DocumentError
from bevquant_quantizers.ranks import (
    LaunchError,
    Line,
    Ranks,
    Shards,
    current_ranks,
    in_order,
    launched_place,
    pack,
    tensors_in_order,
    unpack,
)
from bevquant_quantizers.ranks._ranks import _exchange

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NODELIST": "cpu[003-004],gpu1",
    "SLURM_JOB_ID": "123456",
}  # fmt: skip


class Together:
    """Runs one function as every rank of a world at once, in threads that exchange through memory.

    Attributes:
        on_the_way: What becomes of a message between two ranks.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.on_the_way: Callable[[bytes], bytes] = bytes
        self._own = threading.local()
        monkeypatch.setattr("bevquant_quantizers.ranks._ranks._exchange", self._exchange)

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
            self._news.wait_for(lambda: len(sent) == world or self._failed, timeout=300)
        if len(sent) < world:
            raise RuntimeError("connection closed by peer")
        return [sent[rank] for rank in range(world)]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Together:
    return Together(monkeypatch)


def test_launchers_say_where_a_process_is() -> None:
    assert launched_place(TORCHRUN | {"LOCAL_RANK": "1"}) == (1, 2, 1, "10.0.0.1", 29500)
    place = launched_place(SRUN)
    assert place is not None
    assert (place.rank, place.world, place.address) == (5, 8, "cpu003")
    # torchrun inside srun, one process of torchrun, a batch script outside srun.
    assert launched_place(SRUN | TORCHRUN) == launched_place(TORCHRUN)
    assert launched_place(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert launched_place({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}) is None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"RANK": "2"}, "RANK=2, WORLD_SIZE=2: expected RANK from 0"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE=many"),
        ({"MASTER_ADDR": ""}, "the host of rank 0"),
    ],
)
def test_an_environment_that_contradicts_itself_is_named(wrong: dict[str, str], told: str) -> None:
    with pytest.raises(LaunchError, match=told):
        launched_place(TORCHRUN | wrong)


def test_everything_arrives_bit_for_bit_in_order(together: Together) -> None:
    values: list[Any] = [
        np.array([[0.1, -0.0], [np.inf, 5e-324]]), b"raw\n\0", torch.tensor([1.5, 2.5]),
        np.zeros((0, 7), np.float32), b"", np.array(["a", "bc"]), torch.tensor(7),
    ]  # fmt: skip

    def gathered(ranks: Ranks) -> dict[int, Any]:
        return ranks.gather({i: values[i] for i in reversed(ranks.mine(len(values)))})

    for found in together(3, gathered):
        assert list(found) == list(range(len(values)))
        for i, value in enumerate(values):
            assert type(found[i]) is type(value)
            if isinstance(value, bytes):
                assert found[i] == value
            else:
                here, there = np.asarray(value), np.asarray(found[i])
                assert (here.dtype, here.shape) == (there.dtype, there.shape)
                assert here.tobytes() == there.tobytes()


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "gloo"),
        pytest.param(
            "cuda:0",
            "cpu:gloo,cuda:nccl",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
            ],
        ),
    ],
)
def test_messages_travel_by_gloo_and_by_nccl(device: str, backend: str) -> None:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert current_ranks() == Ranks(0, 1)
        assert _exchange(b"three\0\n", 1, device) == [b"three\0\n"]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("written", "refusal"),
    [
        (b">f4", "does not hold item"),
        (b"<f4,(,", "not a JSON document"),  # numpy evaluates such a text
    ],
)
def test_a_message_with_another_type_is_refused(
    together: Together, written: bytes, refusal: str
) -> None:
    together.on_the_way = lambda message: message.replace(b"<f4", written)
    found = together(2, lambda ranks: ranks.gather({ranks.rank: torch.ones(2)}))
    assert all(isinstance(error, ValueError) and refusal in str(error) for error in found)


def test_a_rank_with_other_settings_is_named(together: Together) -> None:
    found = together(3, lambda ranks: ranks.agree("the weights", "ab" if ranks.rank < 2 else "c"))
    assert all(isinstance(error, LaunchError) for error in found)
    assert "the weights of rank 2 differ from rank 0" in str(found[0])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_frame_is_run_once_and_comes_in_order(together: Together, world: int) -> None:
    run: queue.Queue[int] = queue.Queue()

    def work(index: int) -> dict[str, Any]:
        run.put(index)
        return {"value": np.array(index / 7)}

    def collected(ranks: Ranks) -> list[tuple[int, float]]:
        shards = Shards(Path("nowhere"), "x", {}, Ranks())
        shards.ranks = ranks
        return [(i, float(r["value"])) for i, r in in_order("a", 100, work, shards)]

    for found in together(world, collected):
        assert found == [(i, i / 7) for i in range(100)]
    assert sorted(run.queue) == list(range(100))


def test_what_is_finished_is_not_run_again(together: Together, tmp_path: Path) -> None:
    run: list[int] = []
    fails = True

    def work(index: int) -> dict[str, Any]:
        if fails and index == 5:
            raise ValueError("a bad frame")
        run.append(index)
        return {"value": np.array(index)}

    def collected(ranks: Ranks) -> list[int]:
        shards = Shards(tmp_path, "run", {"seed": 1}, ranks)
        found = [int(r["value"]) for _, r in in_order("a", 8, work, shards, anew=1)]
        shards.remove()
        return found

    first = together(2, collected)
    assert any(isinstance(error, ValueError) for error in first)
    finished = sorted(int(path.stem[2:]) for path in tmp_path.glob(".run.*.shards/a-*.npz"))
    assert finished == sorted(run)
    assert {1, 3} <= set(run)
    fails, before, run[:] = False, set(run), []
    assert together(2, collected) == [list(range(8))] * 2
    assert sorted(run) == sorted({0, *range(8)} - (before - {0}))  # the first always, for pictures
    assert not list(tmp_path.iterdir())


def test_records_of_other_settings_are_set_apart(
    together: Together, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def saved(seed: int) -> Any:
        def work(ranks: Ranks) -> Any:
            shards = Shards(tmp_path, "run", {"seed": seed}, ranks)
            known = shards.load("a", ranks.rank)
            shards.save("a", ranks.rank, {"seed": np.array(seed)})
            return known, shards.folder

        return together(2, work)

    (_, old), _ = saved(1)
    with caplog.at_level(logging.WARNING, logger="bevquant_quantizers"):
        (known, new), _ = saved(2)
    assert known is None
    assert old != new
    assert str(old) in caplog.text
    (known, again), _ = saved(1)
    assert again == old
    assert known is not None
    assert int(known["seed"]) == 1

    (old / "a-000000.npz").write_bytes(b"half a fi")
    error = together(2, lambda ranks: Shards(tmp_path, "run", {"seed": 1}, ranks).load("a", 0))[0]
    assert isinstance(error, DocumentError)
    assert "a-000000.npz" in str(error)


def test_a_process_alone_keeps_nothing(tmp_path: Path) -> None:
    shards = Shards(tmp_path, "run", {})
    shards.save("a", 0, {"value": np.array(1)})
    assert (shards.load("a", 0), shards.file("calibration")) == (None, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("world", [2, 3])
def test_sums_are_taken_in_order_of_items(together: Together, world: int) -> None:
    # In float32 the order decides: (1e8 + 1) - 1e8 is 0, (1e8 - 1e8) + 1 is 1.
    values = [1e8, 1.0, -1e8, 3.0, 1e-3]

    def work(item: int) -> tuple[torch.Tensor, ...]:
        return torch.tensor([values[item], item]), torch.zeros(item)

    def added(ranks: Ranks) -> torch.Tensor:
        found = list(tensors_in_order(len(values), work, ranks))
        assert [len(rest) for _, rest in found] == [0, 1, 2, 3, 4]
        return sum(value for value, _ in found)

    alone = added(Ranks())
    assert all(torch.equal(total, alone) for total in together(world, added))


def test_records_hold_no_objects() -> None:
    with pytest.raises(ValueError, match="wrong: a file holds numbers"):
        pack({"wrong": np.array([{}], object)})
    with pytest.raises(ValueError, match="not a record"):
        unpack(b"PK\x03\x04 and so on")


class Store:
    """What is used of torch's, in memory."""

    def __init__(self) -> None:
        self._values: queue.Queue[bytes] = queue.Queue()

    def set(self, key: str, value: str) -> None:
        self._values.put(value.encode())

    def get(self, key: str) -> bytes:
        value = self._values.get(timeout=300)
        self._values.put(value)
        return value


@pytest.fixture
def lines() -> list[Line]:
    """Three ranks' lines; the first knows of both others."""
    store = Store()
    found = [Line(rank, 3, store, "localhost") for rank in range(3)]
    waiting = threading.Event()
    for _ in range(500):
        if len(found[0]._peers) == 2:
            break
        waiting.wait(0.01)
    return found


def die(line: Line) -> None:
    """What the system does for a process that is killed."""
    line._closed = True
    for peer in line._peers.values():
        peer.shutdown(socket.SHUT_RDWR)


def test_all_hear_of_a_death_and_one_speaks(lines: list[Line]) -> None:
    die(lines[1])
    heard = [lines[0].wait(10), lines[2].wait(10)]
    assert heard == [(1, None), (1, None)]
    ranks = Ranks(0, 3, lines[0])
    ranks.goes_on("run it again")
    with pytest.raises(Exception, match=r"rank 1 of 3 has died.*; run it again") as raised:
        ranks.gather({})
    assert [Ranks(r, 3, lines[r]).error_of(heard[0]).speaks for r in (0, 2)] == [True, False]
    assert raised.value.speaks
    for line in (lines[0], lines[2]):
        line.close()


def test_the_next_rank_speaks_for_a_dead_first(lines: list[Line]) -> None:
    die(lines[0])
    assert [line.wait(10) for line in lines[1:]] == [(0, None)] * 2
    assert [Ranks(r, 3, lines[r]).error_of(lines[r].ending).speaks for r in (1, 2)] == [True, False]
    for line in lines[1:]:
        line.close()


def test_last_words_are_passed_on_and_an_end_in_order_is_none(lines: list[Line]) -> None:
    lines[2].close()
    lines[1].close("frame 7: no points")
    assert lines[0].wait(10) == (1, "frame 7: no points")
    assert "rank 1 of 3: frame 7: no points" in str(Ranks(0, 3, lines[0]).error_of(lines[0].ending))
    lines[0].close()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_many_frames_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tqdm", reason="tqdm is not installed")
    for stderr, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stderr)
        found = [index for index, _ in in_order("compare", 3, lambda index: {})]
        assert found == [0, 1, 2]
        assert ("compare:   0%" in stderr.getvalue() and "0/3" in stderr.getvalue()) == shown
