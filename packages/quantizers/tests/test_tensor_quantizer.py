import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn

from bevquant_quantizers import QuantDescriptor, TensorQuantizer, uncalibrated
from bevquant_quantizers import nn as quant_nn
from bevquant_quantizers.tensor_quant import fake_tensor_quant, tensor_quant


def grid(x, amax, bits=8, low=None):
    """clamp(round(x·q/amax))·amax/q in float64."""
    top = 2 ** (bits - 1) - 1
    return np.clip(np.rint(np.float64(x) * top / amax), low or -top - 1, top) * amax / top


def test_public_path():
    assert quant_nn.TensorQuantizer is TensorQuantizer


# Quantizing


def test_dynamic_range_by_default():
    x = torch.randn(3, 7)
    assert torch.equal(TensorQuantizer()(x), fake_tensor_quant(x, x.abs().max()))
    np.testing.assert_allclose(TensorQuantizer()(x), grid(x, float(x.abs().max())), rtol=1e-6)


def test_integers_and_scale():
    x = torch.randn(3, 7)
    quantizer = TensorQuantizer(QuantDescriptor(fake_quant=False))
    q, scale = tensor_quant(x, x.abs().max())
    assert torch.equal(quantizer(x), q)
    assert torch.equal(quantizer.scale, scale)
    assert int(q.abs().max()) == 127


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1), (1, 3)])
def test_dynamic_range_per_channel(axis):
    x = torch.randn(4, 5, 6, 7)
    axes = [a % 4 for a in ([axis] if isinstance(axis, int) else axis)]
    amax = x.abs().amax([i for i in range(4) if i not in axes], keepdim=True)
    assert torch.equal(
        TensorQuantizer(QuantDescriptor(axis=axis))(x),
        fake_tensor_quant(x, amax, narrow_range=False),
    )


@pytest.mark.parametrize("bits", [2, 4, 8, 11])
@pytest.mark.parametrize("narrow", [False, True])
def test_fixed_range(bits, narrow):
    x = torch.randn(1000)
    quantizer = TensorQuantizer(QuantDescriptor(bits, amax=0.9, narrow_range=narrow))
    top = 2 ** (bits - 1) - 1
    np.testing.assert_allclose(
        quantizer(x), grid(x, np.float32(0.9), bits, -top if narrow else None), rtol=1e-5
    )


def test_scale_amax_applies_each_time():
    x = torch.rand(1023)
    quantizer = TensorQuantizer(QuantDescriptor(amax=0.5, scale_amax=0.9))
    expected = fake_tensor_quant(x, torch.tensor(0.5) * 0.9, narrow_range=False)
    for _ in range(2):
        assert torch.equal(quantizer(x), expected)
    assert quantizer.amax == 0.5


def test_unsigned():
    x = torch.rand(1000)
    quantizer = TensorQuantizer(QuantDescriptor(unsigned=True, amax=1.0))
    np.testing.assert_allclose(quantizer(x), np.rint(x.numpy() * 255.0) / 255, rtol=1e-6)
    with pytest.raises(TypeError, match="negative"):
        quantizer(-x)


def test_disabled_and_idle_quantizers_return_their_input():
    x = torch.randn(3)
    assert TensorQuantizer(disabled=True)(x) is x
    quantizer = TensorQuantizer(if_quant=False)
    assert quantizer(x) is x
    quantizer.enable_quant()
    assert quantizer(x) is not x
    quantizer.disable()
    assert quantizer(x) is x
    quantizer.enable()
    quantizer.disable_quant()
    assert quantizer(x) is x


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 4)])
def test_empty_tensors(shape):
    x = torch.zeros(shape)
    for quantizer in (TensorQuantizer(if_calib=True), TensorQuantizer(QuantDescriptor(amax=1.0))):
        assert quantizer(x).shape == shape


