"""OpenPCDet's configurations, on a package in its form and on its own code where it is at hand."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pcdet_like import write

from bev_data import InputError
from bev_data.points import Frame
from bevfusion.frameworks import load_detector
from bevfusion.frameworks._openpcdet_config import CHECKOUT, Settings, read_config
from bevquant_fusion import fuse_model
from bevquant_qnn import quantize_model

scenes = pytest.importorskip("bev_scenes", reason="frames are streets of bev_scenes")
FRAME = scenes.street_frame(seed=0, size="tiny", cameras=None)
pytestmark = [
    pytest.mark.usefixtures("spconv"),
    pytest.mark.filterwarnings("ignore:Using a non-tuple sequence"),  # spconv's dense()
]


def forget_pcdet() -> None:
    for name in [one for one in sys.modules if one.partition(".")[0] == "pcdet"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("OpenPCDet"))


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test imports pcdet anew, and leaves no path behind."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(CHECKOUT, raising=False)
    forget_pcdet()
    yield
    forget_pcdet()


def load(checkout: Path, name: str, weights: Path | None = None) -> Any:
    return load_detector(f"openpcdet:{checkout}/tools/cfgs/own_models/{name}.yaml", weights)


def test_anchors_are_decoded_by_their_own_code(checkout: Path) -> None:
    detector = load(checkout, "anchors")
    assert detector.classes == ("Car", "Cyclist")
    assert detector.point_cloud_range == pytest.approx((-25.6, -25.6, -4, 25.6, 25.6, 4))
    (turned,) = detector.notes
    assert "to its axes, forward,left,up" in turned
    (voxels,) = detector.arguments(FRAME)
    assert voxels["voxels"].shape[1:] == (5, 4)
    assert set(voxels["voxel_coords"][:, 0].tolist()) == {0}
    assert 0 < float(voxels["voxels"][..., 3].max()) <= 1  # 0..255 in the frame
    with torch.no_grad():
        maps = detector.network(voxels)
        batch = {**voxels, "batch_size": 1}
        for part in detector.network.children():
            batch = part(batch)
    assert {name: tuple(one.shape) for name, one in maps.items()} == {
        "cls_preds": (1, 16, 16, 2),
        "box_preds": (1, 16, 16, 7),
    }
    assert torch.equal(maps["cls_preds"], batch["batch_cls_preds"]["cls_preds"])
    found = detector.boxes(maps, FRAME)
    assert 0 < len(found.boxes) < 256  # suppressed
    assert (np.diff(found.scores) <= 0).all()
    assert found.boxes[0, 2:4] == pytest.approx([0, 4], abs=1)
    assert set(found.labels) <= {0, 1}
    assert not found.velocities.any()


def test_centers_and_what_is_left_out(checkout: Path) -> None:
    detector = load(checkout, "centers")
    assert detector.notes[:-1] == (
        "elongation: frames do not have it; 0 for every point",
        "the second stage (OwnHead) is left out: boxes are the first stage's",
        "DynMeanVFE runs in float in front of the network",
    )
    (given,) = detector.arguments(FRAME)
    assert list(given) == ["features", "coords"]  # of its own encoder, which makes voxels of points
    assert given["features"].shape == (len(given["coords"]), 5)
    assert given["coords"].shape[1] == 4
    assert 0.1 < float(given["features"][:, 3].max()) <= np.tanh(1) + 1e-6
    assert not given["features"][:, 4].any()
    assert "vfe" not in dict(detector.network.named_children())
    found = detector.boxes(detector.network(given), FRAME)
    assert found.boxes.shape == (7, 7)
    assert found.boxes[0, 6] == pytest.approx(7 - 1.5 * np.pi)  # a quarter more than their 7
    assert found.velocities.tolist() == [[1, 1]] * 7  # of their 1 ahead and 1 to the right


@pytest.mark.parametrize(
    ("dataset", "given"),
    [
        ("WaymoDataset", [12, -3]),
        ("NuScenesDataset", [3, 12]),
        ("ONCEDataset", [-3, -12]),
        ("LyftDataset", [3, 12]),
    ],
)
def test_points_are_in_the_axes_of_the_data_set(
    checkout: Path, dataset: str, given: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """A point 12 m ahead and 3 m to the right."""
    path = checkout / "tools" / "cfgs" / "axes.yaml"
    base = "_BASE_CONFIG_: cfgs/own_models/anchors.yaml"
    path.write_text(f"{base}\nDATA_CONFIG: {{DATASET: {dataset}}}\n")
    frame = Frame("point", np.float32([[3, 12, 1, 100, 0]]))

    def seen(name: str) -> Any:
        (given,) = load_detector(name).arguments(frame)
        return given["voxels"][0, 0, :2].tolist()

    assert seen(f"openpcdet:{path}") == pytest.approx(given)
    assert ("axes of its data set are unknown" in caplog.text) == (dataset == "LyftDataset")
    caplog.clear()
    assert seen(f"openpcdet:{path}@back,right,up") == pytest.approx([-12, 3])
    assert not caplog.text
    with pytest.raises(InputError, match="axes='ahead,left,up': expected the directions"):
        seen(f"openpcdet:{path}@ahead,left,up")


def test_a_network_is_quantized(checkout: Path) -> None:
    detector = load(checkout, "anchors")
    voxels = detector.arguments(FRAME)
    fused = fuse_model(detector.network, voxels)
    assert len(fused.fused) == 2
    quantized = quantize_model(fused.model, example_inputs=voxels)
    assert {one.path if hasattr(one, "path") else str(one) for one in quantized.quantized} == {
        "backbone_3d.conv.0", "backbone_2d.block.0", "dense_head.conv_cls", "dense_head.conv_box",
    }  # fmt: skip


def test_random_weights_are_the_same_in_every_run(checkout: Path) -> None:
    first, second = (load(checkout, "anchors").network.state_dict() for _ in range(2))
    assert all(torch.equal(one, second[name]) for name, one in first.items())
    torch.manual_seed(1)
    wanted = torch.rand(1)
    torch.manual_seed(1)
    load(checkout, "anchors")
    assert torch.equal(torch.rand(1), wanted)


def test_nothing_stays_behind(checkout: Path) -> None:
    before = {name: name in sys.modules for name in ("SharedArray", "easydict", "torch_scatter")}
    load(checkout, "anchors")
    assert {name: name in sys.modules for name in before} == before
    assert "pcdet.datasets" not in sys.modules
    assert not hasattr(np, "int")
    assert sys.modules["pcdet"].__version__ == "0+0000000"


def test_a_checkpoint_is_loaded_by_name(checkout: Path, tmp_path: Path) -> None:
    network = load(checkout, "anchors").network
    state = {name: one + 1 for name, one in network.state_dict().items()}
    state["global_step"] = torch.zeros(1, dtype=torch.int64)
    torch.save({"epoch": 80, "model_state": state, "optimizer_state": None}, tmp_path / "a.pth")
    loaded = load(checkout, "anchors", tmp_path / "a.pth")
    assert "model_state" in loaded.notes[0]
    for name, one in loaded.network.state_dict().items():
        assert torch.equal(one, state[name])
    del state["backbone_2d.block.0.weight"]
    torch.save({"model_state": state}, tmp_path / "b.pth")
    with pytest.raises(InputError, match=r"backbone_2d\.block\.0\.weight"):
        load(checkout, "anchors", tmp_path / "b.pth")


def test_where_code_and_configuration_are(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "openpcdet:own_models/anchors.yaml"
    monkeypatch.setenv(CHECKOUT, str(tmp_path))
    with pytest.raises(InputError, match="no folder pcdet/models in it"):
        load_detector(name)
    monkeypatch.setenv(CHECKOUT, str(checkout))
    assert load_detector(name).classes == ("Car", "Cyclist")
    with pytest.raises(InputError, match=r"other\.yaml: no such file, nor below tools/cfgs"):
        load_detector("openpcdet:other.yaml")
    own = tmp_path / "own.yaml"  # outside of the checkout, on a base in it
    own.write_text("_BASE_CONFIG_: cfgs/own_models/anchors.yaml\nCLASS_NAMES: [Car]\n")
    assert load_detector(f"openpcdet:{own}").classes == ("Car",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("MODEL: {DENSE_HEAD: {NAME: NoHead}}", "it cannot be built: KeyError: 'NoHead'"),
        ("MODEL: {VFE: 1}", "it cannot be built: AttributeError"),
        ("DATA_CONFIG: {DATA_PROCESSOR: [{NAME: own_step}]}", "DATA_PROCESSOR has own_step"),
        ("MODEL: {DENSE_HEAD: {DOUBLE_FLIP: True}}", "DOUBLE_FLIP runs four flipped frames"),
        ("MODEL: {DENSE_HEAD: {NAME: OtherHead}}", "OtherHead has no generate_predicted_boxes"),
        ("DATA_CONFIG: {GET_ITEM_LIST: [images]}", "SECONDNet takes camera images"),
        ("_BASE_CONFIG_: cfgs/none.yaml", r"no file cfgs/none\.yaml"),
        ("- a list", "expected a dictionary in YAML, got list"),
        ("a: [", "while parsing"),
    ],
)
def test_what_does_not_go_through_is_refused(checkout: Path, change: str, message: str) -> None:
    path = checkout / "tools" / "cfgs" / "changed.yaml"
    base = "" if "_BASE" in change or "-" in change or "a:" in change else (
        "_BASE_CONFIG_: cfgs/own_models/anchors.yaml\n"
    )  # fmt: skip
    path.write_text(f"{base}{change}\n")
    with pytest.raises(InputError, match=message):
        load_detector(f"openpcdet:{path}")


def test_points_alone_have_no_dense_head(checkout: Path) -> None:
    path = checkout / "tools" / "cfgs" / "points.yaml"
    path.write_text("MODEL: {NAME: PointRCNN}\n")
    with pytest.raises(InputError, match="PointRCNN has no DENSE_HEAD"):
        load_detector(f"openpcdet:{path}")


def test_without_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [one for one in sys.path if "pcdet" not in one.lower()])
    (tmp_path / "a.yaml").write_text("MODEL: {}\n")
    with pytest.raises(InputError, match="No module named 'pcdet'; OpenPCDet's code is needed"):
        load_detector(f"openpcdet:{tmp_path / 'a.yaml'}")


def test_voxels_are_refused(checkout: Path) -> None:
    frame = Frame("v", voxels=(np.zeros((1, 5), np.float32), np.zeros((1, 4), np.int32)))
    with pytest.raises(InputError, match="v: holds voxels, whose axes cannot be changed"):
        load(checkout, "anchors").arguments(frame)


def test_frames_without_points_in_range_are_refused(checkout: Path) -> None:
    frame = Frame("far", np.full((3, 5), 99, np.float32))
    with pytest.raises(InputError, match="far: no point within the model's"):
        load(checkout, "anchors").arguments(frame)


def test_files_are_merged_as_openpcdet_does(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("A: {B: 1, C: [1, {D: 2}]}\nE: 5\n")
    (tmp_path / "own.yaml").write_text(
        "_BASE_CONFIG_: base.yaml\nA: {B: 3}\nF: {_BASE_CONFIG_: base.yaml, E: 6}\nE: {G: 1}\n"
    )
    read = read_config(tmp_path / "own.yaml", None)
    assert read.A == {"B": 3, "C": [1, {"D": 2}]}
    assert read.A.C[1].D == 2
    assert (read.F.A.B, read.F.E, read.E.G) == (1, 6, 1)
    read.A.H = {"I": 7}
    assert read.A.H.I == 7
    assert isinstance(read.A, Settings)
    with pytest.raises(AttributeError, match="no J in the configuration"):
        _ = read.J
