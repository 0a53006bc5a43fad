"""The command: every mistake gets one message and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from bpu_split import small_frame
from clouds import cloud

from bev_data.datasets import write_frame_folder
from bevfusion.model import CONFIGS, build_model
from bevfusion_quant import InputError
from bevfusion_quant.cli import main
from bevfusion_quant.commands.ptq import Demo, Ptq
from bevfusion_quant.frames import as_options, frames_of
from bevfusion_quant.options import FrameOptions, check_options
from bevfusion_quant.ptq import FrameBatches

COMMAND = [sys.executable, "-m", "bevfusion_quant"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    np.savez("good.npz", points=cloud(2000))
    return tmp_path


def refused(
    capsys: pytest.CaptureFixture[str], here: Path, *arguments: str, runs: str = "runs"
) -> str:
    """Run a `ptq` that must be refused: exit code 2, one message, no run; gives the message."""
    before = sorted(here.rglob("*"))
    assert main(["ptq", "--config", "tiny", "--runs", runs, *arguments]) == 2
    assert sorted(here.rglob("*")) == before
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    message = captured.err[captured.err.index("bevfusion-quant: ") :]
    return message


BAD_CLOUDS = {
    "empty cloud": (np.zeros((0, 5), np.float32), "no points|empty"),
    "out of range": (cloud(2000) + np.float32([500, 0, 0, 0, 0]), r"range.*-54.*check"),
    "NaN": (np.where(np.arange(5) == 1, np.float32(np.nan), cloud(50)), "NaN.*row 0"),
    "Inf": (np.where(np.arange(5) == 0, np.float32(np.inf), cloud(50)), "Inf.*row 0"),
    "three columns": (cloud(2000)[:, :3], r"3\]|3 columns|\[N, 4\]"),
    "six columns": (np.hstack([cloud(2000), cloud(2000)[:, :1]]), r"6\]|6 columns|\[N, 4\]"),
}


@pytest.mark.parametrize("what", BAD_CLOUDS)
def test_bad_clouds(here: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    points, expected = BAD_CLOUDS[what]
    np.savez("bad.npz", points=points)
    message = refused(capsys, here, "--points", "bad.npz")
    assert "bad" in message
    assert re.search(expected, message, re.DOTALL), message


def test_bad_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cloud(2000).tofile("cut.bin")
    Path("cut.bin").write_bytes(Path("cut.bin").read_bytes()[:-7])
    Path("empty.bin").touch()
    Path("cut.npz").write_bytes(Path("good.npz").read_bytes()[:500])
    Path("folder").mkdir()
    Path("cloud.ply").touch()
    assert "truncated" in refused(capsys, here, "--points", "cut.bin")
    assert "empty" in refused(capsys, here, "--points", "empty.bin")
    assert "cut.npz" in refused(capsys, here, "--points", "cut.npz")
    assert "no such file" in refused(capsys, here, "--points", "absent.bin")
    message = refused(capsys, here, "--points", "goood")
    assert "no such file or folder" in message
    assert "good.npz" in message
    assert "holds no frames" in refused(capsys, here, "--points", "folder")
    assert "unknown extension" in refused(capsys, here, "--points", "cloud.ply")
    assert "absent.bin" in refused(capsys, here, "--points", "good.npz", "absent.bin")


def test_messages_name_the_options_of_the_command(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cloud(2000)[:, :4].round().tofile("own.bin")
    message = refused(capsys, here, "--points", "own.bin")
    assert "--columns 4" in message
    assert "columns=" not in message
    np.savez("cloud.npz", cloud=cloud(2000) * np.float32([1, 1, 1, 200, 1]))
    assert "say --key" in refused(capsys, here, "--points", "cloud.npz")
    message = refused(capsys, here, "--points", "cloud.npz", "--key", "cloud")
    assert "set --intensity-scale" in message
    assert as_options("/data/key=3/a.npz: say key=") == "/data/key=3/a.npz: say --key"
    told = refused(capsys, here, "--dataset", "street", "--intensity-scale", "2")
    assert "--intensity-scale: --dataset street does not read it" in told


def test_a_bad_second_frame_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("z.npz", points=cloud(2000) + np.float32([500, 0, 0, 0, 0]))
    message = refused(capsys, here, "--points", "good.npz", "z.npz")
    assert "z:" in message


def test_bad_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"encoders.lidar.backbone.extra": torch.ones(1)}, "w.pth")
    message = refused(capsys, here, "--points", "good.npz", "--weights", "w.pth")
    assert "unexpected: encoders.lidar.backbone.extra" in message
    assert message.count("missing: ") == 21 + 21 * 4
    assert "--weights absent.pth: no such file" in refused(
        capsys, here, "--points", "good.npz", "--weights", "absent.pth"
    )


def test_bad_settings(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = ("--points", "good.npz")
    assert "from 1 to" in refused(capsys, here, *good, "--calibration-frames", "2")
    assert "must be from 0 to" in refused(capsys, here, *good, "--calibration-frames", "-1")
    assert "must be from 0 to" in refused(capsys, here, *good, "--seed", "-1")
    assert "cannot name a run" in refused(capsys, here, *good, "--name", "../away")
    assert "no frames given" in refused(capsys, here, "--points")
    Path("file").touch()
    assert "--runs" in refused(capsys, here, *good, runs="file")
    assert "--runs" in refused(capsys, here, *good, runs="file/below")


def write_frame(folder: Path, *, cameras: int = 6, **changes: object) -> None:
    """A frame folder whose first camera is changed as told."""
    frame = small_frame()
    write_frame_folder(folder, replace(frame, cameras=frame.cameras[:cameras]))
    path = folder / "calib.json"
    values = json.loads(path.read_text())
    for key, value in changes.items():
        place = values["cameras"][0] if key in values["cameras"][0] else values["labels"]
        place[key] = value
    path.write_text(json.dumps(values))


SINGULAR = [[0, 0, 160], [0, 0, 90], [0, 0, 1]]
NORMALISED = [[0.79, 0, 0.5], [0, 1.4, 0.5], [0, 0, 1]]
BAD_CAMERAS = {
    "missing camera": ({"cameras": 5}, r"no camera CAM_BACK_RIGHT.*--cameras"),
    "no cameras": ({"cameras": 0}, r"no cameras.*--branch lidar"),
    "missing image": ({"image": "absent.png"}, r"absent.png.*no such image"),
    "image of another size": ({"width": 640, "height": 360}, r"320x180.*640x360.*scale fx"),
    "singular intrinsics": ({"intrinsics": SINGULAR}, r"singular.*calibration"),
    "missing intrinsics": ({"intrinsics": None}, r"intrinsics"),
    "intrinsics in other units": ({"intrinsics": NORMALISED}, r"multiply normalised ones"),
    "no rotation": ({"lidar_to_camera": [[2, 0, 0, 0], [0, 0, -1, 0], [0, 1, 0, 0], [0, 0, 0, 1]]},
                    r"not rigid"),
    "boxes with NaN": ({"boxes": [[float("nan")] * 7]}, r"box|number|NaN|not a JSON document"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_CAMERAS)
def test_bad_cameras(here: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    changes, expected = BAD_CAMERAS[what]
    write_frame(here / "one", **changes)
    message = refused(capsys, here, "--dataset", "files", "--data", "one", "--branch", "camera")
    assert re.search(expected, message, re.DOTALL), message
    assert "one" in message or "CAM_FRONT" in message


def test_a_frame_without_cameras_is_refused_by_name(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = refused(capsys, here, "--points", "good.npz", "--branch", "all")
    assert "good: the frame has no cameras" in message
    assert "--branch lidar" in message


def test_lidar_frames_without_a_match_are_named_with_the_option_that_skips_them(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("velodyne", "image_2", "calib"):
        (here / "kitti" / folder).mkdir(parents=True)
    cloud(2000)[:, :4].tofile("kitti/velodyne/000007.bin")
    message = refused(capsys, here, "--dataset", "kitti", "--data", "kitti")
    assert "000007" in message
    assert "--incomplete skip" in message


def test_a_checkpoint_of_another_configuration(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(build_model(CONFIGS["nuscenes"], ("lidar",)).state_dict(), "w.pth")
    message = refused(capsys, here, "--points", "good.npz", "--weights", "w.pth")
    assert "config 'nuscenes'" in message


def test_columns_and_axes_of_own_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = np.column_stack([cloud(2000), np.linspace(0, 0.1, 2000)])
    np.save("own.npy", rows)
    message = refused(capsys, here, "--points", "own.npy")
    assert "name other columns, such as --columns x,y,z,intensity,ring,-" in message
    assert "--columns has 'refl', none of" in refused(
        capsys, here, "--points", "own.npy", "--columns", "x,y,z,refl,ring,time"
    )
    said = FrameOptions(
        points=(Path("own.npy"),), columns="x,y,z,intensity,ring,time", axes="forward,left,up"
    )
    (frame,) = frames_of(said, with_cameras=False, size="tiny")
    np.testing.assert_allclose(frame.points[:, 0], -rows[:, 1])
    np.testing.assert_allclose(frame.points[:, 4], rows[:, 5], atol=1e-7)
    assert "--axes forward,left" in refused(
        capsys, here, "--points", "own.npy", "--axes", "forward,left"
    )


def test_info_files_of_mmdetection3d(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    box = {"bbox_3d": [8.0, 3, -1, 4, 2, 1.5, 0.3], "bbox_label_3d": 0, "num_lidar_pts": 5}
    record = {"lidar_points": {"lidar_path": "own.bin", "num_pts_feats": 5}, "instances": [box]}
    meta = {"classes": ["car"], "dataset": "ours"}
    Path("infos.pkl").write_bytes(pickle.dumps({"metainfo": meta, "data_list": [record]}))
    cloud(2000).astype("<f4").tofile("own.bin")
    source = ("--dataset", "mmdet3d", "--data", "infos.pkl", "--branch", "lidar")
    message = refused(capsys, here, *source, "--box-origin", "centre")
    assert "say --axes forward,left,up (mmdetection3d's own for LiDAR) or --axes" in message
    source += ("--axes", "right,forward,up")
    assert "say --box-origin bottom" in refused(capsys, here, *source)
    message = refused(capsys, here, *source, "--box-origin", "centre", "--classes", "bus=truck")
    assert "--classes renames bus, no class of infos.pkl, which has car" in message
    assert "--classes bus: expected NAME=NEW_NAME" in refused(
        capsys, here, *source, "--classes", "bus"
    )
    said = FrameOptions(
        dataset="mmdet3d", data=(Path("infos.pkl"),), box_origin="bottom", axes="forward,left,up",
        classes=("car=vehicle",),
    )  # fmt: skip
    (frame,) = frames_of(said, with_cameras=False, size="tiny")
    assert frame.labels is not None
    assert frame.labels.names == ("vehicle",)
    np.testing.assert_allclose(frame.labels.boxes[0, :3], [-3, 8, -0.25])
    wrong = refused(capsys, here, "--dataset", "street", "--classes", "car=bus")
    assert "--classes: --dataset street does not read it" in wrong
    wrong = refused(capsys, here, "--points", "own.bin", "--box-origin", "bottom")
    assert "--box-origin: --points does not read it" in wrong


def test_options_of_another_source(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*arguments: str) -> str:
        return refused(capsys, here, *arguments)

    assert "given twice" in told("--points", "good.npz", "--dataset", "street")
    assert "--data: --dataset street" in told("--dataset", "street", "--data", "x")
    assert "--split" in told("--points", "good.npz", "--split", "val")
    assert "--columns" in told("--dataset", "street", "--columns", "5")
    assert "needs --data" in told("--dataset", "kitti")
    assert "no such folder" in told("--dataset", "kitti", "--data", "absent")
    assert "--first 1 of 1" in told("--points", "good.npz", "--first", "1")
    assert "--branch all" in told("--points", "good.npz", "--quantize-head")


def test_existing_folders(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/thesis.tex").touch()
    arguments = ("--points", "good.npz", "--name", "a")
    assert "--overwrite" in refused(capsys, here, *arguments)
    assert "not a run of bevfusion-quant" in refused(capsys, here, *arguments, "--overwrite")


def test_a_demo_that_fails_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with (
        mock.patch("bevfusion_quant.ptq.run_ptq", side_effect=InputError("no")),
        pytest.raises(InputError, match="no"),
    ):
        Demo().execute("bevfusion-quant demo")
    (beside,) = started
    assert beside.args == [sys.executable, "-m", "bevquant_int8sim", "auto"]
    assert beside.returncode is not None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--unknown"],
        [],
        ["fly"],
        ["demo", "--unknown"],
        ["ptq", "--points", "x.bin", "--branch", "radar"],
        ["tree", "--stage", "int8"],
    ],
)
def test_unknown_options(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("ptq --points x.bin --method best", "--method best: expected one of max, mse, entropy"),
        ("ptq --points x.bin --rounding up", "--rounding up: expected one of gptq, nearest"),
        ("ptq --points x.bin --target bpu --march nash-e", "--march nash-e: expected one of bern"),
        ("sensitivity --run x --precisions int8 int3", "int3: expected one of int4, int8, int16"),
    ],
)
def test_names_that_their_owners_do_not_know(
    here: Path, arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert said in capsys.readouterr().err


def test_a_name_that_its_owner_learns_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bevquant_quantizers.calib.METHODS", ("mse", "median"))
    check_options(Ptq(method="median"))
    with pytest.raises(InputError, match="--method max: expected one of mse, median"):
        check_options(Ptq(method="max"))


def test_a_full_disk(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "bev.png")

    monkeypatch.setattr(FrameBatches, "__getitem__", full)
    message = refused(capsys, here, "--points", "good.npz")
    assert "No space left on device (bev.png)" in message
    assert "--runs" in message


def test_interrupt_in_process(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FrameBatches, "__getitem__", interrupted)
    assert "interrupted" in refused(capsys, here, "--points", "good.npz")


TWICE = """
import sys
from bevfusion_quant.cli import main

