"""From the name of a model to its detector."""

from __future__ import annotations

import importlib
import logging
import re
from dataclasses import replace
from difflib import get_close_matches
from inspect import isfunction
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bev_data import InputError
from bev_data.points import Frame
from bevfusion.frameworks._detector import (
    FORWARD,
    FRAME_AXES,
    ForeignDetector,
    checkpoint_notes,
    run_user_code,
    user_error,
)
from bevfusion.frameworks._mmdet3d import load_mmdet3d
from bevfusion.frameworks._openpcdet import load_openpcdet
from bevquant_graph import refuse_unusable

_LOG = logging.getLogger(__name__)


def points_argument(frame: Frame) -> tuple[Any, ...]:
    """The frame's points as one argument, float32 [n, 5]: x, y, z, intensity, time lag."""
    if frame.points is None:
        raise InputError(f"{frame.name}: it holds voxels, and the model takes points")
    return (torch.from_numpy(frame.points),)


def load_function(name: str) -> ForeignDetector:
    """Call `package.module:function` of the user, which returns a detector.

    The function takes no argument. It returns a `ForeignDetector`, or a module, which then takes
    the points of a frame, or a tuple of a module and `arguments`, or of these and `boxes`.
    """
    module_name, _, function_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        near = get_close_matches(module_name, ("mmdet3d", "openpcdet"), 1)
        meant = f"probably {near[0]}:… is meant; or " if near else ""
        raise InputError(
            f"--model {name}: {user_error(error)}; {meant}give package.module:function, "
            "importable from here (PYTHONPATH)"
        ) from error
    function = getattr(module, function_name, None)
    if isinstance(function, nn.Module) or not callable(function):
        known = [key for key, value in vars(module).items() if isfunction(value)]
        near = get_close_matches(function_name, known, 3, 0.4)
        found = f"has no attribute {function_name!r}"
        if hasattr(module, function_name):
            found = f"has a {type(function).__name__} by this name"
        raise InputError(
            f"--model {name}: module {module_name!r} {found}; expected a function without "
            f"arguments that returns a model{'; nearest: ' * bool(near)}{', '.join(near)}"
        )
    made = run_user_code(f"--model {name}: the function", function, advice="it gets no argument")
    parts = made if isinstance(made, tuple) else (made,)
    if isinstance(made, ForeignDetector):
        detector = made
    elif isinstance(parts[0], nn.Module) and len(parts) <= 3 and all(map(callable, parts[1:])):
        detector = ForeignDetector(parts[0], *(parts[1:] or (points_argument,)))
    else:
        raise InputError(
            f"--model {name}: it returned {type(made).__name__}; return a torch.nn.Module, "
            "(module, arguments), (module, arguments, boxes) or a ForeignDetector"
        )
    try:  # before minutes of compilation, or values of memory that nobody wrote
        refuse_unusable(detector.network, f"--model {name}", finite=False)
    except ValueError as error:
        raise InputError(str(error)) from error
    detector.network.eval()
    return detector


def load_detector(name: str, weights: Path | None = None) -> ForeignDetector:
    """The detector that a name stands for.

    Args:
        name: ``mmdet3d:CONFIG.py``, ``openpcdet:CONFIG.yaml`` or ``package.module:function``. If
            the network reads other axes than its configuration suggests, followed by ``@`` and
            their directions: ``mmdet3d:CONFIG.py@forward,left,up``.
        weights: A checkpoint for it; the model's own weights without.

    Returns:
        A detector of frames with x right, y forward, z up. It turns them to the network's axes, and
        boxes back.

    Raises:
        InputError: It cannot be imported or built, or the checkpoint is another model's.

    Example:
        >>> load_detector("nowhere:nothing")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        bev_data._errors.InputError: --model nowhere:nothing: ModuleNotFoundError: ...
    """
    said = re.fullmatch(r"(.+)@([\w,]+)", name)
    bare = said[1] if said else name
    framework, _, config = bare.partition(":")
    if framework == "mmdet3d":
        detector = load_mmdet3d(config, weights)
    elif framework == "openpcdet":
        detector = load_openpcdet(config, weights)
    else:
        detector = load_function(bare)
        if weights is not None:
            notes = (*detector.notes, *checkpoint_notes(detector.network, weights))
            detector = replace(detector, notes=notes)
    if said:
        detector = replace(detector, axes=said[2])
    elif not detector.axes:
        _LOG.warning(
            "--model %s: the axes of its data set are unknown. It reads frames as they are, %s; "
            "for x forward give --model %s@%s", name, FRAME_AXES, name, FORWARD,
        )  # fmt: skip
    return detector.turned()
