"""The searches against upstream on the same histogram, and against their definitions."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bevquant_quantizers.calib import entropy_amax, mse_amax, percentile_amax, search_amax
from bevquant_quantizers.calib._entropy import _divergence

KINDS = [
    "relu", "gaussian", "heavy", "uniform", "sparse", "integers", "outlier", "lognormal",
]  # fmt: skip


@pytest.fixture(params=["numba", "numpy"])
def backend(request):
    if request.param == "numba":
        pytest.importorskip("numba", reason="numba is not installed")
    return request.param


@pytest.fixture
def backends():
    """Both where numba is installed: upstream's loops, which take longer, run once for them."""
    return ["numpy", *(["numba"] if find_spec("numba") else [])]


def mse_by_definition(counts, edges, amax, bits, unsigned):
    """sum n (c − Q(c))² in float64, one candidate."""
    centers = torch.from_numpy(edges)
    centers = ((centers[1:] + centers[:-1]) / 2).double().numpy()
    top = 2 ** (bits - 1 + unsigned) - 1
    step = amax / top
    return float((counts * (centers - np.minimum(np.rint(centers / step), top) * step) ** 2).sum())


def divergence_by_definition(counts, i, levels):
    """sum p log(p / q) of the histogram up to bin i and its quantized form, bin by bin."""
    p, q = [float(n) for n in counts[:i]], [0.0] * i
    for group in range(levels):
        members = [j for j in range(i) if j * levels // i == group and counts[j]]
        for j in members:
            q[j] = sum(float(counts[k]) for k in members) / len(members)
    p[-1] += float(counts[i:].sum())
    if not sum(q) or any(a and not b for a, b in zip(p, q, strict=True)):
        return np.inf
    p, q = [a / sum(p) for a in p], [b / sum(q) for b in q]
    return sum(a * np.log(a / b) for a, b in zip(p, q, strict=True) if a)


@pytest.mark.parametrize("kind", ["relu", "heavy", "integers", "outlier"])
@pytest.mark.parametrize(("bits", "unsigned"), [(4, False), (4, True), (3, False)])
def test_entropy_is_the_least_divergence_by_brute_force(backend, histogram, kind, bits, unsigned):
    counts, edges, _ = histogram(kind, bins=96, n=3000)
    levels = 2 ** (bits - 1 + unsigned)
    bins = counts.copy()
    bins[0] = bins[1]
    tried = range(20, 97, 2)
    wanted = {i: divergence_by_definition(bins, i, levels) for i in tried}
    for i in tried:
        assert _divergence(bins, i, levels) == pytest.approx(wanted[i], rel=1e-9, abs=1e-12)
    found = entropy_amax(counts, edges, bits, unsigned, 2, 20, backend)
    (chosen,) = (i for i in tried if edges[i] == found)
    assert wanted[chosen] <= min(wanted.values()) * (1 + 1e-9)


def test_of_equal_candidates_entropy_takes_the_last(backend):
    """Levels for every bin: all ranges that cut nothing off lose nothing."""
    counts = np.array([3, 3, 5, 2, 0, 0, 0, 0])
    edges = np.arange(9, dtype=np.float32)
    assert entropy_amax(counts, edges, 5, False, 1, 1, backend) == 8.0
    assert entropy_amax(counts, edges, 5, False, 2, 1, backend) == 7.0
    assert entropy_amax(counts, edges, 5, False, 1, 9, backend) == 8.0
    assert entropy_amax(counts, edges, 5, False, 1, 8, backend) == 8.0
    assert entropy_amax(np.zeros(8, np.int64), edges, 5, False, 1, 1, backend) == 8.0
    assert counts.tolist() == [3, 3, 5, 2, 0, 0, 0, 0]


# Small histograms keep upstream's loops short; the benchmark compares the full size.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bits", "unsigned"), [(8, False), (8, True), (4, False), (6, True)])
def test_mse_is_upstreams(upstream, backends, histogram, kind, bits, unsigned):
    counts, edges, largest = histogram(kind, bins=512)
    theirs = float(
        upstream.histogram._compute_amax_mse(counts.astype(np.int32), edges, bits, unsigned)
    )
    for backend in backends:
        ours = mse_amax(counts, edges, bits, unsigned, 1, 128, largest, backend)
        if ours == pytest.approx(largest, rel=1e-9):  # the candidate that upstream has not
            errors = [mse_by_definition(counts, edges, a, bits, unsigned) for a in (ours, theirs)]
            assert errors[0] < errors[1], backend
        else:
            assert ours == theirs, backend


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("bits", "unsigned"), [(8, False), (8, True), (4, False)])
def test_entropy_is_upstreams(upstream, backends, histogram, kind, bits, unsigned):
    counts, edges, _ = histogram(kind, bins=400)
    theirs = upstream.histogram._compute_amax_entropy(
        counts.astype(np.int32), edges, bits, unsigned, stride=3
    )
    for backend in backends:
        ours = entropy_amax(counts, edges, bits, unsigned, 3, 128, backend)
        assert ours == float(theirs), backend


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("percentile", [0.1, 50.0, 99.0, 99.99, 100.0])
def test_percentile_is_upstreams(upstream, histogram, kind, percentile):
    counts, edges, _ = histogram(kind)
    theirs = float(upstream.histogram._compute_amax_percentile(counts, edges, percentile))
    if theirs > 0:
        assert percentile_amax(counts, edges, percentile) == theirs
    else:  # upstream's range would quantize everything to zero
        assert percentile_amax(counts, edges, percentile) == edges[1]


