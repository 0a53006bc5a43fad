from __future__ import annotations

import pytest
import torch
from torch import nn

from bevquant_hybrid.quantization import (
    FakeQuantize,
    FakeQuantState,
    FixedScaleObserver,
    LSQFakeQuantize,
    PACTFakeQuantize,
    get_default_qat_qconfig,
    get_default_qconfig,
    set_fake_quantize,
)


def reference(x: torch.Tensor, scale: torch.Tensor, low: int, high: int) -> torch.Tensor:
    return ((x.double() / scale.double()).round().clamp(low, high) * scale.double()).float()


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("qint8", -128, 127), ("qint16", -32768, 32767)]
)
def test_values_lie_on_the_grid(dtype: str, low: int, high: int) -> None:
    x = torch.randn(1000)
    fake_quant = FakeQuantize(dtype=dtype)
    q = fake_quant(x)
    assert q.dtype == dtype
    torch.testing.assert_close(
        q.dequantize(), reference(x, fake_quant.scale, low, high), rtol=1e-5, atol=1e-6
    )
    assert q.int_repr().max() == high or q.int_repr().min() == low


@pytest.mark.parametrize(("saturate", "expected"), [(None, [1.0, 1.0]), (True, [1.0, 0.0])])
def test_gradients_pass_through_unless_saturated(saturate, expected: list[float]) -> None:
    fake_quant = FakeQuantize(observer=FixedScaleObserver, scale=0.01, saturate=saturate)
    x = torch.tensor([0.5, 9.0], requires_grad=True)
    fake_quant(x).dequantize().sum().backward()
    assert x.grad.tolist() == expected


def test_states_switch_observer_and_rounding() -> None:
    model = nn.Sequential(FakeQuantize(averaging_constant=1.0))
    x = torch.randn(50)
    set_fake_quantize(model, FakeQuantState.CALIBRATION)
    assert torch.equal(model(x).dequantize(), x)
    scale = model[0].scale.clone()
    set_fake_quantize(model, FakeQuantState.VALIDATION)
    assert not torch.equal(model(3 * x).dequantize(), 3 * x)
    assert torch.equal(model[0].scale, scale)
    set_fake_quantize(model, FakeQuantState.QAT)
    model(3 * x)
    torch.testing.assert_close(model[0].scale, 3 * scale)


def test_a_scale_set_gives_the_symmetric_range() -> None:
    fake_quant = FakeQuantize()
    fake_quant.set_qparams(0.02)
    assert fake_quant.observed
    torch.testing.assert_close(fake_quant.activation_post_process.max_val, torch.tensor([2.55]))
    with pytest.raises(ValueError, match="zero_point=1"):
        fake_quant.set_qparams(0.02, 1)
    with pytest.raises(ValueError, match="expected 0"):
        fake_quant.set_qparams(torch.tensor([0.02, 0.03]), torch.tensor([0, 1]))


def test_a_fixed_scale_stays() -> None:
    fake_quant = FakeQuantize(observer=FixedScaleObserver, scale=1 / 128)
    fake_quant(torch.randn(100) * 50)
    assert fake_quant.scale.tolist() == [1 / 128]


def test_state_dicts_load_whatever_their_channels() -> None:
    trained = get_default_qat_qconfig().weight()
    trained.observe(torch.randn(7, 3))
    fresh = get_default_qat_qconfig().weight()
    fresh.load_state_dict(trained.state_dict())
    assert torch.equal(fresh.scale, trained.scale)
    assert fresh.observed
    assert repr(fresh) == repr(trained)


def test_calibration_and_training_have_the_same_state_dict_keys() -> None:
    calib = get_default_qconfig(activation_observer="mse").activation()
    train = get_default_qconfig(activation_qkwargs={"averaging_constant": 0.0}).activation()
    calib(torch.randn(10))
    train.load_state_dict(calib.state_dict())
    assert torch.equal(train.scale, calib.scale)


def test_lsq_learns_the_step_of_the_paper() -> None:
    fake_quant = LSQFakeQuantize(use_grad_scaling=False)
    fake_quant.set_qparams(0.1)
    x = torch.tensor([0.33, -0.58, 100.0, -100.0])
    fake_quant(x).dequantize().sum().backward()
    steps = x / 0.1
    slopes = (steps.round() - steps)[:2].sum() + 127 - 128
    torch.testing.assert_close(fake_quant.scale.grad, slopes.reshape(1))


def test_pact_sends_clamped_gradients_to_alpha() -> None:
    fake_quant = PACTFakeQuantize(alpha=1.0)
    x = torch.tensor([0.5, 2.0, -3.0], requires_grad=True)
    y = fake_quant(x).dequantize()
    (y * torch.tensor([1.0, 2.0, 4.0])).sum().backward()
    assert fake_quant.alpha.grad.tolist() == [2.0 - 4.0]
    assert x.grad.tolist() == [1.0, 0.0, 0.0]
    assert y[1].item() == pytest.approx(127 * 2 / 255)


@pytest.mark.parametrize("kind", ["lsq", "pact"])
def test_learned_ranges_train(kind: str) -> None:
    fake_quant = get_default_qat_qconfig(activation_fake_quant=kind).activation()
    x = torch.randn(2000)
    fake_quant.set_qparams(1.0 if kind == "lsq" else 0.004)  # too coarse, or far too narrow
    optimizer = torch.optim.Adam(fake_quant.parameters(), lr=0.03)
    first = (fake_quant(x).dequantize() - x).square().mean().item()
    for _ in range(150):
        loss = (fake_quant(x).dequantize() - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1 * first


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"activation_observer='mean'.*'min_max'"):
        get_default_qconfig(activation_observer="mean")
    with pytest.raises(ValueError, match="fake_quant='lsqq'"):
        get_default_qat_qconfig(activation_fake_quant="lsqq")
    with pytest.raises(ValueError, match="'fast'"):
        set_fake_quantize(nn.Identity(), "fast")
