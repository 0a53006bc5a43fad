"""Kernels and other calls with good arguments, and bad ones."""

from __future__ import annotations

import tempfile
from typing import Any

import torch

from fuzz.mutate import Rng
from fuzz.target import Call


def kernels() -> dict[str, Call]:
    import bevquant_fusion as fusion
    import bevquant_int8sim as sim
    import bevquant_quantizers as quantizers
    import bevquant_sparse as sparse

    g = torch.Generator().manual_seed(0)

    def q8(*shape: int) -> torch.Tensor:
        return torch.randint(-20, 20, shape, generator=g, dtype=torch.int8)

    def f32(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    bias, multiplier = torch.ones(4, dtype=torch.int32), torch.full((4,), 0.01, dtype=torch.float64)
    rows = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2]], dtype=torch.int32)
    made = sparse.build_rulebook(rows, (4, 4, 4), 3, 1, 1, 1, subm=True)
    bn = [torch.ones(4), torch.ones(4), 1e-5, torch.ones(4), torch.ones(4)]

    def histogram(x: Any, bits: int, bins: int, method: str, stride: int, start: int) -> Any:
        calibrator = quantizers.calib.HistogramCalibrator(bits, None, False, num_bins=bins)
        calibrator.collect(x)
        return calibrator.compute_amax(method, stride=stride, start_bin=start)

    def voxels(points: Any, size: Any, bounds: Any, most: Any, most_voxels: Any) -> Any:
        from bev_data.voxelize import Voxelizer

        return Voxelizer(size, bounds, most, most_voxels)(points)

    return {
        "quantize": Call(sim.quantize, (f32(3, 4), 0.1)),
        "dequantize": Call(sim.dequantize, (q8(3, 4), 0.1)),
        "requantize": Call(
            sim.requantize, (torch.arange(12, dtype=torch.int32).reshape(3, 4), 0.1)
        ),
        "int8_linear": Call(
            sim.int8_linear, (q8(3, 5), q8(4, 5), bias), {"multiplier": multiplier}
        ),
        "int8_conv1d": Call(
            sim.int8_conv1d, (q8(1, 3, 9), q8(4, 3, 3), bias), {"multiplier": multiplier}
        ),
        "int8_conv2d": Call(
            sim.int8_conv2d,
            (q8(1, 3, 9, 9), q8(4, 3, 3, 3), bias),
            {
                "multiplier": multiplier,
                "stride": 2,
                "padding": 1,
                "dilation": 1,
                "groups": 1,
                "addend": q8(1, 4, 5, 5),
                "addend_multiplier": 0.5,
                "out_dtype": torch.int8,
                "rounding": "half_even",
                "arithmetic": "float64",
                "relu": True,
            },
        ),
        "int8_conv3d": Call(
            sim.int8_conv3d,
            (q8(1, 3, 5, 5, 5), q8(4, 3, 3, 3, 3), bias),
            {"multiplier": multiplier},
        ),
        "int8_conv_transpose2d": Call(
            sim.int8_conv_transpose2d,
            (q8(1, 3, 4, 4), q8(3, 4, 2, 2), bias),
            {"multiplier": multiplier, "stride": 2},
        ),
        "int8_max_pool": Call(sim.int8_max_pool, (q8(1, 3, 9, 9), 3, 2, 1, 1)),
        "int8_avg_pool": Call(sim.int8_avg_pool, (q8(1, 3, 9, 9), 3, 2, 1, 0.5)),
        "int8_relu": Call(sim.int8_relu, (q8(3, 4), 1.5)),
        "int8_relu6": Call(sim.int8_relu6, (q8(3, 4), 0.1, 0.05)),
        "int8_leaky_relu": Call(sim.int8_leaky_relu, (q8(3, 4), 0.25, 1.5)),
        "int8_add": Call(sim.int8_add, (q8(3, 4), q8(3, 4), 0.5, 0.25), {"relu": False}),
        "int8_concat": Call(sim.int8_concat, ([q8(3, 4), q8(3, 2)], [0.5, 0.25], 1)),
        "int8_lookup": Call(sim.int8_lookup, (q8(3, 4), q8(256))),
        "lookup_table": Call(sim.lookup_table, (torch.tanh, 0.1, 0.05)),
        "int8_resize": Call(sim.int8_resize, (q8(1, 2, 4, 4), (8, 8)), {"mode": "bilinear"}),
        "int8_resize by a factor": Call(
            sim.int8_resize, (q8(1, 2, 4, 4),), {"scale_factor": 2.0, "align_corners": False}
        ),
        "int8_to_dense": Call(sim.int8_to_dense, (q8(3, 2), rows, (4, 4, 4), 1)),
        "fixed_point_multiplier": Call(sim.fixed_point_multiplier, (multiplier,), {"bits": 31}),
        "quantize_bias": Call(sim.quantize_bias, (f32(4), 0.1, torch.full((4,), 0.01))),
        "plan_rulebook": Call(
            sim.plan_rulebook, (rows, (4, 4, 4), 3, 2, 1, 1), {"subm": False, "batch_size": 1}
        ),
        "int8_sparse_conv": Call(
            sim.int8_sparse_conv,
            (q8(3, 2), q8(27, 2, 4), bias, made),
            {"layout": sparse.WeightLayout.VCK, "multiplier": multiplier},
        ),
        "build_rulebook": Call(
            sparse.build_rulebook, (rows, (4, 4, 4), 3, 1, 1, 1), {"subm": False}
        ),
        "sparse_conv": Call(
            sparse.sparse_conv,
            (f32(3, 2), f32(27, 2, 4), f32(4), made),
            {"layout": sparse.WeightLayout.VCK},
        ),
        "sparse_max_pool": Call(sparse.sparse_max_pool, (f32(3, 2), made)),
        "sparse_avg_pool": Call(sparse.sparse_avg_pool, (f32(3, 2), made)),
        "to_dense": Call(sparse.to_dense, (f32(3, 2), rows, (4, 4, 4), 1)),
        "permute_weight": Call(
            sparse.permute_weight,
            (f32(3, 3, 3, 2, 4), sparse.WeightLayout.RSCK, sparse.WeightLayout.KRSC),
        ),
        "fuse_conv_bn_weights": Call(fusion.fuse_conv_bn_weights, (f32(4, 3, 3, 3), f32(4), *bn)),
        "fuse_linear_bn_weights": Call(fusion.fuse_linear_bn_weights, (f32(4, 3), f32(4), *bn)),
        "fuse_sparse_conv_bn_weights": Call(
            fusion.fuse_sparse_conv_bn_weights,
            (f32(4, 3, 3, 3, 2), f32(4), *bn),
            {"layout": sparse.WeightLayout.KRSC},
        ),
        "Voxelizer": Call(
            voxels,
            (f32(20, 5), [0.5, 0.5, 1.0], [-4.0, -4.0, -2.0, 4.0, 4.0, 2.0], 10, 100),
        ),
        "fake_quantize": Call(
            quantizers.fake_quantize,
            (f32(3, 4), torch.tensor(1.5), 8, False, True, None),
            {"backend": "auto"},
        ),
        "HistogramCalibrator": Call(histogram, (f32(40), 8, 64, "mse", 1, 16)),
        "TensorQuantizer": Call(_quantized, (1.5, 8, None, False, None)),
    }


