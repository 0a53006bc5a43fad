"""Bit-identical results and gradients: run to run, at any thread count, whatever else is there."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bevquant_sparse import WeightLayout, _conv_matmul, build_rulebook, sparse_conv

BACKENDS = ("torch", "numba")


def scene(seed=0, voxels=6000, shape=(40, 40, 20)):
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randperm(shape[0] * shape[1] * shape[2], generator=generator)[:voxels]
    return torch.stack(torch.unravel_index(cells, (1, *shape)), 1).int()


def run(rulebook, in_channels, out_channels, backend, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(rulebook.num_in, in_channels, generator=generator, dtype=dtype)
    weight = torch.randn(27, in_channels, out_channels, generator=generator, dtype=dtype)
    bias = torch.randn(out_channels, generator=generator, dtype=dtype)
    leaves = [value.requires_grad_() for value in (features, weight, bias)]
    out = sparse_conv(*leaves, rulebook, layout=WeightLayout.VCK, backend=backend)
    out.backward(torch.randn(out.shape, generator=generator, dtype=dtype))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.bits
@pytest.mark.parametrize("backend", BACKENDS)
def test_trap_20_forward_and_backward_never_race(backend):
    if backend == "numba":
        pytest.importorskip("numba", reason="the numba extra is not installed")
    rulebook = build_rulebook(scene(voxels=3000), (40, 40, 20), 3, 2, 1, subm=False, batch_size=1)
    first = run(rulebook, 16, 32, backend)
    assert all(equal(run(rulebook, 16, 32, backend), first) for _ in range(20))


@pytest.mark.bits
@pytest.mark.parametrize("channels", [(5, 16), (16, 33), (3, 130), (64, 64)])
@pytest.mark.parametrize("shape", [(40, 40, 20), (20, 20, 20)], ids=["sparse", "crowded"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_trap_20_same_bits_at_any_thread_count(backend, shape, channels):
    if backend == "numba":
        pytest.importorskip("numba", reason="the numba extra is not installed")
    indices = scene(shape=shape)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        rulebook = build_rulebook(indices, shape, 3, subm=True, batch_size=1)
        results.append(run(rulebook, *channels, backend))
    assert equal(results[0], results[1])
    assert equal(results[0], results[2])


@pytest.mark.bits
def test_trap_20_same_bits_in_float64():
    rulebook = build_rulebook(scene(voxels=1500), (40, 40, 20), 3, 2, 1, subm=False, batch_size=1)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(run(rulebook, 16, 33, "torch", torch.float64))
    assert equal(*results)


def gathered(x, w, sources):
    """``x[sources] @ w``."""
    found = x.new_zeros(len(sources), w.shape[1])
    for rows, values in _conv_matmul.GatheredProduct(x, w.shape[1])(sources, w):
        found[rows] = values
    return found


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 2, 7, 255, 257, 1777])
def test_products_do_not_depend_on_threads(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    for inner, columns in [(1, 1), (3, 33), (5, 16), (64, 128), (128, 77), (256, 96), (300, 130)]:
        x = torch.randn(rows, inner, generator=generator, dtype=dtype)
        w = torch.randn(inner, columns, generator=generator, dtype=dtype)
        g = torch.randn(rows, columns, generator=generator, dtype=dtype)
        every = torch.arange(rows)
        results = []
        for threads in (1, 2, 4, 6):
            torch.set_num_threads(threads)
            results.append(
                [
                    gathered(x, w, every),
                    _conv_matmul.matmul_transposed(x, g),
                    _conv_matmul.column_sum(g),
                ]
            )
        assert all(equal(results[0], other) for other in results[1:])
        for got, want in zip(results[0], (x @ w, x.t() @ g, g.sum(0)), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def at_address(value, skip):
    """A copy of ``value`` that lies ``skip`` bytes behind a multiple of 64."""
    size = value.element_size()
    raw = torch.empty(value.numel() + 128 // size, dtype=value.dtype)
    first = (-raw.data_ptr() % 64 + skip) // size
    return raw[first : first + value.numel()].view(value.shape).copy_(value)


@pytest.mark.bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [3, 256, 1777])
def test_trap_37_products_do_not_depend_on_addresses(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    size = torch.finfo(dtype).bits // 8
    for inner, columns in [(1, 1), (5, 16), (64, 33), (300, 8)]:
        x = torch.randn(rows, inner, generator=generator, dtype=dtype)
        w = torch.randn(inner, columns, generator=generator, dtype=dtype)
        g = torch.randn(rows, columns, generator=generator, dtype=dtype)
        every = torch.arange(rows)
        chosen = torch.randint(rows, (rows // 2,), generator=generator)
        expected = None
        for number, skip in enumerate(range(0, 64, size)):
            torch.set_num_threads(1 + number % 4)
            a, b, c = (at_address(value, skip) for value in (x, w, g))
            found = [
                gathered(a, b, every),
                gathered(a, b, chosen),
                _conv_matmul.matmul_transposed(a, c),
                _conv_matmul.column_sum(c),
            ]
            # A transposed weight is what the gradient of the features multiplies by.
            found.append(gathered(c, at_address(w.t().contiguous().t(), 0).t(), every))
            expected = expected or found
            assert equal(found, expected)
        for got, want in zip(expected, (x @ w, x[chosen] @ w, x.t() @ g), strict=False):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.bits
def test_trap_37_a_blas_gets_one_shape_at_aligned_addresses(monkeypatch):
    seen, real = set(), _conv_matmul._multiply

    def watch(left, right, out):
        assert left.data_ptr() % 64 == right.data_ptr() % 64 == out.data_ptr() % 64 == 0
        assert left.shape[0] >= max(2, torch.get_num_threads())
        assert left.shape[2] <= 256
        seen.add((left.shape[1:], right.shape[1:]))
        real(left, right, out)

    monkeypatch.setattr(_conv_matmul, "_multiply", watch)
    for rows in (1, 255, 256, 700, 5000):
        torch.set_num_threads(1 + rows % 5)
        x, g = at_address(torch.randn(rows, 5), 4), at_address(torch.randn(rows, 7), 12)
        gathered(x, at_address(torch.randn(5, 7), 20), torch.arange(rows))
        _conv_matmul.matmul_transposed(x, g)
    assert len(seen) == 2


def test_what_a_buffer_held_before_adds_nothing():
    x, g = torch.randn(5000, 3), torch.rand(5000, 4) + 1
    x[:4096] = torch.inf  # in places that the last rows, which are fewer, use again
    assert (_conv_matmul.matmul_transposed(x, g) == torch.inf).all()


@pytest.mark.bits
def test_numba_rows_do_not_depend_on_their_company():
    pytest.importorskip("numba", reason="the numba extra is not installed")
    near = scene(voxels=800, shape=(10, 10, 10))
    far = near.clone()
    far[:, 1:] += 20  # a second cloud out of reach of the first
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1600, 16, generator=generator)
    weight = torch.randn(27, 16, 48, generator=generator)
    alone = build_rulebook(near, (40, 40, 40), 3, subm=True, batch_size=1)
    both = torch.stack([far, near], 1).flatten(0, 1)
    together = build_rulebook(both, (40, 40, 40), 3, subm=True, batch_size=1)
    mixed = torch.stack([features[800:], features[:800]], 1).flatten(0, 1)
    one = sparse_conv(features[:800], weight, None, alone, layout=WeightLayout.VCK, backend="numba")
    two = sparse_conv(mixed, weight, None, together, layout=WeightLayout.VCK, backend="numba")
    assert torch.equal(one, two[1::2])


@pytest.mark.bits
@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_from_several_threads(backend):
    if backend == "numba":
        pytest.importorskip("numba", reason="the numba extra is not installed")
    rulebook = build_rulebook(scene(voxels=2000), (40, 40, 20), 3, subm=True, batch_size=1)
    expected = run(rulebook, 16, 16, backend)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: run(rulebook, 16, 16, backend), range(8)))
    assert all(equal(result, expected) for result in results)
