"""OpenPCDet's LiDAR detectors from its own YAML files, without its compiled operators."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from bev_data import InputError
from bev_data.boxes import Detections
from bev_data.points import Frame
from bevfusion.frameworks import _operators as operators
from bevfusion.frameworks._detector import (
    DATASET_AXES,
    ForeignDetector,
    checkpoint_notes,
    sorted_detections,
)
from bevfusion.frameworks._extensions import _Extension, use_operator_standins
from bevfusion.frameworks._openpcdet_config import CHECKOUT, Settings, find_checkout, read_config
from bevquant_graph import FunctionCalls
from bevquant_sparse import use_bevquant_kernels

# OpenPCDet's code without its build, its data sets' packages and CUDA.


def _scatter_max(source: Tensor, index: Tensor, dim: int) -> tuple[Tensor, None]:
    return operators.scatter_points(source, index[:, None], "max")[0], None


def _scatter_mean(source: Tensor, index: Tensor, dim: int) -> Tensor:
    return operators.scatter_points(source, index[:, None], "mean")[0]


def _uncompiled(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    return lambda function: function


PACKAGES: Mapping[str, Mapping[str, Any]] = {
    "pcdet.version": {"__version__": "0+0000000"},  # its setup.py writes this file
    "easydict": {"EasyDict": Settings},
    "numba": {"jit": _uncompiled, "njit": _uncompiled},
    "torch_scatter": {"scatter_max": _scatter_max, "scatter_mean": _scatter_mean},
    "SharedArray": {},
    "torchvision": {},
    "pcdet.datasets": {},  # imports the tools of every data set
    "pcdet.datasets.augmentor": {},
}
"""Imports of OpenPCDet's models; functions without an entry serve training and cameras alone."""


def _is_absent(name: str) -> bool:
    try:
        return name not in sys.modules and importlib.util.find_spec(name) is None
    except ImportError:  # of the parent
        return True


@contextmanager
def _packages(folder: Path) -> Iterator[None]:
    """Stand-ins for absent packages, and `pcdet.datasets` without its readers, while imported."""
    made: dict[str, ModuleType] = {}
    for name, contents in PACKAGES.items():
        if name not in sys.modules and (name.startswith("pcdet.datasets") or _is_absent(name)):
            made[name] = _Extension(name, contents)
    sys.modules.update(made)
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]


def _on_the_cpu(function: Any, args: Any, kwargs: Any) -> Any:
    """`tensor.cuda()` is the tensor."""
    return args[0] if function is Tensor.cuda else function(*args, **kwargs)


@contextmanager
def without_cuda() -> Iterator[None]:
    """Run OpenPCDet's code on the CPU, with the names of old numpy that it uses."""
    names = [name for name in ("int", "float") if not hasattr(np, name)]
    with ExitStack() as stack:
        for name in names:
            setattr(np, name, {"int": int, "float": float}[name])
            stack.callback(delattr, np, name)
        stack.enter_context(FunctionCalls(_on_the_cpu))
        yield


def import_openpcdet(checkout: Path | None) -> ModuleType:
    """The module ``pcdet.models`` of a checkout, or of the installed package."""
    if checkout is not None and str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    spec = importlib.util.find_spec("pcdet")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("No module named 'pcdet'")
    use_operator_standins()
    with _packages(Path(spec.submodule_search_locations[0])), without_cuda():
        return importlib.import_module("pcdet.models")


