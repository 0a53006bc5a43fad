"""mmdetection3d's wheels: its configurations to boxes, files and a page.

They need mmdet3d 1.4.0, mmdet, mmengine and mmcv-lite: `nox -s mmdet3d` installs them.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mmdet3d_configs
import numpy as np
import onnx
import pytest
import torch

from bev_data.points import Frame
from bev_scenes import street_frame
from bevfusion.frameworks import load_detector, use_operator_standins
from bevfusion.frameworks._mmdet3d import load_mmdet3d
from bevfusion.frameworks._mmdet3d_frames import to_detections
from bevquant_export import export_detector
from bevquant_fusion import fuse_model
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import use_bevquant_kernels

pytest.importorskip("mmdet3d", reason="needs mmdet3d 1.4.0 with mmcv-lite, mmdet and mmengine")
pytestmark = pytest.mark.filterwarnings("ignore")  # of their imports, on a newer torch
CENTERPOINT = "centerpoint/centerpoint_pillar02_second_secfpn_8xb4-cyclic-20e_nus-3d.py"
VOXELS = "centerpoint/centerpoint_voxel01_second_secfpn_8xb4-cyclic-20e_nus-3d.py"
SMOKE = "smoke/smoke_dla34_dlaneck_gn-all_4xb8-6x_kitti-mono3d.py"


@pytest.fixture(scope="module")
def frame() -> Frame:
    return street_frame(0, size="nuscenes", cameras="tiny", sweeps=1)


def theirs(detector: Any, frame: Frame) -> Any:
    """Boxes of the detector's own `predict`, and the axes that they are in."""
    from mmdet3d import structures

    loader, model = detector.boxes.__self__.loader, detector.network.model
    first, *calibration = detector.arguments(frame)
    inputs: dict[str, Any] = {"points": [loader.points(frame)]} if not loader.images else {}
    metas: dict[str, Any] = {"box_type_3d": structures.LiDARInstance3DBoxes}
    to_boxes = np.eye(4)
    if isinstance(first, dict):
        inputs["voxels"] = first
    elif loader.images:
        inputs["imgs"] = first
        metas = {**loader.image(loader.transformed(frame))[1], **metas}
        if not calibration:
            metas["box_type_3d"] = structures.CameraInstance3DBoxes
            to_boxes = frame.cameras[0].lidar_to_camera
    else:
        inputs["points"] = [first[0]]
    sample = structures.Det3DDataSample(metainfo=metas)
    with torch.no_grad():
        (found,) = model.predict(inputs, [sample])
    return to_detections(found.pred_instances_3d, to_boxes)


@pytest.mark.parametrize(
    "name",
    [
        CENTERPOINT,
        "parta2/parta2_hv_secfpn_8xb2-cyclic-80e_kitti-3d-3class.py",
        "dynamic_voxelization/second_dv_secfpn_8xb6-80e_kitti-3d-car.py",
        SMOKE,
        "imvoxelnet/imvoxelnet_8xb4_kitti-3d-car.py",
        "3dssd/3dssd_4xb4_kitti-3d-car.py",
        "ssn/ssn_hv_secfpn_sbn-all_16xb2-2x_lyft-3d.py",
    ],
)
def test_boxes_are_those_of_their_predict(name: str, frame: Frame) -> None:
    torch.manual_seed(0)
    detector = load_mmdet3d(name, edit=mmdet3d_configs.cut_down)
    assert detector.boxes is not None
    with torch.no_grad():  # as a run: the network is a copy, and the head decodes its outputs
        outputs = copy.deepcopy(detector.network)(*detector.arguments(frame))
    found, wanted = detector.boxes(outputs, frame), theirs(detector, frame)
    assert len(found.boxes) == len(wanted.boxes)
    for ours, own in zip(found, wanted, strict=True):
        assert np.allclose(ours, own, atol=1e-4)


def test_kernels_of_one_key_from_mmcv_to_a_file(tmp_path: Path) -> None:
    """Three kernels along the first one's rulebook, as in Cylinder3D, in integers and libspconv."""
    use_operator_standins()
    from mmcv.ops import SparseConvTensor, SubMConv3d

    class Blocks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kernels = [(1, 3, 3), (3, 1, 3), (3, 3, 3)]
            convs = [SubMConv3d(4, 4, kernel, padding=1, indice_key="up") for kernel in kernels]
            self.convs = torch.nn.ModuleList(convs)

        def forward(self, features: torch.Tensor, coords: torch.Tensor) -> Any:
            x = SparseConvTensor(features, coords.int(), np.array([9, 8, 7]), 1)
            for conv in self.convs:
                x = conv(x)
                x.features = x.features.relu()
            return x.dense()

    net = Blocks().eval()
    use_bevquant_kernels(net)
    places = torch.cartesian_prod(*map(torch.arange, (9, 8, 7)))[::3]
    coords = torch.nn.functional.pad(places, (1, 0)).int().contiguous()
    inputs = (torch.randn(len(coords), 4), coords)
    with torch.no_grad():
        wanted = net(*inputs)
    with pytest.raises(ValueError, match=r"is quantized after .*fuse_model with example inputs"):
        quantize_model(net).model(*inputs)
    fused = fuse_model(net, inputs)
    assert fused.plain == ("convs.1", "convs.2")
    quantized = quantize_model(fused.model, example_inputs=inputs).model
    calibrate(quantized, [inputs])
    integers = simulate(quantized, inputs)(*inputs)
    assert mmdet3d_configs.decibels(wanted, integers) > 25
    made = export_detector(quantized, inputs, tmp_path)
    nodes = onnx.load(made.sparse.path).graph.node
    kernels = [a.ints for n in nodes for a in n.attribute if a.name == "kernel_size"]
    assert kernels == [[1, 3, 3]] * 3


