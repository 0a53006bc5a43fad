"""The streaming path: large contiguous tensors, one mask bit a value, against plain torch."""

from __future__ import annotations

import pytest
import torch

from bevquant_quantizers import fake_quantize

pytest.importorskip("numba", reason="numba is not installed")

SHAPES = [(1024, 1024), (16, 65536), (3, 131072 + 16), (1024, 1023), (7, 70000)]


def pair(shape: tuple[int, ...], backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    x.view(-1)[:6] = torch.tensor([float("nan"), float("inf"), -float("inf"), 2.0, -2.0, -0.0])
    x.requires_grad_()
    y = fake_quantize(x, torch.tensor(2.0), backend=backend)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4))
    (grad,) = torch.autograd.grad(y, x, weight)
    return y.detach(), grad


@pytest.mark.bits
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_the_torch_path(shape: tuple[int, ...]) -> None:
    y, grad = pair(shape, "numba")
    expected, expected_grad = pair(shape, "torch")
    assert torch.equal(y.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(grad, expected_grad)


def test_mask_takes_one_bit_a_value() -> None:
    x = torch.randn(1024, 1024, requires_grad=True)
    made = fake_quantize(x, torch.tensor(1.0))  # torch 2.10 frees the mask with the result
    (inside,) = made.grad_fn.saved_tensors
    assert inside.numel() * inside.element_size() * 8 == x.numel()


def test_gradient_of_any_layout_and_of_a_gradient() -> None:
    x = torch.randn(1024, 1024, requires_grad=True)
    amax = torch.tensor(1.0)
    inside = (x.abs() <= amax).float()
    fake_quantize(x, amax).sum().backward()  # a gradient of stride 0
    assert torch.equal(x.grad, inside)
    weight = torch.randn(1024, 1024).t()
    (grad,) = torch.autograd.grad(fake_quantize(x, amax), x, weight)
    assert torch.equal(grad, inside * weight)
    upstream = torch.randn(1024, 1024, requires_grad=True)
    (grad,) = torch.autograd.grad(fake_quantize(x, amax), x, upstream, create_graph=True)
    grad.sum().backward()
    assert torch.equal(upstream.grad, inside)


def test_learned_range_keeps_its_gradient() -> None:
    x = torch.randn(1024, 1024, requires_grad=True)
    amax = torch.tensor(1.0, requires_grad=True)
    fake_quantize(x, amax).sum().backward()
    expected = torch.where(x.abs() <= 1, 0.0, x.sign()).sum()
    torch.testing.assert_close(amax.grad, expected.detach())
