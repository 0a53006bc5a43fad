"""The command line's form of a command: its options in titled groups, with one-reading help.

A command stays a flat dataclass. `grouped` makes the nested class that tyro reads, a group of
`GROUPS` to each nested field, and `flat` turns what tyro read back into the command. Help texts are
the `Args` of the docstrings, of the most derived class that has the option.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, make_dataclass
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser
import tyro
from tyro.constructors import PrimitiveConstructorSpec

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
        "method", "calibration_frames", "rounding", "bias_correction", "allow_poor_calibration",
    ),
    "precision": (
        "target", "march", "cpu", "quantize_head", "quantize_first_layer", "exclude", "plan",
        "weight_bits", "unsigned", "fold", "integers", "backend",
    ),
    "measurement": (
        "metric", "output", "precisions", "estimate", "alone_only", "budget", "plan_rounds",
        "layer_frames", "resamples", "resample_seed", "measure",
    ),
    "training": (
        "steps", "batch", "lr", "weight_decay", "clip", "freeze_after", "learn_ranges", "distill",
        "flip", "rotation", "scale", "device", "workers", "cache", "checkpoint_every", "resume",
        "half",
    ),
    "output": (
        "runs", "name", "out", "overwrite", "pdf", "browser", "dry_run", "quiet", "verbose", "json",
    ),
}  # fmt: skip
"""Titles of the help, and the options below each."""

OFF_SWITCHES = {
    "fold": "Keep batch norms apart. The run then has no integer form and no files.",
    "flip": "Do not mirror frames along x and y.",
}
"""Help of switches that turn a default off; the docstring describes the default."""

OPEN_ENDED = {"config": "FILE"}
"""Values that an option takes beside its names (`saved_options` reads them)."""


_UNSAID = (None, (), False)
"""Defaults that the help leaves out."""


def grouped(command: type, defaults: Mapping[str, Any] | None = None) -> type:
    """The nested class of a flat command that tyro reads; `defaults` replace the command's own."""
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
        nested.append((title, group, field()))
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
