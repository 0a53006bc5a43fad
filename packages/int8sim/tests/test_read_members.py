"""Integer models need of a ``batch_dict`` the members that the model reads."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from bevquant_fusion import fuse_model
from bevquant_graph import ReadMembers
from bevquant_int8sim import IntegerModel, compare, simulate
from bevquant_int8sim.program import from_document, to_document
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import use_bevquant_kernels


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8)

    def forward(self, batch_dict):
        batch_dict["features"] = self.bn(self.conv(batch_dict["cells"])).relu()
        return batch_dict


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, data_dict):
        x = self.conv(data_dict.pop("features")).relu()
        data_dict.update({"spatial_features_2d": x, "multi_scale": {"x_conv1": x}})
        return data_dict


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.boxes = nn.Conv2d(8, 7, 1)

    def forward(self, data_dict):
        scale = data_dict["img_metas"][0]["scale"]
        data_dict["boxes"] = self.boxes(data_dict["spatial_features_2d"]) * scale
        return data_dict


class Detector(nn.Module):
    """Modules that get a batch_dict and write to it."""

    def __init__(self, *, returns_all):
        super().__init__()
        self.module_list = nn.ModuleList([Encoder(), Backbone(), Head()])
        self.returns_all = returns_all

    def forward(self, batch_dict):
        for module in self.module_list:
            batch_dict = module(batch_dict)
        return batch_dict if self.returns_all else batch_dict["boxes"]


class Calibration:
    pass


def frame(seed, count=1, **more):
    random = torch.Generator().manual_seed(seed)
    return {
        "frame_id": f"{seed:06}",
        "cells": torch.randn(count, 4, 12, 12, generator=random),
        "gt_boxes": torch.randn(count, seed + 1, 8, generator=random),
        "calib": [Calibration()],
        "img_metas": [{"scale": 2.0, "filename": f"{seed}.png"}],
        **more,
    }


@pytest.fixture(scope="module", params=[True, False], ids=["all", "boxes"])
def stages(request):
    torch.manual_seed(0)
    net, used = Detector(returns_all=request.param).eval(), frame(0)
    with torch.no_grad():
        net(used)
    fused = fuse_model(net, (used,)).model
    model = quantize_model(fused, example_inputs=(used,)).model
    calibrate(model, [(frame(seed),) for seed in range(3)])
    return net, fused, model, simulate(model, (used,))


def boxes_of(result):
    return result["boxes"] if isinstance(result, dict) else result


def noise(want, got):
    return float((want - got).square().mean() / want.square().mean())


def test_frames_of_a_loader(stages):
    net, _, _, integer = stages
    given = frame(7, 2, points=Calibration())
    keys = [*given]
    got = integer(given)
    assert [*given] == keys
    with torch.no_grad():
        want = net(dict(given))
    assert noise(boxes_of(want), boxes_of(got)) < 1e-2
    if net.returns_all:
        assert [*got] == [*want]
        assert got["points"] is given["points"]
        assert got["img_metas"] == want["img_metas"]
        assert got["calib"] is given["calib"]
    alone = {"cells": given["cells"], "img_metas": [{"scale": 2.0}]}
    assert torch.equal(boxes_of(integer(alone)), boxes_of(got))
    returned, _ = integer.run((given,))
    assert torch.equal(boxes_of(returned), boxes_of(got))


def test_what_is_read_is_required(stages):
    integer = stages[-1]
    given = frame(7)
    with pytest.raises(TypeError, match=r"\['cells'\] missing"):
        integer({key: value for key, value in given.items() if key != "cells"})
    refused = r"'scale'\]: the model was simulated with 2.0 here .*, or with a list of frames"
    with pytest.raises(ValueError, match=refused):
        integer({**given, "img_metas": [{"scale": 3.0}]})


def test_comparison_of_other_frames(stages):
    _, fused, model, integer = stages
    batches = [(frame(5),), (frame(6, more=1),)]
    assert compare(fused, integer, batches).wrong == ()
    assert compare(fused, model, batches, verify=True).wrong == ()


def test_saved_models_know_it(stages, tmp_path):
    integer = stages[-1]
    integer.save(tmp_path / "model")
    loaded = IntegerModel.load(tmp_path / "model")
    assert loaded.program.members == integer.program.members
    given = frame(8, more=2)
    want, got = integer(given), loaded(given)
    assert torch.equal(boxes_of(want), boxes_of(got))
    assert type(want) is type(got)
    if isinstance(want, dict):
        assert [*want] == [*got]
    with pytest.raises(TypeError, match=r"\['cells'\] missing"):
        loaded({"img_metas": [{"scale": 2.0}]})


def test_models_of_earlier_versions_take_exactly_their_members(stages):
    data, tensors = to_document(stages[-1].program)
    data = json.loads(json.dumps(data))
    del data["members"]
    old = from_document(data, tensors)
    assert old.members == ReadMembers()
    given = frame(8)
    with pytest.raises(TypeError, match=r"\['frame_id', 'gt_boxes', 'calib'\] not in the example"):
        IntegerModel(old)(given)
    IntegerModel(old)({"cells": given["cells"], "img_metas": [{"scale": 2.0}]})


@pytest.mark.parametrize(
    "members",
    [
        {"asked": [{"$tuple": [{"$tuple": [0, 0, "cells"]}, {"$tuple": ["x"]}]}]},
        {"asked": [{"$tuple": [{"$tuple": [0, 3]}, {"$tuple": ["x"]}]}]},
        {"asked": [{"$tuple": [{"$tuple": [0, 0]}, {"$tuple": ["cells"]}]}]},
        {"asked": [1]},
        {"asked": 3},
        {"handed": [{"$tuple": [{"$tuple": [9]}, {"$tuple": [0, 0]}, {"$tuple": []}]}]},
        {"handed": [[1, 2]]},
        {"handed": {"$ref": "x"}},
    ],
)
def test_damaged_members_are_refused(stages, members):
    data, tensors = to_document(stages[-1].program)
    with pytest.raises(ValueError, match=r"."):
        from_document({**data, "members": members}, tensors)


class MeanVFE(nn.Module):
    def forward(self, batch_dict):
        points, counts = batch_dict["voxels"], batch_dict["voxel_num_points"]
        batch_dict["voxel_features"] = points.sum(1) / counts.clamp(min=1).view(-1, 1).float()
        return batch_dict


class SparseBackbone(nn.Module):
    def __init__(self, spconv):
        super().__init__()
        self.tensor = spconv.SparseConvTensor
        conv = spconv.SubMConv3d(4, 8, 3, padding=1, bias=False, indice_key="a")
        down = spconv.SparseConv3d(8, 8, 3, stride=2, padding=1, bias=False)
        self.conv = spconv.SparseSequential(conv, nn.BatchNorm1d(8), nn.ReLU())
        self.down = spconv.SparseSequential(down, nn.BatchNorm1d(8), nn.ReLU())

    def forward(self, batch_dict):
        features, coords = batch_dict["voxel_features"], batch_dict["voxel_coords"].int()
        x = self.conv(self.tensor(features, coords, [4, 8, 8], batch_dict["batch_size"]))
        dense = self.down(x).dense()
        batch_dict.update(encoded=x, spatial_features=dense.flatten(1, 2))
        return batch_dict


def scan(seed, voxels, **more):
    random = torch.Generator().manual_seed(seed)
    cells = torch.randperm(4 * 8 * 8, generator=random)[:voxels].sort().values
    coords = torch.stack([0 * cells, cells // 64, cells // 8 % 8, cells % 8], 1).int()
    return {
        "frame_id": f"{seed:06}",
        "voxels": torch.randn(voxels, 5, 4, generator=random),
        "voxel_num_points": torch.randint(1, 6, (voxels,), generator=random),
        "voxel_coords": coords,
        "batch_size": 1,
        "points": torch.randn(9 + seed, 4, generator=random),
        **more,
    }


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")
def test_a_sparse_pipeline_and_an_example_that_a_float_run_used():
    spconv = pytest.importorskip("spconv.pytorch", reason="the spconv extra is not installed")
    torch.manual_seed(0)
    net = nn.Sequential(MeanVFE(), SparseBackbone(spconv)).eval()
    use_bevquant_kernels(net)
    used = scan(0, 60)
    with torch.no_grad():
        net(used)
    fused = fuse_model(net, (used,)).model
    model = quantize_model(fused, example_inputs=(used,)).model
    calibrate(model, [(scan(seed, 60),) for seed in range(3)])
    integer = simulate(model, (used,))
    given = scan(7, 80, calib=Calibration())
    got = integer(given)
    with torch.no_grad():
        want = net(dict(given))
    assert [*got] == [*want]
    assert noise(want["spatial_features"], got["spatial_features"]) < 1e-2
    assert got["points"] is given["points"]
    assert "encoded" not in given
    assert compare(fused, integer, [(given,)]).wrong == ()
    needed = ("voxels", "voxel_num_points", "voxel_coords", "batch_size")
    alone = integer({key: given[key] for key in needed})
    assert torch.equal(alone["spatial_features"], got["spatial_features"])
