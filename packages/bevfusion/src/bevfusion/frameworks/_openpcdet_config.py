"""OpenPCDet's YAML files, and where its code lies."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bev_data import InputError

CHECKOUT = "BEVQUANT_OPENPCDET"
"""Environment variable: the folder of an OpenPCDet checkout."""


class Settings(dict[str, Any]):
    """A dictionary whose keys are attributes too, nested ones included: EasyDict's interface."""

    def __init__(self, given: Mapping[str, Any] | None = None, **more: Any) -> None:
        super().__init__()
        self.update({**(given or {}), **more})

    def update(self, given: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Set every entry of a dictionary."""
        for key, value in given.items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, _nested(value))

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(f"no {key} in the configuration") from None

    __setattr__ = __setitem__


def _nested(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_nested, value))
    return Settings(value) if type(value) is dict else value


def find_checkout(config: Path) -> Path | None:
    """The folder with OpenPCDet's ``pcdet``; None where the installed package is used."""
    # The variable's, or the one around the configuration, which may lie in a checkout.
    named = os.environ.get(CHECKOUT)
    if named:
        if not (Path(named) / "pcdet" / "models").is_dir():
            raise InputError(f"{CHECKOUT}={named}: no folder pcdet/models in it; name a checkout")
        return Path(named).resolve()
    if importlib.util.find_spec("pcdet") is not None:
        return None
    around = config.resolve().parents
    return next((one for one in around if (one / "pcdet" / "models").is_dir()), None)


def read_config(path: Path, checkout: Path | None) -> Settings:
    """A configuration with its ``_BASE_CONFIG_`` files, as OpenPCDet merges them."""
    try:
        import yaml
    except ImportError as error:
        raise InputError(f"openpcdet:{path}: {error}; pip install pyyaml") from error
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"openpcdet:{path}: {error}") from error
    if not isinstance(given, dict):
        raise InputError(
            f"openpcdet:{path}: expected a dictionary in YAML, got {type(given).__name__}"
        )
    # A base file's path is relative to a folder around the configuration, or to `tools`.
    folders = [*path.resolve().parents, *([checkout / "tools"] if checkout else [])]
    return _merged(Settings(), given, path, folders, checkout)


def _merged(
    into: Settings, given: Mapping[str, Any], path: Path, folders: list[Path], checkout: Path | None
) -> Settings:
    base = given.get("_BASE_CONFIG_")
    if base is not None:
        found = next((one / base for one in folders if (one / base).is_file()), None)
        if found is None:
            raise InputError(
                f"openpcdet:{path}: no file {base} (_BASE_CONFIG_) in {folders[0]} or above"
            )
        into.update(read_config(found, checkout))
    # Dictionaries are merged, other values replaced.
    for key, value in given.items():
        if isinstance(value, dict):
            own = into.get(key)
            into[key] = _merged(
                own if isinstance(own, Settings) else Settings(), value, path, folders, checkout
            )
        else:
            into[key] = value
    return into
