"""Products of two tensors of integers, against loops of int64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bevquant_int8sim import IntegerModel, compare, simulate
from bevquant_int8sim._matmul import exact_product
from bevquant_int8sim.program import Matmul
from bevquant_qnn import QuantConfig, quantize_model
from bevquant_quantizers import calibrate


@pytest.mark.parametrize("depth", [1, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_products_are_exact(depth: int, dtype: torch.dtype) -> None:
    info, random = torch.iinfo(dtype), torch.Generator().manual_seed(depth)
    a = torch.randint(info.min, info.max + 1, (2, 3, depth), generator=random).to(dtype)
    b = torch.randint(info.min, info.max + 1, (2, depth, 4), generator=random).to(dtype)
    a[0], b[0] = info.min, info.min  # the largest sum
    a[1, 0], b[1, :, 0] = info.min, info.max
    wanted = np.matmul(a.numpy().astype(np.int64), b.numpy().astype(np.int64))
    assert np.array_equal(exact_product(a, b).double().numpy(), wanted)
    got = exact_product(a, b.mT.contiguous(), "nij,nkj->nik")
    assert np.array_equal(got.double().numpy(), wanted)


class Attention(nn.Module):
    """Two products, one of them an einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(16, 48), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the rows of x."""
        q, k, v = self.layer(x).chunk(3, -1)
        scores = torch.einsum("bic,bjc->bij", q, k)
        return self.out(scores.softmax(-1) @ v)


def _made(**settings: Any) -> tuple[nn.Module, Any, Tensor]:
    torch.manual_seed(0)
    net, x = Attention().eval(), torch.randn(2, 9, 16)
    config = QuantConfig(quantize_matmul=True, **settings)
    quantized = quantize_model(net, config, example_inputs=x).model
    calibrate(quantized, [x])
    return net, simulate(quantized, x), x


def test_steps_multiply_integers(tmp_path: Path) -> None:
    net, integers, _ = _made()
    steps = [step for step in integers.steps if isinstance(step, Matmul)]
    assert [step.equation for step in steps] == ["bic,bjc->bij", ""]
    seen: dict[str, Any] = {}
    y = torch.randn(3, 9, 16)  # another batch, too

    def see(step: Any, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        if isinstance(step, Matmul):
            seen[step.outputs[0]] = given, made[0]

    result = integers.run(y, observe=see)
    for step in steps:
        (a, b), got = seen[step.outputs[0]]
        assert a.dtype == b.dtype == torch.int8
        whole = (t.numpy().astype(np.int64) for t in (a, b))
        sums = np.einsum(step.equation or "bij,bjk->bik", *whole)
        assert np.array_equal(got.numpy(), (sums * step.scale).astype(np.float32))
    integers.save(tmp_path / "model")
    assert torch.equal(IntegerModel.load(tmp_path / "model")(y), integers(y))
    assert result is not None
    assert "within one step" in str(compare(net, integers, [y]))
    assert {fallback.what for fallback in integers.float_fallbacks} == {"softmax"}


def test_products_of_fp8_are_floats_by_name() -> None:
    net, integers, x = _made(num_bits=(4, 3))
    reasons = [f.reason for f in integers.float_fallbacks if "FP8" in f.reason]
    assert reasons == ["products of two FP8 tensors are computed in float32"] * 2
    with torch.no_grad():
        wanted = net(x)
    assert float((integers(x) - wanted).norm() / wanted.norm()) < 0.1
