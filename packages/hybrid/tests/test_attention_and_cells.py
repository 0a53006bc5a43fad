"""Attention and recurrent cells: float, calibrated, trained, in integers and back."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bevquant_hybrid.nn import qat
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
QAT = get_default_qat_qconfig()


class Attends(nn.Module):
    def __init__(self, **settings) -> None:
        super().__init__()
        self.quant, self.quant_kv, self.dequant = QuantStub(), QuantStub(), DeQuantStub()
        self.attend = nn.MultiheadAttention(12, 3, **settings)

    def forward(self, x: Tensor, y: Tensor, mask=None, padding=None):
        q, kv = self.quant(x), self.quant_kv(y)
        result, weights = self.attend(q, kv, kv, key_padding_mask=padding, attn_mask=mask)
        return self.dequant(result), self.dequant(weights)


def trained(model: nn.Module, *inputs, dtype: str = "qint8") -> nn.Module:
    calibrated = prepare_calibration_fx(model, {"": get_default_calib_qconfig(dtype)}).eval()
    calibrated(*inputs)
    made = prepare_qat_fx(calibrated, {"": get_default_qat_qconfig(dtype)}).eval()
    set_fake_quantize(made, "validation")
    return made


BLOCKED = torch.ones(5, 7, dtype=torch.bool).triu(3)
FLOATS = torch.randn(9, 5, 7)
PADDED = torch.tensor([[False] * 7, [False] * 5 + [True] * 2, [False] * 6 + [True]])
MASKS = {
    "none": (None, None),
    "blocked": (BLOCKED, None),
    "minus infinity": (torch.zeros(5, 7).masked_fill(BLOCKED, -torch.inf), None),
    "values of each head": (FLOATS, None),
    "padding": (None, PADDED),
    "both": (BLOCKED, PADDED),
}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", ["qint8", "qint16"])
def test_attention_is_near_torchs_and_its_integers_nearer(name, batch_first, dtype) -> None:
    mask, padding = MASKS[name]
    x, y = torch.randn(3, 5, 12), torch.randn(3, 7, 12)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    model = Attends(batch_first=batch_first).eval()
    made = trained(model, x, y, mask, padding, dtype=dtype)
    exact, result = model(x, y, mask, padding), made(x, y, mask, padding)
    converted = convert_fx(made)
    integers = converted(x, y, mask, padding)
    near = 0.06 if dtype == "qint8" else 0.01  # weights keep 8 bits
    steps = made.attend.out_proj.activation_post_process.scale.item(), 1 / 127.5
    if dtype == "qint16":
        steps = steps[0], 1 / 32767.5
    for a, b, c, step in zip(exact, result, integers, steps, strict=True):
        assert (b - a).norm() <= near * a.norm()
        assert (c - b).abs().max() <= (2.01 if dtype == "qint8" else 8.01) * step
    if name == "both":
        assert integers[1][:, BLOCKED].abs().max() == 0
        assert integers[1][1, :, 5:].abs().max() == 0


def test_every_step_of_attention_is_an_int64_sum() -> None:
    x, y = torch.randn(2, 4, 12), torch.randn(2, 6, 12)
    converted = convert_fx(trained(Attends(batch_first=True).eval(), x, y))
    attend = converted.attend
    seen = {}
    for name, module in attend.named_modules():
        operate = getattr(module, "operate", None)
        if name in ("scores", "context") and operate is not None:

            def keep(op, tensors, name=name, operate=operate, **settings):
                seen[name] = tensors, operate(op, tensors, **settings)
                return seen[name][1]

            module.operate = keep
    converted(x, y)
    for name, transposed in (("scores", True), ("context", False)):
        (a, b), result = seen[name]
        left, right = a.int_repr().long(), b.int_repr().long()
        product = left @ (right.mT if transposed else right)
        factor = a.scale.double() * b.scale.double() / result.scale.double()
        expected = torch.floor(product.double() * factor + 0.5).clamp(-128, 127)
        assert torch.equal(result.int_repr().double(), expected)


def test_parameters_train_and_come_back() -> None:
    model = Attends(batch_first=True)
    x, y = torch.randn(2, 4, 12), torch.randn(2, 6, 12)
    before = copy.deepcopy(model.state_dict())
    made = prepare_qat_fx(model, {"": QAT})
    optimizer = torch.optim.SGD(made.parameters(), 0.5)
    made(x, y)[0].square().mean().backward()
    optimizer.step()
    back = made.attend.to_float()
    assert type(back) is nn.MultiheadAttention
    assert not torch.equal(back.in_proj_weight, before["attend.in_proj_weight"])
    for name in ("in_proj_weight", "in_proj_bias"):
        rows = torch.cat([getattr(p, name[8:]) for p in projections(made.attend)])
        assert torch.equal(getattr(back, name), rows)
    assert torch.equal(model.attend.in_proj_weight, before["attend.in_proj_weight"])


def projections(attend: qat.MultiheadAttention) -> list[nn.Module]:
    return [attend.q_proj, attend.k_proj, attend.v_proj]


def test_a_mask_that_no_batch_had_is_refused_once_converted() -> None:
    x, y = torch.randn(2, 4, 12), torch.randn(2, 6, 12)
    converted = convert_fx(trained(Attends(batch_first=True).eval(), x, y))
    with pytest.raises(
        ValueError, match=r"attend \(MultiheadAttention\): called with a float mask"
    ):
        converted(x, y, torch.randn(4, 6))
    assert converted(x, y, torch.ones(4, 6, dtype=torch.bool).triu(1))[0].shape == (2, 4, 12)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"add_bias_kv": True}, "add_bias_kv=True"),
        ({"add_zero_attn": True}, "add_zero_attn=True"),
        ({"kdim": 5, "vdim": 7}, "kdim=5, vdim=7"),
    ],
)
def test_attention_that_a_bpu_does_not_do_is_refused_by_name(settings, what: str) -> None:
    with pytest.raises(ValueError, match=rf"attend \(MultiheadAttention\): {what}: a BPU takes"):
        prepare_qat_fx(Attends(**settings), {"": QAT})


class Sequence(nn.Module):
    """A cell stepped over a sequence, from zeros."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(), DeQuantStub()
        self.cell = nn.LSTMCell(5, 6, bias)

    def forward(self, x: Tensor):
        state = self.cell(self.quant(x[0]))
        for i in range(1, 4):
            state = self.cell(self.quant(x[i]), state)
        return self.dequant(state[0]), self.dequant(state[1])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("dtype", "near"), [("qint8", 0.05), ("qint16", 0.01)])
