"""OpenPCDet's own code, where it is at hand: its boxes, and CenterPoint's weights and files.

The folder of a checkout is named in the environment variable `BEVQUANT_OPENPCDET`; an installed
``pcdet`` will do too. Grids are small.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from bevfusion.centerpoint import VOXEL_CONFIGS, build_centerpoint
from bevfusion.frameworks import ForeignDetector, load_detector
from bevfusion.frameworks._openpcdet import _Data, import_openpcdet, load_openpcdet, without_cuda
from bevfusion.frameworks._openpcdet_config import CHECKOUT, find_checkout, read_config
from bevfusion.model import load_state_dict
from bevquant_export import export_detector
from bevquant_fusion import fuse_model
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import use_bevquant_kernels

CODE = os.environ.get(CHECKOUT)
if CODE is None and importlib.util.find_spec("pcdet") is None:
    pytest.skip(f"needs OpenPCDet's code: name a checkout in {CHECKOUT}", allow_module_level=True)
scenes = pytest.importorskip("bev_scenes", reason="frames are streets of bev_scenes")
FRAME = scenes.street_frame(seed=0, size="tiny", cameras=None)
pytestmark = [
    pytest.mark.usefixtures("spconv"),
    pytest.mark.filterwarnings("ignore"),  # of their code, on a newer torch and numpy
]
VOXELS = "nuscenes_models/cbgs_voxel01_res3d_centerpoint.yaml"


def small(folder: Path, base: str, cells: int = 128) -> Path:
    """The configuration with a grid of `cells` × `cells` voxels, and boxes of any score."""
    config = read_config(Path(CODE or "") / "tools" / "cfgs" / base, find_checkout(Path(base)))
    data, head = config.DATA_CONFIG, config.MODEL.DENSE_HEAD
    size = next(step.VOXEL_SIZE for step in data.DATA_PROCESSOR if "VOXEL_SIZE" in step)
    low_x = data.POINT_CLOUD_RANGE[0] and -cells / 2 * size[0]
    low, high = data.POINT_CLOUD_RANGE[2], data.POINT_CLOUD_RANGE[5]
    bounds = [low_x, -cells / 2 * size[1], low, low_x + cells * size[0], cells / 2 * size[1], high]
    limits = "DENSE_HEAD: {POST_PROCESSING: {MAX_OBJ_PER_SAMPLE: 50}}, "
    path = folder / Path(base).name
    path.write_text(
        f"_BASE_CONFIG_: cfgs/{base}\n"
        f"DATA_CONFIG: {{POINT_CLOUD_RANGE: {[round(float(one), 4) for one in bounds]}}}\n"
        f"MODEL: {{{limits if 'POST_PROCESSING' in head else ''}"
        "POST_PROCESSING: {SCORE_THRESH: 0.005}}\n"
    )
    return path


def theirs(path: Path, network: torch.nn.Module) -> Any:
    """Boxes of their complete detector with the same weights."""
    config = read_config(path, find_checkout(path))
    models = import_openpcdet(find_checkout(path))
    data = _Data(config.DATA_CONFIG, voxelized=not config.MODEL.VFE.NAME.startswith("Dyn"))
    classes = tuple(config.CLASS_NAMES)
    with without_cuda():
        torch.manual_seed(0)
        model = models.build_network(config.MODEL, len(classes), data.for_model(classes)).eval()
    model.load_state_dict({**model.state_dict(), **network.state_dict()})
    use_bevquant_kernels(model)
    with torch.no_grad(), without_cuda():
        return model({**data.arguments(FRAME)[0], "batch_size": 1})[0][0]


@pytest.mark.parametrize(
    ("base", "cells"),
    [
        (VOXELS, 128),
        ("nuscenes_models/cbgs_second_multihead.yaml", 128),
        ("nuscenes_models/cbgs_voxel0075_voxelnext.yaml", 128),
        ("kitti_models/second.yaml", 128),
        ("kitti_models/pointpillar.yaml", 32),
        ("waymo_models/centerpoint_pillar_1x.yaml", 32),
        ("waymo_models/centerpoint_dyn_pillar_1x.yaml", 32),
        ("waymo_models/pillarnet.yaml", 128),
    ],
)
def test_boxes_are_their_own(base: str, cells: int, tmp_path: Path) -> None:
    path = small(tmp_path, base, cells)
    detector = load_openpcdet(path)  # in their axes
    assert detector.boxes is not None
    with torch.no_grad():
        found = detector.boxes(detector.network(*detector.arguments(FRAME)), FRAME)
    wanted = theirs(path, detector.network)
    order = torch.from_numpy(np.argsort(-wanted["pred_scores"].numpy(), kind="stable"))
    assert len(found.boxes) > 0
    assert np.array_equal(found.scores, wanted["pred_scores"][order].numpy())
    assert np.array_equal(found.boxes[:, :6], wanted["pred_boxes"][order, :6].numpy())
    assert np.array_equal(found.labels, wanted["pred_labels"][order].numpy() - 1)


@pytest.mark.parametrize(
    "base",
    ["kitti_models/pv_rcnn.yaml", "kitti_models/PartA2.yaml", "kitti_models/second_iou.yaml"],
)
def test_second_stages_are_left_out(base: str, tmp_path: Path) -> None:
    detector = load_detector(f"openpcdet:{small(tmp_path, base)}")
    assert any("second stage" in note for note in detector.notes)
    assert detector.boxes is not None
    with torch.no_grad():
        assert len(detector.boxes(detector.network(*detector.arguments(FRAME)), FRAME).boxes)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("kitti_models/CaDDN.yaml", "CaDDN takes camera images"),
        ("nuscenes_models/bevfusion.yaml", "BevFusion takes camera .* --model bevfusion --config "),
        ("nuscenes_models/transfusion_lidar.yaml", "TransFusionHead has no generate_predicted"),
        ("kitti_models/pointrcnn.yaml", "PointRCNN has no DENSE_HEAD"),
        ("nuscenes_models/cbgs_voxel0075_voxelnext_doubleflip.yaml", "DOUBLE_FLIP"),
    ],
)
def test_what_has_no_network_here_is_refused(base: str, message: str) -> None:
    path = Path(CODE or "") / "tools" / "cfgs" / base
    with pytest.raises(ValueError, match=message):
        load_detector(f"openpcdet:{path}")


@pytest.fixture(scope="module")
def centerpoint(tmp_path_factory: pytest.TempPathFactory) -> ForeignDetector:
    path = small(tmp_path_factory.mktemp("config"), VOXELS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_detector(f"openpcdet:{path}")


@pytest.fixture(scope="module")
def ours(centerpoint: ForeignDetector) -> Any:
    """CenterPoint under mmdetection3d's names, with the same weights."""
    config = VOXEL_CONFIGS["nuscenes-voxel01"]
    bounds = (-6.4, -6.4, -5.0, 6.4, 6.4, 3.0)
    model = build_centerpoint(
        replace(
            config,
            lidar=replace(config.lidar, sparse_shape=(128, 128, 41), point_cloud_range=bounds),
            head=replace(config.head, map_size=(16, 16), origin=bounds[:2]),
        )
    ).eval()
    load_state_dict(model, centerpoint.network.state_dict(), names="openpcdet")
    return model


