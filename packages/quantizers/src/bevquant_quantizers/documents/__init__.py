"""Untrusted files: JSON, safetensors, `.npz` and torch checkpoints, read and written whole.

Every reader of bevquant uses these functions. A file that is damaged, cut short, nested too deep,
too large or of another form raises one `DocumentError` with the file, the field, the expected and
the given value. Nothing is unpickled into code. A reader itself only checks facts of its own: that
names fit a model, that digests agree.

| file | read | write |
|---|---|---|
| JSON, of a typed form | `read_json`, `parse_json`, `JsonDocument` | `write_json`, `write_whole` |
| safetensors with metadata | `read_tensors` | `write_tensors` |
| `.npz`, `.npy` | `read_arrays`, `read_array` | `write_arrays` |
| weights as training frameworks save them | `read_checkpoint` | |
| pickles of plain data | `read_plain_pickle` | |
| a folder | | `write_folder` |

A file or folder appears whole or not at all. The remains of a killed writer are removed by the next
one that writes there.
"""

from __future__ import annotations

from ._arrays import (
    Tensors,
    check_arrays,
    pack_arrays,
    read_array,
    read_arrays,
    read_tensors,
    write_arrays,
    write_tensors,
)
from ._checkpoint import Checkpoint, read_checkpoint
from ._inert_pickle import read_plain_pickle
from ._json import (
    Count,
    DocumentError,
    Finite,
    JsonDocument,
    NotNegative,
    Size,
    as_form,
    parse_json,
    plain,
    read_content,
    read_json,
    write_json,
)
from ._table import filled, record_table, text_table
from ._write import sha256, sweep, write_folder, write_whole

__all__ = [
    "Checkpoint",
    "Count",
    "DocumentError",
    "Finite",
    "JsonDocument",
    "NotNegative",
    "Size",
    "Tensors",
    "as_form",
    "check_arrays",
    "filled",
    "pack_arrays",
    "parse_json",
    "plain",
    "read_array",
    "read_arrays",
    "read_checkpoint",
    "read_content",
    "read_json",
    "read_plain_pickle",
    "read_tensors",
    "record_table",
    "sha256",
    "sweep",
    "text_table",
    "write_arrays",
    "write_folder",
    "write_json",
    "write_tensors",
    "write_whole",
]