def test_a_cell_is_near_torchs_over_a_sequence(bias: bool, dtype: str, near: float) -> None:
    model = Sequence(bias).eval()
    x = torch.randn(4, 3, 5)
    made = trained(model, x, dtype=dtype)
    exact, result, integers = model(x), made(x), convert_fx(made)(x)
    for a, b, c in zip(exact, result, integers, strict=True):
        assert (b - a).norm() <= near * a.norm()
        assert (c - b).norm() <= near * a.norm()
    assert made.cell.input_proj.weight is model.cell.weight_ih
    back = made.cell.to_float()
    assert type(back) is nn.LSTMCell
    assert torch.equal(back(x[0])[0], model.cell(x[0])[0])


def test_a_cells_state_is_rounded_where_its_sums_are() -> None:
    x = torch.randn(4, 3, 5)
    converted = convert_fx(trained(Sequence().eval(), x))
    hidden, cell = converted.cell(converted.quant(x[0]))
    gates = converted.cell.gates.add(
        converted.cell.input_proj(converted.quant(x[0])),
        converted.cell.hidden_proj(hidden.like(torch.zeros_like(hidden.int_repr()))),
    )
    sizes = gates.dequantize().double().chunk(4, 1)
    written = torch.sigmoid(sizes[0]) * torch.tanh(sizes[2])
    # The product of two rounded tables, rounded, then a sum rounded.
    steps = [converted.cell.write.scale, converted.cell.cell.scale]
    tables = converted.cell.input_gate.scale + converted.cell.candidate.scale
    allowed = 0.5 * (sum(steps) + tables).item() + 1e-6
    assert (cell.dequantize() - written).abs().max() <= allowed


def test_single_samples_and_eager_models() -> None:
    model = Sequence()
    model.qconfig = QAT
    made = prepare_qat(model)
    x = torch.randn(4, 5)
    assert made(x)[0].shape == (6,)
    set_fake_quantize(made, "validation")
    step = made.cell.hidden.activation_post_process.scale.item()
    assert (convert(made)(x)[0] - made(x)[0]).abs().max() <= 3.01 * step
    attends = Attends()
    attends.qconfig = QAT
    attention = prepare_qat(attends)
    assert attention(torch.randn(5, 12), torch.randn(7, 12))[0].shape == (5, 12)
    traced = torch.jit.trace(convert(made), x)
    assert torch.equal(traced(x)[0], convert(made)(x)[0])


def test_a_float_input_names_the_cell() -> None:
    cell = qat.qat_form(nn.LSTMCell(5, 6), QAT)
    with pytest.raises(TypeError, match=r"LSTMCell \(LSTMCell\): its input is a float tensor"):
        cell(torch.randn(2, 5))
