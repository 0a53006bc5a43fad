"""What public sparse networks do besides convolving, float to integers, and on a second frame."""

from __future__ import annotations

import copy
from functools import cache
from operator import index
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("spconv.pytorch", reason="the spconv extra is not installed")

import spconv.pytorch as spconv

from bevquant_fusion import fuse_model
from bevquant_int8sim import IntegerModel, compare, simulate
from bevquant_int8sim.model import _fast_program
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import use_bevquant_kernels

# spconv 2.3.8's own dense() indexes with a list.
pytestmark = pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")


def layer(conv: Any, channels: int) -> nn.Module:
    made: nn.Module = spconv.SparseSequential(conv, nn.BatchNorm1d(channels), nn.ReLU())
    return made


def subm(channels: int, out: int, key: str, size: int = 3) -> nn.Module:
    return layer(spconv.SubMConv3d(channels, out, size, bias=False, indice_key=key), out)


def voxels(seed: int, count: int, extent: int) -> tuple[Tensor, Tensor]:
    """Features, and coordinates of different voxels in a grid of that extent."""
    random = torch.Generator().manual_seed(seed)
    cells = torch.randperm(extent**3, generator=random)[:count].sort().values
    coords = torch.stack([cells // extent**2, cells // extent % extent, cells % extent], 1)
    return torch.randn(count, 4, generator=random), coords


class ComputedGrid(nn.Module):
    """A U-Net whose grid and batch size come out of the coordinates and counts of the scans."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = subm(4, 8, "stem", 5)
        down = spconv.SparseConv3d(8, 12, 2, stride=2, bias=False, indice_key="down")
        up = spconv.SparseInverseConv3d(12, 8, 2, bias=False, indice_key="down")
        self.down, self.up, self.mixed = layer(down, 12), layer(up, 8), subm(16, 8, "mixed")
        self.last = spconv.SubMConv3d(8, 3, 1, bias=True)

    def forward(self, scans: dict[str, Tensor]) -> Tensor:
        ends, coords = scans["offset"], scans["coords"]
        counts = torch.diff(ends, prepend=torch.tensor([0]))
        batch = torch.arange(len(counts)).repeat_interleave(counts)
        grid = (coords.max(dim=0).values + 3).tolist()
        indices = torch.cat([batch[:, None].int(), coords.int()], dim=1).contiguous()
        x = spconv.SparseConvTensor(scans["features"], indices, grid, batch[-1].tolist() + 1)
        skip = self.stem(x)
        x = self.up(self.down(skip))
        x = x.replace_feature(torch.cat((x.features, skip.features), dim=1))
        result: Tensor = self.last(self.mixed(x)).features
        return result


def scans(frame: int) -> tuple[dict[str, Tensor]]:
    features, coords = voxels(frame, 300 + 40 * frame, 12 + frame)
    return ({"features": features, "coords": coords, "offset": torch.tensor([len(coords)])},)


class TwoSweeps(nn.Module):
    """One layer on two sweeps, each on a grid of its own behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = subm(4, 8, "first")
        self.down = layer(spconv.SparseConv3d(8, 8, 2, stride=2, bias=False), 8)

    def forward(self, now: Tensor, there: Tensor, before: Tensor, elsewhere: Tensor) -> Tensor:
        grids = [
            self.down(self.first(spconv.SparseConvTensor(x, places, [12, 12, 12], 1))).dense()
            for x, places in ((now, there), (before, elsewhere))
        ]
        return torch.cat(grids, 1)


def sweeps(frame: int) -> tuple[Tensor, ...]:
    return (*indexed(frame), *indexed(frame + 5))


def test_voxels_of_each_of_two_sweeps_are_put_in_order_with_their_features() -> None:
    model, frame = integers(TwoSweeps, sweeps), sweeps(1)
    assert torch.equal(model(*frame), model.run(frame)[0])


def test_a_call_that_sorts_voxels_without_their_features_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_fast_program, "take_rows", lambda features, order: features)
    model, refusal = quantized(TwoSweeps, sweeps), "result 0 of a call, which joins steps and sorts"
    with pytest.raises(ValueError, match=refusal):
        simulate(model, sweeps(0))
    unseen = simulate(model, sweeps(0), verify=False)
    with pytest.raises(ValueError, match=refusal):
        compare(model, unseen, [sweeps(0)], verify=True)
    assert compare(model, unseen, [sweeps(0)]).rows


class Scales(nn.Module):
    """Voxels of a coarser grid put among those of a finer one, and all summed from above."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = subm(4, 8, "fine")
        strided = spconv.SparseConv3d(8, 8, 3, stride=2, padding=1, bias=False)
        self.coarse = layer(strided, 8)
        self.flat = layer(spconv.SubMConv2d(8, 6, 3, bias=False, indice_key="flat"), 6)

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = spconv.SparseConvTensor(batch["features"], batch["coords"].int(), [16, 16, 16], 1)
        fine = self.fine(x)
        coarse = self.coarse(fine)
        coarse.indices[:, 1:] *= 2
        both = fine.replace_feature(torch.cat([fine.features, coarse.features]))
        both.indices = torch.cat([fine.indices, coarse.indices])
        places, inverse = torch.unique(both.indices[:, [0, 2, 3]], dim=0, return_inverse=True)
        sums = both.features.new_zeros((places.shape[0], both.features.shape[1]))
        sums.index_add_(0, inverse, both.features)
        above = spconv.SparseConvTensor(sums, places, both.spatial_shape[1:], both.batch_size)
        batch.update({"above": self.flat(above), "scales": {"fine": both}})
        return batch


def batch(frame: int) -> tuple[dict[str, Tensor]]:
    features, coords = voxels(frame, 300 + 40 * frame, 15)
    return ({"features": features, "coords": nn.functional.pad(coords, (1, 0)).float()},)


class Chosen(nn.Module):
    """The half of the voxels that a layer finds important goes on, and rounding changes who."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.judge = subm(4, 8, "first"), subm(8, 1, "judge")
        self.last = subm(8, 6, "last")

    def forward(self, batch: dict[str, Any]) -> Any:
        x = spconv.SparseConvTensor(batch["features"], batch["coords"].int(), [16, 16, 16], 1)
        x = self.first(x)
        important = self.judge(x).features[:, 0]
        kept = important > important.median()
        if kept.sum() > 3:
            indices, features = x.indices[kept], x.features[kept]
            x = spconv.SparseConvTensor(features, indices, x.spatial_shape, x.batch_size)
        return self.last(x)


class MovedVoxels(nn.Module):
    """Rows on coordinates that the forward makes of those it was given, row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = subm(4, 8, "first"), subm(8, 6, "second")

    def forward(self, features: Tensor, given: Tensor) -> Tensor:
        x = self.first(spconv.SparseConvTensor(features, given, [12, 12, 12], 1))
        moved = given.clone()
        moved[:, 1:] = moved[:, 1:].flip(1)
        result: Tensor = self.second(
            spconv.SparseConvTensor(x.features, moved, [12, 12, 12], 1)
        ).dense()
        return result


class SummedVoxels(nn.Module):
    """Voxels of two branches, added where both have one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = subm(4, 8, "first"), subm(8, 6, "last")
        self.wide = layer(spconv.SparseConv3d(8, 8, 3, padding=1, bias=False), 8)

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        x = self.first(spconv.SparseConvTensor(features, coords, [12, 12, 12], 1))
        total = spconv.functional.sparse_add(x, self.wide(x), x)
        result: Tensor = self.last(total).dense()
        return result


class ChosenVoxels(nn.Module):
    """Means over points and one voxel for many, counted with ``len``, then a sparse network."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU())
        self.first, self.second = subm(6, 8, "first"), subm(8, 6, "second")

    def forward(self, features: Tensor, coords: Tensor) -> Tensor:
        kept, to_voxel = torch.unique(coords // 2, dim=0, return_inverse=True)
        rows = self.points(features)
        largest = rows.new_zeros(len(kept), 6)
        index = to_voxel[:, None].expand(-1, 6)
        largest = largest.scatter_reduce(0, index, rows, "amax", include_self=False)
        indices = torch.cat([torch.zeros(len(kept), 1), kept], 1).int()
        x = spconv.SparseConvTensor(largest, indices, [6, 6, 6], 1)
        result: Tensor = self.second(self.first(x)).dense()
        return result


def cloud(frame: int) -> tuple[Tensor, Tensor]:
    """Features and coordinates, not in the order of these."""
    features, coords = voxels(frame, 300 + 40 * frame, 12)
    return features, coords.flip(0)


def indexed(frame: int) -> tuple[Tensor, Tensor]:
    """The same with the frame's number before the coordinates, as a layer takes them."""
    features, coords = cloud(frame)
    return features, torch.cat([torch.zeros(len(coords), 1), coords], 1).int()


@cache
def quantized(make: Any, inputs: Any) -> nn.Module:
    """The model folded, quantized and calibrated on two frames."""
    torch.manual_seed(0)
    model = make().train()
    use_bevquant_kernels(model)
    with torch.no_grad():
        for frame in (0, 1, 0, 1):
            model(*inputs(frame))
    result = fuse_model(model.eval(), inputs(0))
    assert len(result.fused) == sum(isinstance(m, nn.BatchNorm1d) for m in model.modules())
    made: nn.Module = quantize_model(result.model, example_inputs=inputs(0)).model
    calibrate(made, [inputs(0), inputs(1)], method="max")
    return made


@cache
def integers(make: Any, inputs: Any) -> IntegerModel:
    return simulate(quantized(make, inputs), inputs(0))


def close(wanted: Tensor, made: Tensor) -> bool:
    return bool((wanted - made).norm() < 0.05 * wanted.norm())


@torch.no_grad()
@pytest.mark.parametrize("frame", [0, 1, 2])
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (ComputedGrid, scans),
        (Scales, batch),
        (MovedVoxels, indexed),
        (SummedVoxels, indexed),
        (ChosenVoxels, cloud),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # spconv's sparse_add
def test_integers_follow_on_frames_of_any_size(make: Any, inputs: Any, frame: int) -> None:
    wanted = quantized(make, inputs)(*inputs(frame))
    made = integers(make, inputs)(*inputs(frame))
    if isinstance(wanted, Tensor):
        assert close(wanted, made)
        return
    for wanted_tensor, tensor in (
        (wanted["above"], made["above"]),
        (wanted["scales"]["fine"], made["scales"]["fine"]),
    ):
        assert torch.equal(wanted_tensor.indices, tensor.indices)
        assert list(wanted_tensor.spatial_shape) == list(tensor.spatial_shape)
        assert close(wanted_tensor.features, tensor.features)


@torch.no_grad()
def test_chosen_voxels_are_followed_and_another_decision_is_refused_by_file_and_line() -> None:
    model = integers(Chosen, batch)
    for frame in (1, 2):
        wanted, made = (m(*batch(frame)) for m in (quantized(Chosen, batch), model))
        assert torch.equal(wanted.indices, made.indices)
        assert close(wanted.features, made.features)
    few = ({name: tensor[:6] for name, tensor in batch(0)[0].items()},)
    with pytest.raises(
        ValueError, match=r"asked about in .*test_sparse_idioms\.py:\d+: the forward"
    ):
        model(*few)


class Counted(nn.Module):
    """The number of voxels as a number of Python: the graph holds the example's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = subm(4, 4, "a")

    def forward(self, batch: dict[str, Any]) -> Any:
        x = spconv.SparseConvTensor(batch["features"], batch["coords"].int(), [16, 16, 16], 1)
        x = self.conv(x)
        return x.features + torch.arange(index(x.features.shape[0]))[:, None]


def test_a_number_of_voxels_that_the_forward_fixes_is_told_on_another_frame() -> None:
    model = integers(Counted, batch)
    with pytest.raises(ValueError, match=r"expected size \d+ in axis 0.*the size itself"):
        model(*batch(1))


class CalledNorm(nn.Module):
    """Norms called as functions, of tensors that modules hold."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spconv.SubMConv3d(4, 8, 3, padding=1, bias=False)
        self.second = spconv.SubMConv3d(8, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in range(2))

    def forward(self, features: Tensor, coords: Tensor, batch_size: int) -> Tensor:
        x = spconv.SparseConvTensor(features, coords, [16, 16, 16], batch_size)
        for conv, n in zip((self.first, self.second), self.norms, strict=True):
            x = conv(x)
            called = nn.functional.batch_norm(
                x.features, n.running_mean, n.running_var, n.weight, n.bias, False, 0.0, n.eps
            )
            x = x.replace_feature(torch.relu(called))
        return x.features


def test_a_folded_norm_that_is_still_called_is_nothing() -> None:
    features, coords = voxels(0, 300, 16)
    frame = features, torch.nn.functional.pad(coords, (1, 0)).int().contiguous(), 1
    model = CalledNorm().eval()
    use_bevquant_kernels(model)
    for norm in model.norms:
        assert isinstance(norm, nn.BatchNorm1d)
        assert norm.running_mean is not None
        norm.running_mean.normal_(0, 0.1)
    plain = quantize_model(model, example_inputs=frame).model
    calibrate(plain, [frame], forward=lambda m, f: m(*f), method="max")
    called = [step for step in simulate(plain, frame).steps if step.op == "float"]
    assert len(called) >= 2
    fused = quantize_model(fuse_model(model, frame).model, example_inputs=frame).model
    calibrate(fused, [frame], forward=lambda m, f: m(*f), method="max")
    integers = simulate(fused, frame)
    assert [step.reason for step in integers.steps if step.op == "float"] == []
    torch.testing.assert_close(integers(*frame), fused(*frame), atol=0.02, rtol=0)


class HalfPlaces(nn.Module):
    """A layer on given coordinates, and one on these after float16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = subm(4, 8, "first"), subm(8, 8, "second")

    def forward(self, features: Tensor, places: Tensor) -> Tensor:
        x = self.first(spconv.SparseConvTensor(features, places, [4096, 16, 16], 1))
        moved = spconv.SparseConvTensor(x.features, places.half().int(), [4096, 16, 16], 1)
        result: Tensor = self.second(moved).features
        return result


@torch.no_grad()
def test_coordinates_that_float16_moves_are_others() -> None:
    places = torch.tensor([[0, 2047, 0, 0], [0, 2049, 0, 0]], dtype=torch.int32)
    frame = torch.ones(2, 4), places  # neighbours in float16 alone, as 2047 and 2048
    wanted, made = quantized(HalfPlaces, indexed)(*frame), integers(HalfPlaces, indexed)(*frame)
    assert close(wanted, made)


class HalfFeatures(nn.Module):
    """Features in a type of their own, as encoders in half precision have them."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.first, self.second, self.dtype = subm(4, 8, "a"), subm(8, 8, "a"), dtype

    def forward(self, features: Tensor, places: Tensor) -> Tensor:
        x = spconv.SparseConvTensor(features.to(self.dtype), places, [16, 16, 16], 1)
        result: Tensor = self.second(self.first(x)).features
        return result.float()


@torch.no_grad()
def test_layers_of_half_precision_run_in_integers() -> None:
    model = copy.deepcopy(quantized(HalfFeatures, indexed))
    made = simulate(model, indexed(0))
    assert [step.op for step in made.steps].count("sparse_conv") == 2
    assert not made.float_fallbacks
    model.dtype = torch.float32
    frame = indexed(2)[0].half().float(), indexed(2)[1]
    wanted = simulate(model, indexed(0))(*frame)
    assert torch.equal(made(*frame), wanted.half().float())  # the same integers
    model.dtype = torch.bfloat16  # which does not hold the quantized values
    reasons = [f.reason for f in simulate(model, indexed(0)).float_fallbacks if f.reason]
    assert any("its input is bfloat16" in reason for reason in reasons)