print("code", main(sys.argv[1:]), file=sys.stderr, flush=True)
sys.exit(main(sys.argv[1:]))
"""


def test_signals_in_the_middle(here: Path) -> None:
    """Ctrl-C, and SIGTERM in a second run of the process, which imports torch once."""
    run = subprocess.Popen(
        [sys.executable, "-c", TWICE, "ptq", "--points", "good.npz", "--config", "tiny"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # What a shell started behind & ignores Ctrl-C, and so would its children.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert run.stderr is not None
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            for line in run.stderr:
                if line.startswith("calibrate"):
                    break
            assert list(Path("runs").iterdir())
            run.send_signal(number)
            said = ""
            for line in run.stderr:
                said += line
                if line.startswith("code"):
                    break
            assert "interrupted: nothing half-written is left" in said
            assert "Traceback" not in said
            assert not Path("runs").exists()
            assert said.endswith("code 2\n") == (number == signal.SIGINT)
        out, _ = run.communicate(timeout=600)
    finally:
        run.kill()
    assert run.returncode == 2
    assert out == ""


def test_without_spconv_the_standin_is_used(here: Path) -> None:
    code = (
        "import atexit, gc, sys; sys.modules['spconv'] = None; "
        "atexit.register(lambda: print(gc.get_freeze_count() > 0)); "
        "from bevfusion_quant.cli import main; "
        "code = main(['tree']); print(gc.get_threshold()); sys.exit(code)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    # This process is the command's own: torch's modules are looked through for garbage less often,
    # and not once more at the end.
    assert run.stdout.endswith("(2000, 20, 50)\nTrue\n")
    assert "SubMConv3d" in run.stdout
    assert "Traceback" not in run.stderr


def test_mistake_in_a_real_process(here: Path) -> None:
    run = subprocess.run(
        [*COMMAND, "ptq", "--points", "absent.bin"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert run.stdout == ""
    (line,) = run.stderr.strip().splitlines()
    assert line.startswith("bevfusion-quant: absent.bin: no such file or folder; looked in ")
    assert "it holds good.npz" in line
    assert sorted(p.name for p in here.iterdir()) == ["good.npz"]


@pytest.mark.parametrize(("given", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_told_otherwise(given: str | None, expected: str) -> None:
    code = (
        "import os; from bevfusion_quant.cli import _let_waiting_threads_sleep as f; f(); "
        "print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {"OMP_WAIT_POLICY": given} if given else {}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout.strip() == expected


def test_the_environment_of_a_program_that_calls_main_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    before = gc.get_threshold()
    assert main(["tree", "--config", "tiny"]) == 0
    assert "OMP_WAIT_POLICY" not in os.environ
    assert gc.get_threshold() == before


def test_closed_pipe_is_not_a_traceback(here: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run([*COMMAND, "tree"], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert b"Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--count", "99999999999999999999"], "--count 99999999999999999999: it must be from 0 to"),
        (["--seed", "99999999999999999999999"], "--seed 99999999999999999999999: it must be"),
        (["--seed", "-1"], "--seed -1: it must be from 0 to"),
        (["--name", ""], "--name '': it names nothing"),
        (["--runs", ""], "--runs '': it names nothing"),
        (["--runs="], "--runs '': it names nothing"),
        (
            ["--cameras", "CAM_NOPE", "--branch", "lidar"],
            "--cameras CAM_NOPE: the model reads no images",
        ),
        (
            ["--cameras", "CAM_FRONT", "CAM_NOPE", "--count", "2147483647"],
            "--cameras CAM_NOPE: the street's car has CAM_FRONT, ",
        ),
    ],
)
def test_what_no_command_can_use_is_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["ptq", "--config", "tiny", "--dataset", "street", "--runs", str(tmp_path / "runs")]
    rendered = mock.patch("bev_scenes._frame.street_frame", side_effect=AssertionError)
    with rendered:  # refused before anything that takes long
        assert main([*given, *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [("evaluate", "--resamples", "1000000000000"), ("train", "--workers", "-1")],
)
def test_numbers_out_of_any_use_are_refused(
    command: str, option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "--out" if command == "train" else "--run"
    assert main([command, place, str(tmp_path), "--dataset", "street", option, value]) == 2
    assert f"{option} {value}: it must be from 0 to" in capsys.readouterr().err
