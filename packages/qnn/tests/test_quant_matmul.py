"""Products of two activations: which are quantized, and what they compute."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_qnn import QuantAttention, QuantConfig, QuantMatmul, quantize_model, sensitivity
from bevquant_quantizers import calibrate

BOTH = QuantConfig(quantize_matmul=True, input_calibrator="max")
X = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """An attention whose products are written in one of several ways."""

    def __init__(self, written: str, dim: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.written, self.heads = written, heads

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the rows of x, [batch, rows, channels]."""
        b, n, c = x.shape
        q, k, v = (
            f(x).view(b, n, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scale = q.shape[-1] ** -0.5
        if self.written == "sdpa":
            made = F.scaled_dot_product_attention(q, k, v)
        elif self.written == "@":
            made = ((q * scale) @ k.transpose(-2, -1)).softmax(-1) @ v
        elif self.written == "einsum":
            scores = torch.einsum("bhnc,bhmc->bhnm", q * scale, k)
            made = torch.einsum("bhnm,bhmc->bhnc", scores.softmax(-1), v)
        else:
            q, k, v = (t.flatten(0, 1) for t in (q, k, v))
            made = torch.bmm(torch.bmm(q * scale, k.mT).softmax(-1), v).view(b, -1, n, c // 2)
        return self.out(made.transpose(1, 2).reshape(b, n, c))


class Torch(nn.Module):
    """Torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        """Attend over x."""
        return self.attention(x, x, x)


def _quantized(net: nn.Module) -> Any:
    result = quantize_model(net.eval(), BOTH, example_inputs=X)
    calibrate(result.model, [X])
    return result


@pytest.mark.parametrize("written", ["sdpa", "@", "einsum", "bmm"])
def test_both_products_are_quantized(written: str) -> None:
    torch.manual_seed(1)
    net = Attention(written)
    result = _quantized(net)
    added = [item.path for item in result.quantized if item.path.startswith("quant_")]
    assert added == (
        ["quant_attention"] if written == "sdpa" else ["quant_matmul", "quant_matmul_1"]
    )
    assert not [note for note in result.skipped if "product" in note.reason]
    assert not [note for note in result.skipped if "not reached" in note.reason]
    # The formula, on the model's own quantizers.
    model = result.model
    if written == "sdpa":
        scores, values = model.quant_attention.scores, model.quant_attention.values
    else:
        scores, values = model.quant_matmul, model.quant_matmul_1
    with torch.no_grad():
        q, k, v = (f(X).view(2, 12, 2, 16).transpose(1, 2) for f in (model.q, model.k, model.v))
        q = scores._input_quantizer(q * 0.25)
        weights = (q @ scores._other_quantizer(k).mT).softmax(-1)
        made = values._input_quantizer(weights) @ values._other_quantizer(v)
        expected = model.out(made.transpose(1, 2).reshape(2, 12, 32))
        got = model(X)
        assert torch.allclose(got, expected, atol=1e-5)
        assert float((got - net(X)).norm() / net(X).norm()) < 0.05
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(X), got)
    assert not quantize_model(model, BOTH, example_inputs=X).quantized


def test_torchs_attention_keeps_its_weights() -> None:
    torch.manual_seed(2)
    net = Torch()
    model = _quantized(net).model
    assert isinstance(model.attention.quant_attention, QuantAttention)
    with torch.no_grad():
        (got, weights), (expected, shares) = model(X), net.eval()(X)
    assert torch.allclose(got, expected, atol=0.02)
    assert torch.allclose(weights, shares, atol=0.02)
    assert float((got - expected).abs().max()) > 0


@pytest.mark.parametrize("kind", ["flags", "floats", "causal", "none seen", "grouped", "scaled"])
def test_attention_is_torchs(kind: str) -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, heads, 7, 16) for heads in (4, 2, 2))
    given: dict[str, Any] = {"enable_gqa": kind == "grouped"}
    if kind != "grouped":
        q = q[:, :2]
    if kind in ("flags", "none seen"):
        given["attn_mask"] = torch.rand(7, 7) > 0.4
        given["attn_mask"][2] = kind == "flags"
    elif kind == "floats":
        given["attn_mask"] = torch.randn(2, 1, 7, 7)
    elif kind == "causal":
        given["is_causal"] = True
    elif kind == "scaled":
        given["scale"] = 0.7
    attention = QuantAttention()
    for module in (attention.scores, attention.values):
        for quantizer in module.operand_quantizers:
            quantizer.disable()
    expected = F.scaled_dot_product_attention(q, k, v, **given)
    assert torch.allclose(attention(q, k, v, **given), expected, atol=1e-5)


def test_off_by_default_and_by_pattern() -> None:
    left = quantize_model(Attention("@").eval(), example_inputs=X)
    assert not [item for item in left.quantized if item.path.startswith("quant_")]
    config = QuantConfig(quantize_matmul=True, exclude=("quant_matmul_1",))
    some = quantize_model(Attention("@").eval(), config, example_inputs=X)
    assert [i.path for i in some.quantized if i.path.startswith("quant_")] == ["quant_matmul"]
    with pytest.raises(ValueError, match=r"quantize_matmul=True\) needs example_inputs"):
        quantize_model(Attention("@"), BOTH)


def test_a_parameter_is_no_activation() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.table = nn.Linear(32, 32), nn.Parameter(torch.randn(32, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) @ self.table

    result = quantize_model(Table().eval(), BOTH, example_inputs=X)
    assert [item.path for item in result.quantized] == ["first"]
    assert [note.path for note in result.skipped if "a matrix product" in note.reason] == [""]


@pytest.mark.parametrize(
    ("equation", "shapes", "depth"),
    [
        (None, [(2, 3, 4), (4, 5)], 4),
        ("bhnc,bhmc->bhnm", [(2, 3, 4, 5), (2, 3, 6, 5)], 5),
        ("...ic, ...jc -> ...ij", [(2, 4, 5), (2, 6, 5)], 5),
        ("ab...,cb...->ac...", [(2, 3, 4), (5, 3, 4)], 3),
        ("ij,jk", [(2, 3), (3, 4)], 3),
        ("nij,nij->n", [(2, 3, 4), (2, 3, 4)], 12),
    ],
)
def test_products_of_a_value(equation: str | None, shapes: list[Any], depth: int) -> None:
    product = QuantMatmul(equation)
    a, b = (torch.ones(shape) for shape in shapes)
    for quantizer in product.operand_quantizers:
        quantizer.disable()
    assert product.depth(a, b) == depth
    assert torch.equal(product(a, b).unique(), torch.tensor([float(depth)]))


def test_sensitivity_counts_multiplications() -> None:
    model = _quantized(Attention("@")).model
    rows = {row.modules[0]: row.operations for row in sensitivity(model, [X]).rows}
    assert rows["quant_matmul"] == rows["quant_matmul_1"] == 2 * 2 * 12 * 12 * 16


def test_gradients_reach_both_operands() -> None:
    product = QuantMatmul("ij,kj->ik")
    product.input_quantizer.amax, product.other_quantizer.amax = 4.0, 4.0
    a, b = (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    product(a, b).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert float(a.grad.abs().min()) > 0
