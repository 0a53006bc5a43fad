"""Checkpoints as training frameworks save them: tensors by name, and a list of the rest.

A zip or the older file of `torch.save`, a plain pickle, or safetensors. Nothing in the file is
executed (`_inert_pickle`). Only the tensors of the entry that is returned are read.
"""

from __future__ import annotations

import io
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from bevquant_graph import file_path

from ._arrays import read_tensors
from ._inert_pickle import (
    Global,
    Opaque,
    Storage,
    StoredArray,
    StoredTensor,
    dtype_named,
    opaque_names,
    read_pickle,
)
from ._json import DocumentError, a, read_content

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_UNPACKED = 16  # times the file: weights hardly shrink, a zip bomb does
_SHOWN = 20  # lines of what was passed over
_LARGEST_PICKLE = 1 << 28
_COUNTERS = ("steps", "n_averaged")  # of averaged models, beside the names under `module.`
_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.|_fsdp_wrapped_module\.|_forward_module\.)+")

# Entries that hold a model's weights, the usual ones first; "" is the file itself.
_PLAIN = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network",
          "weights", "params", "")  # fmt: skip
_AVERAGED = re.compile(r"(^|[._])(ema|averaged?|shadow)([._]|$)")
_OTHER = re.compile(r"^(optim|lr_sched|sched|callbacks|loops|meta|scaler|hyper_param|message_hub)")


@dataclass(frozen=True)
class Checkpoint:
    """The weights in a file, and its other content.

    Attributes:
        tensors: By name, on the CPU. `module.` and other prefixes that all names have are removed.
        entry: Path of their entry, such as "state_dict"; "" for the file itself.
        averaged: Whether they are averages over the training (EMA); None if the file does not say.
        entries: Paths of all entries that hold tensors by name.
        passed_over: Path and type of each other entry and each object of an unknown class.
        facts: Numbers and short texts beside the weights, such as "epoch" and
            "meta.mmdet3d_version".
    """

    tensors: dict[str, Tensor]
    entry: str
    averaged: bool | None
    entries: tuple[str, ...]
    passed_over: dict[str, str]
    facts: dict[str, str | int | float]

    def __str__(self) -> str:
        kind = {True: ", averaged (EMA)", False: ", not averaged", None: ""}[self.averaged]
        lines = [f"{len(self.tensors)} tensors of {self.entry or 'the file itself'}{kind}"]
        over = [f"passed over: {path} ({kind})" for path, kind in self.passed_over.items()]
        more = [f"and {len(over) - _SHOWN} more"] if len(over) > _SHOWN else []
        return "\n".join([*lines, *over[:_SHOWN], *more])


def read_checkpoint(
    path: str | os.PathLike[str],
    what: str = "checkpoint",
    *,
    key: str | None = None,
    ema: bool | None = None,
    option: str = "`key`",
) -> Checkpoint:
    """Read the weights of a checkpoint of mmengine, OpenPCDet, det3d, Lightning or torch.

    Objects of other classes than tensors, arrays, numbers and plain containers are not created:
    each is listed in `passed_over`. numpy arrays among the weights become tensors.

    Args:
        path: The file.
        what: Expected content, for messages.
        key: Path of the entry to read, such as "state_dict" or "ema.model". Default: the usual one.
        ema: True for averaged weights, False for the optimizer's. Default: the entry that the
            framework itself loads. mmengine's EMAHook and Lightning's WeightAveraging write the
            averages to `state_dict` and the others beside it; most others do the opposite.
        option: Name of `key` in messages, for a caller with another name.

    Raises:
        DocumentError: The file is missing, cut short, damaged, compressed too strongly, of another
            kind, or has no such entry.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     torch.save({"epoch": 3, "model_state": {"module.w": torch.ones(2)}}, file)
        ...     _ = file.flush()
        ...     found = read_checkpoint(file.name)
        >>> found.entry, list(found.tensors), found.facts
        ('model_state', ['w'], {'epoch': 3})
    """
    place = str(file_path(path, what))
    if not os.path.isfile(place):
        read_content(place, what)  # says what is there instead
    begin = f"{place} cannot be read as {a(what)}"
    try:
        with open(place, "rb") as file:
            content, load = _opened(file, place, what)
            entry, averaged, entries = _choose(content, key, ema, option)
            held = entries[entry]
            rest = [n for n, value in held.items() if not _is_tensor(value)]
            others = {f"{entry}.{n}" if entry else str(n): _kind(held[n]) for n in rest}
            tensors = {str(n): load(value) for n, value in held.items() if n not in rest}
    except _FileError:
        raise
    except DocumentError as error:
        raise DocumentError(f"{begin}: {error}") from None
    except Exception as error:  # whatever zip, pickle and numpy raise, it is no such file
        other = _instead(place)
        raise DocumentError(
            f"{begin}: it is {other or 'damaged, cut short or something else'}"
            + ("" if other else f" ({type(error).__name__})")
        ) from error
    if entry:
        root = entry.split(".")[0]
        others |= {str(n): _kind(value) for n, value in content.items() if str(n) != root}
    others |= opaque_names(content)
    return Checkpoint(
        _unwrapped(tensors), entry, averaged, tuple(entries), dict(sorted(others.items())),
        _facts(content),
    )  # fmt: skip