PARTS = ("vfe", "backbone_3d", "map_to_bev_module", "backbone_2d", "dense_head")
"""Modules of a detector from voxels to the first boxes, in the order of their execution."""
STEPS = {
    "mask_points_and_boxes_outside_range",
    "shuffle_points",  # not done: it decides only which points exceed a limit and are dropped
    "transform_points_to_voxels",
    "transform_points_to_voxels_placeholder",
    "calculate_grid_size",
}
"""Of a DATA_PROCESSOR."""
COLUMNS = {"x": 0, "y": 1, "z": 2, "intensity": 3, "timestamp": 4, "time": 4}
"""Columns of `Frame.points` by OpenPCDet's names."""
NORMALIZED = ("KittiDataset", "PandasetDataset", "CustomDataset")
"""Data sets whose intensities are 0..1 in OpenPCDet; `Frame` has 0..255."""
NEEDS = (
    "OpenPCDet's code is needed, not its build: git clone https://github.com/open-mmlab/OpenPCDet, "
    f"and name the folder in {CHECKOUT} or give a configuration in it"
)


class FirstStage(nn.Module):
    """Voxels of one frame to a head's maps: a detector without voxelization and decoding."""

    def __init__(self, model: Any, parts: Sequence[str] = PARTS) -> None:
        super().__init__()
        for name in parts:
            if getattr(model, name, None) is not None:
                self.add_module(name, getattr(model, name))

    def forward(self, voxels: dict[str, Tensor]) -> Any:
        """The head's inputs for decoding, from voxels under OpenPCDet's names."""
        batch: dict[str, Any] = {**voxels, "batch_size": 1}
        # Without an encoder of voxels these are its results.
        for name in ("features", "coords"):
            if name in voxels:
                batch[f"voxel_{name}"] = batch[f"pillar_{name}"] = voxels[name]
        for part in self.children():
            batch = part(batch)
        boxes = batch.get("final_box_dicts")
        return batch["batch_cls_preds"] if boxes is None else boxes[0]


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, Tensor)


def _split(head: Any) -> Callable[[Mapping[str, Any]], Any]:
    """Let a head end with the arguments of its decoding; return that decoding, of the arguments."""
    kind = type(head)
    if not hasattr(kind, "generate_predicted_boxes"):
        raise InputError(
            f"{kind.__name__} has no generate_predicted_boxes, which divides a head into maps and "
            "boxes; name a function that returns your network instead (package.module:function)"
        )
    signature = inspect.signature(kind.generate_predicted_boxes)

    def maps(own: Any, *args: Any, **kwargs: Any) -> tuple[Any, None]:
        given = signature.bind(own, *args, **kwargs).arguments
        return {name: one for name, one in given.items() if _holds_tensors(one)}, None

    def decode(given: Mapping[str, Any]) -> Any:
        arguments: dict[str, Any] = dict.fromkeys(signature.parameters)
        return kind.generate_predicted_boxes(
            **{**arguments, "self": head, "batch_size": 1, **given}
        )

    # The same module under a class of the same name: only what follows the maps is left out.
    contents = {"generate_predicted_boxes": maps, "__module__": kind.__module__}
    head.__class__ = type(kind.__name__, (kind,), contents)
    head.predict_boxes_when_training = False  # regions of a second stage
    return decode


