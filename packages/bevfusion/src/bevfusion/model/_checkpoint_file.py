"""Reading a state dict from disk: `.pth` without unpickling code, or safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from bev_data import InputError
from bevquant_quantizers.documents import DocumentError, read_checkpoint, read_tensors

__all__ = ["read_state_dict"]


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, on the CPU.

    A `state_dict` wrapper and a `module.` prefix on every name, as training scripts leave them, are
    taken off. Nothing in the file is executed.

    Raises:
        InputError: The file is missing, damaged, or holds something other than tensors by name.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"no weights file at {path}: check the path given to --weights")
    try:
        if path.suffix == ".safetensors":
            content: object = read_tensors(path, "state dict").tensors
        else:
            content = read_checkpoint(path, "state dict")
    except DocumentError as error:
        raise InputError(
            f"{error}: save `model.state_dict()` with torch.save or safetensors and pass that file"
        ) from error
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping) or not content:
        raise InputError(
            f"{path} holds {type(content).__name__} where a state dict (tensors by name) was "
            "expected"
        )
    others = [str(k) for k, v in content.items() if not isinstance(v, Tensor)]
    if others:
        raise InputError(
            f"{path} is not a state dict: {len(others)} entries are not tensors, such as "
            f"{others[0]!r}; "
            "pass a file saved from model.state_dict()"
        )
    names = [str(k) for k in content]
    wrapped = all(n.startswith("module.") for n in names)
    return {n.removeprefix("module.") if wrapped else n: content[n] for n in names}
