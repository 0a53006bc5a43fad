"""CenterPoint from float to integers and files, and its loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bev_data import InputError
from bev_data.points import Frame, VoxelData
from bevfusion.centerpoint import CenterHeadConfig, center_loss, decode
from bevfusion.deployment import export_files
from bevfusion.detectors import DETECTORS, build_detector, example_of
from bevfusion.evaluation import FrameBatches
from bevfusion.model import Detector, random_weights
from bevfusion.quantization import (
    calibrate_detector,
    evaluate_quantized,
    expand_patterns,
    fuse_detector,
    quantize_detector,
)
from bevfusion.training import RARE, Targets, untrained_model
from bevquant_export import open_onnx
from bevquant_int8sim import simulate

KINDS = ("centerpoint", "centerpoint-pillars")


def small(kind: str) -> Any:
    """The small sizes with two tasks."""
    sizes = DETECTORS[kind].configs["tiny"]
    tasks = (("car", "truck"), ("pedestrian",))
    return replace(sizes, head=replace(sizes.head, tasks=tasks))


def frames(count: int = 2) -> list[Frame]:
    generator = np.random.default_rng(0)
    clouds = generator.normal(0, (6, 6, 1, 0, 0), (count, 900, 5)).astype(np.float32)
    clouds[..., 3] = generator.uniform(0, 255, clouds.shape[:2])
    return [Frame(str(i), cloud) for i, cloud in enumerate(clouds)]


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest) -> tuple[Detector, Detector, FrameBatches]:
    return quantized_as(small(request.param))


def quantized_as(sizes: Any) -> tuple[Detector, Detector, FrameBatches]:
    model = build_detector(sizes)
    batches = FrameBatches(frames(), sizes, model)
    random_weights(model, *batches[0])
    folded = fuse_detector(model, example_of(sizes, batches[0]))
    assert not folded.skipped
    assert folded.max_error < 1e-4
    parts = DETECTORS[sizes.kind].parts
    quantized = quantize_detector(folded.model, example_of(sizes, batches[0]), parts).model
    calibrate_detector(quantized, batches)
    return folded.model, quantized, batches


def test_all_of_it_computes_in_integers(made: Any) -> None:
    folded, quantized, batches = made
    found = evaluate_quantized(folded, quantized, batches)
    assert [row.stage for row in found.stage_rows] == ["lidar", "decoder", "head"]
    assert all(row.sqnr_db is None or row.sqnr_db > 10 for row in found.stage_rows)
    assert len(found.float_detections) == 2
    integers = simulate(quantized, tuple(batches[0]))
    assert integers.integer_share > 0.99
    with torch.no_grad():
        wanted = quantized(*batches[0])
    for name, value in integers(*batches[0]).items():
        error = (value - wanted[name]).square().sum() / wanted[name].square().sum()
        assert float(error) < 1e-2, name


@pytest.mark.parametrize("target", ["tensorrt11", "onnxruntime"])
def test_files_in_a_row_are_the_integer_model(made: Any, target: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    folded, quantized, batches = made
    written = export_files(folded, quantized, batches, tmp_path / "files", target=target)
    assert not written.failures
    encoder = (
        "pts_voxel_encoder" if batches.sizes.kind == "centerpoint-pillars" else "centerpoint.scn"
    )
    assert [file.name for file in written.files] == [f"{encoder}.onnx", "rpn_centerhead.onnx"]
    names = tuple(port.name for port in written.files[1].outputs)
    assert names == quantized.head.output_names
    assert names[:2] == ("reg_0", "height_0")
    assert names[-1] == "heatmap_1"
    assert written.agreement[0].matched > 0
    if batches.sizes.kind == "centerpoint-pillars":
        assert written.files[0].kind == "float"
        assert written.files[0].inputs[0].shape == (8000, 20, 11)


def test_autoware_reads_pillars_of_its_own_sizes_alone(made: Any, tmp_path: Path) -> None:
    folded, quantized, batches = made
    if batches.sizes.kind == "centerpoint-pillars":
        with pytest.raises(InputError, match=r"has 2 tasks.*20 points a pillar.*--config autoware"):
            export_files(folded, quantized, batches, tmp_path / "files", target="autoware")
        return
    pytest.importorskip("onnxruntime")
    written = export_files(folded, quantized, batches, tmp_path / "files", target="autoware")
    assert not written.failures
    assert [file.name for file in written.files] == ["centerpoint.scn.onnx", "rpn_centerhead.onnx"]
    assert written.agreement[0].matched > 0
    assert any("no node for a CenterPoint of voxels" in note for note in written.files[0].notes)


def test_autoware_s_node_reads_boxes_of_older_mmdetection3d(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")  # writes the float encoder
    pytest.importorskip("onnxruntime")
    sizes = DETECTORS["centerpoint-pillars"].configs["tiny"]
    sizes = replace(
        sizes,
        lidar=replace(sizes.lidar, max_num_points=32),
        head=replace(sizes.head, tasks=(("car", "truck"),)),
    )
    folded, quantized, batches = quantized_as(sizes)
    written = export_files(folded, quantized, batches, tmp_path / "files", target="autoware")
    assert not written.failures
    encoder, dense = written.files
    assert encoder.name == "pts_voxel_encoder_centerpoint.onnx"
    assert dense.name == "pts_backbone_neck_head_centerpoint.onnx"
    assert [port.name for port in encoder.inputs] == ["input_features"]
    assert "autoware_lidar_centerpoint builds" in dense.build
    assert "class_names ['car', 'truck']" in dense.notes[-1]
    # The node binds the outputs by their places.
    maps = ["heatmap", "reg", "height", "dim", "rot", "vel"]
    assert [port.name for port in dense.outputs] == maps
    assert written.agreement[0].matched > 0
    with torch.no_grad():
        features = quantized.encode_lidar(*batches[0][:3])
        # Float sums of other threads flip integers, which random weights amplify.
        wanted = simulate(quantized, tuple(batches[0]))(*batches[0])
    got = open_onnx(tmp_path / "files" / dense.name)({"spatial_features": features})
    length, width, height = wanted["dim_0"][0]
    apart = (got["dim"][0] - torch.stack([width, length, height])).abs()
    assert float(apart.mean()) < 1e-3 < float((length - width).abs().mean())
    yaw = torch.atan2(*wanted["rot_0"][0])
    node_yaw = -torch.atan2(*got["rot"][0]) - torch.pi / 2  # as autoware_lidar_centerpoint's
    assert float(torch.sin((node_yaw - yaw) / 2).abs().median()) < 1e-3


def test_patterns_may_leave_the_part_out() -> None:
    model = build_detector(small("centerpoint"))
    assert expand_patterns(model, ["conv_input"]) == ("pts_middle_encoder.conv_input",)
    assert expand_patterns(model, ["task_heads.0.*"]) == ("pts_bbox_head.task_heads.0.*",)


def test_voxels_of_a_file_get_the_encoders_axes() -> None:
    sizes = DETECTORS["centerpoint"].configs["tiny"]
    model = build_detector(sizes, ("lidar",))
    (frame,) = frames(1)
    means, coords, _ = model.lidar["voxelize"](frame.points)
    xyz = coords[:, [0, 3, 2, 1]].numpy()
    stored = Frame("stored", None, voxels=VoxelData(means.numpy(), xyz))
    batch = FrameBatches([stored], sizes, model)[0]
    assert torch.equal(batch.coords, coords)
    sizes = DETECTORS["centerpoint-pillars"].configs["tiny"]
    pillars = build_detector(sizes, ("lidar",))
    with pytest.raises(InputError, match="pillar encoder reads single points"):
        FrameBatches([stored], sizes, pillars)[0]


def test_the_codes_of_targets_decode_to_the_boxes() -> None:
    """The loss of the maps that say the targets is 0, and decode finds the targets in them."""
    config = replace(CenterHeadConfig(map_size=(40, 30), voxel_size=(0.2, 0.15)), nms="none")
    boxes = np.array(
        [[-50.1, -51.2, 0.4, 4.2, 1.9, 1.6, 2.5], [-45.3, -40.7, -1.0, 0.7, 0.6, 1.8, -0.3]],
        np.float32,
    )
    target = Targets(boxes, np.array([[3, -1], [0.5, 0]], np.float32), np.array([0, 8]))
    x, y = config.map_size
    outputs = {
        f"{name}_{task}": torch.full((1, n, y, x), -20.0 if name == "heatmap" else 0.0)
        for task, classes in enumerate(config.tasks)
        for name, n in (*config.branches, ("heatmap", len(classes)))
    }
    cell = np.array(config.cell_size)
    for box, velocity, task in zip(boxes, target.velocities, (0, 5), strict=True):
        place = (box[:2] - np.array(config.origin)) / cell
        i, j = place.astype(int)
        values = {
            "reg": place - (i, j), "height": box[2:3], "dim": np.log(box[3:6]),
            "rot": [np.sin(box[6]), np.cos(box[6])], "vel": velocity,
        }  # fmt: skip
        for name, value in values.items():
            outputs[f"{name}_{task}"][0, :, j, i] = torch.tensor(np.array(value, np.float32))
        outputs[f"heatmap_{task}"][0, 0, j, i] = 20.0
    loss = center_loss(outputs, [target], config)
    assert float(loss.boxes) < 1e-5
    assert float(loss.heatmap) < 1e-5
    (found,) = decode(outputs, config)
    order = np.argsort(found.labels)
    np.testing.assert_allclose(found.boxes[order], boxes, atol=1e-5)
    assert found.labels[order].tolist() == [0, 8]
    outputs["rot_0"] = -outputs["rot_0"]
    assert float(center_loss(outputs, [target], config).boxes) > 0.2


def test_training_begins_with_rare_objects() -> None:
    model = untrained_model(lambda: build_detector(small("centerpoint-pillars")), seed=3)
    biases = torch.cat([layer.bias for layer in model.head.heatmap_layers])
    torch.testing.assert_close(biases.sigmoid(), torch.full((3,), RARE))
