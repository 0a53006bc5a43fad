"""Choosing quantizers by exact path, and switching them for a while."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bevquant_quantizers import (
    QuantDescriptor,
    TensorQuantizer,
    named_quantizers,
    quantization_disabled,
    quantization_enabled,
    select,
)


def quantizer(**kwargs):
    return TensorQuantizer(QuantDescriptor(amax=1.0), **kwargs)


@pytest.fixture
def model():
    def conv():
        return nn.ModuleDict({"_input_quantizer": quantizer(), "_weight_quantizer": quantizer()})

    return nn.ModuleDict(
        {
            "conv1": conv(),
            "conv10": conv(),
            "block": nn.ModuleDict({"conv1": conv()}),
            "off": quantizer(disabled=True),
            "idle": quantizer(if_quant=False),
        }
    )


def state(model):
    return [(e.name, e.quantizer._disabled, e.quantizer._if_quant) for e in named_quantizers(model)]


def names(model, *patterns):
    return [entry.name for entry in select(model, *patterns)]


def test_trap_13_own_state_restored(model):
    before = state(model)
    with quantization_disabled(model):
        assert all(disabled for _, disabled, _ in state(model))
        with quantization_enabled(model):
            assert all(not disabled and quant for _, disabled, quant in state(model))
            with quantization_disabled(model, "conv1"):
                pass
        assert all(disabled for _, disabled, _ in state(model))
    assert state(model) == before
    for switch in (quantization_disabled, quantization_enabled):
        with pytest.raises(KeyboardInterrupt), switch(model):
            raise KeyboardInterrupt
        assert state(model) == before


def test_trap_13_exact_paths(model):
    assert names(model, "conv1") == ["conv1._input_quantizer", "conv1._weight_quantizer"]
    with quantization_disabled(model, "conv1"):
        assert model["conv1"]["_input_quantizer"]._disabled
        assert not model["conv10"]["_input_quantizer"]._disabled
        assert not model["block"]["conv1"]["_input_quantizer"]._disabled
        assert model["off"]._disabled


def test_patterns_keep_to_path_components(model):
    assert names(model, "conv?._weight_quantizer") == ["conv1._weight_quantizer"]
    assert names(model, "conv*._weight_quantizer") == [
        "conv1._weight_quantizer",
        "conv10._weight_quantizer",
    ]
    assert len(names(model, "**.conv1")) == 4
    assert len(names(model, "**._input_quantizer")) == 3
    assert names(model, "block", "off") == [
        "block.conv1._input_quantizer",
        "block.conv1._weight_quantizer",
        "off",
    ]
    assert len(names(model)) == len(names(model, "**")) == 8
    for pattern in ("conv", "onv1", "conv1._input", "", "conv1.*.x"):
        with pytest.raises(ValueError, match="no quantizer lies at or below"):
            select(model, pattern)


def test_an_unknown_path_changes_nothing(model):
    before = state(model)
    with pytest.raises(ValueError, match="conv3"), quantization_disabled(model, "conv1", "conv3"):
        pass
    assert state(model) == before


def test_shared_quantizers_are_one_under_all_their_paths():
    shared = quantizer()
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleDict({"c": shared})})
    (entry,) = named_quantizers(model)
    assert entry.names == ("a", "b.c")
    for path in ("a", "b", "b.c"):
        assert [e.quantizer for e in select(model, path)] == [shared]


def test_disabled_is_the_float_model():
    x = torch.randn(100) * 3
    q = quantizer()
    with quantization_disabled(q):
        assert q(x) is x
    assert not torch.equal(q(x), x)
