"""Runtime checks of the package's annotations, and what several test files share."""

import itertools
import os
import random
from pathlib import Path

import jaxtyping
import numpy as np
import pytest
import torch

# What runs below the operators. The numba kernels are left alone, as a checking wrapper cannot be
# compiled, and what a tracer goes through, as sizes are symbols there.
_CHECKED = "conv_matmul conv_numba conv_torch rulebook_torch"
jaxtyping.install_import_hook(
    [f"bevquant_sparse._{name}" for name in _CHECKED.split()], "beartype.beartype"
)


@pytest.fixture(params=["torch", "numba"])
def backend(request):
    if request.param == "numba":
        pytest.importorskip("numba", reason="the numba extra is not installed")
    return request.param


@pytest.fixture(scope="session")
def random_voxels():
    """``(seed, batch_size, shape, count)`` to distinct int32 coordinates in random order."""

    def make(seed, batch_size, shape, count):
        sizes = (batch_size, *shape)
        volume = int(np.prod([int(size) for size in sizes], dtype=object))
        chosen = random.Random(seed).sample(range(volume), min(count, volume))
        columns = []
        for size in reversed(sizes):
            columns.insert(0, [key % size for key in chosen])
            chosen = [key // size for key in chosen]
        return torch.tensor(columns, dtype=torch.int32).t().contiguous()

    return make


@pytest.fixture(scope="session")
def brute_force():
    """The pair set ``{(input row, output coordinate, kernel offset)}`` by loops and a dict."""

    def pairs(indices, out_shape, kernel, stride, padding, dilation, *, subm, transposed=False):
        voxels = {tuple(row): number for number, row in enumerate(indices.tolist())}
        found = set()
        for (batch, *place), number in voxels.items():
            for offset, k in enumerate(itertools.product(*map(range, kernel))):
                out = []
                for axis, coordinate in enumerate(place):
                    reach = k[axis] * dilation[axis]
                    if transposed:
                        value, rest = coordinate * stride[axis] - padding[axis] + reach, 0
                    else:
                        value, rest = divmod(coordinate + padding[axis] - reach, stride[axis])
                    if rest == 0 and 0 <= value < out_shape[axis]:
                        out.append(value)
                target = (batch, *out)
                if len(out) == len(place) and (not subm or target in voxels):
                    found.add((number, target, offset))
        return found

    return pairs


@pytest.fixture(scope="session")
def pair_set():
    """The pair set of a rulebook, in the form of ``brute_force``."""

    def pairs(rulebook):
        in_rows, out_rows, bounds = rulebook.pairs
        outputs = [tuple(row) for row in rulebook.out_indices.tolist()]
        found = [
            (i, outputs[o], offset)
            for offset in range(rulebook.kernel_volume)
            for i, o in zip(
                in_rows[bounds[offset] : bounds[offset + 1]].tolist(),
                out_rows[bounds[offset] : bounds[offset + 1]].tolist(),
                strict=True,
            )
        ]
        assert len(set(found)) == len(found)
        return set(found)

    return pairs


@pytest.fixture(scope="session")
def real_voxels():
    """Coordinates (batch, x, y, z) of a real nuScenes frame on its grid of 1440×1440×41."""
    name = "nvidia_scn/in_indices_xyz.torch.int32.tensor"
    folders = [Path(p) / "shared" / "data" for p in Path(__file__).resolve().parents]
    if "BEVQUANT_DATA" in os.environ:
        folders.insert(0, Path(os.environ["BEVQUANT_DATA"]))
    path = next((f / name for f in folders if (f / name).is_file()), None)
    if path is None:
        pytest.skip("real data not found: set BEVQUANT_DATA")
    raw = np.fromfile(path, dtype="<i4")
    ndim = int(raw[1])
    return torch.from_numpy(raw[3 + ndim :].reshape(raw[3 : 3 + ndim]).copy())
