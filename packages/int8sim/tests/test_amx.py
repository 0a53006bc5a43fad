"""The AMX kernels: against integers, run through an emulation of the tile instructions."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba", reason="the numba extra is not installed")

sys.path.insert(0, str(Path(__file__).parent))

from amx_emulation import emulate
from extremes import int8

from bevquant_int8sim import (
    BackendStatus,
    _backends,
    backend_report,
    int8_conv2d,
    int8_conv_transpose2d,
    int8_sparse_conv,
)
from bevquant_int8sim._compiled import dense, dot_product, kernels, self_test
from bevquant_sparse import WeightLayout, build_rulebook

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or dot_product.instruction_set("vnni") is None,
    reason="kernels for x86 with VNNI",
)


@pytest.fixture(scope="module")
def emulated():
    with pytest.MonkeyPatch.context() as patch:
        errors = emulate(patch)
        real = dot_product.instruction_set
        patch.setattr(
            dot_product, "instruction_set", lambda kind: "emulated" if kind == "amx" else real(kind)
        )
        patch.setattr(self_test, "_has_leave", lambda: True)
        _backends._known.clear()
        backend_report("amx")  # its self-test, which would otherwise run in the first of the tests
        yield errors
    _backends._known.clear()
    kernels.kernel.cache_clear()


@pytest.fixture
def packed_kinds(monkeypatch):
    """The kernels that weights of dense layers were packed for."""
    kinds, pack = [], dense.pack_weight

    def see(weight, kind):
        packed = pack(weight, kind)
        kinds.append(packed.kind)
        return packed

    monkeypatch.setattr(dense, "pack_weight", see)
    return kinds


def voxels(generator, count, stride):
    cells = torch.from_numpy(generator.permutation(8**3)[:count])
    indices = torch.stack(torch.unravel_index(cells, (1, 8, 8, 8)), 1).int()
    return build_rulebook(
        indices, (8, 8, 8), 3, stride=stride, padding=1, subm=stride == 1, batch_size=1
    )


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("count", [1, 17, 333])
@pytest.mark.parametrize("channels", [(32, 64), (64, 32), (128, 96), (192, 128)])
def test_sums_of_voxels_are_those_of_int64(emulated, channels, count, stride):
    generator = np.random.default_rng(count)
    rulebook = voxels(generator, count, stride)
    x, w = int8(generator, count, channels[0]), int8(generator, 27, *channels)
    bias = torch.from_numpy(generator.integers(-(10**6), 10**6, channels[1]).astype(np.int32))
    made = int8_sparse_conv(x, w, bias, rulebook, layout=WeightLayout.VCK, backend="amx")
    expected = np.tile(bias.numpy().astype(np.int64), (rulebook.num_out, 1))
    neighbours = rulebook.neighbours.numpy()
    for row, offset in zip(*np.nonzero(neighbours >= 0), strict=True):
        source = x[neighbours[row, offset]].numpy().astype(np.int64)
        expected[row] += source @ w[offset].numpy().astype(np.int64)
    assert not emulated
    np.testing.assert_array_equal(made.numpy(), expected)


SETTINGS = {
    "relu": {"multiplier": 2e-4, "relu": True},
    "per channel": {"multiplier": torch.linspace(1e-5, 1e-3, 64)},
    "half up": {"multiplier": 2e-4, "rounding": "half_up"},
    "float": {"multiplier": 2e-4, "out_dtype": torch.float32},
    "int16": {"multiplier": 2e-2, "out_dtype": torch.int16},
    "ties": {"multiplier": 0.5**9},
    "residual": {"multiplier": 2e-4, "residual": True, "sum_multiplier": 0.7, "relu": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_results_are_those_of_the_other_backends(emulated, name):
    generator = np.random.default_rng(7)
    rulebook, chosen = voxels(generator, 200, 1), dict(SETTINGS[name])
    x, w = int8(generator, 200, 64), int8(generator, 27, 64, 64)
    if "residual" in chosen:
        chosen["residual"] = int8(generator, 200, 64)
    made = [
        int8_sparse_conv(x, w, None, rulebook, layout=WeightLayout.VCK, backend=backend, **chosen)
        for backend in ("amx", "vnni", "torch")
    ]
    assert not emulated
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


@pytest.mark.parametrize(
    ("channels", "settings"),
    [
        ((64, 64), {"padding": 1}),
        ((128, 32), {"padding": 1, "stride": 2}),
        ((32, 96), {"multiplier": 1e-3, "relu": True}),
        ((32, 32), {"padding": 2, "dilation": 2, "multiplier": 1e-3}),
        ((128, 128), {"padding": 1, "groups": 2, "multiplier": 1e-3}),
        ((80, 48), {"padding": 1}),  # goes to VNNI, for its 48 outputs
    ],
)
def test_dense_grids(emulated, channels, settings):
    generator = np.random.default_rng(1)
    inner = channels[0] // settings.get("groups", 1)
    x, w = int8(generator, 2, channels[0], 7, 9), int8(generator, channels[1], inner, 3, 3)
    made, expected = (int8_conv2d(x, w, backend=b, **settings) for b in ("amx", "torch"))
    assert not emulated
    assert torch.equal(made, expected)


@pytest.mark.parametrize(
    ("channels", "kernel", "settings"),
    [
        ((3, 64), (7, 7), {"padding": 3, "stride": 2, "multiplier": 1e-3}),
        ((4, 32), (3, 6), {}),  # in the input's own memory
        ((16, 32), (3, 3), {"padding": 1, "stride": (1, 2)}),
        ((80, 64), (1, 1), {"multiplier": 1e-3}),
        ((80, 64), (3, 3), {"padding": 1}),
        ((40, 32), (2, 3), {"padding": 2, "dilation": (3, 1)}),
        ((48, 32), (2, 3), {"dilation": 2}),  # pixels apart: each alone
    ],
)
def test_lines_of_pixels_fill_tiles(emulated, packed_kinds, channels, kernel, settings):
    generator = np.random.default_rng(1)
    x, w = int8(generator, 2, channels[0], 9, 11), int8(generator, *channels[::-1], *kernel)
    x = x.contiguous(memory_format=torch.channels_last)
    made, expected = (int8_conv2d(x, w, backend=b, **settings) for b in ("amx", "torch"))
    assert not emulated
    assert "amx" in packed_kinds
    assert torch.equal(made, expected)


@pytest.mark.parametrize("channels", [(3, 32), (12, 32)])
def test_lines_that_fill_less_than_half_go_to_vnni(emulated, packed_kinds, channels):
    generator = np.random.default_rng(1)
    x, w = int8(generator, 1, channels[0], 9, 11), int8(generator, *channels[::-1], 3, 1)
    made, expected = (int8_conv2d(x, w, backend=b) for b in ("amx", "torch"))
    assert packed_kinds == ["vnni"]
    assert torch.equal(made, expected)


def test_transposed_grids(emulated):
    generator = np.random.default_rng(2)
    x, w = int8(generator, 1, 64, 5, 6), int8(generator, 64, 32, 2, 2)
    made, expected = (int8_conv_transpose2d(x, w, stride=2, backend=b) for b in ("amx", "torch"))
    assert not emulated
    assert torch.equal(made, expected)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 80),
    channels=st.tuples(st.sampled_from([32, 64, 128, 192]), st.sampled_from([32, 64, 96])),
)
def test_any_voxels(emulated, seed, count, channels):
    generator = np.random.default_rng(seed)
    rulebook = voxels(generator, count, 1)
    x, w = int8(generator, count, channels[0]), int8(generator, 27, *channels)
    made, expected = (
        int8_sparse_conv(x, w, None, rulebook, layout=WeightLayout.VCK, multiplier=1e-4, backend=b)
        for b in ("amx", "torch")
    )
    assert not emulated
    assert torch.equal(made, expected)


def test_threads_have_tiles_of_their_own(emulated):
    generator = np.random.default_rng(3)
    rulebook = voxels(generator, 500, 1)
    x, w = int8(generator, 500, 64), int8(generator, 27, 64, 64)
    made = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        made.append(int8_sparse_conv(x, w, None, rulebook, layout=WeightLayout.VCK, backend="amx"))
    assert not emulated
    assert torch.equal(*made)


def test_the_self_test_passes_and_can_fail(emulated, monkeypatch, forget_backends):
    import amx_emulation

    assert backend_report("amx") == (BackendStatus("amx", True, "emulated"),)
    forget_backends()
    monkeypatch.setattr(amx_emulation, "WIDE", np.int16)  # as of a CPU that wraps too early
    (status,) = backend_report("amx")
    assert not status.available
    assert status.detail == "emulated: the self-test ended with wrong results"


@pytest.mark.parametrize(
    ("size", "channels", "kind"),
    [
        (3, (64, 64), "amx"),
        (3, (32, 32), "amx"),
        (3, (16, 32), "vnni"),  # a quarter of a tile, and what it would gain is lost in padding
        (3, (80, 64), "vnni"),
        (3, (5, 32), "vnni"),
        (3, (64, 48), "vnni"),
        (5, (256, 64), "vnni"),  # more inputs than the block holds
    ],
)
def test_layers_that_whole_tiles_do_not_fit_go_to_vnni(emulated, size, channels, kind):
    from amx_emulation import ran

    generator = np.random.default_rng(4)
    indices = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 1, 0]], dtype=torch.int32)
    rulebook = build_rulebook(indices, (4, 4, 4), size, subm=True, batch_size=1)
    x, w = int8(generator, 3, channels[0]), int8(generator, size**3, *channels)
    backend_report("amx")  # its self-test, which is made once, uses the tiles
    ran.clear()
    made, expected = (
        int8_sparse_conv(x, w, None, rulebook, layout=WeightLayout.VCK, backend=backend)
        for backend in ("amx", "torch")
    )
    assert ("tdpbssd" in ran) == (kind == "amx")
    assert torch.equal(made, expected)


def test_the_emulation_forbids_what_a_cpu_does(emulated):
    from amx_emulation import CALLBACKS

    bad = np.zeros(64, np.uint8)
    CALLBACKS["ldtilecfg"](bad.ctypes.data)
    CALLBACKS["tileloadd64"](0, bad.ctypes.data, 64)
    assert len(emulated) == 2
    assert "palette" in emulated[0]
    assert "not configured" in emulated[1]
    emulated.clear()