def _instead(place: str) -> str:
    """What downloads leave in place of a file, and what to do; "" of anything else."""
    with open(place, "rb") as file:
        begin = file.read(64).lstrip().lower()
    if not begin:
        return "empty: download or copy it again"
    if begin.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the file: run git lfs pull in its repository"
    if begin.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "a web page, not the file: download it again, perhaps signed in"
    return ""


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefixes of DistributedDataParallel, torch.compile and averaged models."""
    wrapped = {n: t for n, t in tensors.items() if n not in _COUNTERS}
    short = {_WRAPPERS.sub("", n): t for n, t in wrapped.items()}
    every = all(_WRAPPERS.match(n) for n in wrapped)
    return short if every and len(short) == len(wrapped) else tensors


# Entries ------------------------------------------------------------------------------------


def _is_tensor(value: Any) -> bool:
    if isinstance(value, StoredArray):
        return value.array is not None
    return isinstance(value, Tensor | StoredTensor)


def _as_dict(value: Any) -> Mapping[Any, Any]:
    value = value.items if isinstance(value, Opaque) else value
    return value if isinstance(value, dict) else {}


def _entries(content: Any) -> dict[str, Mapping[str, Any]]:
    """Dicts that hold tensors by name, down to three levels, by path."""
    found: dict[str, Mapping[str, Any]] = {}
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    while waiting:
        path, value, depth = waiting.pop(0)
        held = _as_dict(value)
        if any(isinstance(n, str) and _is_tensor(item) for n, item in held.items()):
            found[path] = held
        if depth < 3 and not _OTHER.match(path):
            waiting += [
                (f"{path}.{n}" if path else n, item, depth + 1)
                for n, item in held.items()
                if isinstance(n, str)
            ]
    return found


def _choose(
    content: Any, key: str | None, ema: bool | None, option: str
) -> tuple[str, bool | None, dict[str, Mapping[str, Any]]]:
    entries = _entries(content)
    named = {p: sum(map(_is_tensor, held.values())) for p, held in entries.items()}
    listed = ", ".join(f"{p or 'the file itself'} ({n})" for p, n in named.items()) or "none"
    if key is not None:
        if key not in entries:
            raise DocumentError(
                f"it has no entry {key!r} of tensors by name; entries and their tensors: {listed}"
            )
        return key, _role(key, entries), entries
    weights = [p for p in entries if not _OTHER.match(p)]
    if not weights:
        raise DocumentError(_without_weights(content))
    plain = [p for p in weights if not _AVERAGED.search(p)]
    averaged = [p for p in weights if _AVERAGED.search(p)]
    usual = [p for p in _PLAIN if p in plain] or plain or averaged
    if ema is not None:
        usual = [p for p in (*usual, *averaged, *plain) if _role(p, entries) is ema] or (
            usual if ema is False and not averaged else []
        )
        if not usual:
            raise DocumentError(
                f"it has no {'averaged (EMA)' if ema else 'unaveraged'} weights; entries and "
                f"their tensors: {listed}; leave `ema` out, or name one with {option}"
            )
    if usual[0] not in _PLAIN and len(usual) > 1 and ema is None:
        raise DocumentError(
            f"it has several entries of tensors by name: {listed}; name one with {option}"
        )
    return usual[0], _role(usual[0], entries), entries


def _role(path: str, entries: Mapping[str, Mapping[str, Any]]) -> bool | None:
    """Whether an entry holds averages."""
    # mmengine's EMAHook exchanges the two before it saves; its averaged model counts `steps`.
    exchanged = "steps" in entries.get("ema_state_dict", {}) and "state_dict" in entries
    if exchanged and path in ("state_dict", "ema_state_dict"):
        return path == "state_dict"
    if "current_model_state" in entries and path in ("state_dict", "current_model_state"):
        return path == "state_dict"  # Lightning's WeightAveraging
    if _AVERAGED.search(path):
        return True
    return False if any(_AVERAGED.search(p) for p in entries) else None


def _without_weights(content: Any) -> str:
    unknown = opaque_names(content)
    if unknown:
        path, name = next(iter(unknown.items()))
        return (
            f"it holds no tensors by name, but an object of the class {name}"
            f"{f' at {path!r}' if path else ''}, a pickled model perhaps, which is not made: "
            "save `model.state_dict()` and give that file"
        )
    return (
        f"it holds {_kind(content)} where a state dict (tensors by name) was expected: save "
        "`model.state_dict()` and give that file"
    )


def _kind(value: Any) -> str:
    if isinstance(value, Opaque | Global):
        return value.name
    if isinstance(value, StoredTensor | Tensor):
        return "tensor"
    if isinstance(value, StoredArray):
        return "numpy array"
    return type(value).__name__


def _facts(content: Any) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {}
    for outer, value in _as_dict(content).items():
        inner = _as_dict(value) if outer == "meta" else {}
        for path, fact in [(outer, value), *((f"meta.{n}", item) for n, item in inner.items())]:
            if isinstance(fact, int | float) or (isinstance(fact, str) and len(fact) <= 80):
                found[str(path)] = fact
    return found


# Files --------------------------------------------------------------------------------------

_Loader = Callable[[Any], Tensor]


class _FileError(DocumentError):
    """An error that names the file already."""


def _opened(file: IO[bytes], place: str, what: str) -> tuple[Any, _Loader]:
    """Content of a file with its tensors unread, and the function that reads one."""
    head = file.read(16)
    file.seek(0)
    if head.startswith(b"PK"):
        return _opened_zip(zipfile.ZipFile(file), os.path.getsize(place))
    if place.endswith(".safetensors") or head[8:9] == b"{":
        try:
            return dict(read_tensors(place, what).tensors), _first_loaded
        except DocumentError as error:
            raise _FileError(str(error)) from error
    content = file.read()
    if content[257:262] == b"ustar":
        raise DocumentError(
            "it is a tar file, as torch before 0.2 wrote: load it with torch and save "
            "`model.state_dict()` anew"
        )
    return _opened_pickle(io.BytesIO(content))


def _first_loaded(value: Tensor) -> Tensor:
    return value


def _opened_zip(archive: zipfile.ZipFile, size: int) -> tuple[Any, _Loader]:
    members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    unpacked = sum(info.file_size for info in members.values())
    if unpacked > _UNPACKED * size:
        raise DocumentError(
            f"its members unpack to {unpacked} bytes, the file has {size}: weights do not shrink "
            "like that; save it with torch.save"
        )
    if "constants.pkl" in members:
        raise DocumentError(
            "it is a TorchScript archive, code and all: save `model.state_dict()` with torch.save"
        )
    if "data.pkl" not in members:
        raise DocumentError("it is a zip file without data.pkl: torch.save did not write it")
    if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
        raise DocumentError("its numbers are big-endian: save it on a little-endian machine")
    if members["data.pkl"].file_size > _LARGEST_PICKLE:
        raise DocumentError("its data.pkl has more than 256 MiB")
    content = read_pickle(io.BytesIO(archive.read(members["data.pkl"])), _storage)

    def numbers(storage: Storage) -> bytes:
        return archive.read(members[f"data/{storage.key}"])

    return content, _loader(numbers)


def _storage(identity: Any) -> Any:
    """The storage of a persistent id, ("storage", type, key, location, size, …)."""
    mark, kind, key, _, size = identity[:5]
    if mark != "storage" or int(size) < 0 or identity[5:] not in ((), (None,)):
        raise ValueError("a persistent id that is no storage")
    # One of a type that is not read, such as a quantized one, is an unknown object.
    dtype = dtype_named(kind.name)
    return Opaque(kind.name) if dtype is None else Storage(str(key), dtype, int(size))


def _opened_pickle(stream: io.BytesIO) -> tuple[Any, _Loader]:
    """The older form of `torch.save`, several pickles and then the numbers; or one pickle."""
    content = read_pickle(stream)
    if content != _LEGACY_MAGIC:
        return content, _loader(lambda _: b"")
    protocol, system = read_pickle(stream), read_pickle(stream)
    if protocol != 1001 or not system["little_endian"]:
        raise DocumentError("its numbers are big-endian, or its protocol is not 1001")
    storages: dict[str, Storage] = {}

    def noted(identity: Any) -> Storage:
        storage = _storage(identity)
        if isinstance(storage, Opaque):  # its length is not known, nor where the next one begins
            raise DocumentError(f"it holds numbers of the type {storage.name}, which is not read")
        return storages.setdefault(storage.key, storage)

    content = read_pickle(stream, noted)
    begins: dict[str, int] = {}
    for key in read_pickle(stream):
        storage = storages[key]
        if int.from_bytes(stream.read(8), "little") != storage.size:
            raise ValueError("a storage of another size than its tensors say")
        begins[key] = stream.tell()
        stream.seek(storage.size * storage.dtype.itemsize, io.SEEK_CUR)
    numbers = stream.getbuffer()
    if stream.tell() > len(numbers) or set(begins) != set(storages):
        raise ValueError("storages that are not in the file")
    return content, _loader(lambda storage: numbers[begins[storage.key] :])


def _loader(numbers: Callable[[Storage], Any]) -> _Loader:
    """Reads tensors; those that share a storage in the file share it in memory."""
    read: dict[str, Tensor] = {}

    def load(value: Any) -> Tensor:
        if isinstance(value, StoredArray):
            array = np.array(value.array, value.array.dtype.newbyteorder("="))  # type: ignore[union-attr]
            return torch.from_numpy(array)
        storage = value.storage
        if storage.key not in read:
            length = storage.size * storage.dtype.itemsize
            part = bytearray(memoryview(numbers(storage))[:length])
            if len(part) != length:
                raise ValueError(f"storage {storage.key} is cut short")
            read[storage.key] = torch.frombuffer(part, dtype=torch.uint8) if part else _NOTHING
        whole = read[storage.key].view(value.dtype)
        return whole.as_strided(value.shape, value.stride, value.offset)

    return load


_NOTHING = torch.zeros(0, dtype=torch.uint8)
