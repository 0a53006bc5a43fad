"""Bytes, JSON, arrays, archives and texts, changed as damage and other hands change them."""

from __future__ import annotations

import copy
import io
import json
import random
import warnings
import zipfile
from typing import Any

import numpy as np

Rng = random.Random

NASTY = [
    None, True, False, 0, -1, 1, 2, 2**31, 2**63 - 1, -(2**63), 1e308, -1e308, 1e-320, 0.5, "",
    "x", "abc", "no", "\x00", "é" * 50, [], {}, [1], ["mse"], [[]], {"a": 1}, 255, 256, 65536, 1e9,
    "<script>", "../../x", "nan", 3.0,
]  # fmt: skip
LITERALS = ["9" * 400, "-" + "9" * 30, "NaN", "Infinity", "1e400", "[" * 100_000, '{"a":' * 3000]


def changed_bytes(rng: Rng, data: bytes) -> bytes:
    raw = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        place = rng.randrange(len(raw)) if raw else 0
        what = rng.randrange(8)
        if what <= 2 and raw:
            raw[place] ^= 1 << rng.randrange(8)
        elif what == 3:
            del raw[place:]
        elif what == 4:
            del raw[place : place + rng.randrange(1, 64)]
        elif what == 5:
            raw[place:place] = rng.randbytes(rng.randrange(1, 32))
        elif what == 6 and raw:
            start = rng.randrange(len(raw))
            raw[place : place + 16] = raw[start : start + 16]
        elif raw:
            raw[place : place + 8] = rng.choice([b"\0" * 8, b"\xff" * 8, rng.randbytes(8)])
    return bytes(raw)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [at]
    if isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            found += places(item, (*at, key))
    return found


def changed_value(rng: Rng, value: Any) -> Any:
    value = copy.deepcopy(value)
    for _ in range(rng.choice([1, 1, 1, 2])):
        at = rng.choice(places(value))
        new = copy.deepcopy(rng.choice(NASTY))
        if not at:
            value = new if rng.random() < 0.2 else value
            continue
        holder = value
        for key in at[:-1]:
            holder = holder[key]
        old, what = holder[at[-1]], rng.random()
        if what < 0.2 and isinstance(old, int | float) and not isinstance(old, bool):
            new = rng.choice([old + 1, old - 1, -old, old * 1000, old / 3, str(old), [old]])
        if what > 0.9:
            del holder[at[-1]]
        elif what > 0.8 and isinstance(holder, dict):
            holder["more"] = new
        elif what > 0.75 and isinstance(holder, list):
            holder.insert(at[-1], copy.deepcopy(old))
        else:
            holder[at[-1]] = new
    return value


def changed_json(rng: Rng, data: bytes) -> bytes:
    if rng.random() < 0.15:
        return changed_bytes(rng, data)
    value = changed_value(rng, json.loads(data))
    if rng.random() < 0.1 and isinstance(value, dict | list) and places(value)[1:]:
        *at, last = rng.choice(places(value)[1:])
        holder = value
        for key in at:
            holder = holder[key]
        holder[last] = "@@@"
        return json.dumps(value).replace('"@@@"', rng.choice(LITERALS)).encode()
    return json.dumps(value).encode()


def changed_array(rng: Rng, array: np.ndarray) -> np.ndarray:
    what = rng.randrange(7)
    if what == 0:
        return array.astype(rng.choice(["f4", "f8", "i8", "i4", "u1", "f2", "U8", "c8", "?"]))
    if what == 1:
        return array.reshape(-1)
    if what == 2:
        return array[..., :1] if array.ndim else array.reshape(1)
    if what == 3:
        return array[None]
    if what == 4:
        return np.zeros(rng.choice([(0,), (), (3,), (0, 7)]), array.dtype)
    array = array.copy()
    if array.size and array.dtype.kind in "iuf":
        top = np.iinfo(array.dtype).max if array.dtype.kind in "iu" else np.inf
        values = [0, 1, top, -1 if array.dtype.kind != "u" else 0]
        values += [np.nan, -np.inf, 1e-40] if array.dtype.kind == "f" else []
        with np.errstate(all="ignore"):
            array.reshape(-1)[rng.randrange(array.size)] = np.array(rng.choice(values)).astype(
                array.dtype
            )
    return array