def load_openpcdet(
    config: str | os.PathLike[str], checkpoint: str | Path | None = None
) -> ForeignDetector:
    """A LiDAR detector of OpenPCDet from its configuration file.

    Its own code builds and runs it, on the CPU and not compiled; see `use_operator_standins`. Of a
    detector with two stages it is the first one, up to its boxes.

    Args:
        config: A YAML file of OpenPCDet, or the name of one below its ``tools/cfgs``, such as
            ``nuscenes_models/cbgs_voxel0075_res3d_centerpoint.yaml``. The code is that of the
            environment variable `CHECKOUT`, the installed ``pcdet``, or the checkout around the
            file, in this order.
        checkpoint: As OpenPCDet saves it (``model_state``); random weights without. Nothing in it
            is executed.
    """
    name = f"openpcdet:{config}"
    path = Path(config)
    checkout = find_checkout(path)
    if not path.is_file() and checkout is not None:
        path = checkout / "tools" / "cfgs" / config
    if not path.is_file():
        raise InputError(f"{name}: no such file, nor below tools/cfgs of a checkout; {NEEDS}")
    try:
        models = import_openpcdet(checkout)
    except Exception as error:  # of any module in it
        raise InputError(f"{name}: {type(error).__name__}: {error}; {NEEDS}") from error
    settings = read_config(path, checkout)
    reason = _refusal(settings)
    if reason:
        raise InputError(
            f"{name}: {reason}; name a function that returns your network instead "
            "(package.module:function)"
        )
    classes = tuple(settings.get("CLASS_NAMES", ()))
    try:
        with without_cuda(), torch.random.fork_rng(devices=()):
            dynamic = settings.MODEL.VFE.NAME.startswith("Dyn")
            data = _Data(settings.DATA_CONFIG, voxelized=not dynamic)
            torch.manual_seed(0)  # random weights are the same in every run
            model = models.build_network(settings.MODEL, len(classes), data.for_model(classes))
    except Exception as error:  # of the configuration, or of a constructor anywhere
        raise InputError(f"{name}: it cannot be built: {type(error).__name__}: {error}") from error
    model.eval()
    notes = [*data.notes]
    if checkpoint is not None:
        notes = [*checkpoint_notes(model, checkpoint), *notes]
    second = settings.MODEL.get("ROI_HEAD")
    if second is not None:
        notes.append(f"the second stage ({second.NAME}) is left out: boxes are the first stage's")
    decode = _split(model.dense_head)
    network = FirstStage(model, PARTS[1:] if dynamic else PARTS).eval()
    use_bevquant_kernels(network)
    arguments = _encoded(model.vfe, data.arguments) if dynamic else data.arguments
    if dynamic:
        notes.append(f"{settings.MODEL.VFE.NAME} runs in float in front of the network")
    return ForeignDetector(
        network, arguments, _boxes(model, decode), classes, tuple(notes), data.bounds,
        DATASET_AXES.get(settings.DATA_CONFIG.get("DATASET"), ""),
    )  # fmt: skip


def _encoded(
    encoder: Any, arguments: Callable[[Frame], tuple[Any, ...]]
) -> Callable[[Frame], tuple[Any, ...]]:
    """Results of an encoder that makes its own voxels by `torch.unique`, which no file can do."""

    def encoded(frame: Frame) -> tuple[Any, ...]:
        with torch.no_grad():
            made = encoder({**arguments(frame)[0], "batch_size": 1})
        kind = "pillar" if "pillar_features" in made else "voxel"
        coords = made["pillar_coords" if "pillar_coords" in made else "voxel_coords"]
        return ({"features": made[f"{kind}_features"], "coords": coords},)

    return encoded


def _refusal(settings: Settings) -> str:
    """Why a configuration has no network from voxels to maps; empty if it has."""
    model, data = settings.get("MODEL", Settings()), settings.get("DATA_CONFIG", Settings())
    name, head = model.get("NAME"), model.get("DENSE_HEAD")
    steps = {step.NAME for step in data.get("DATA_PROCESSOR", ())}
    if "images" in data.get("GET_ITEM_LIST", ()) or "IMAGE_BACKBONE" in model:
        own = "its checkpoint fits --model bevfusion --config nuscenes-swint-mmdet3d; "
        images = f"{name} takes camera images, and its frames are points"
        return f"{images}; {own if name == 'BevFusion' else ''}".removesuffix("; ")
    if head is None:
        return f"{name} has no DENSE_HEAD, whose maps end a network here"
    if head.get("DOUBLE_FLIP"):
        return "DOUBLE_FLIP runs four flipped frames; give the configuration without it"
    if not steps <= STEPS:
        return f"its DATA_PROCESSOR has {', '.join(sorted(steps - STEPS))}, unknown here"
    return ""