def test_the_table_has_every_configuration() -> None:
    use_operator_standins()
    rows = mmdet3d_configs.read_table()
    grouped = mmdet3d_configs.kinds()
    assert set(rows) == {name for names in grouped.values() for name in names}
    for first, *others in grouped.values():
        for name in others:
            assert rows[name] in (rows[first], f"as `{first}` | | | |")


def saved(name: str, folder: Path, *, averaged: bool = False) -> dict[str, torch.Tensor]:
    """A configuration cut down, and a checkpoint of mmengine's own runner; the weights in it."""
    from mmengine.runner import Runner

    settings = mmdet3d_configs.settings_of(name)
    mmdet3d_configs.cut_down(settings)
    settings.dump(folder / "config.py")
    model = load_detector(f"mmdet3d:{folder / 'config.py'}").network.model
    with torch.no_grad():
        for parameter in model.parameters():
            noise = 0.01 * torch.randn_like(parameter)  # offsets of convolutions are 0 untrained
            parameter.add_(noise)
    optimizer = {"type": "SGD", "lr": 0.1}
    runner = Runner(
        model, str(folder), torch.utils.data.DataLoader([0]),
        train_cfg={"by_epoch": True, "max_epochs": 20},
        optim_wrapper={"type": "OptimWrapper", "optimizer": optimizer},
        custom_hooks=[{"type": "EMAHook", "momentum": 0.5}] * averaged,
        default_scope="mmengine", experiment_name=f"{folder.name} {averaged}",
    )  # fmt: skip
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    runner.call_hook("before_run")
    wanted = {path: tensor.clone() for path, tensor in model.state_dict().items()}
    if averaged:
        hook = next(h for h in runner.hooks if type(h).__name__ == "EMAHook")
        hook.after_train_iter(runner, 0)  # the first average is a copy
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                parameter.mul_(1.02)
                wanted[path] *= 1.01  # halfway
        hook.after_train_iter(runner, 0)
    runner.message_hub.update_scalar("train/loss", 0.5)
    runner.save_checkpoint(str(folder), "epoch_20.pth", save_param_scheduler=False)
    return wanted


@pytest.mark.parametrize(
    ("name", "cameras", "files"),
    [
        (VOXELS, [], ("sparse.onnx", "dense.onnx")),
        (CENTERPOINT, [], ("dense.onnx",)),
        (SMOKE, ["--cameras", "CAM_FRONT"], ("dense.onnx",)),
    ],
)
def test_one_command_from_a_checkpoint_to_files(
    name: str, cameras: list[str], files: tuple[str, ...], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from bevfusion_quant.cli import main

    saved(name, tmp_path, averaged=name == VOXELS)
    command = ["ptq", "--model", f"mmdet3d:{tmp_path / 'config.py'}"]
    command += ["--weights", str(tmp_path / "epoch_20.pth"), "--dataset", "street", "--count", "1"]
    assert main([*command, *cameras, "--runs", str(tmp_path), "--name", "run", "--quiet"]) == 0
    for file in files:
        assert onnx.load(tmp_path / "run" / "onnx" / file).graph.node
    manifest = json.loads((tmp_path / "run" / "onnx" / "manifest.json").read_text(encoding="utf-8"))
    assert (manifest["target"], manifest["verified"]) == ("tensorrt", True)
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "checkpoint: passed over: message_hub" in page.partition("Left out")[0]
    begins = "the file begins behind model.pts_voxel_encoder" in page
    assert begins == ("sparse.onnx" in files)
    assert "begins behind" not in capsys.readouterr().err  # a note of the file, no warning


@pytest.mark.parametrize("averaged", [False, True])
def test_the_checkpoints_weights_are_used(averaged: bool, tmp_path: Path) -> None:
    weights = saved(CENTERPOINT, tmp_path, averaged=averaged)
    detector = load_detector(f"mmdet3d:{tmp_path / 'config.py'}", tmp_path / "epoch_20.pth")
    loaded = detector.network.model.state_dict()
    assert all(torch.allclose(loaded[name], value) for name, value in weights.items())
    note = ", averaged (EMA)" if averaged else ""
    assert detector.notes[0] == f"checkpoint: {len(loaded)} tensors of state_dict{note}"
