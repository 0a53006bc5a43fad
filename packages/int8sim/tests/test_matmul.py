"""Every way in which torch multiplies integer matrices, whichever this machine would choose."""

import time

import pytest
import torch

from bevquant_int8sim import _matmul

SHAPES = [(1, 1, 1), (5, 3, 2), (33, 40, 17), (40, 1024, 8), (3, 1025, 9), (2, 2500, 3)]


@pytest.fixture(params=["int_mm", "float32", "float64"])
def method(request, monkeypatch):
    if request.param == "int_mm" and not _matmul._int_mm_is_exact("cpu"):
        pytest.skip("torch._int_mm is not exact on this CPU")
    monkeypatch.setattr(_matmul, "matmul_method", lambda *_: request.param)


@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_every_method_is_exact(method, rows, depth, columns):
    """On drawn operands, and on the largest products: −128 by −128 throughout."""
    generator = torch.Generator().manual_seed(rows)
    draw = lambda *s: torch.randint(-128, 128, s, generator=generator, dtype=torch.int8)  # noqa: E731
    lowest = torch.full((rows, depth), -128, dtype=torch.int8)
    for a, b in (
        (draw(rows, depth), draw(depth, columns)),
        (lowest, lowest[:1].t().repeat(1, columns)),
    ):
        made = _matmul.exact_matmul(a, b, fits_int32=True)
        assert made.dtype == torch.int32
        assert torch.equal(made.long(), a.long() @ b.long())
        assert torch.equal(_matmul.exact_matmul(a, b, fits_int32=False), a.long() @ b.long())


def test_sums_beyond_int32():
    a = torch.full((2, 600), 32767, dtype=torch.int16)
    b = torch.full((600, 3), 127, dtype=torch.int8)
    made = _matmul.exact_matmul(a, b, fits_int32=False)
    assert made.dtype == torch.int64
    assert made.tolist() == [[32767 * 127 * 600] * 3] * 2
    assert 32767 * 127 * 600 > 2**31


@pytest.mark.parametrize(("rows", "depth", "columns"), [(0, 3, 2), (2, 0, 3), (2, 3, 0)])
def test_without_operands_there_are_zeros(method, rows, depth, columns):
    a, b = torch.ones(rows, depth, dtype=torch.int8), torch.ones(depth, columns, dtype=torch.int8)
    made = _matmul.exact_matmul(a, b, fits_int32=True)
    assert made.dtype == torch.int32
    assert made.shape == (rows, columns)
    assert not made.any()


def saturating(a, b):
    """As x86 without VNNI: uint8 × int8, pairs of products summed in int16."""
    shifted = (a.long() + 128).unsqueeze(2) * b.long()
    pairs = shifted.view(a.shape[0], -1, 2, b.shape[1]).sum(2).clamp(-(2**15), 2**15 - 1)
    return (pairs.sum(1) - 128 * b.long().sum(0)).int()


def absent(a, b):
    raise RuntimeError("not implemented for 'Char'")


@pytest.mark.parametrize(
    ("made_by", "exact"),
    [(lambda a, b: (a.long() @ b.long()).int(), True), (saturating, False), (absent, False)],
)
def test_a_product_that_saturates_is_not_trusted(monkeypatch, made_by, exact):
    monkeypatch.setattr(torch, "_int_mm", made_by)
    monkeypatch.setattr(_matmul, "_int_mm_is_faster", lambda: True)
    assert _matmul._int_mm_is_exact("cpu") is exact
    assert chosen("torch.int8") == ("int_mm" if exact else "float32")
    assert chosen("torch.int16") == "float64"


def test_an_exact_product_that_takes_longer_is_passed_over(monkeypatch):
    """As torch's on an AMD EPYC with AVX2 alone, which takes 20 times as long as float32's."""

    def slow(a, b):
        time.sleep(0.1)
        return (a.long() @ b.long()).int()

    monkeypatch.setattr(torch, "_int_mm", slow)
    assert _matmul._int_mm_is_exact("cpu")
    assert chosen("torch.int8") == "float32"


def chosen(dtype):
    _matmul.matmul_method.cache_clear()
    try:
        return _matmul.matmul_method("cpu", dtype)
    finally:
        _matmul.matmul_method.cache_clear()


def test_operands_at_which_saturation_shows():
    a, b = _matmul.saturating_operands(6, 12, 5)
    assert a.shape == (6, 12)
    assert b.shape == (12, 5)
    assert set(a.flat) == set(b.flat) == {-128, 127}
    assert (a[0] == -128).all()
    assert (a[1] == 127).all()
    # The others alternate: two, two, three places a run, and two of a period are opposites.
    assert [[int(v) for v in row] for row in a[2:] < 0] == [
        [1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0],
        [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1],
        [1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1],
    ]
    assert (b.T == a[:5]).all()
    (one,), _ = _matmul.saturating_operands(1, 3, 1)
    assert set(one) == {127}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
@pytest.mark.parametrize("columns", [1, 3, 5, 6, 8, 20, 64])
def test_rows_by_words_are_those_rows(columns, dtype):
    info = torch.iinfo(dtype)
    x = torch.randint(info.min, info.max + 1, (40, columns), dtype=dtype)
    rows = torch.randint(0, 40, (99,))
    assert torch.equal(_matmul.taken_by_words(x, rows), x[rows])
    assert torch.equal(_matmul.gathered(x, rows), x[rows])
    assert _matmul.taken_by_words(x, rows[:0]).shape == (0, columns)
