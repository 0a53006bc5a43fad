"""The processes that share a run, and how they exchange what they have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from bevfusion_quant._errors import InputError
from bevquant_quantizers.documents import DocumentError, parse_json

if TYPE_CHECKING:
    from torch import Tensor

    from bevfusion_quant.ranks._group import Ending, Line

Value = TypeVar("Value", bytes, "np.ndarray[Any, Any]", "Tensor")


class RankError(Exception):
    """The run ends because a rank has ended before its time.

    Args:
        message: Which one, and what to do.
        speaks: Whether this rank is the one that says so.
    """

    def __init__(self, message: str, *, speaks: bool = True) -> None:
        super().__init__(message)
        self.speaks = speaks


@dataclass(frozen=True)
class Ranks:
    """The processes of one run; `Ranks()` is a process alone.

    All of them call `gather` and `agree` at the same places, in the same order.

    Args:
        rank: This process, from 0.
        world: How many there are.
        line: Tells when another one ends; None where nobody does.
        gpu: This process's own GPU, where all processes have one and nccl joins these.

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
            raise self.told(ending)

    def told(self, ending: Ending) -> RankError:
        """The message of the one rank that speaks: the first, or the next where it has died."""
        goes_on = "" if self.line is None else self.line.goes_on
        return RankError(
            ending.message(self.world, goes_on), speaks=self.rank == ending.spoken_by(self.world)
        )

    def goes_on(self, how: str) -> None:
        """What the user should do if a rank dies from now on, for the message."""
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
        """Make sure that all ranks have the same.

        Args:
            what: Named in the message.
            text: This process's, such as a digest.

        Raises:
            InputError: They have not.
        """
        texts = self.gather({self.rank: text.encode()})
        apart = [rank for rank, other in texts.items() if other != texts[0]]
        if apart:
            raise InputError(
                f"{what}: rank {apart[0]} has another than rank 0: give every rank the same "
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
    """Every rank's message, in order of ranks; messages of any length.

    The device decides what carries them: gloo, or nccl on a GPU.
    """
    import torch
    import torch.distributed as dist

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
