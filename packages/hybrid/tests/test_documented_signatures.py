"""Signatures and recipes as the documents print them."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn

import bevquant_hybrid as horizon
from bevquant_hybrid.dtype import qint8, qint16
from bevquant_hybrid.quantization import (
    LSQFakeQuantize,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
    observer_v2,
    qconfig,
)

# Path: the names and defaults in the documented order; more may follow.
SIGNATURES = {
    "quantization.QuantStub": "scale=None, zero_point=None, qconfig=None",
    "quantization.get_default_qat_qconfig": (
        "dtype='qint8', weight_dtype='qint8', activation_fake_quant='fake_quant', "
        "weight_fake_quant='fake_quant', activation_qkwargs=None, weight_qkwargs=None, backend=''"
    ),
    "quantization.get_default_qat_out_qconfig": (
        "dtype='qint8', weight_fake_quant='fake_quant', weight_qkwargs=None, backend=''"
    ),
    "quantization.get_default_calib_qconfig": "dtype='qint8', calib_qkwargs=None, backend=''",
    "quantization.get_default_qconfig": (
        "activation_fake_quant='fake_quant', weight_fake_quant='fake_quant', "
        "activation_observer='min_max', weight_observer='min_max', activation_qkwargs=None, "
        "weight_qkwargs=None"
    ),
    "quantization.check_model": (
        "module, example_inputs, march=None, input_source='ddr', advice=None, "
        "check_quanti_param=True"
    ),
    "quantization.compile_model": (
        "module, example_inputs, hbm, march=None, name=None, input_source='ddr', "
        "input_layout=None, output_layout='NCHW', opt='O2', balance_factor=2, progressbar=True, "
        "jobs=16, debug=True, extra_args=None"
    ),
    "quantization.export_hbir": "module, example_inputs, hbir, march=None",
    "quantization.fuse_known_modules": (
        "mod_list, is_qat=False, additional_fuser_method_mapping=None"
    ),
    "quantization.prepare_qat": (
        "model, mapping=None, inplace=False, optimize_graph=False, hybrid=False, "
        "optimize_kwargs=None"
    ),
    "quantization.prepare_calibration": "model, inplace=False",
    "quantization.convert": (
        "module, mapping=None, inplace=False, remove_qconfig=True, fast_mode=False"
    ),
    "quantization.fuse_fx": "model, fuse_custom_config_dict=None",
    "quantization.prepare_qat_fx": (
        "model, qconfig_dict=None, prepare_custom_config_dict=None, optimize_graph=False, "
        "hybrid=False, hybrid_dict=None"
    ),
    "quantization.prepare_calibration_fx": (
        "model, qconfig_dict=None, prepare_custom_config_dict=None, optimize_graph=False, "
        "hybrid=False, hybrid_dict=None"
    ),
    "quantization.convert_fx": (
        "graph_module, inplace=False, convert_custom_config_dict=None, _remove_qconfig=True, "
        "fast_mode=False"
    ),
    "quantization.set_fake_quantize": "model, state",
    "quantization.load_observer_params": "src, dst",
    "quantization.MovingAverageMinMaxObserver": (
        "averaging_constant=0.01, dtype='qint8', qscheme=torch.per_tensor_symmetric, "
        "quant_min=None, quant_max=None, is_sync_quantize=False, factory_kwargs=None"
    ),
    "quantization.MovingAveragePerChannelMinMaxObserver": (
        "averaging_constant=0.01, ch_axis=0, dtype='qint8', qscheme=torch.per_channel_symmetric, "
        "quant_min=None, quant_max=None, is_sync_quantize=False, factory_kwargs=None"
    ),
    "quantization.observer_v2.MinMaxObserver": (
        "averaging_constant=0.01, ch_axis=-1, dtype='qint8', qscheme=torch.per_tensor_symmetric, "
        "quant_min=None, quant_max=None, is_sync_quantize=False, factory_kwargs=None"
    ),
    "quantization.observer_v2.KLObserver": "bins=512, update_interval=1, averaging_constant=0.01",
    "quantization.observer_v2.MSEObserver": "stride=1, averaging_constant=0.01",
    "quantization.observer_v2.PercentileObserver": (
        "percentile=99.99, bins=2048, averaging_constant=0.01"
    ),
    "functional.rgb2centered_yuv": "input, swing='studio'",
    "functional.centered_yuv2rgb": (
        "input, swing='studio', mean=(128.0,), std=(128.0,), q_scale=0.0078125"
    ),
    "nn.BgrToYuv444": "channel_reversal=False",
    "nn.PointPillarsScatter": "output_shape=None",
    "nn.Correlation": (
        "kernel_size=1, max_displacement=1, stride1=1, stride2=1, pad_size=0, is_multiply=True"
    ),
    "nn.DetectionPostProcess": (
        "score_threshold=0, regression_scale=None, background_class_idx=None, size_threshold=None, "
        "image_size=None, pre_decode_top_n=None, post_decode_top_n=None, iou_threshold=None, "
        "pre_nms_top_n=None, post_nms_top_n=None, nms_on_each_level=False, mode='normal'"
    ),
    "nn.DetectionPostProcessV1": (
        "num_classes, box_filter_threshold, class_offsets, use_clippings, image_size, "
        "nms_threshold, pre_nms_top_k, post_nms_top_k, nms_padding_mode=None, nms_margin=0.0, "
        "use_stable_sort=None, bbox_min_hw=(0, 0)"
    ),
    "nn.RcnnPostProcess": (
        "image_size=(1024, 1024), nms_threshold=0.3, box_filter_threshold=0.1, num_classes=1, "
        "post_nms_top_k=100, delta_mean=(0.0, 0.0, 0.0, 0.0), delta_std=(1.0, 1.0, 1.0, 1.0)"
    ),
    "nn.functional.point_pillars_preprocess": (
        "points_list, pc_range, voxel_size, max_voxels, max_points_per_voxel"
    ),
    "nn.functional.filter": "*inputs, threshold, idx_range=None",
    "utils.fx_helper.wrap": "skip_compile=False",
    "utils.onnx_helper.export_to_onnx": "model, args, f, export_params=True, verbose=False",
}


def written(signature: inspect.Signature, count: int) -> str:
    parts = []
    for name, parameter in list(signature.parameters.items())[:count]:
        star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
        default = parameter.default
        text = f"'{default}'" if isinstance(default, str) else repr(default)
        parts.append(f"{star}{name}" + ("" if default is parameter.empty else f"={text}"))
    return ", ".join(parts)


@pytest.mark.parametrize("path", SIGNATURES)
def test_arguments_stand_in_the_documented_order(path: str) -> None:
    home, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(f"bevquant_hybrid.{home}"), name)
    documented = SIGNATURES[path]
    count = documented.count(", ") + 1
    assert written(inspect.signature(found), count) == documented


def test_a_fake_quantizer_takes_the_documented_arguments() -> None:
    given = inspect.signature(horizon.quantization.FakeQuantize)
    assert written(given, 0) == ""
    assert list(given.parameters)[:5] == [
        *("observer", "saturate", "in_place", "compat_mask", "channel_len"),
    ]
    assert given.parameters["compat_mask"].default is True
    made = horizon.quantization.FakeQuantize.with_args(averaging_constant=0.0, dtype="qint16")()
    assert made.dtype == "qint16"
    assert made.activation_post_process.averaging_constant == 0.0


@pytest.mark.parametrize("name", ["KLObserver", "MSEObserver", "MixObserver", "PercentileObserver"])
def test_newer_observers_take_what_all_take(name: str) -> None:
    every = {
        "averaging_constant": 0.5,
        "ch_axis": -1,
        "dtype": torch.qint8,
        "qscheme": torch.per_tensor_symmetric,
        "quant_min": -127,
        "quant_max": 127,
        "is_sync_quantize": False,
        "factory_kwargs": None,
    }
    observer = getattr(observer_v2, name)(**every)
    observer(torch.linspace(-1, 1, 5000))
    assert observer.dtype == "qint8"
    assert observer.calculate_qparams()[0].item() == pytest.approx(1 / 127, rel=0.02)


PER_CHANNEL = {"qscheme": torch.per_channel_symmetric, "ch_axis": 0}


def same(made, documented) -> None:
    """Two qconfigs that make the same quantizers."""
    for name in ("activation", "weight"):
        a, b = getattr(made, name), getattr(documented, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert repr(a()) == repr(b())
            x = torch.randn(3, 4, 5, 5)
            assert torch.equal(a()(x).scale, b()(x).scale)


def recipe(activation="fake_quant", observer="min_max", weight="fake_quant", **more):
    return get_default_qconfig(
        activation_fake_quant=activation,
        weight_fake_quant=weight,
        activation_observer=observer if activation else None,
        weight_observer="min_max",
        activation_qkwargs=more or None,
        weight_qkwargs=dict(PER_CHANNEL),
    )


RECIPES = {
    "default_qat_8bit_fake_quant_qconfig": recipe(),
    "default_qat_out_8bit_fake_quant_qconfig": recipe(activation=None),
    "default_qat_8bit_weight_32bit_out_fake_quant_qconfig": recipe(activation=None),
    "default_calib_8bit_fake_quant_qconfig": recipe(observer="percentile"),
    "default_calib_out_8bit_fake_quant_qconfig": recipe(activation=None),
    "default_calib_8bit_weight_32bit_out_fake_quant_qconfig": recipe(activation=None),
    "default_qat_8bit_weight_16bit_act_fake_quant_qconfig": recipe(dtype=qint16),
    "default_calib_8bit_weight_16bit_act_fake_quant_qconfig": recipe(
        observer="percentile", dtype=qint16
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_default_qconfigs_are_the_documented_recipes(name: str) -> None:
    same(getattr(qconfig, name), RECIPES[name])
    assert getattr(horizon.qconfig, name) is getattr(horizon.quantization, name)


def test_the_learned_recipe() -> None:
    made = qconfig.default_qat_8bit_lsq_quant_qconfig
    for factory, channels in ((made.activation, 1), (made.weight, 3)):
        fake_quant = factory()
        fake_quant(torch.randn(3, 4))
        assert type(fake_quant) is LSQFakeQuantize
        assert fake_quant.use_grad_scaling
        assert fake_quant.activation_post_process.averaging_constant == 1.0
        assert fake_quant.scale.numel() == channels


@pytest.mark.parametrize("kind", ["fake_quant", "lsq", "pact"])
@pytest.mark.parametrize("observer", ["min_max", "clip", "percentile", "clip_std", "mse", "mix"])
def test_every_weight_recipe_is_per_channel_where_asked(kind: str, observer: str) -> None:
    made = get_default_qconfig(
        weight_fake_quant=kind, weight_observer=observer, weight_qkwargs=dict(PER_CHANNEL)
    )
    x = torch.randn(4, 6, 3, 3) * torch.tensor([0.05, 0.1, 0.2, 0.3]).reshape(4, 1, 1, 1)
    weight = made.weight()
    quantized = weight(x)
    assert quantized.scale.shape == (4,)
    assert (quantized.scale[1:] > quantized.scale[:-1]).all()
    assert (quantized.dequantize() - x).norm() < 0.2 * x.norm()


@pytest.mark.parametrize("observer", ["min_max", "percentile", "clip_std", "mse", "kl", "mix"])
@pytest.mark.parametrize("kind", ["fake_quant", "lsq", "pact"])
def test_every_activation_recipe_trains_a_layer(kind: str, observer: str) -> None:
    made = get_default_qconfig(activation_fake_quant=kind, activation_observer=observer)
    model = nn.Sequential(horizon.quantization.QuantStub(), nn.Conv2d(2, 3, 1))
    qat = horizon.quantization.prepare_qat_fx(model, {"": made})
    x = torch.randn(2, 2, 20, 20)
    result = qat(x)
    result.dequantize().sum().backward()
    assert (result.dequantize() - model(x)).norm() < 0.1 * model(x).norm()
    assert model.get_submodule("1").weight.grad is not None


def test_types_go_by_name_object_and_torchs_own() -> None:
    for dtype in ("qint8", qint8, torch.qint8):
        made = get_default_qat_qconfig(dtype=dtype, weight_dtype=dtype)
        assert made.activation().dtype == made.weight().dtype == "qint8"
    assert get_default_calib_qconfig(dtype=qint16).activation().dtype == "qint16"
    assert get_default_qat_out_qconfig().activation is None
    wide = get_default_qat_qconfig(activation_qkwargs={"dtype": "qint16", "scale": 1 / 2**15,
        "observer": horizon.quantization.FixedScaleObserver})  # fmt: skip
    assert wide.activation().scale.item() == 1 / 2**15
    march = horizon.march.March
    assert (march.Bayes, march.Bernoulli2) == (march.BAYES, march.BERNOULLI2)
