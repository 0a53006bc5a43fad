"""The command line's form of a command: its options in titled groups, with one-reading help.

A command stays a flat dataclass. `grouped` makes the nested class that tyro reads, a group of
`GROUPS` to each nested field, and `flat` turns what tyro read back into the command. Help texts are
the `Args` of the docstrings, of the most derived class that has the option. With `--config FILE`
the settings of a finished run are the defaults of the options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, make_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import PrimitiveConstructorSpec

from bevfusion_quant.options._choices import ConfigName

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GROUPS = {
    "data": (
        "run", "qat", "bpu", "take", "points", "dataset", "data", "first", "count", "split",
        "conditions", "data_version", "classes", "box_origin", "incomplete", "cameras", "columns",
        "axes", "dtype", "intensity_scale", "key", "nonfinite", "held_out",
    ),
    "model": (
        "model", "config", "branch", "stage", "weights", "weight_entry", "weight_layout", "start",
        "seed",
    ),
    "calibration": (
        "method", "calibration_frames", "rounding", "bias_correction", "search_ranges",
        "allow_poor_calibration",
    ),
    "precision": (
        "target", "march", "cpu", "quantize_head", "quantize_first_layer", "exclude", "plan",
        "weight_bits", "output_weight_bits", "unsigned", "fold", "integers", "backend",
    ),
    "measurement": (
        "metric", "output", "precisions", "sparse_precisions", "estimate", "alone_only", "budget",
        "plan_rounds", "layer_frames", "resamples", "resample_seed", "measure",
    ),
    "training": (
        "steps", "batch", "lr", "weight_decay", "clip", "freeze_after", "learn_ranges", "distill",
        "train_float", "flip", "rotation", "scale", "device", "workers", "cache",
        "checkpoint_every", "resume", "half",
    ),
    "output": (
        "runs", "name", "out", "overwrite", "pdf", "browser", "dry_run", "quiet", "verbose", "json",
    ),
}  # fmt: skip
"""Titles of the help, and the options below each."""

OFF_SWITCHES = {
    "fold": "Keep batch norms apart. The run then has no integer form and no files.",
    "flip": "Do not mirror frames along x and y.",
    "learn_ranges": "Ranges follow the largest values instead of learning by gradient (LSQ).",
}
"""Help of switches that turn a default off; the docstring describes the default."""

OPEN_ENDED = {"config": "FILE"}
"""Values that an option takes beside its names (`saved_options` reads them)."""


_UNSAID = (None, (), False)
"""Defaults that the help leaves out."""


def grouped(command: type, defaults: Mapping[str, Any] | None = None) -> type:
    """The nested class of a flat command that tyro reads; `defaults` replace the command's own."""
    return _nested(command, defaults) if defaults else _own_form(command)


@cache
def _own_form(command: type) -> type:
    return _nested(command, None)


def _nested(command: type, defaults: Mapping[str, Any] | None) -> type:
    hints = get_type_hints(command, include_extras=True)
    help_texts = _help_texts(command)
    own = {one.name: one for one in fields(command)}
    nested = []
    for title, names in _titled(own).items():
        inner = [
            (name, _option(hints[name], own[name], help_texts[name]), _default(own[name], defaults))
            for name in names
        ]
        group = make_dataclass(title, inner, kw_only=True, frozen=True)
        group.__doc__ = ""
        # Without a text of its own, tyro would look for one in the source files.
        nested.append((title, group, field(metadata={"help": ""})))
    made = make_dataclass(command.__name__, nested, kw_only=True, frozen=True)
    made.__doc__ = (command.__doc__ or "").partition("\n    Args:")[0].strip()
    return made


def flat(command: type[DataclassInstance], read: Any) -> Any:
    """The flat command of an object of the class that `grouped` made."""
    values = {
        one.name: getattr(getattr(read, group.name), one.name)
        for group in fields(read)
        for one in fields(getattr(read, group.name))
    }
    return command(**values)


def _titled(own: Mapping[str, Field[Any]]) -> dict[str, list[str]]:
    """The command's options by title, in the order of `GROUPS`."""
    titled = {title: [name for name in names if name in own] for title, names in GROUPS.items()}
    known = {name for names in titled.values() for name in names}
    titled["other"] = [name for name in own if name not in known]
    return {title: names for title, names in titled.items() if names}


def _default(own: Field[Any], defaults: Mapping[str, Any] | None) -> Any:
    if defaults is not None and own.name in defaults:
        return field(default=defaults[own.name])
    if own.default is not MISSING:
        return field(default=own.default)
    return field()


def _help_texts(command: type) -> dict[str, str]:
    texts: dict[str, str] = {}
    for cls in command.__mro__:
        for entry in docstring_parser.parse(cls.__doc__ or "").params:
            texts.setdefault(entry.arg_name, " ".join((entry.description or "").split()))
    return texts


def _option(hint: Any, own: Field[Any], text: str) -> Any:
    """The option's type with its help, without None among the values and the defaults."""
    if own.default is True:
        return Annotated[hint, tyro.conf.arg(help=OFF_SWITCHES[own.name], help_behavior_hint="")]
    metavar = _metavar(hint) if NoneType in get_args(hint) else None
    if own.name in OPEN_ENDED:
        metavar = "{" + ",".join([*_names(hint), OPEN_ENDED[own.name]]) + "}"
    behind = "" if any(own.default is value for value in _UNSAID) else None
    return Annotated[hint, tyro.conf.arg(help=text, metavar=metavar, help_behavior_hint=behind)]


def _metavar(hint: Any) -> str:
    """The placeholder of an optional type's value, such as {a,b}, PATH or INT."""
    (inner,) = (part for part in get_args(hint) if part is not NoneType)
    for part in getattr(inner, "__metadata__", ()):
        if isinstance(part, PrimitiveConstructorSpec):
            return str(part.metavar)
    names = _names(inner)
    return "{" + ",".join(names) + "}" if names else getattr(inner, "__name__", "TEXT").upper()


def _names(hint: Any) -> list[str]:
    """The values of literals, nested ones too."""
    if get_origin(hint) is Literal:
        return [str(name) for name in get_args(hint)]
    return [name for part in get_args(hint) for name in _names(part)]


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
