"""Frames that nothing can be calibrated on end the command, and are named wherever one looks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from clouds import cloud
from torch import nn
from without_pictures import without_pictures

from bev_data.points import Frame, VoxelData, read_points
from bev_scenes import street_frame
from bevfusion.evaluation import FrameNote, PoorData, frame_findings, note_of, note_record
from bevfusion_quant.cli import main
from bevfusion_quant.frames import finding_lines
from bevfusion_quant.ptq import FrameBatches, calibrate_branch
from bevquant_export import lint_onnx
from bevquant_quantizers import QuantDescriptor, TensorQuantizer


def scan(seed: int = 1, broken: int = 0) -> np.ndarray:
    """A cloud in which every so many-th intensity is broken."""
    points = cloud(seed=seed)
    if broken:
        points[::broken, 3] = 3e38
    return points


def ptq(
    capsys: pytest.CaptureFixture[str], *more: str, **frames: np.ndarray
) -> tuple[int, str, str]:
    """Exit code, what was printed, and the error of a run on these frames."""
    for name, points in frames.items():
        np.savez(f"{name}.npz", points=points)
    files = [f"{name}.npz" for name in frames]
    code = main(["ptq", "--points", *files, "--config", "tiny", "--name", "a", *more])
    said = capsys.readouterr()
    return code, said.out, said.err


pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def summary() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Path("runs/a/summary.json").read_text())
    return content


def test_trap_49_points_at_zero(capsys: pytest.CaptureFixture[str]) -> None:
    points = np.zeros((2000, 5), np.float32)
    code, told, error = ptq(capsys, "--quantize-first-layer", zeros=points)
    assert code == 1
    assert "the calibration cannot be right" in error
    assert "encoders.lidar, zeros: few voxels: 2,000 points in 1 voxel; " in error
    assert "--allow-poor-calibration" in error
    assert "conv_input.0._input_quantizer, zeros: all zero" in told
    # The run is there to be looked at, and says so itself.
    found = summary()["calibration"]["findings"]
    assert found[0]["frame"] == "zeros"
    assert found[0]["poor"] is True
    page = Path("runs/a/report.html").read_text()
    assert "few voxels" in page
    assert "2,000 points in 1 voxel" in page
    assert json.loads(Path("runs/a/config.json").read_text())["poor_calibration"]


def test_trap_49_copies_of_one_point_are_allowed_where_one_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    points = np.tile(np.float32([[12.3, -4.5, 0.6, 70, 0]]), (10_000, 1))
    code, told, error = ptq(
        capsys, "--allow-poor-calibration", "--quantize-first-layer", copies=points
    )
    assert code == 0
    assert "copies: few voxels: 10,000 points in 1 voxel; " in told
    assert "few values: 5 values, and integers have 128 magnitudes" in told
    assert "cannot be right" not in error
    # Whoever gets its files is told by the linter.
    main("export --run runs/a --points copies.npz --name files".split())
    (file,) = Path("runs/files/onnx").glob("*.onnx")
    found = [finding for finding in lint_onnx(file, "libspconv") if finding.id == "CAL001"]
    assert any("copies: few values" in finding.reason for finding in found)


def test_trap_49_one_broken_frame_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """1 % broken intensities: the file is refused by name, before anything is calibrated."""
    code, told, error = ptq(capsys, good=scan(), bad=scan(2, broken=100))
    assert code == 2
    assert "bad.npz" in error
    assert "the intensity spans 0..3e+38" in error
    assert (told, Path("runs").exists()) == ("", False)


def test_values_that_become_infinite_name_frame_and_tensor() -> None:
    class Frames(list[tuple[torch.Tensor]]):
        """As `FrameBatches`, of which two were read."""

        names: ClassVar = {0: ("good", 1), 1: ("bad", 1)}

    model = nn.Sequential(TensorQuantizer(QuantDescriptor(calib_method="histogram")))
    batches: Any = Frames([(torch.rand(300),), (torch.full((3,), torch.inf),)])
    with pytest.raises(ValueError, match=r"^bad: 0: .* 3 infinite values cannot be calibrated"):
        calibrate_branch(model, batches)
    with pytest.raises(ValueError, match=r"^unknown method"):  # which is no frame's fault
        calibrate_branch(model, batches, method="kl")


def test_one_thin_frame_among_others_is_told_and_allowed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with without_pictures():
        code, told, _ = ptq(capsys, good=scan(), thin=scan(2)[:20])
    assert code == 0
    assert "encoders.lidar, thin: few voxels: 20 points in " in told
    # A frame that does not calibrate is nothing to the calibration.
    with without_pictures():
        code, told, _ = ptq(
            capsys, "--calibration-frames", "1", "--overwrite", good=scan(), thin=scan(2)[:20]
        )
    assert code == 0
    assert "few voxels" not in told
    assert summary()["calibration"]["findings"] == []
    assert "poor_calibration" not in json.loads(Path("runs/a/config.json").read_text())


@pytest.mark.parametrize("value", [-1.0, 256.0, 3e38, np.inf])
def test_intensities_of_no_sensor(value: float) -> None:
    points = scan()
    points[7, 3] = value
    (found,) = frame_findings(Frame("odd", points), 2000)
    assert (found.kind, found.frame, found.poor) == ("intensity", "odd", True)
    assert "1 of 3,000 intensities" in found.evidence
    voxels = VoxelData(points, np.zeros((3000, 4), np.int32))
    assert frame_findings(Frame("odd", voxels=voxels), 2000)[0].kind == "intensity"


def test_limits_of_what_is_usual() -> None:
    points = scan()
    points[:2, 3] = 0, 255.5
    frame = Frame("usual", points)
    assert frame_findings(frame, 26) == ()
    (found,) = frame_findings(frame, 25)
    assert found.evidence == "3,000 points in 25 voxels"


def test_findings_travel_between_processes() -> None:
    (found,) = frame_findings(Frame("f", np.zeros((9, 5), np.float32)), 1)
    note = FrameNote("f", 9, None, (found,))
    assert note_of(note_record(note)) == note
    assert note_of(note_record(FrameNote("f", 9, None))).findings == ()


def test_many_findings_are_told_in_short() -> None:
    found = [PoorData(f"layer{i}", "f", "constant", "one value", "more data") for i in range(11)]
    lines = finding_lines(found)
    assert lines[0] == "layer0, f: constant: one value; more data"
    assert len(lines) == 9
    assert lines[-1].startswith("3 more")
    assert len(finding_lines(found[:8])) == 8


def test_facts_that_ask_for_nothing_are_no_warnings() -> None:
    fact = PoorData("fc", "all frames", "channels", "2 of 5", "ranges of their own", poor=False)
    assert finding_lines([fact] * 9) == ()


@pytest.fixture(scope="module")
def data() -> Path:
    folder = Path(os.environ.get("BEVQUANT_DATA") or Path(__file__).parents[3] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no real data: set BEVQUANT_DATA")
    return folder


def test_real_frames_and_streets_are_usual(data: Path) -> None:
    files = [
        *sorted((data / "avod_kitti13/object/training/velodyne").glob("*.bin")),
        *(data / "mmdet3d_demo/nuscenes").glob("*LIDAR_TOP*.pcd.bin"),
        data / "nvidia_scn/in_features.torch.fp16.tensor",
    ]
    assert len(files) == 8
    for frame in (*map(read_points, files), street_frame(seed=3, size="tiny", cameras=None)):
        assert frame_findings(frame, len(frame)) == ()


def test_frames_without_a_lidar_branch_are_not_judged() -> None:
    from bevfusion.model import CONFIGS, build_model
    from bevfusion_quant.stages import built_parts

    frame = street_frame(seed=3, size="tiny", cameras="tiny")
    batches = FrameBatches(
        [frame], CONFIGS["tiny"], build_model(CONFIGS["tiny"], built_parts("camera"))
    )
    batches[0]
    assert batches.note(0).findings == ()