def _quantized(amax: Any, bits: Any, axis: Any, narrow_range: Any, scale_amax: Any) -> Any:
    """A descriptor's quantizer, run, its range saved and read again."""
    from bevquant_quantizers import QuantDescriptor, TensorQuantizer, load_ranges, save_ranges

    quantizer = TensorQuantizer(
        QuantDescriptor(
            num_bits=bits, axis=axis, amax=amax, narrow_range=narrow_range, scale_amax=scale_amax
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        save_ranges(quantizer, f"{folder}/r.json")
        load_ranges(quantizer, f"{folder}/r.json")
    return quantizer(torch.ones(2, 3))


def changed_argument(rng: Rng, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        what = rng.choice([0, 3, 4, 6, 7]) if value.dim() == 0 else rng.randrange(9)
        if what == 0:
            return value.to(rng.choice([torch.float64, torch.int32, torch.int64, torch.float16,
                                        torch.bool, torch.uint8, torch.complex64]))  # fmt: skip
        if what == 1:
            return value[..., :-1]
        if what == 2:
            return value[:0]
        if what == 3:
            return value.unsqueeze(0)
        if what == 4:
            return value.reshape(-1)
        if what == 5:
            return value.transpose(0, -1) if value.dim() else value
        if what == 6:
            value = value.clone(memory_format=torch.contiguous_format)
            if value.numel():
                worst = [0, -1, 127, 2**31 - 1] if not value.is_floating_point() else [
                    float("nan"), float("inf"), 0.0, -1.0, 1e38, 1e-45]  # fmt: skip
                new = torch.tensor(rng.choice(worst)).to(value.dtype)
                value.view(-1)[rng.randrange(value.numel())] = new
            return value
        if what == 7:
            return rng.choice([None, 3, "x", [1.0], value.tolist()])
        return torch.zeros((0,) * value.dim(), dtype=value.dtype)
    if isinstance(value, bool):
        return rng.choice([None, 1, "x", not value])
    if isinstance(value, int | float):
        numbers = [0, -1, 10**9, 2**63, 10**400, 0.5, float("nan"), float("inf"), 1e-320, -value]
        others = [None, "x", True, [value], (value, value), (1, 2, 3, 4)]
        return rng.choice([*numbers, *others])
    if isinstance(value, tuple | list) and value and rng.random() < 0.7:
        items = list(value)
        items[rng.randrange(len(items))] = rng.choice([0, -1, 10**12, 2**63, 1.5, "x", None, True])
        return type(value)(items)
    return rng.choice([None, 0, "x", [], (), 1.5, {}])