def test_voxels_and_maps_are_those_of_centerpoint(centerpoint: ForeignDetector, ours: Any) -> None:
    (arguments,) = centerpoint.arguments(FRAME)
    features, coords, _ = ours.pts_voxel_layer(FRAME.points)
    assert torch.equal(coords, arguments["voxel_coords"])
    with torch.no_grad():
        wanted = ours(features, coords, 1)
        found = centerpoint.network(arguments)["pred_dicts"]
    names = {"hm": "heatmap", "center": "reg", "center_z": "height", "dim": "dim", "vel": "vel"}
    for task, maps in enumerate(found):
        for name, own in names.items():
            assert torch.allclose(maps[name], wanted[f"{own}_{task}"], atol=1e-4), name
        assert torch.allclose(maps["rot"][:, [1, 0]], wanted[f"rot_{task}"], atol=1e-4)


def files(model: torch.nn.Module, example: tuple[Any, ...], folder: Path) -> list[onnx.GraphProto]:
    """The sparse and the dense file."""
    fused = fuse_model(model, example)
    quantized = quantize_model(fused.model, example_inputs=example)
    calibrate(quantized.model, [example], method="max")
    made = export_detector(quantized.model, example, folder, "tensorrt11")
    assert made.checks[0].layers[0] == 0 < made.checks[0].layers[1]
    assert made.sparse is not None
    assert made.dense is not None
    return [onnx.load(one.path).graph for one in (made.sparse, made.dense)]


def sparse_layers(graph: onnx.GraphProto) -> list[tuple[bytes, bytes, Any]]:
    """Weights, biases and ranges of the weights of each convolution."""
    held = {one.name: one.raw_data for one in graph.initializer}
    return [
        (held[node.input[1]], held[node.input[2]], list(one.floats))
        for node in graph.node
        if node.op_type == "SparseConvolution"
        for one in node.attribute
        if one.name == "weight_dynamic_ranges"
    ]


def test_files_are_those_of_centerpoint(
    centerpoint: ForeignDetector, ours: Any, tmp_path: Path
) -> None:
    features, coords, _ = ours.pts_voxel_layer(FRAME.points)
    found = files(centerpoint.network, centerpoint.arguments(FRAME), tmp_path / "theirs")
    wanted = files(ours, (features, coords, 1), tmp_path / "ours")
    # Before the first convolution ours has one of 1 × 1 × 1 that scales the columns of a voxel.
    assert len(sparse_layers(found[0])) == 21
    assert sparse_layers(found[0]) == sparse_layers(wanted[0])[1:]
    weights = [
        {one.name: one.raw_data for one in graph.initializer if len(one.dims) == 4}
        for graph in (found[1], wanted[1])
    ]
    others = set(weights[1].values())
    converted = {f"dense_head.heads_list.{task}.rot.1.weight" for task in range(6)}
    converted.add("backbone_2d.deblocks.0.0.weight")  # a 1 × 1 deconvolution, ours a convolution
    assert {name for name, data in weights[0].items() if data not in others} <= converted
    assert len(weights[0]) == len(weights[1]) > 80
