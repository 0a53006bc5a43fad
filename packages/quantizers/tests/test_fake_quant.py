"""fake_quantize: upstream bit for bit, on both paths, forward and backward."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bevquant_quantizers import fake_quantize

HAS_NUMBA = find_spec("numba") is not None
BACKENDS = ["torch", "numba"] if HAS_NUMBA else ["torch"]
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a, b):
    kind = _BITS[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def awkward(dtype, unsigned, rows=50):
    """Normal values, zeros of both signs, ties, values out of range, NaN and infinity."""
    x = torch.randn(rows, 7)
    x[0], x[2], x[3, 1], x[4] = 0.0, torch.arange(7) * 0.5, torch.inf, 1e-30
    if unsigned:
        x = x.abs()
    else:
        x[5, 0], x[6, 0] = torch.nan, -torch.inf
    x[1] = -0.0
    return x.to(dtype)


RANGES = {
    "tensor": torch.tensor(1.3),
    "zero": torch.tensor(0.0),
    "infinite": torch.tensor(torch.inf),
    "channels": torch.tensor([[0.0, 1, 2, 3, 4, 5, 1e-9]]),
    "rows": torch.linspace(0.1, 3, 50)[:, None],
    "both": torch.rand(50, 7) + 0.1,
}


@pytest.mark.bits
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", list(RANGES))
def test_equals_upstream_bit_for_bit(upstream, kind, dtype, unsigned, backend):
    amax = RANGES[kind]
    for num_bits in (4, 8, 16):
        for narrow in (False, True):
            theirs = awkward(dtype, unsigned).requires_grad_()
            ours = theirs.detach().clone().requires_grad_()
            y = upstream.tensor_quant.fake_tensor_quant(theirs, amax, num_bits, unsigned, narrow)
            z = fake_quantize(ours, amax, num_bits, unsigned, narrow, backend=backend)
            assert same_bits(y, z)
            assert same_bits(y, fake_quantize(ours.detach(), amax, num_bits, unsigned, narrow))
            grad = torch.randn_like(y)
            y.backward(grad)
            z.backward(grad)
            assert same_bits(theirs.grad, ours.grad)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "transposed", "sliced"])
@pytest.mark.parametrize("channels", [False, True])
def test_memory_layouts_agree(layout, channels):
    pytest.importorskip("numba", reason="numba is not installed")
    x = torch.randn(3, 8, 10, 12)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.transpose(1, 2)
    elif layout == "sliced":
        x = x[:, :, ::2]
    amax = torch.rand(x.shape[1]) + 0.2 if channels else torch.tensor(1.1)
    axis = 1 if channels else None
    results = []
    for backend in ("torch", "numba"):
        leaf = x.detach().requires_grad_()
        y = fake_quantize(leaf, amax, axis=axis, backend=backend)
        y.backward(x)
        results.append((y, leaf.grad))
    assert same_bits(*(y.contiguous() for y, _ in results))
    assert same_bits(*(grad.contiguous() for _, grad in results))


@pytest.mark.bits
@pytest.mark.parametrize("numel", [100_000, 500_000, 500_003])  # cached, streamed, a ragged end
def test_same_bits_at_any_number_of_threads(numel):
    pytest.importorskip("numba", reason="numba is not installed")
    x = torch.randn(numel)
    x[:6] = torch.tensor([0.5, 1.5, 2.5, -0.5, torch.inf, torch.nan])
    leaf = x.clone().requires_grad_()
    y = fake_quantize(leaf, 1.5, backend="torch")
    y.backward(x)
    expected = torch.stack([y.detach(), leaf.grad])
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        leaf = x.clone().requires_grad_()
        y = fake_quantize(leaf, 1.5)
        y.backward(x)
        found.append(torch.stack([y.detach(), leaf.grad]))
        found.append(torch.stack([fake_quantize(x, 1.5), leaf.grad]))
    assert all(same_bits(expected, each) for each in found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_input_is_left_alone_and_empty_is_fine(backend):
    x = torch.randn(20_000)
    kept = x.clone()
    fake_quantize(x, 1.0, backend=backend)
    assert torch.equal(x, kept)
    assert fake_quantize(torch.empty(0, 4), 1.0, backend=backend).shape == (0, 4)
    assert fake_quantize(torch.empty(0), 1.0, unsigned=True, backend=backend).numel() == 0


def test_range_learns_as_a_clip():
    x = torch.tensor([-3.0, -1.0, 0.5, 1.0, 2.0, 5.0], requires_grad=True)
    amax = torch.tensor(1.0, requires_grad=True)
    fake_quantize(x, amax).backward(torch.tensor([1.0, 10, 100, 1000, 10000, 100000]))
    assert x.grad.tolist() == [0, 10, 100, 1000, 0, 0]
    assert amax.grad == 110000 - 1
    channels = torch.ones(1, 2, requires_grad=True)
    fake_quantize(torch.tensor([[2.0, 0.0], [3.0, -4.0]]), channels).sum().backward()
    assert channels.grad.tolist() == [[2.0, -1.0]]


@pytest.mark.parametrize("numel", [8, 40_000, 400_000])
def test_gradient_of_the_gradient(numel):
    x = torch.randn(numel, requires_grad=True)
    y = fake_quantize(x, 1.0).square().sum()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    assert torch.equal(second, torch.where(x.abs() <= 1, 2.0, 0.0))


@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=30),
    amax=st.floats(0.0078125, 64, width=32),
    bits=st.integers(2, 12),
)
def test_round_trip_stays_within_half_a_step(values, amax, bits):
    x = torch.tensor(values, dtype=torch.float32)
    y = fake_quantize(x, amax, bits)
    step = amax / (2 ** (bits - 1) - 1)
    assert ((y - x.clamp(-amax, amax)).abs() <= step / 2 * 1.0001 + 1e-6).all()
    assert same_bits(fake_quantize(y, amax, bits), y)


def test_rounds_half_to_even_after_scaling():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 127.5, -127.5, -128.0])
    assert fake_quantize(x, 127.0).tolist() == [0, 2, 2, 0, -2, 126, 127, -127, -127]
    assert fake_quantize(x, 127.0, narrow_range=False).tolist()[-2:] == [-128, -128]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranges_up_to_the_smallest_float16_are_zero(backend):
    """2⁻²⁴ counts as zero, the next float does not."""
    x = torch.full((20_000,), 0.5)
    dead = torch.tensor(2.0**-24)
    assert not fake_quantize(x, dead, backend=backend).any()
    alive = torch.nextafter(dead, torch.tensor(1.0))
    torch.testing.assert_close(fake_quantize(x, alive, backend=backend), x * 0 + alive)
    both = torch.stack([dead, alive]).reshape(2, 1)
    kept = fake_quantize(x.reshape(2, -1), both, backend=backend).any(1)
    assert kept.tolist() == [False, True]


@pytest.mark.parametrize(
    ("options", "bounds"),
    [
        ((8, False, True), (-127, 127)),
        ((8, False, False), (-128, 127)),
        ((8, True, True), (0, 255)),
        ((4, False, True), (-7, 7)),
        ((2, True, False), (0, 3)),
    ],
)
def test_integer_bounds(options, bounds):
    """With steps of one, values far outside come back as the integers at the ends."""
    far = torch.tensor([0.0 if options[1] else -1e9, 1e9])
    assert tuple(fake_quantize(far, float(bounds[1]), *options).tolist()) == bounds


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_axes(backend):
    x = torch.randn(6, 50, 70)
    amax = torch.rand(6, 70) + 0.1
    found = fake_quantize(x, amax, axis=(0, -1), backend=backend)
    for i, k in ((0, 0), (3, 11), (5, 69)):
        assert torch.equal(found[i, :, k], fake_quantize(x[i, :, k], amax[i, k]))
    assert torch.equal(found, fake_quantize(x, amax[:, None], backend=backend))
    assert torch.equal(
        fake_quantize(x, torch.tensor([0.7]), axis=1, backend=backend), fake_quantize(x, 0.7)
    )


def test_errors_say_what_to_do():
    x = torch.randn(20_000)
    with pytest.raises(ValueError, match="must not be negative"):
        fake_quantize(x, -1.0)
    for backend in BACKENDS:
        with pytest.raises(TypeError, match=r"negative values .* unsigned"):
            fake_quantize(x, 1.0, unsigned=True, backend=backend)
    with pytest.raises(TypeError, match="floating-point"):
        fake_quantize(torch.arange(3), 1.0)
    with pytest.raises(ValueError, match="does not fit axis 0"):
        fake_quantize(torch.randn(4, 3), torch.ones(3), axis=0)
    with pytest.raises(ValueError, match="backend"):
        fake_quantize(x, 1.0, backend="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_agrees_with_the_cpu():
    x = torch.randn(1000, 64)
    for amax in (torch.tensor(1.5), torch.rand(64) + 0.1):
        assert same_bits(fake_quantize(x.cuda(), amax.cuda()).cpu(), fake_quantize(x, amax))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": [1.0]}, TypeError, "floating-point input, got list"),
        ({"x": None}, TypeError, "floating-point input, got NoneType"),
        ({"amax": "x"}, TypeError, "amax 'x' is no number"),
        ({"amax": 10**400}, TypeError, "is no number"),
        ({"amax": torch.ones(1, dtype=torch.complex64)}, TypeError, "must be real"),
        ({"amax": torch.ones(4)}, ValueError, r"\(4,\) does not fit"),
        ({"amax": torch.ones(0)}, ValueError, r"\(0,\) does not fit"),
        ({"num_bits": 10**4}, ValueError, "at most 32"),
        ({"num_bits": "8"}, TypeError, "num_bits must be an integer"),
        ({"axis": 2}, ValueError, "axis 2 is out of range"),
        ({"axis": "x"}, TypeError, "axis 'x'"),
        ({"x": torch.tensor(1.0), "axis": 0}, ValueError, "axis 0 is out of range"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(change, error, words):
    arguments = {"x": torch.ones(2, 3), "amax": torch.tensor(1.5)} | change
    with pytest.raises(error, match=words):
        fake_quantize(**arguments)