class _Data:
    """Points as a configuration's data set prepares them for a test."""

    def __init__(self, config: Settings, *, voxelized: bool) -> None:
        self.config, self.voxelized = config, voxelized
        self.low, self.high = np.split(np.array(config.POINT_CLOUD_RANGE, np.float32), 2)
        encoding = config.POINT_FEATURE_ENCODING
        self.features = list(encoding.used_feature_list)
        self.step = next(one for one in config.DATA_PROCESSOR if "VOXEL_SIZE" in one)
        absent = ", ".join(one for one in self.features if one not in COLUMNS)
        self.notes = [f"{absent}: frames do not have it; 0 for every point"] if absent else []

    def for_model(self, classes: tuple[str, ...]) -> SimpleNamespace:
        """The attributes of OpenPCDet's data set that its models read."""
        size = self.step.VOXEL_SIZE
        return SimpleNamespace(
            class_names=list(classes),
            point_feature_encoder=SimpleNamespace(num_point_features=len(self.features)),
            grid_size=np.round((self.high - self.low) / np.array(size)).astype(np.int64),
            point_cloud_range=np.concatenate([self.low, self.high]),
            voxel_size=size,
            depth_downsample_factor=None,
            dataset_cfg=self.config,
        )

    @property
    def bounds(self) -> Any:
        """Low x, y, z, then high x, y, z [m]."""
        return (*self.low.tolist(), *self.high.tolist())

    def arguments(self, frame: Frame) -> tuple[Any, ...]:
        """The model's voxels of a frame, or its points where the model voxelizes itself."""
        if frame.points is None:
            raise InputError(f"{frame.name}: it holds voxels; the model voxelizes points itself")
        given = frame.points.copy()
        if self.config.DATASET in NORMALIZED:
            given[:, 3] /= 255
        elif self.config.DATASET == "WaymoDataset":
            given[:, 3] = np.tanh(given[:, 3] / 255)
        within = ((given[:, :2] >= self.low[:2]) & (given[:, :2] <= self.high[:2])).all(1)
        if not within.any():
            raise InputError(f"{frame.name}: no point within the model's POINT_CLOUD_RANGE")
        given = np.pad(given[within], ((0, 0), (0, 1)))  # a column of zeros at -1
        points = torch.from_numpy(given[:, [COLUMNS.get(name, -1) for name in self.features]])
        if not self.voxelized:
            return ({"points": functional.pad(points, (1, 0))},)
        voxels, cells, counts = operators.hard_voxelize(
            points,
            self.step.VOXEL_SIZE,
            self.bounds,
            self.step.MAX_POINTS_PER_VOXEL,
            self.step.MAX_NUMBER_OF_VOXELS["test"],
        )
        coords = functional.pad(cells, (1, 0))
        return ({"voxels": voxels, "voxel_num_points": counts, "voxel_coords": coords},)


def _boxes(
    model: Any, decode: Callable[[Mapping[str, Any]], Any]
) -> Callable[[Any, Frame], Detections]:
    """The head's decoding, then suppression where it is the detector's."""
    # Not the method of the detector's class, which may take the boxes of a second stage.
    template = importlib.import_module("pcdet.models.detectors").Detector3DTemplate
    heads = getattr(model.dense_head, "rpn_heads", ())
    labels = [getattr(head, "head_label_indices", None) for head in heads]

    def boxes(maps: Any, frame: Frame) -> Detections:
        with without_cuda(), torch.no_grad():
            made = decode(maps)
            if isinstance(made, tuple):  # scores and boxes of all anchors
                batch = {
                    "batch_size": 1,
                    "batch_cls_preds": made[0],
                    "batch_box_preds": made[1],
                    "cls_preds_normalized": False,
                    "multihead_label_mapping": labels,
                }
                made = template.post_processing(model, batch)[0]
        found = made[0]
        rows = found["pred_boxes"].numpy()
        return sorted_detections(
            rows[:, :7], found["pred_scores"].numpy(), found["pred_labels"].numpy() - 1,
            rows[:, 7:9] if rows.shape[1] > 8 else None,
        )  # fmt: skip

    return boxes
