"""Ranges as a JSON file: exact, checked as a whole, loaded as a whole."""

from __future__ import annotations

import json
import math
import os
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor, nn

from ._float_ranges import FloatRange, Ranges, float_ranges, set_float_ranges
from ._select import NamedQuantizer, named_quantizers
from .documents import DocumentError, NotNegative, read_json, write_whole
from .nn import TensorQuantizer

_SCHEMA = "bevquant-ranges/1"
# A reader that does not know of factors must not take ranges which count on them.
_WITH_FACTORS = "bevquant-ranges/2"
_SETTINGS = ("num_bits", "unsigned", "narrow_range", "axis")


def save_ranges(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write the range of every quantizer to a JSON file.

    Numbers keep the bits of float32. A learned range is written as learned; a quantizer without a
    range is listed as dynamic; factors of channels are written with their range. The result of
    `float_ranges` is written too. The file is written to a temporary name and renamed.

    Args:
        model: Any module.
        path: File to write; an existing one is replaced.

    Raises:
        ValueError: No quantizer, a range that is NaN, infinite or negative, or no such folder.

    Examples:
        >>> import tempfile
        >>> from torch import nn
        >>> from bevquant_quantizers import QuantDescriptor
        >>> model = nn.Sequential(TensorQuantizer(QuantDescriptor(amax=0.1)))
        >>> other = nn.Sequential(TensorQuantizer())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_ranges(model, f"{folder}/ranges.json")
        ...     load_ranges(other, f"{folder}/ranges.json")
        >>> other[0].amax == model[0].amax
        tensor(True)
    """
    entries = named_quantizers(model)
    if not entries:
        raise ValueError("the model has no quantizer, so there is no range to save")
    amaxs = [entry.quantizer.amax_in_use for entry in entries]
    bad = [
        entry.name
        for entry, amax in zip(entries, amaxs, strict=True)
        if amax is not None and not bool((amax.isfinite() & (amax >= 0)).all())
    ]
    if bad:
        raise ValueError(
            f"ranges that are NaN, infinite or negative cannot be saved: {', '.join(bad)}; "
            "calibrate these quantizers or disable them"
        )
    quantizers = [
        {
            "names": list(entry.names),
            **{key: _plain(getattr(entry.quantizer, key)) for key in _SETTINGS},
            "amax": None if amax is None else amax.detach().float().cpu().tolist(),
            **({} if factors is None else {"factors": factors.cpu().tolist()}),
        }
        for entry, amax in zip(entries, amaxs, strict=True)
        for factors in (entry.quantizer.channel_factors,)
    ]
    schema = _WITH_FACTORS if any("factors" in quantizer for quantizer in quantizers) else _SCHEMA
    lines = ",\n".join("  " + json.dumps(q, allow_nan=False) for q in quantizers)
    floats = json.dumps(floats_as_json(float_ranges(model)), allow_nan=False)
    text = f'{{"schema": "{schema}", "quantizers": [\n{lines}\n], "floats": {floats}}}\n'
    write_whole(path, text.encode())


def load_ranges(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load a file of `save_ranges` into the quantizers; all of them or, on error, none.

    Ranges between modules (`float_ranges`) are loaded too; a file of a version without them removes
    the model's.

    Args:
        model: A module with the quantizers of the saved one: same paths, shared in the same way,
            same bits, sign, narrow range and axis.
        path: File to read.

    Raises:
        ValueError: The file is missing, not JSON, of another schema or damaged, or does not fit the
            model: every missing, unexpected or misshapen entry is listed.
    """
    quantizers = named_quantizers(model)
    entries, floats = _read(path)
    problems: list[str] = []
    loads: list[tuple[TensorQuantizer, Tensor | None, list[float] | None]] = []
    for name in sorted(set(entries).difference(n for q in quantizers for n in q.names)):
        problems.append(f"unexpected: {name} is in the file, not in the model")
    for quantizer in quantizers:
        absent = [name for name in quantizer.names if name not in entries]
        problems += [f"missing: {name} is in the model, not in the file" for name in absent]
        if absent:
            continue
        entry, amax = entries[quantizer.name]
        found = _misfits(quantizer, entry, amax, {n: id(entries[n][0]) for n in quantizer.names})
        problems += found
        if not found:
            loads.append((quantizer.quantizer, amax, entry.factors))
    unknown = sorted(floats.keys() - {name for name, _ in model.named_modules()})
    problems += [
        f"unexpected: {name} has float ranges, but is not in the model" for name in unknown
    ]
    if problems:
        raise ValueError(
            f"{os.fspath(path)} does not fit the model; nothing was loaded:\n  "
            + "\n  ".join(problems)
        )
    for target, amax, factors in loads:
        set_range(target, amax)
        like = next(iter(target.buffers()), torch.zeros(()))
        target.channel_factors = None if factors is None else torch.tensor(factors).to(like.device)
    set_float_ranges(model, floats)


@torch.no_grad()
def set_range(quantizer: TensorQuantizer, amax: Tensor | None) -> None:
    """Set the range, whatever its shape was before; None makes it dynamic."""
    old = quantizer.amax
    if amax is None:
        if old is not None:
            del quantizer._amax
        return
    quantizer._store_range(amax if old is not None else amax.to(_device(quantizer, amax)))
    # What is learnt starts from the range that was found.
    if quantizer._learn_amax:
        quantizer.init_learn_amax()


def _device(quantizer: TensorQuantizer, amax: Tensor) -> torch.device:
    return next(quantizer.parameters(), amax).device


class _Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One quantizer of a ranges file."""

    names: Annotated[list[str], msgspec.Meta(min_length=1)]
    num_bits: int | list[int] | str
    unsigned: bool
    narrow_range: bool
    axis: int | list[int] | None
    amax: Any  # nested lists of numbers, which torch takes
    factors: (
        Annotated[list[Annotated[float, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)] | None
    ) = None


class _Document(msgspec.Struct, frozen=True):
    schema: str
    quantizers: list[_Entry]
    floats: dict[str, dict[str, tuple[NotNegative | None, bool]]] = {}


def floats_as_json(ranges: Ranges) -> dict[str, dict[str, tuple[float | None, bool]]]:
    """Largest value, null where it was infinite, and whether all values were whole numbers."""
    return {
        path: {
            name: (found.largest if math.isfinite(found.largest) else None, found.whole)
            for name, found in values.items()
        }
        for path, values in ranges.items()
    }


def floats_of_json(entries: dict[str, dict[str, tuple[float | None, bool]]]) -> Ranges:
    """Inverse of `floats_as_json`."""
    return {
        path: {
            name: FloatRange(math.inf if largest is None else float(largest), whole)
            for name, (largest, whole) in values.items()
        }
        for path, values in entries.items()
    }


def _read(
    path: str | os.PathLike[str],
) -> tuple[dict[str, tuple[_Entry, Tensor | None]], Ranges]:
    """Return the file's entries under each of their names, with their ranges."""
    document = read_json(
        path,
        _Document,
        what="ranges file",
        head={"schema": (_SCHEMA, _WITH_FACTORS)},
        remedy="save the ranges again with save_ranges",
    )
    problems: list[str] = []
    entries: dict[str, tuple[_Entry, Tensor | None]] = {}
    for entry in document.quantizers:
        try:
            amax = None if entry.amax is None else torch.tensor(entry.amax, dtype=torch.float32)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            problems.append(f"{entry.names[0]}: amax must be numbers, nested evenly")
            continue
        if amax is not None and not bool((amax.isfinite() & (amax >= 0)).all()):
            problems.append(f"{entry.names[0]}: amax must be finite and not negative")
            continue
        problems += [f"{name} is listed twice" for name in entry.names if name in entries]
        entries.update(dict.fromkeys(entry.names, (entry, amax)))
    if problems:
        listed = "\n  ".join(problems)
        raise DocumentError(f"{os.fspath(path)} is damaged; nothing was loaded:\n  {listed}")
    return entries, floats_of_json(document.floats)


def _misfits(
    quantizer: NamedQuantizer, entry: _Entry, amax: Tensor | None, objects: dict[str, int]
) -> list[str]:
    """Fields of an entry that do not fit its quantizer."""
    name, module = quantizer.name, quantizer.quantizer
    if set(entry.names) != set(quantizer.names) or len(set(objects.values())) > 1:
        return [
            f"shared otherwise: {name} stands for {', '.join(quantizer.names)} in the model, for "
            f"{', '.join(entry.names)} in the file"
        ]
    found = [
        f"differs: {name}.{key} is {_plain(getattr(module, key))!r} in the model, "
        f"{getattr(entry, key)!r} in the file"
        for key in _SETTINGS
        if _plain(getattr(module, key)) != getattr(entry, key)
    ]
    if amax is None:
        return found
    expected = None if module.amax is None else tuple(module.amax.shape)
    size = 1 if module.axis is None else None if expected is None else math.prod(expected)
    if size is not None and (
        amax.numel() != size or (module.axis is not None and tuple(amax.shape) != expected)
    ):
        found.append(
            f"misshapen: {name} takes a range of shape "
            f"{expected if expected is not None else ()}, the file has {tuple(amax.shape)}"
        )
    return found


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
