"""QuantConfig: validation, JSON, and which modules it leaves float."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import bevquant_qnn as qnn

configs = st.builds(
    qnn.QuantConfig,
    num_bits=st.integers(2, 16),
    input_calibrator=st.sampled_from(["histogram", "max"]),
    weight_calibrator=st.sampled_from(["histogram", "max"]),
    weight_per_channel=st.booleans(),
    narrow_range=st.booleans(),
    exclude=st.lists(st.text(max_size=8), max_size=3).map(tuple),
    quantize_add=st.booleans(),
    quantize_linear=st.booleans(),
    quantize_last_layer=st.booleans(),
)


@given(configs)
def test_json_round_trip(config):
    assert qnn.QuantConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_bits": 1}, "num_bits must be a whole number from 2 to 16, .*, got 1"),
        ({"num_bits": "nvfp4"}, "got 'nvfp4'. .*: apply_precision with a PrecisionPlan"),
        ({"input_calibrator": "mse"}, "input_calibrator must be 'histogram' or 'max', got mse"),
        ({"exclude": "head"}, r"must be a tuple of paths; write \('head',\)"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        qnn.QuantConfig(**settings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": 2}', "QuantConfig.to_json wrote: schema 2, expected 1"),
        ("[]", "QuantConfig.to_json wrote: expected `object`, got `array`"),
        ('{"schema": 1, "bits": 4}', r"does not know the settings \['bits'\]"),
    ],
)
def test_foreign_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        qnn.QuantConfig.from_json(text)


def _net():
    layers = {f"conv{i}": nn.Conv2d(2, 2, 1) for i in (1, 10, 11)}
    layers |= {"pool": nn.MaxPool2d(2), "flat": nn.Flatten(), "fc": nn.Linear(8, 2)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def _quantized(**settings):
    model = _net()
    result = qnn.quantize_model(
        model, qnn.QuantConfig(**settings), torch.randn(1, 2, 4, 4), inplace=True
    )
    return model, result, [item.path for item in result.quantized]


def test_trap_13_exact_paths_not_substrings():
    _, result, paths = _quantized(exclude=("conv1",))
    assert paths == ["conv10", "conv11", "pool", "fc"]
    assert [(i.path, i.reason) for i in result.skipped] == [("conv1", "excluded by 'conv1'")]
    assert _quantized(exclude=("conv1*",))[2] == ["pool", "fc"]


def test_a_container_stands_for_everything_below_it():
    model = nn.Sequential(_net(), nn.Linear(2, 2))
    result = qnn.quantize_model(model, qnn.QuantConfig(exclude=("0",)))
    assert [item.path for item in result.quantized] == ["1"]


def test_pattern_that_names_nothing_is_refused_before_anything_changes():
    model = _net()
    with pytest.raises(ValueError, match=r"exclude=\['conv2'\].*nearest paths are (\w+\.)*conv"):
        qnn.quantize_model(model, qnn.QuantConfig(exclude=("conv2",)), inplace=True)
    assert type(model.conv1) is nn.Conv2d


def test_layer_kinds_and_ends_can_be_left_out():
    assert _quantized(quantize_pool=False)[2] == ["conv1", "conv10", "conv11", "fc"]
    assert _quantized(quantize_linear=False)[2] == ["conv1", "conv10", "conv11", "pool"]
    assert _quantized(quantize_first_layer=False)[2] == ["conv10", "conv11", "pool", "fc"]
    assert _quantized(quantize_last_layer=False)[2] == ["conv1", "conv10", "conv11", "pool"]


def test_descriptors_follow_the_settings():
    model, _, _ = _quantized(
        num_bits=4, input_calibrator="max", weight_per_channel=False, narrow_range=True
    )
    assert repr(model.conv1._input_quantizer) == (
        "TensorQuantizer(4bit narrow fake per-tensor amax=dynamic calibrator=MaxCalibrator "
        "scale=1.0 quant)"
    )
    assert model.fc._weight_quantizer.axis is None


def test_excluding_what_would_be_added(nets):
    config = qnn.QuantConfig(exclude=("deep.0.residual_quantizer", "neck.quant_concat"))
    model = nets.ResNetFPN()
    result = qnn.quantize_model(model, config, torch.randn(1, 3, 64, 64), inplace=True)
    assert not hasattr(model.deep[0], "residual_quantizer")
    assert hasattr(model.deep[1], "residual_quantizer")
    assert {"deep.0.residual_quantizer", "neck.quant_concat"} <= {i.path for i in result.skipped}
