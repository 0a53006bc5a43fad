"""The parts of the model: which go together, and where each lies in the module tree."""

from __future__ import annotations

from collections.abc import Iterable

from bev_data import InputError

PARTS = ("camera", "lidar", "fuser", "decoder", "head")

PART_PATHS = {
    "camera": "encoders.camera",
    "lidar": "encoders.lidar",
    "fuser": "fuser",
    "decoder": "decoder",
    "head": "heads.object",
}
"""The module that holds each part; the model's entries of a state dict begin with its path."""

STAGES = {
    "camera": "encoders.camera.vtransform",
    "lidar": "encoders.lidar.backbone",
    "fuser": "fuser",
    "decoder": "decoder.neck",
    "head": "heads.object",
}
"""The module whose output is the part's: a map [batch, channels, x, y], of the head a dict."""


def check_parts(parts: Iterable[str]) -> tuple[str, ...]:
    """The parts in the order in which they run.

    Raises:
        InputError: An unknown part, or parts that cannot run together; the message says why.
    """
    given = set(parts)
    unknown = sorted(given - set(PARTS))
    if unknown:
        raise InputError(f"unknown parts {unknown}: the model consists of {', '.join(PARTS)}")
    chosen = tuple(part for part in PARTS if part in given)
    sensors = given & {"camera", "lidar"}
    problem = None
    if not sensors:
        problem = "none of them reads a sensor: add camera or lidar"
    elif len(sensors) == 2 and "fuser" not in given:
        problem = "camera and lidar make two maps, and nothing joins them: add fuser, or drop one"
    elif len(sensors) == 1 and "fuser" in given:
        missing = ({"camera", "lidar"} - sensors).pop()
        problem = f"the fuser joins two maps: add {missing}, or drop fuser"
    elif "head" in given and "decoder" not in given:
        problem = "the head reads the decoder's map: add decoder, or drop head"
    if problem is not None:
        raise InputError(f"the parts {', '.join(chosen) or '(none)'} cannot run alone: {problem}")
    return chosen
