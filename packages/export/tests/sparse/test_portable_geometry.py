"""Geometries at random: onnxruntime on standard operators against the integer kernels."""

import importlib.util

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from bevquant_export.sparse import SparseOnnxModel
from bevquant_export.sparse._graph import Conv, Graph

if importlib.util.find_spec("onnxruntime") is None:
    pytest.skip("onnxruntime is not installed", allow_module_level=True)


def conv(x, y, generator, channels, kernel, **given):
    weight = torch.randn(channels[1], *kernel, channels[0], generator=generator)
    q = (weight * 60).round().clamp(-127, 127)
    ranges = torch.rand(channels[1], generator=generator) + 0.5
    return Conv(
        path="", x=x, y=y, name=f"conv{y}",
        weight=(q * ranges.view(-1, 1, 1, 1, 1) / 127).half(),
        bias=torch.randn(channels[1], generator=generator).half(),
        kernel_size=kernel, output_padding=(0, 0, 0), weight_ranges=tuple(ranges.tolist()),
        precision="int8", output_bound=10**6, output_spatial_shape=(1, 1, 1), rows=(0, 0),
        **given,
    )  # fmt: skip


def run_both(nodes, features, coords, batch_size):
    graph = Graph(input="0", channels=5, nodes=nodes, outputs=(nodes[-1].y,))
    wanted = SparseOnnxModel(graph, backend="torch").run(features, coords, batch_size)
    made = SparseOnnxModel(graph, backend="onnxruntime").run(features, coords, batch_size)
    for name, recorded in wanted[1].items():
        assert torch.equal(made[1][name].value, recorded.value), name
        assert made[1][name].value.dtype == recorded.value.dtype
    assert torch.equal(made[0].indices, wanted[0].indices)
    assert torch.equal(made[0].features, wanted[0].features)
    assert list(made[0].spatial_shape) == list(wanted[0].spatial_shape)


AXES = {
    name: st.tuples(*[numbers] * 3)
    for name, numbers in {
        "grid": st.integers(1, 9),
        "kernel": st.sampled_from([1, 2, 3, 3, 5]),
        "stride": st.integers(1, 3),
        "padding": st.integers(0, 2),
        "dilation": st.sampled_from([1, 1, 2]),
    }.items()
}


@given(
    **AXES,
    kind=st.sampled_from(["subm", "strided", "inverse"]),
    share=st.sampled_from([0.02, 0.3, 1.0]),
    batch_size=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
@example(
    grid=(7, 6, 5), kernel=(3, 3, 3), stride=(3, 3, 3), padding=(1, 1, 1), dilation=(1, 1, 1),
    kind="inverse", share=1.0, batch_size=3, seed=0,
)  # fmt: skip
@example(
    grid=(9, 2, 9), kernel=(3, 5, 3), stride=(1, 1, 1), padding=(0, 0, 0), dilation=(2, 2, 2),
    kind="subm", share=1.0, batch_size=2, seed=0,
)  # fmt: skip
@example(  # a pointwise kernel moves nothing, unless one axis is padded
    grid=(4, 3, 5), kernel=(1, 1, 1), stride=(1, 1, 1), padding=(1, 0, 0), dilation=(1, 1, 1),
    kind="strided", share=0.3, batch_size=2, seed=0,
)  # fmt: skip
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_geometry(grid, kernel, stride, padding, dilation, kind, share, batch_size, seed):
    if kind == "subm":
        kernel = tuple(k // 2 * 2 + 1 for k in kernel)
        stride = (1, 1, 1)
    span = zip(grid, kernel, padding, dilation, strict=True)
    assume(kind == "subm" or all(n + 2 * p > d * (k - 1) for n, k, p, d in span))
    generator = torch.Generator().manual_seed(seed)
    coords = (torch.rand(batch_size, *grid, generator=generator) < share).nonzero()
    coords = coords[torch.randperm(len(coords), generator=generator)].int()
    features = torch.randn(len(coords), 5, generator=generator)
    geometry = {"stride": stride, "padding": padding, "dilation": dilation}
    shape = {"input_spatial_shape": grid}
    first = conv(
        "0", "1", generator, (5, 6), kernel, subm=kind == "subm", inverse=False, rulebook="a",
        activation="ReLU", input_range=2.5, output_precision="int8", **geometry, **shape,
    )  # fmt: skip
    second = conv(
        "1", "2", generator, (6, 3), kernel if kind == "inverse" else (1, 3, 1),
        subm=kind != "inverse", inverse=kind == "inverse",
        rulebook="a" if kind == "inverse" else "b", activation="None", input_range=1.5,
        output_precision="fp16", **geometry | {"stride": (1, 1, 1), "dilation": (1, 1, 1)}, **shape,
    )  # fmt: skip
    run_both((first, second), features, coords, batch_size)


def one(**changes):
    """A strided convolution of stride 2 on a grid of 6×5×4."""
    settings = {
        "stride": (2, 2, 2), "padding": (1, 1, 1), "dilation": (1, 1, 1), "subm": False,
        "inverse": False, "rulebook": "", "activation": "None", "input_range": 2.0,
        "output_precision": "fp16", "input_spatial_shape": (6, 5, 4),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    return (conv("0", "1", generator, (5, 4), (3, 3, 3), **settings | changes),)


@pytest.mark.parametrize("corner", [0, 1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("subm", [False, True])
def test_one_voxel_in_each_corner(corner, subm):
    nodes = one(subm=subm, stride=(1, 1, 1)) if subm else one()
    place = [n - 1 if corner >> i & 1 else 0 for i, n in enumerate((6, 5, 4))]
    run_both(nodes, torch.ones(1, 5), torch.tensor([[0, *place]], dtype=torch.int32), 1)


def test_no_voxels():
    nothing = torch.zeros(0, 4, dtype=torch.int32)
    for nodes in (one(), one(subm=True, stride=(1, 1, 1))):
        run_both(nodes, torch.zeros(0, 5), nothing, 2)


def test_frames_without_voxels():
    coords = torch.tensor([[1, 0, 0, 0], [1, 5, 4, 3], [1, 2, 2, 2]], dtype=torch.int32)
    run_both(one(), torch.randn(3, 5), coords, 3)


def test_voxels_of_two_frames_do_not_meet():
    """The last voxel of a frame and the first one of the next lie side by side in the maps."""
    coords = torch.tensor([[0, 5, 4, 3], [1, 0, 0, 0]], dtype=torch.int32)
    run_both(one(subm=True, stride=(1, 1, 1)), torch.randn(2, 5), coords, 2)
