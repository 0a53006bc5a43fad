"""Frames for training: moved consistently, kept on disk, split from those that judge."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from bev_data.boxes import count_inside
from bev_data.cameras import depth_images, order_cameras, prepare_cameras
from bev_data.points import Frame, Labels
from bev_scenes import street_frame
from bevfusion.model import CONFIGS, build_model
from bevfusion.training import CompactFrame, compact, make_batch, order_of
from bevfusion_quant import InputError
from bevfusion_quant.commands.training import Train
from bevfusion_quant.train import (
    Augmentation,
    FrameSource,
    Motion,
    TrainConfig,
    held_out,
    prepare_frames,
    training_frames,
)
from bevquant_quantizers.documents import read_arrays, write_arrays

MOTIONS = (
    Motion(0.7),
    Motion(-0.3, (-1, 1)),
    Motion(1.9, (1, -1), 1.1),
    Motion(0.0, (-1, -1), 0.9),
)


@pytest.fixture(scope="module")
def frame() -> Frame:
    return street_frame(3, size="tiny", beams=16, sweeps=1, azimuth_steps=256, cameras="tiny")


@pytest.mark.parametrize("motion", MOTIONS)
def test_boxes_hold_their_points_after_a_motion(frame: Frame, motion: Motion) -> None:
    # A little larger, so that rounding moves no point across a side.
    boxes = frame.labels.boxes.copy()
    boxes[:, 3:6] += 0.02
    before = count_inside(frame.points, boxes)
    assert before.sum() > 50
    moved = motion.labels(frame.labels._replace(boxes=boxes))
    after = count_inside(motion.points(frame.points), moved.boxes)
    np.testing.assert_array_equal(after, before)
    assert (np.abs(moved.boxes[:, 6]) <= math.pi).all()


@pytest.mark.parametrize("motion", MOTIONS)
def test_velocities_and_headings_move_with_the_boxes(motion: Motion) -> None:
    yaw = np.array([0.4, -2.5, 3.0])
    ahead = np.stack([np.cos(yaw), np.sin(yaw)], 1)
    boxes = np.zeros((3, 7), np.float32)
    boxes[:, 3:6], boxes[:, 6] = 1, yaw
    labels = motion.labels(Labels(boxes, ("car",) * 3, (5 * ahead).astype(np.float32)))
    turned = np.stack([np.cos(labels.boxes[:, 6]), np.sin(labels.boxes[:, 6])], 1)
    np.testing.assert_allclose(labels.velocities, 5 * motion.scale * turned, atol=1e-5)


@pytest.mark.parametrize("motion", MOTIONS)
def test_cameras_see_moved_points_where_they_saw_them(frame: Frame, motion: Motion) -> None:
    inputs = prepare_cameras(order_cameras(frame.cameras), (96, 256))
    before = depth_images(frame.points.astype(np.float64), inputs)
    matrix = motion.matrix
    points = frame.points[:, :3].astype(np.float64) @ matrix[:3, :3].T
    moved = torch.from_numpy(motion.camera(inputs.lidar_to_camera.numpy()))
    after = depth_images(points, inputs._replace(lidar_to_camera=moved))
    same = (before - after).abs() < 1e-3
    assert same.double().mean() > 0.9995  # but for points on the edge of a pixel


@pytest.mark.parametrize("motion", MOTIONS)
def test_the_cameras_map_moves_with_the_points(frame: Frame, motion: Motion) -> None:
    model = build_model(CONFIGS["tiny"], ("camera", "decoder", "head"))
    prepared = compact(frame, (96, 256))
    view = model.camera["vtransform"]
    both = [make_batch([prepared], [m], model)[0].cells for m in (Motion(), motion)]
    size, counts = 1.35, view.counts
    # The map's first cells also hold what lies up to a cell outside.
    inside = torch.ones_like(both[0], dtype=torch.bool)
    for cells in both:
        inside &= (cells >= counts[1]) & (cells % counts[1] > 0)
    assert inside.double().mean() > 0.3
    xy = [
        np.stack([c[inside].numpy() // counts[1], c[inside].numpy() % counts[1]], 1) * size
        - 54.0
        + size / 2
        for c in both
    ]
    error = xy[0] @ motion.matrix[:2, :2].T - xy[1]
    # Both are rounded to the middle of a cell.
    assert np.abs(error).max() < size * 1.35
    assert np.abs(error.mean(0)).max() < 0.1


def test_draws_depend_on_the_generator_alone() -> None:
    still = Augmentation(flip=False, rotation=0.0, scale=0.0)
    first, second = np.random.default_rng(1), np.random.default_rng(1)
    assert still.draw(first) == Motion()
    drawn = Augmentation().draw(second)
    assert abs(drawn.angle) <= 0.2
    assert abs(drawn.scale - 1) <= 0.05
    assert first.random() == second.random()


@pytest.mark.parametrize(("setting", "value"), [("rotation", -0.1), ("scale", 1.0)])
def test_an_augmentation_out_of_range_is_refused(setting: str, value: float) -> None:
    with pytest.raises(InputError, match=f"--{setting}"):
        Augmentation(**{setting: value})


def test_a_prepared_frame_is_the_frame_within_its_rounding(frame: Frame, tmp_path: Path) -> None:
    compact(frame, (96, 256)).save(tmp_path / "0.npz")
    kept = CompactFrame.load(tmp_path / "0.npz")
    np.testing.assert_allclose(kept.points[:, :3], frame.points[:, :3], atol=0.00201)
    np.testing.assert_allclose(kept.points[:, 3:], frame.points[:, 3:], rtol=1e-3)
    inputs = prepare_cameras(order_cameras(frame.cameras), (96, 256))
    assert torch.equal(kept.network_images(), inputs.images)
    np.testing.assert_allclose(kept.depth, depth_images(frame.points, inputs), rtol=1e-3)
    np.testing.assert_array_equal(kept.calibration[1], inputs.lidar_to_camera)
    assert kept.labels.names == frame.labels.names
    np.testing.assert_array_equal(kept.labels.boxes, frame.labels.boxes)
    np.testing.assert_array_equal(kept.labels.num_points, frame.labels.num_points)


def test_frames_without_labels_or_points_are_refused(frame: Frame) -> None:
    with pytest.raises(InputError, match="no labels"):
        compact(Frame("bare", frame.points), None)
    with pytest.raises(InputError, match="CAM_BACK"):
        compact(dataclasses.replace(frame, cameras=frame.cameras[:1]), (96, 256))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0.npz").write_bytes(b"PK\x03\x04 nothing else")
    with pytest.raises(InputError, match="not a prepared frame"):
        CompactFrame.load(tmp_path / "0.npz")


def test_frames_without_a_point_in_range_are_refused(frame: Frame) -> None:
    model = build_model(CONFIGS["tiny"], ("lidar", "decoder", "head"))
    far = compact(dataclasses.replace(frame, points=frame.points + np.float32(70)), None)
    with pytest.raises(InputError, match="street_3: no point lies in the range"):
        make_batch([far], [Motion()], model)
    batch, targets = make_batch([far, compact(frame, None)], [Motion()] * 2, model)
    assert set(batch.coords[:, 0].tolist()) == {1}
    assert len(targets) == 2


def small_streets(first: int, count: int) -> list[Frame]:
    return [
        street_frame(seed, size="tiny", beams=4, sweeps=1, azimuth_steps=60)
        for seed in range(first, first + count)
    ]


def source(first: int, count: int) -> FrameSource:
    return FrameSource(f"{count} from {first}", partial(small_streets, first, count))


def test_what_lies_prepared_is_not_made_again(tmp_path: Path) -> None:
    config = TrainConfig(branch="lidar")
    once = prepare_frames(source(0, 2), config, tmp_path / "f", workers=0)
    stamp = (tmp_path / "f" / "000000.npz").stat().st_mtime_ns
    (tmp_path / "f" / "000001.npz").unlink()
    again = prepare_frames(source(0, 2), config, tmp_path / "f", workers=0)
    assert [again[i].name for i in range(len(again))] == ["street_0", "street_1"]
    assert (tmp_path / "f" / "000000.npz").stat().st_mtime_ns == stamp
    np.testing.assert_array_equal(once[1].xyz, again[1].xyz)


def test_prepared_frames_of_others_are_refused(tmp_path: Path) -> None:
    config = TrainConfig(branch="lidar")
    prepare_frames(source(0, 1), config, tmp_path / "f", workers=0)
    with pytest.raises(InputError, match="holds other frames"):
        prepare_frames(source(5, 1), config, tmp_path / "f", workers=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").touch()
    with pytest.raises(InputError, match="not empty"):
        prepare_frames(source(0, 1), config, tmp_path / "mine", workers=0)


def test_every_epoch_shows_every_frame_once_in_another_order() -> None:
    epochs = [order_of(3, 7 * epoch, 7, 7) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    pieces = [i for position in range(0, 21, 3) for i in order_of(3, position, 3, 7)]
    assert [i for epoch in epochs for i in epoch] == pieces


def test_streets_that_judge_are_never_trained_on() -> None:
    options = Train(dataset="street", out=Path("runs/x"))
    trained = training_frames(options, size="tiny", with_cameras=False).open()
    evaluated = held_out(options, size="tiny", with_cameras=False, count=300).open()
    assert len(trained) == 1000
    assert len(evaluated) == 300
    assert not set(trained.keys) & set(evaluated.keys)
    assert min(trained.keys) > 100 * max(evaluated.keys)
    assert held_out(options, size="tiny", with_cameras=False, count=0) is None


def test_pandaset_frames_that_judge_are_never_trained_on(real_data: Path) -> None:
    folder = real_data / "pandaset_002_compact"
    if not folder.is_dir():
        pytest.skip("no PandaSet sequence among the real data")
    options = Train(dataset="pandaset", data=(folder,), out=Path("runs/x"))
    trained = training_frames(options, size="tiny", with_cameras=False).open()
    evaluated = held_out(options, size="tiny", with_cameras=False, count=1).open()
    assert max(map(int, trained.keys)) < 28 <= min(map(int, evaluated.keys))
    assert len(trained) + len(evaluated) == len(list(folder.glob("frame_*.npz")))


def test_pandasets_frames_become_batches(real_data: Path) -> None:
    folder = real_data / "pandaset_002_compact"
    if not folder.is_dir():
        pytest.skip("no PandaSet sequence among the real data")
    options = Train(dataset="pandaset", data=(folder,), out=Path("runs/x"))
    frames = training_frames(options, size="tiny", with_cameras=False).open()
    model = build_model(CONFIGS["tiny"], ("lidar", "decoder", "head"))
    batch, (targets,) = make_batch([compact(frames[0], None)], [MOTIONS[0]], model)
    assert len(batch.features) > 1000
    assert len(targets) > 3
    assert np.isnan(targets.velocities).all()


def test_a_frame_of_other_arrays_is_refused(frame: Frame, tmp_path: Path) -> None:
    """`boxes` without an axis has no length."""
    compact(frame, None).save(tmp_path / "0.npz")
    arrays = read_arrays(tmp_path / "0.npz")
    for changed in ({"boxes": np.float32(1)}, {"names": np.zeros(3, bool)}, {"xyz": np.zeros(3)}):
        write_arrays(tmp_path / "1.npz", {**arrays, **changed})
        with pytest.raises(InputError, match=r"not a prepared frame: .*remove it"):
            CompactFrame.load(tmp_path / "1.npz")