def test_percentile_of_a_range_set_by_one_outlier(upstream):
    """All values but one in bin 0: upstream's range is 0, which erases them."""
    counts = np.zeros(2048, np.int64)
    counts[0], counts[-1] = 1_000_000, 1
    edges = torch.linspace(0, 50, 2049).numpy()
    assert float(upstream.histogram._compute_amax_percentile(counts, edges, 99.99)) == 0.0
    assert percentile_amax(counts, edges, 99.99) == edges[1]


@given(
    st.lists(st.integers(0, 40), min_size=4, max_size=60).filter(lambda n: n[-1] > 0),
    st.sampled_from([(2, False), (3, True), (4, False), (9, False)]),
    st.integers(0, 8),
    st.integers(1, 4),
)
def test_trap_34_mse_is_the_least_by_brute_force(counts, kind, start, stride):
    """Every candidate scored from the definition: no other scores better."""
    bits, unsigned = kind
    counts = np.array(counts)
    edges = torch.linspace(0, 3.7, len(counts) + 1).numpy()
    largest = float(edges[-1])
    centers = (edges[1:] + edges[:-1]) / 2
    candidates = [*centers[start::stride].tolist(), largest]
    errors = [mse_by_definition(counts, edges, a, bits, unsigned) for a in candidates]
    energy = float((counts * centers.astype(np.float64) ** 2).sum())
    for backend in ("auto", "numpy"):
        found = mse_amax(counts, edges, bits, unsigned, stride, start, largest, backend)
        assert found in candidates
        error = mse_by_definition(counts, edges, found, bits, unsigned)
        slack = 8 * 2**-24 * np.sqrt(energy * error) + 1e-6 * error + 1e-12 * energy
        assert error <= min(errors) + 2 * slack


@pytest.mark.parametrize("bits", [3, 4, 6, 8])
def test_trap_34_mse_at_full_size_is_the_least_by_brute_force(histogram, backend, bits):
    """nvidia-modelopt 0.47 hands num_bits to its quantizer as a bias: all bits look like eight."""
    counts, edges, largest = histogram("gaussian")
    found = mse_amax(counts, edges, bits, False, 1, 128, largest, backend)
    candidates = [*((edges[1:] + edges[:-1]) / 2)[128:].tolist(), largest]
    least = min(mse_by_definition(counts, edges, a, bits, False) for a in candidates)
    assert mse_by_definition(counts, edges, found, bits, False) <= least * (1 + 1e-5)


def test_trap_11_max_is_a_candidate(backend, histogram):
    """On uniform values mse never loses to max, and for some only max itself does not."""
    won = 0
    for seed in range(12):
        counts, edges, largest = histogram("uniform", n=144, seed=seed)
        found = mse_amax(counts, edges, 8, False, 1, 128, largest, backend)
        error = mse_by_definition(counts, edges, found, 8, False)
        assert error <= mse_by_definition(counts, edges, largest, 8, False) * (1 + 1e-5)
        won += found == largest
    assert won


