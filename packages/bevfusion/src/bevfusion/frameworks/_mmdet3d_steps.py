"""Steps of mmdetection3d's test pipelines on frames that are read already.

Its own classes of steps need nuscenes-devkit and lyft_dataset_sdk; of those for tests few change
anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from bev_data import InputError

UNCHANGED = ("GlobalRotScaleTrans", "RandomFlip3D", "PointSegClassMapping", "GlobalAlignment")
"""Without effect in tests (no flip, no rotation), or on labels or scans of ScanNet alone."""


def run_steps(steps: Sequence[Mapping[str, Any]], loaded: dict[str, Any]) -> None:
    """Change the loaded data in place: "points" [n, columns], "img" (or images) and calibration.

    Args:
        steps: Of a configuration's test pipeline.
        loaded: See `FrameLoader`.

    Raises:
        InputError: A step is unknown.
    """
    for step in steps:
        name = step["type"].removeprefix("mmdet.")
        if name.startswith(("Load", "Pack")) or name in UNCHANGED:
            continue
        if name == "MultiScaleFlipAug3D":  # of several scales the first, without flips
            scale = step["img_scale"]
            scale = scale[0] if isinstance(scale, list) else scale
            run_steps([_with_scale(one, scale) for one in step["transforms"]], loaded)
        elif name == "MultiViewWrapper":
            _each_view(step["transforms"], loaded)
        elif name in ("Resize", "Resize3D", "RandomResize3D"):
            _resize(step, loaded, calibrate=name != "Resize")
        elif name == "AffineResize":
            _affine(step, loaded)
        elif name == "PointsRangeFilter":
            bounds, points = step["point_cloud_range"], loaded["points"]
            low, high = points.new_tensor(bounds[:3]), points.new_tensor(bounds[3:])
            inside = (points[:, :3] > low) & (points[:, :3] < high)
            loaded["points"] = points[inside.all(1)]
        elif name == "PointSample":
            loaded["points"] = _sample(loaded["points"], step)
        else:
            raise InputError(
                f"the configuration's test_pipeline has {name}, which is unknown here: remove it, "
                "or name a function that returns your network (package.module:function)"
            )


def _with_scale(step: Mapping[str, Any], scale: Any) -> Mapping[str, Any]:
    return {**step, "scale": scale} if "Resize" in step["type"] else step


def _each_view(steps: Sequence[Mapping[str, Any]], loaded: dict[str, Any]) -> None:
    count = len(loaded["img"])
    views = [{name: loaded[name][index] for name in loaded} for index in range(count)]
    for view in views:
        run_steps(steps, view)
    loaded.update({name: [view[name] for view in views] for name in views[0]})


def _resize(step: Mapping[str, Any], loaded: dict[str, Any], *, calibrate: bool) -> None:
    """mmcv's: to the largest size within a scale, or by factors; `calibrate` changes `cam2img`."""
    import mmcv

    image = loaded["img"]
    height, width = image.shape[:2]
    scale = step.get("scale")
    if scale is None:
        factors = step["scale_factor"]
        x, y = factors if isinstance(factors, tuple | list) else (factors, factors)
        resized = mmcv.imresize(image, (int(width * x + 0.5), int(height * y + 0.5)))
    elif step.get("keep_ratio"):
        resized = mmcv.imrescale(image, tuple(scale))
    else:
        resized = mmcv.imresize(image, tuple(scale))
    factor = resized.shape[1] / width, resized.shape[0] / height
    loaded |= {"img": resized, "img_shape": resized.shape[:2], "scale_factor": factor}
    if calibrate:
        loaded["cam2img"][:2] *= np.array(factor)[:, None]


def _affine(step: Mapping[str, Any], loaded: dict[str, Any]) -> None:
    """The centre stays the centre, and the width is the new one (SMOKE)."""
    import cv2

    image, (width, height) = loaded["img"], step["img_scale"]
    resized = cv2.warpAffine(image, _centred(image, width, height)[:2], (width, height))
    ratio = step["down_ratio"]
    loaded |= {
        "img": resized,
        "img_shape": resized.shape[:2],
        "trans_mat": _centred(image, width // ratio, height // ratio).astype(np.float32),
    }


def _centred(image: Any, width: int, height: int) -> Any:
    factor = width / image.shape[1]
    x, y = (width - factor * image.shape[1]) / 2, (height - factor * image.shape[0]) / 2
    return np.array([[factor, 0, x], [0, factor, y], [0, 0, 1]])


def _sample(points: Tensor, step: Mapping[str, Any]) -> Tensor:
    """As many points as the model takes, the same of a frame in every call.

    With `sample_range` [m] all points beyond are kept.
    """
    chance, count = np.random.default_rng(0), step["num_points"]
    if len(points) < count:
        return points[chance.choice(len(points), count)]
    far = np.zeros(0, np.int64)
    near = np.arange(len(points))
    if step.get("sample_range") is not None:
        distant = points[:, :3].norm(dim=1).numpy() >= step["sample_range"]
        far, near = near[distant], near[~distant]
        far = chance.choice(far, min(len(far), count), replace=False)
    rows = np.concatenate([far, chance.choice(near, count - len(far), replace=False)])
    return points[chance.permutation(rows)]
