"""`--config FILE`: the settings of a finished run as defaults of the options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from bevfusion_quant.options._choices import ConfigName

_PATHS = ("weights", "plan", "start", "cache")


def saved_options(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Replace ``--config FILE`` by the sizes that the file names, and return its other settings.

    The file is a run's config.json, or the run's folder. Options on the command line take
    precedence; the settings are defaults.

    Args:
        arguments: Of the command line.

    Returns:
        The arguments with the name of the sizes in place of the file, and the settings by option.

    Raises:
        ValueError: There is no such file, or it is not a run's settings.
    """
    changed = [
        part
        for one in arguments
        for part in (one.split("=", 1) if one.startswith("--config=") else [one])
    ]
    place = changed.index("--config") + 1 if "--config" in changed else len(changed)
    if place >= len(changed) or changed[place] in get_args(ConfigName):
        return list(arguments), {}
    path = Path(changed[place])
    path = path / "config.json" if path.is_dir() else path
    known = ", ".join(get_args(ConfigName))
    if not path.is_file():
        raise ValueError(
            f"--config {changed[place]}: no such file; give one of {known}, or a run's config.json"
        )
    from bevfusion_quant.run import RUN_FORMAT, refuse_version
    from bevquant_quantizers.documents import read_json

    try:
        head = {"format": RUN_FORMAT}
        written = read_json(path, dict[str, Any], what="run's settings", head=head)
        refuse_version("its schema is", written.get("version", 1))
        changed[place] = written["config"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"--config {path}: it is not the config.json of a run ({type(error).__name__}: "
            f"{error}); give one that ptq or qat wrote"
        ) from error
    trained = written.get("qat") or {}
    return changed, {name: _value(name, value) for name, value in {**written, **trained}.items()}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return Path(value) if name in _PATHS and value is not None else value