@pytest.mark.parametrize("start", [0, 1, 500, 600, 10_000])
def test_first_bin_beyond_the_histogram(histogram, backend, start):
    """Upstream fails on an empty list of candidates."""
    counts, edges, largest = histogram("gaussian", bins=512)
    by_mse = mse_amax(counts, edges, 8, False, 1, start, largest, backend)
    by_entropy = entropy_amax(counts, edges, 8, False, 1, start, backend)
    assert 0 < by_mse <= largest
    assert 0 < by_entropy <= largest
    if start > 512:
        assert by_mse == pytest.approx(largest)
        assert by_entropy == edges[-1]


@pytest.mark.parametrize("bits", [2, 10, 12, 16])
def test_any_number_of_bits(histogram, backend, bits):
    counts, edges, largest = histogram("gaussian", bins=256)
    found = mse_amax(counts, edges, bits, False, 1, 1, largest, backend)
    centers = (edges[1:] + edges[:-1]) / 2
    least = min(mse_by_definition(counts, edges, float(c), bits, False) for c in centers[1:])
    energy = float((counts * centers.astype(np.float64) ** 2).sum())
    assert (
        mse_by_definition(counts, edges, found, bits, False) <= least * (1 + 1e-4) + 1e-11 * energy
    )


def test_many_bins_are_searched_in_parts(backend, histogram):
    """A grown histogram: candidates × levels no longer fit one table."""
    counts, edges, largest = histogram("heavy", bins=20_000)
    by_mse = mse_amax(counts, edges, 8, False, 1, 128, largest, backend)
    by_entropy = entropy_amax(counts, edges, 8, False, 1, 128, backend)
    coarse, coarse_edges, _ = histogram("heavy", bins=2_500)
    assert by_mse == pytest.approx(
        mse_amax(coarse, coarse_edges, 8, False, 1, 16, largest, backend), rel=2e-2
    )
    assert 0 < by_entropy <= edges[-1]


def test_trap_12_counts_beyond_int32(upstream):
    """Upstream narrows to int32, where 3·10⁹ is negative; here the shape alone matters."""
    small = np.zeros(600, np.int64)
    small[:300], small[300:] = 6, 1
    edges = torch.linspace(0, 2, 601).numpy()
    large = small * 500_000_000
    for method in ("mse", "entropy", "percentile"):
        found = [
            search_amax(method, counts, edges, num_bits=8, unsigned=False, percentile=70.0)
            for counts in (small, large)
        ]
        assert found[0] == found[1]
    wrapped = large.astype(np.int32)
    assert (wrapped < 0).any()


def test_trap_09_searches_change_nothing(histogram):
    counts, edges, largest = histogram("sparse")
    before = counts.copy(), edges.copy()
    for method in ("entropy", "mse", "percentile", "max"):
        search_amax(method, counts, edges, num_bits=8, unsigned=False, largest=largest)
    np.testing.assert_array_equal(counts, before[0])
    np.testing.assert_array_equal(edges, before[1])


def test_max_method_and_zero_histogram(histogram):
    counts, edges, largest = histogram("gaussian")
    assert search_amax("max", counts, edges, num_bits=8, unsigned=False, largest=1.25) == 1.25
    for method in ("mse", "entropy", "percentile", "max"):
        none = search_amax(method, counts, edges, num_bits=8, unsigned=False, largest=0.0)
        assert none == 0.0
    assert largest > 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"method": "kl"}, TypeError, "Unknown calibration method"),
        ({"method": "percentile", "percentile": -1}, ValueError, "range"),
        ({"method": "percentile", "percentile": 200}, ValueError, "range"),
        ({"method": "percentile", "percentile": float("nan")}, ValueError, "range"),
        ({"method": "mse", "stride": 0}, ValueError, "stride"),
        ({"method": "entropy", "start_bin": -1}, ValueError, "start_bin"),
        ({"method": "mse", "stride": float("inf")}, ValueError, "integers stride"),
        ({"method": "mse", "stride": 1.5}, ValueError, "integers stride"),
        ({"method": "entropy", "start_bin": "x"}, ValueError, "start_bin"),
    ],
)
def test_bad_arguments(histogram, arguments, error, text):
    counts, edges, _ = histogram("gaussian", bins=256)
    with pytest.raises(error, match=text):
        search_amax(counts=counts, edges=edges, num_bits=8, unsigned=False, **arguments)