def changed_npz(rng: Rng, data: bytes) -> bytes:
    if rng.random() < 0.5:
        return changed_bytes(rng, data)
    with np.load(io.BytesIO(data)) as file:
        arrays = {name: file[name] for name in file.files}
    name = rng.choice(sorted(arrays))
    if rng.random() < 0.1:
        del arrays[name]
    elif name == "header":
        arrays[name] = np.frombuffer(changed_json(rng, arrays[name].tobytes()), np.uint8)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                arrays[name] = changed_array(rng, arrays[name])
            except ValueError:
                arrays[name] = np.zeros(3)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def changed_tensors(rng: Rng, data: bytes) -> bytes:
    """Safetensors: bytes, the header, or the JSON in its metadata."""
    if rng.random() < 0.4:
        return changed_bytes(rng, data)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    texts = [key for key, text in header.get("__metadata__", {}).items() if text[:1] == "{"]
    if texts and rng.random() < 0.6:
        text = header["__metadata__"][texts[0]].encode()
        header["__metadata__"][texts[0]] = changed_json(rng, text).decode("utf-8", "replace")
    else:
        header = changed_value(rng, header)
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data[8 + length :]


def changed_zip(rng: Rng, data: bytes) -> bytes:
    """A zip checkpoint: bytes, or the pickle in it."""
    if rng.random() < 0.4:
        return changed_bytes(rng, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice([n for n in members if n.endswith("data.pkl")] * 3 + sorted(members))
    members[name] = changed_bytes(rng, members[name])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for key, content in members.items():
            archive.writestr(key, content)
    return buffer.getvalue()


def changed_text(rng: Rng, data: bytes) -> bytes:
    words = data.split(b" ")
    for _ in range(rng.choice([1, 2])):
        new = rng.choice([b"", b"nan", b"x", b"1e400", b"-1", b"9" * 400, b"\xff", b"inf", b"0"])
        words[rng.randrange(len(words))] = new
    return changed_bytes(rng, data) if rng.random() < 0.3 else b" ".join(words)


def changed_onnx(rng: Rng, data: bytes) -> bytes:
    """An ONNX file: bytes, the JSON in its metadata, or the fields of its messages."""
    import onnx

    model = onnx.load_model_from_string(data)
    what = rng.random()
    if what < 0.3:
        return changed_bytes(rng, data)
    if what < 0.5 and any(note.value[:1] in "{[" for note in model.metadata_props):
        return changed_notes(rng, data)
    for _ in range(rng.choice([1, 1, 2])):
        message = rng.choice([m for m in _messages(model) if m.ListFields()])
        field, value = rng.choice(message.ListFields())
        several = hasattr(value, "append")
        place = rng.randrange(len(value)) if several else 0
        old = value[place] if several else value
        new: Any = None
        if isinstance(old, str | bytes):
            text = rng.choice(["", "x", "\x00", "Conv", "nope", "a" * 300])
            new = text if isinstance(old, str) else text.encode()
        elif isinstance(old, int | float):
            new = type(old)(rng.choice([0, 1, 2, 7, 16, 1000, 2**31 - 1]))
        try:
            if new is not None and rng.random() < 0.7:
                if several:
                    value[place] = new
                else:
                    setattr(message, field.name, new)
            elif several and new is None and rng.random() < 0.5:
                value.add().CopyFrom(old)
            elif several:
                del value[place]
            else:
                message.ClearField(field.name)
        except ValueError:  # no value of this enum
            message.ClearField(field.name)
    content: bytes = model.SerializeToString()
    return content


def _messages(message: Any) -> list[Any]:
    found = [message]
    for field, value in message.ListFields():
        if field.cpp_type == field.CPPTYPE_MESSAGE:
            for item in value if hasattr(value, "append") else [value]:
                found += _messages(item)
    return found


def changed_notes(rng: Rng, data: bytes) -> bytes:
    """An ONNX file: bytes, or the JSON in its metadata."""
    import onnx

    if rng.random() < 0.3:
        return changed_bytes(rng, data)
    model = onnx.load_model_from_string(data)
    note = rng.choice([note for note in model.metadata_props if note.value[:1] in "{["])
    note.value = changed_json(rng, note.value.encode()).decode("utf-8", "replace")
    content: bytes = model.SerializeToString()
    return content
