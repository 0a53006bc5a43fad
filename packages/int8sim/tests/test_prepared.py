"""A convolution called again: what is kept of the first call never shows."""

import gc
import weakref

import pytest
import torch

from bevquant_int8sim import int8_conv2d, int8_conv_transpose2d


def numbers(generator, *shape, dtype=torch.int8):
    return torch.randint(-128, 128, shape, generator=generator).to(dtype)


@pytest.fixture
def operands():
    generator = torch.Generator().manual_seed(0)
    x = numbers(generator, 1, 16, 7, 9)
    weight, bias = numbers(generator, 24, 16, 3, 3), numbers(generator, 24, dtype=torch.int32)
    multiplier = torch.rand(24, generator=generator, dtype=torch.float64) / 2000
    return x, weight, bias, multiplier


def fresh(x, weight, bias, multiplier, **settings):
    """The same on tensors that nothing is kept of."""
    return int8_conv2d(x.clone(), weight.clone(), bias.clone(), multiplier=multiplier.clone(),
                       **settings)  # fmt: skip


@pytest.mark.parametrize("change", ["weight", "bias", "multiplier"])
def test_operands_changed_in_place(operands, backend, change):
    x, weight, bias, multiplier = operands
    settings = dict(padding=1, backend=backend)
    before = int8_conv2d(x, weight, bias, multiplier=multiplier, **settings)
    if change == "multiplier":
        multiplier /= 3
    else:
        (weight if change == "weight" else bias)[5] = 77
    again = int8_conv2d(x, weight, bias, multiplier=multiplier, **settings)
    assert torch.equal(again, fresh(*operands, **settings))
    assert not torch.equal(again, before)


@pytest.mark.parametrize("change", ["bias", "multiplier"])
def test_other_operands_of_the_same_shape(operands, backend, change):
    x, weight, bias, multiplier = operands
    int8_conv2d(x, weight, bias, multiplier=multiplier, backend=backend)
    if change == "bias":
        bias = bias + 2000
    else:
        multiplier = multiplier / 2
    again = int8_conv2d(x, weight, bias, multiplier=multiplier, backend=backend)
    assert torch.equal(again, fresh(x, weight, bias, multiplier, backend=backend))


def test_other_inputs_and_settings(operands, backend):
    x, weight, bias, multiplier = operands
    generator = torch.Generator().manual_seed(1)
    inputs = [
        numbers(generator, *x.shape),
        numbers(generator, 2, 16, 7, 9),
        numbers(generator, 1, 16, 7, 9).contiguous(memory_format=torch.channels_last),
        numbers(generator, 1, 32, 7, 18)[:, ::2, :, ::2],
        *([] if backend in ("amx", "vnni") else [x.short()]),
    ]
    settings = [{}, {"padding": [1, 1]}, {"stride": 2}, {"relu": True}, {"out_dtype": torch.int16}]
    for _ in range(2):
        for given in inputs:
            for setting in settings:
                result = int8_conv2d(
                    given, weight, bias, multiplier=multiplier, backend=backend, **setting
                )
                assert torch.equal(
                    result, fresh(given, weight, bias, multiplier, backend=backend, **setting)
                )


def test_results_stay_as_they_were(operands, backend):
    x, weight, bias, multiplier = operands
    first = int8_conv2d(x, weight, bias, multiplier=multiplier, backend=backend)
    kept = first.clone()
    int8_conv2d(~x, weight, bias, multiplier=multiplier, backend=backend)
    assert torch.equal(first, kept)


def test_bad_operands_are_refused_the_second_time_too(operands):
    x, weight, bias, multiplier = operands
    int8_conv2d(x, weight, bias, multiplier=multiplier)
    with pytest.raises(ValueError, match="multipliers for 24 output channels"):
        int8_conv2d(x, weight, bias, multiplier=multiplier[:7])
    with pytest.raises(TypeError, match="unknown arguments reul"):
        int8_conv2d(x, weight, bias, multiplier=multiplier, reul=True)
    with pytest.raises(ValueError, match="backend"):
        int8_conv2d(x, weight, bias, multiplier=multiplier, backend="vnnni")


def test_operands_that_are_no_keys(operands, backend):
    x, weight, bias, multiplier = operands
    stride = torch.tensor(1)
    for _ in range(2):
        q = int8_conv2d(x, weight, bias, multiplier=0.001, padding=[[1, 0], [1, 1]],
                        backend=backend)  # fmt: skip
        assert torch.equal(q, fresh(x, weight, bias, torch.tensor(0.001, dtype=torch.float64),
                                    padding=((1, 0), (1, 1)), backend=backend))  # fmt: skip
        with pytest.raises((TypeError, ValueError), match="stride"):
            int8_conv2d(x, weight, bias, multiplier=multiplier, stride=stride, backend=backend)


def test_transposed(operands, backend):
    x, weight, bias, multiplier = operands
    weight = weight.transpose(0, 1).contiguous()
    for given in (x, ~x, x):
        settings = dict(stride=2, padding=1, backend=backend)
        again = int8_conv_transpose2d(given, weight, bias, multiplier=multiplier, **settings)
        expected = int8_conv_transpose2d(
            given, weight.clone(), bias.clone(), multiplier=multiplier, **settings
        )
        assert torch.equal(again, expected)


def test_nothing_outlives_the_weight(operands, backend):
    x, weight, bias, multiplier = operands
    weight = weight.clone()
    int8_conv2d(x, weight, bias, multiplier=multiplier, backend=backend)
    known = weakref.ref(weight)
    del weight
    gc.collect()
    assert known() is None