def test_input_is_never_changed():
    x = torch.randn(100)
    before = x.clone()
    for quantizer in (
        TensorQuantizer(if_calib=True),
        TensorQuantizer(QuantDescriptor(learn_amax=True)),
        TensorQuantizer(QuantDescriptor(fake_quant=False)),
        TensorQuantizer(QuantDescriptor(calib_method="histogram"), if_calib=True),
    ):
        quantizer(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("axis", [None, 1])
def test_torch_ops_for_export(axis):
    x = torch.randn(4, 5, 6)
    amax = 1.5 if axis is None else np.linspace(0.5, 2.5, 5).reshape(1, 5, 1)
    quantizer = TensorQuantizer(QuantDescriptor(axis=axis, amax=amax))
    default = quantizer(x)
    quantizer.use_fb_fake_quant = True
    other = quantizer(x)
    step = quantizer.step_size
    assert (torch.round(default / step) - torch.round(other / step)).abs().max() <= 1
    torch.testing.assert_close(other, default, rtol=1e-5, atol=1e-6)
    assert TensorQuantizer.use_fb_fake_quant is False
    assert int(torch.round(other / step).min()) == -128
    with pytest.raises(TypeError, match="float32"):
        quantizer(x.half())


def test_torch_ops_take_one_axis():
    quantizer = TensorQuantizer(QuantDescriptor(axis=(0, 1)))
    quantizer.use_fb_fake_quant = True
    with pytest.raises(TypeError, match="one axis"):
        quantizer(torch.randn(2, 3, 4))


@pytest.mark.parametrize("arguments", [
    {}, {"axis": 0}, {"axis": (0, 2)}, {"amax": 0.7}, {"num_bits": 4, "narrow_range": True},
    {"amax": 0.5, "scale_amax": 0.8}, {"fake_quant": False}, {"amax": 0.5, "learn_amax": True},
    {"fake_quant": False, "axis": 1, "num_bits": 5},
])  # fmt: skip
@pytest.mark.parametrize("torch_ops", [False, True])
def test_output_and_gradient_are_upstreams(upstream, monkeypatch, arguments, torch_ops):
    ours = TensorQuantizer(QuantDescriptor(**arguments))
    theirs = upstream.nn.TensorQuantizer(upstream.tensor_quant.QuantDescriptor(**arguments))
    if torch_ops:
        if arguments.get("axis") == (0, 2):
            return
        monkeypatch.setattr(upstream.nn.TensorQuantizer, "use_fb_fake_quant", True)
        monkeypatch.setattr(TensorQuantizer, "use_fb_fake_quant", True)
    x = torch.randn(3, 4, 5, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    a, b = ours(x), theirs(y)
    assert torch.equal(a, b)
    if a.requires_grad:
        (a * torch.arange(60.0).view(3, 4, 5)).sum().backward()
        (b * torch.arange(60.0).view(3, 4, 5)).sum().backward()
        assert torch.equal(x.grad, y.grad)
    for (name, p), (other, q) in zip(
        ours.named_parameters(), theirs.named_parameters(), strict=True
    ):
        assert name == other
        assert torch.equal(p.grad, q.grad)


# Learned ranges


def test_learned_range_clips_and_learns():
    quantizer = TensorQuantizer(QuantDescriptor(amax=0.5, learn_amax=True))
    x = torch.rand(1023)
    np.testing.assert_allclose(quantizer(x).detach(), grid(x, 0.5), rtol=1e-6)
    assert sorted(quantizer.state_dict()) == ["_amax", "clip.clip_value_max", "clip.clip_value_min"]
    quantizer(x).sum().backward()
    assert quantizer.clip.clip_value_max.grad == (x >= 0.5).sum()
    assert quantizer.clip.clip_value_min.grad == 0


def test_range_in_use_is_the_larger_end_of_a_clip_that_learns():
    quantizer = TensorQuantizer(QuantDescriptor(amax=3.0, learn_amax=True))
    quantizer.clip.clip_value_min.data.fill_(-5.0)
    assert float(quantizer.amax_in_use) == 5.0
    assert not quantizer.amax_in_use.requires_grad
    assert float(TensorQuantizer(QuantDescriptor(amax=3.0)).amax_in_use) == 3.0
    assert TensorQuantizer().amax_in_use is None


def test_learned_range_moves_towards_the_data():
    quantizer = TensorQuantizer(QuantDescriptor(amax=0.25, learn_amax=True))
    optimizer = torch.optim.SGD(quantizer.parameters(), lr=0.05)
    x = torch.randn(4000)
    first = last = None
    for _ in range(60):
        loss = (quantizer(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = float(loss.detach())
        first = first or last
    assert quantizer.clip.clip_value_max > 0.6
    assert last < 0.5 * first


def test_clip_stage_alone():
    quantizer = TensorQuantizer(
        QuantDescriptor(amax=0.5, learn_amax=True), if_quant=False, if_clip=True
    )
    x = torch.randn(100)
    assert torch.equal(quantizer(x).detach(), x.clamp(-0.5, 0.5))
    quantizer.disable_clip()
    assert quantizer(x) is x
    assert not any(p.requires_grad for p in quantizer.parameters())
    quantizer.enable_clip()
    assert all(p.requires_grad for p in quantizer.parameters())


def test_clip_needs_a_learned_range():
    with pytest.raises(ValueError, match="learn_amax"):
        TensorQuantizer(if_clip=True)
    quantizer = TensorQuantizer()
    quantizer.disable_clip()
    with pytest.raises(ValueError, match="learn_amax"):
        quantizer.enable_clip()
    with pytest.raises(RuntimeError, match="learn_amax=False"):
        quantizer.init_learn_amax()
    with pytest.raises(RuntimeError, match="load_calib_amax"):
        TensorQuantizer(QuantDescriptor(learn_amax=True)).init_learn_amax()


def test_learned_range_starts_from_the_calibrated_one():
    quantizer = TensorQuantizer(QuantDescriptor(learn_amax=True), if_calib=True)
    x = torch.randn(100)
    quantizer(x)
    quantizer.load_calib_amax()
    quantizer.init_learn_amax()
    assert quantizer.clip.clip_value_max == x.abs().max()
    assert quantizer.clip.clip_value_min == -x.abs().max()


def test_clip_module_like_upstream(upstream):
    x = torch.randn(500, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    ours = quant_nn.Clip(-0.5, 0.7, learn_min=True, learn_max=True)
    theirs = upstream.nn.Clip(-0.5, 0.7, learn_min=True, learn_max=True)
    a, b = ours(x), theirs(y)
    assert torch.equal(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    assert torch.equal(x.grad, y.grad)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    with pytest.raises(ValueError, match="one value"):
        quant_nn.Clip(np.zeros(2), 1.0, learn_min=True)
    assert torch.equal(quant_nn.Clip(-1.0, 1.0)(x), x.clamp(-1, 1))


# Properties


def test_setting_amax():
    quantizer = TensorQuantizer(QuantDescriptor(amax=3.14))
    quantizer.amax = 0.577
    assert quantizer.amax == np.float32(0.577)
    assert quantizer.step_size == 0.577 / 127.0
    quantizer = TensorQuantizer()
    assert quantizer.amax is None
    assert quantizer.step_size is None
    quantizer.amax = np.array([3.142, 2.718])
    np.testing.assert_array_equal(quantizer.amax, np.float32([3.142, 2.718]))
    assert quantizer.amax.dtype == torch.float32
    with pytest.raises(TypeError, match="Changing shape"):
        quantizer.amax = 1.0
    quantizer.amax = None
    assert quantizer.amax is not None


def test_setting_the_rest():
    quantizer = TensorQuantizer()
    quantizer.num_bits, quantizer.unsigned, quantizer.narrow_range = 7, True, True
    assert (quantizer.num_bits, quantizer.unsigned, quantizer.narrow_range) == (7, True, True)
    assert (quantizer.axis, quantizer.fake_quant, quantizer.scale) == (None, True, 1.0)
    with pytest.raises(AttributeError):
        quantizer.axis = 1


def test_bits_set_later_hold_for_the_calibrator():
    """Upstream goes on searching a range for eight bits."""
    x = torch.randn(5000)
    found = []
    for bits in (4, 8):
        quantizer = TensorQuantizer(QuantDescriptor(calib_method="histogram"), if_calib=True)
        quantizer.num_bits = bits
        quantizer(x)
        quantizer.load_calib_amax("mse")
        found.append(float(quantizer.amax))
    assert found[0] < 0.9 * found[1]


def test_unknown_calibration_method():
    with pytest.raises(ValueError, match="unknown calib_method 'entropy'"):
        TensorQuantizer(QuantDescriptor(calib_method="entropy"))
    quantizer = TensorQuantizer(QuantDescriptor(calib_method=None, name="conv1.input"))
    with pytest.raises(ValueError, match=r"conv1\.input.*Calibrator was not created"):
        quantizer.enable_calib()
    with pytest.raises(RuntimeError, match=r"conv1\.input.*Calibrator not created"):
        quantizer.load_calib_amax()


@pytest.mark.parametrize("arguments", [
    {}, {"axis": 0}, {"amax": 0.5}, {"amax": [0.1, 2.0]}, {"num_bits": 4, "unsigned": True},
    {"narrow_range": True}, {"fake_quant": False}, {"scale_amax": 0.5}, {"axis": (0, 1)},
    {"calib_method": "histogram"}, {"amax": 1.0, "learn_amax": True},
])  # fmt: skip
def test_repr_is_upstreams(upstream, arguments):
    ours = TensorQuantizer(QuantDescriptor(**arguments))
    theirs = upstream.nn.TensorQuantizer(upstream.tensor_quant.QuantDescriptor(**arguments))
    assert repr(ours) == repr(theirs)
    for quantizer in (ours, theirs):
        quantizer.enable_calib()
        quantizer.disable_quant()
    assert repr(ours) == repr(theirs)
    for quantizer in (ours, theirs):
        quantizer.disable()
    assert repr(ours) == repr(theirs)
    assert "disabled" in repr(ours)


# Calibrating


def test_calibration_loads_a_range():
    quantizer = TensorQuantizer(QuantDescriptor(axis=(0, 1)), if_calib=True, if_quant=False)
    x = torch.rand(12, 6, 7, 7)
    assert quantizer(x) is x
    quantizer.load_calib_amax()
    assert torch.equal(quantizer.amax, x.amax((2, 3), keepdim=True))
    quantizer.disable_calib()
    quantizer(10 * x)
    quantizer.load_calib_amax()
    assert torch.equal(quantizer.amax, x.amax((2, 3), keepdim=True))


@pytest.mark.parametrize("method", ["mse", "entropy", "percentile"])
@pytest.mark.parametrize("axis", [None, 0])
def test_histogram_calibration(method, axis):
    desc = QuantDescriptor(calib_method="histogram", axis=axis)
    quantizer = TensorQuantizer(desc, if_calib=True, if_quant=False)
    quantizer(torch.rand(3, 6, 7))
    quantizer(torch.rand(3, 6, 7))
    quantizer.load_calib_amax(method)
    assert torch.equal(quantizer.amax, quantizer._calibrator.compute_amax(method))
    assert quantizer.amax.shape == (() if axis is None else (3, 1, 1))


def test_loaded_range_does_not_follow_the_calibrator():
    """Upstream's buffer is the calibrator's own tensor, and grows with every later batch."""
    quantizer = TensorQuantizer(if_calib=True)
    quantizer(torch.ones(3))
    quantizer.load_calib_amax()
    quantizer(5 * torch.ones(3))
    assert quantizer.amax == 1.0


def test_trap_07_nothing_seen_is_an_error_that_names_the_quantizer(caplog):
    quantizer = TensorQuantizer(QuantDescriptor(name="backbone.conv1._input_quantizer"))
    with pytest.raises(RuntimeError, match=r"backbone\.conv1.*Calibrator returned None"):
        quantizer.load_calib_amax()
    with caplog.at_level(logging.WARNING, logger="bevquant_quantizers"):
        quantizer.load_calib_amax(strict=False)
    assert "backbone.conv1" in caplog.text
    assert quantizer.amax.isnan()


@pytest.mark.parametrize("method", ["max", "histogram"])
def test_trap_07_only_zeros_is_an_error_that_names_the_quantizer(method):
    quantizer = TensorQuantizer(QuantDescriptor(calib_method=method), if_calib=True)
    quantizer.name = "head.conv"
    quantizer(torch.zeros(10))
    with pytest.raises(RuntimeError, match=r"head\.conv.*amax is 0"):
        quantizer.load_calib_amax()
    quantizer.load_calib_amax(strict=False)
    assert quantizer.amax == 0


def test_trap_07_a_dead_channel_is_no_error():
    weight = torch.randn(3, 4)
    weight[1] = 0
    quantizer = TensorQuantizer(QuantDescriptor(axis=0), if_calib=True)
    quantizer(weight)
    quantizer.load_calib_amax()
    assert quantizer.amax[1] == 0
    assert not quantizer(weight)[1].any()
    assert uncalibrated(quantizer) == []


def test_trap_07_uncalibrated_lists_every_one():
    def with_amax(value):
        quantizer = TensorQuantizer()
        if value is not None:
            quantizer.amax = value
        return quantizer

    model = nn.ModuleDict(
        {
            "fine": with_amax(1.0),
            "missing": with_amax(None),
            "nan": with_amax(float("nan")),
            "infinite": with_amax(float("inf")),
            "zero": with_amax(0.0),
            "dead_channel": with_amax([0.0, 1.0]),
            "nan_channel": with_amax([float("nan"), 1.0]),
            "negative": with_amax(-1.0),
            "disabled": TensorQuantizer(disabled=True),
            "idle": TensorQuantizer(if_quant=False),
            "learned": TensorQuantizer(QuantDescriptor(learn_amax=True)),
        }
    )
    model["shared"] = model["missing"]
    expected = ["missing", "nan", "infinite", "zero", "nan_channel", "negative"]
    assert uncalibrated(model) == expected
    assert uncalibrated(nn.Sequential(model)) == [f"0.{name}" for name in expected]


@pytest.mark.parametrize("method", ["max", "histogram"])
def test_nan_in_a_batch_names_the_quantizer(method):
    quantizer = TensorQuantizer(QuantDescriptor(calib_method=method), if_calib=True)
    quantizer.name = "neck.deblocks.0"
    with pytest.raises(ValueError, match=r"neck\.deblocks\.0.*1 NaN"):
        quantizer(torch.tensor([1.0, float("nan")]))


@pytest.mark.parametrize("method", ["max", "histogram"])
def test_a_tensor_without_values_names_the_quantizer(method):
    quantizer = TensorQuantizer(QuantDescriptor(calib_method=method), if_calib=True)
    quantizer.name = "neck.deblocks.0"
    with pytest.raises(ValueError, match=r"neck\.deblocks\.0: a tensor on the meta device"):
        quantizer(torch.ones(2, device="meta"))


# State


@pytest.mark.parametrize("amax", [1.5, [3.142, 2.718], np.ones((3, 1, 1))])
def test_trap_14_state_dicts_load_without_a_buffer(amax):
    saved = TensorQuantizer(QuantDescriptor(amax=amax)).state_dict()
    assert list(saved) == ["_amax"]
    fresh = TensorQuantizer()
    fresh.load_state_dict(saved)
    assert torch.equal(fresh.amax, saved["_amax"])
    fresh.amax.zero_()
    assert saved["_amax"].all()
    model = nn.Sequential(TensorQuantizer())
    model.load_state_dict({"0._amax": saved["_amax"]})
    assert torch.equal(model[0].amax, saved["_amax"])


def test_trap_14_upstreams_state_dict_loads(upstream):
    theirs = upstream.nn.QuantConv2d(3, 8, 3)
    theirs.weight_quantizer.amax = np.random.default_rng(0).random((8, 1, 1, 1), np.float32)
    theirs.input_quantizer.amax = 2.0
    ours = nn.Conv2d(3, 8, 3)
    ours._input_quantizer = TensorQuantizer()
    ours._weight_quantizer = TensorQuantizer(QuantDescriptor(axis=0))
    assert ours.load_state_dict(theirs.state_dict()).missing_keys == []
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(
        nn.functional.conv2d(
            ours._input_quantizer(x), ours._weight_quantizer(ours.weight), ours.bias
        ),
        theirs(x),
    )


def test_state_dict_errors():
    quantizer = TensorQuantizer(QuantDescriptor(amax=[1.0, 2.0]))
    with pytest.raises(RuntimeError, match="Missing key"):
        quantizer.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch"):
        quantizer.load_state_dict({"_amax": torch.ones(3)})
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"0\._amax: expected finite numbers, got"):
            nn.Sequential(TensorQuantizer()).load_state_dict({"0._amax": torch.tensor(number)})


def test_copies_are_independent():
    quantizer = TensorQuantizer(QuantDescriptor(calib_method="histogram", amax=1.0), if_calib=True)
    quantizer(torch.randn(100))
    other = copy.deepcopy(quantizer)
    other.amax = 2.0
    other(torch.randn(50))
    assert quantizer.amax == 1.0
    assert int(quantizer._calibrator._calib_hist.sum()) == 100
    assert int(other._calibrator._calib_hist.sum()) == 150


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("axis", [None, 1])
def test_on_a_gpu(axis):
    x = torch.randn(4, 5, 600)
    for method in ("max", "histogram"):
        pair = []
        for device in ("cpu", "cuda"):
            quantizer = TensorQuantizer(
                QuantDescriptor(axis=axis, calib_method=method), if_calib=True
            )
            quantizer(x.to(device))
            quantizer.load_calib_amax(*(["mse"] if method == "histogram" else []))
            assert quantizer.amax.device.type == device
            pair.append((quantizer.amax.cpu(), quantizer(x.to(device)).cpu()))
        assert torch.equal(pair[0][0], pair[1][0])
        assert torch.equal(pair[0][1], pair[1][1])
    late = TensorQuantizer(QuantDescriptor(axis=axis))
    late.load_state_dict({"_amax": torch.ones(() if axis is None else (1, 5, 1))})
    assert late(x.cuda()).device.type == "cuda"
