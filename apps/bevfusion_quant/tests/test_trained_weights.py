"""The weights that come with the package: small, told from where, and of use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from bev_scenes import street_frame
from bevfusion.detectors import DETECTORS, build_detector
from bevfusion.model import (
    CONFIGS,
    build_model,
    load_weights,
    named_weights,
    trained_weights,
)
from bevfusion_quant import InputError
from bevfusion_quant.options import PtqConfig
from bevfusion_quant.ptq import FrameBatches
from bevfusion_quant.run import Clock
from bevfusion_quant.stages import fill_weights
from bevfusion_quant.train import targets_of


def test_weights_go_by_name_or_path() -> None:
    assert named_weights(None, "tiny") is None
    assert named_weights("random", "tiny") is None
    assert named_weights("a/b.pth", "tiny") == Path("a/b.pth")
    assert trained_weights("nuscenes") is None
    with pytest.raises(InputError, match="none for config 'nuscenes'"):
        named_weights("trained", "nuscenes")


def weights(name: str) -> Path:
    found = trained_weights(name)
    assert found is not None
    assert found == named_weights("trained", name)
    return found


@pytest.fixture(scope="module")
def path() -> Path:
    return weights("tiny")


@pytest.mark.parametrize("kind", ["bevfusion", "centerpoint", "centerpoint-pillars"])
def test_the_file_says_where_it_comes_from_and_how_good_it_is(kind: str) -> None:
    path = weights(DETECTORS[kind].configs["tiny"].name)
    assert path.stat().st_size < 6 * 2**20
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["bevfusion-quant"])
    assert about["command"].startswith("bevfusion-quant train")
    assert about["settings"].get("model", "bevfusion") == kind
    assert "first 1000000" in about["training_frames"]
    assert about["held_out"]["frames"].startswith("street, seeds 0 to")
    assert 0.5 < about["held_out"]["mean_ap"] < 1


# TransFusion's score is a product of two probabilities, CenterPoint's is one.
@pytest.mark.parametrize(
    ("kind", "sure"), [("bevfusion", 0.2), ("centerpoint", 0.4), ("centerpoint-pillars", 0.4)]
)
def test_it_finds_the_cars_of_a_street_it_never_saw(kind: str, sure: float) -> None:
    sizes = DETECTORS[kind].configs["tiny"]
    model = build_detector(sizes)
    load_weights(model, weights(sizes.name))
    frame = street_frame(7, size="tiny", cameras="tiny")
    with torch.no_grad():
        (found,) = model.head.decode(model(*FrameBatches([frame], sizes, model)[0]))
    targets = targets_of(frame.labels, sizes.head)
    car = sizes.head.classes.index("car")
    cars = targets.boxes[(targets.classes == car) & (np.abs(targets.boxes[:, :2]).max(1) < 40)]
    boxes = found.boxes[(found.labels == car) & (found.scores > sure)]
    apart = np.linalg.norm(cars[:, None, :2] - boxes[None, :, :2], axis=2)
    assert len(cars) > 5
    assert (apart.min(1) < 2).mean() > 0.6  # found
    assert (apart.min(0) < 4).mean() > 0.5  # not invented


def test_a_framework_s_checkpoint_is_read_by_its_entry(path: Path, tmp_path: Path) -> None:
    model = build_model(CONFIGS["tiny"], ("lidar",))
    load_weights(model, path)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    theirs = {n.replace("encoders.lidar.backbone", "pts_middle_encoder"): t for n, t in own.items()}
    other = {name: tensor + 1 for name, tensor in theirs.items()}
    torch.save({"state_dict": other, "mine": theirs, "meta": {"epoch": 3}}, tmp_path / "e.pth")
    config = PtqConfig(config="tiny", weights=tmp_path / "e.pth", weight_entry="mine")
    about, _ = fill_weights(model, config, (), Clock())
    assert (about["entry"], about["names"]) == ("mine", "mmdet3d-bevfusion")
    assert all(torch.equal(tensor, own[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(InputError, match=r"no entry 'theirs'.*state_dict \(\d+\), mine"):
        fill_weights(model, replace(config, weight_entry="theirs"), (), Clock())
