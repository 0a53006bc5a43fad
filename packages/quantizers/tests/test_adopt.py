import pytest
import torch
from torch import nn

from bevquant_quantizers import QuantDescriptor, TensorQuantizer, adopt_quantizers


@pytest.fixture
def model(upstream):
    torch.manual_seed(5)
    desc = upstream.tensor_quant.QuantDescriptor(calib_method="histogram")
    conv = upstream.nn.QuantConv2d(3, 4, 3, quant_desc_input=desc)
    linear = upstream.nn.QuantLinear(4, 2, quant_desc_input=desc)
    learned = upstream.nn.TensorQuantizer(
        upstream.tensor_quant.QuantDescriptor(amax=0.5, learn_amax=True)
    )
    model = nn.ModuleDict({"conv": conv, "linear": linear, "learned": learned})
    model["shared"] = conv._input_quantizer
    for quantizer in (conv._input_quantizer, conv._weight_quantizer):
        quantizer.enable_calib()
        quantizer.disable_quant()
    for _ in range(3):
        conv(torch.randn(2, 3, 9, 9))
    conv._weight_quantizer.load_calib_amax()
    conv._weight_quantizer.enable_quant()
    linear._weight_quantizer.disable()
    return model


def test_everything_is_carried_over(model, upstream):
    texts = {name: repr(m) for name, m in model.named_modules()}
    old = {name: m for name, m in model.named_modules()}
    theirs = old["conv._input_quantizer"]._calibrator
    expected = {
        m: float(theirs.compute_amax(m, stride=16)) for m in ("mse", "percentile", "entropy")
    }
    state = {k: v.clone() for k, v in model.state_dict().items()}
    places = adopt_quantizers(model)
    assert sorted(places) == [
        "conv._input_quantizer", "conv._weight_quantizer", "learned",
        "linear._input_quantizer", "linear._weight_quantizer", "shared",
    ]  # fmt: skip
    assert {name: repr(m) for name, m in model.named_modules()} == texts
    assert not any(isinstance(m, upstream.nn.TensorQuantizer) for m in model.modules())
    assert model["shared"] is model["conv"]._input_quantizer
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    new = model["conv"]._input_quantizer
    assert new.name == "conv._input_quantizer"
    for method, amax in expected.items():
        assert new._calibrator.compute_amax(method, stride=16) == amax
    assert torch.equal(
        model["conv"]._weight_quantizer._calibrator.compute_amax(),
        old["conv._weight_quantizer"]._calibrator.compute_amax(),
    )
    assert model["learned"].clip.clip_value_max is old["learned"].clip.clip_value_max
    assert adopt_quantizers(model) == []


def test_outputs_stay_the_same(model):
    x = torch.randn(1, 3, 9, 9)
    for quantizer in (model["conv"]._input_quantizer, model["conv"]._weight_quantizer):
        quantizer.disable_calib()
        quantizer.enable_quant()
    before = model["conv"](x)
    adopt_quantizers(model)
    assert isinstance(model["conv"]._input_quantizer, TensorQuantizer)
    assert torch.equal(model["conv"](x), before)


def test_collecting_goes_on_where_upstream_stopped(model, upstream):
    theirs = model["conv"]._input_quantizer._calibrator
    total = int(theirs._calib_hist.sum())
    adopt_quantizers(model)
    ours = model["conv"]._input_quantizer._calibrator
    x = torch.rand(500)
    ours.collect(x)
    theirs.collect(x)
    assert int(ours._calib_hist.sum()) == total + 500
    assert ours.compute_amax("mse", stride=8) == theirs.compute_amax("mse", stride=8)


def test_numpy_histograms(upstream):
    """Upstream's numpy collection starts at the smallest value, not at 0."""
    model = nn.Sequential(upstream.nn.TensorQuantizer())
    calibrator = upstream.calib.HistogramCalibrator(8, None, False, torch_hist=False)
    calibrator.collect(1 + torch.rand(5000))
    model[0]._calibrator = calibrator
    expected = float(calibrator.compute_amax("percentile"))
    adopt_quantizers(model)
    ours = model[0]._calibrator
    assert int(ours._calib_hist.sum()) == 5000
    assert float(ours.compute_amax("percentile")) == pytest.approx(expected, abs=2 / 2048)


def test_a_quantizer_alone_and_unknown_calibrators(upstream):
    with pytest.raises(TypeError, match="wrap it"):
        adopt_quantizers(upstream.nn.TensorQuantizer())
    model = nn.Sequential(upstream.nn.TensorQuantizer(), upstream.nn.TensorQuantizer())
    model[1]._calibrator = object()
    with pytest.raises(TypeError, match=r"1: its calibrator is a object"):
        adopt_quantizers(model)
    assert isinstance(model[0], upstream.nn.TensorQuantizer)
    model[1]._calibrator = None
    assert adopt_quantizers(model) == ["0", "1"]


def test_own_quantizers_stay():
    model = nn.Sequential(TensorQuantizer(QuantDescriptor(amax=1.0)), nn.ReLU())
    kept = model[0]
    assert adopt_quantizers(model) == []
    assert model[0] is kept
