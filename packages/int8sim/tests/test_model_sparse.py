"""simulate() on a residual sparse network, against loops over its voxels written out by hand."""

from __future__ import annotations

import dataclasses
import math
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import fx, nn

from bevquant_fusion import fuse_model
from bevquant_int8sim import IntegerModel, SparseOutput, simulate
from bevquant_int8sim.model import Coords, Geometry
from bevquant_int8sim.model._coords import pooled
from bevquant_int8sim.program import Float8Layer
from bevquant_qnn import QuantConfig, freeze, quantize_model
from bevquant_quantizers import calibrate
from bevquant_sparse import to_dense, use_bevquant_kernels

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    spconv = pytest.importorskip("spconv.pytorch", reason="spconv is not installed")

SHAPE = [6, 8, 8]
fx.wrap("to_dense")


class Block(spconv.SparseModule):
    def __init__(self, width):
        super().__init__()
        self.conv1 = spconv.SubMConv3d(width, width, 3, padding=1, bias=False, indice_key="subm")
        self.bn1 = nn.BatchNorm1d(width)
        self.conv2 = spconv.SubMConv3d(width, width, 3, padding=1, bias=False, indice_key="subm")
        self.bn2 = nn.BatchNorm1d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        out = self.conv1(x)
        out = out.replace_feature(self.relu(self.bn1(out.features)))
        out = self.conv2(out)
        out = out.replace_feature(self.bn2(out.features) + x.features)
        return out.replace_feature(self.relu(out.features))


class Net(nn.Module):
    def __init__(self, up=True):
        super().__init__()
        self.stem = spconv.SparseSequential(
            spconv.SubMConv3d(5, 8, 3, padding=1, bias=False, indice_key="subm"),
            nn.BatchNorm1d(8),
            nn.ReLU(inplace=True),
        )
        self.block = Block(8)
        self.down = spconv.SparseSequential(
            spconv.SparseConv3d(8, 12, 3, stride=2, padding=1, bias=False, indice_key="down"),
            nn.BatchNorm1d(12),
            nn.ReLU(),
        )
        self.up = spconv.SparseInverseConv3d(12, 4, 3, bias=True, indice_key="down") if up else None

    def forward(self, features, coords, batch_size):
        x = spconv.SparseConvTensor(features, coords, SHAPE, batch_size)
        x = self.down(self.block(self.stem(x)))
        if self.up is not None:
            return self.up(x)
        dense = to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)
        return dense.permute(0, 1, 4, 2, 3).flatten(1, 2)


def frame(seed, share=0.15, batch_size=2):
    generator = torch.Generator().manual_seed(seed)
    occupied = torch.rand(batch_size, *SHAPE, generator=generator) < share
    coords = occupied.nonzero().int().contiguous()
    order = torch.randperm(len(coords), generator=generator)
    return torch.randn(len(coords), 5, generator=generator), coords[order], batch_size


def folded_net(**settings):
    torch.manual_seed(0)
    net = Net(**settings).eval()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.05, 0.2)
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias, std=0.3)
    use_bevquant_kernels(net)
    return fuse_model(net, frame(0)).model


def calibrated_net(config=None, **settings):
    net = quantize_model(folded_net(**settings), config, example_inputs=frame(0)).model
    calibrate(net, [frame(s) for s in range(3)], forward=lambda m, b: m(*b), method="mse")
    return net


# The same network by hand: Python integers and loops, scales read off the quantizers.


def half_even(value):
    return round(Fraction(value))


def clamp(value, relu=False):
    return max(0 if relu else -128, min(127, value))


def scale_of(quantizer):
    return float(quantizer.amax) / 127


def loop_quantize(values, scale):
    return [[clamp(half_even(float(v) / scale)) for v in row] for row in values.tolist()]


def neighbour(place, offset, kind):
    """Input coordinate that output `place` sees under `offset`, kernel 3, or None."""
    batch, *rest = place
    if kind == "subm":
        return (batch, *(p + o - 1 for p, o in zip(rest, offset, strict=True)))
    if kind == "down":
        return (batch, *(2 * p + o - 1 for p, o in zip(rest, offset, strict=True)))
    at = [p + 1 - o for p, o in zip(rest, offset, strict=True)]
    return None if any(a % 2 for a in at) else (batch, *(a // 2 for a in at))


def loop_conv(x, module, places, out_places, kind):
    """(accumulators, scale per channel) of a quantized spconv layer; its weight is KRSC."""
    s_x = scale_of(module._input_quantizer)
    s_w = [float(a) / 127 for a in module._weight_quantizer.amax.flatten()]
    weight = module.weight.detach().double().numpy()
    q = np.zeros(weight.shape, np.int64)
    for index, value in np.ndenumerate(weight):
        q[index] = half_even(float(value) / s_w[index[0]])
    row_of = {place: row for row, place in enumerate(places)}
    sums: list[list[int]] = []
    filters_of = q.tolist()
    for place in out_places:
        total = [0] * len(q)
        if module.bias is not None:
            biases = zip(module.bias.tolist(), s_w, strict=True)
            total = [half_even(b / (s_x * s)) for b, s in biases]
        for i, j, k in np.ndindex(*q.shape[1:4]):
            row = row_of.get(neighbour(place, (i, j, k), kind))
            if row is not None:
                for c, filters in enumerate(filters_of):
                    products = zip(x[row], filters[i][j][k], strict=True)
                    total[c] += sum(v * w for v, w in products)
        sums.append(total)
    return sums, [s_x * s for s in s_w]


def loop_requantize(sums, scales, scale, relu):
    return [
        [clamp(half_even(a * (s / scale)), relu) for a, s in zip(row, scales, strict=True)]
        for row in sums
    ]


def by_hand(net, features, coords):
    """Every intermediate by module path."""
    places = [tuple(c) for c in coords.tolist()]
    made = {}

    def layer(path, x, where, out_where, kind, reader, relu=True):
        module = net.get_submodule(path)
        sums, scales = loop_conv(x, module, where, out_where, kind)
        made[path] = loop_requantize(sums, scales, scale_of(reader), relu)
        return made[path]

    block, down = net.block, net.down[0]
    x = loop_quantize(features, scale_of(net.stem[0]._input_quantizer))
    x = layer("stem.0", x, places, places, "subm", block.conv1._input_quantizer)
    h = layer("block.conv1", x, places, places, "subm", block.conv2._input_quantizer)
    add = block.quant_add._input_quantizer
    h = layer("block.conv2", h, places, places, "subm", add, relu=False)
    ratio = scale_of(add) / scale_of(down._input_quantizer)
    x = [
        [clamp(half_even((a + b) * ratio), relu=True) for a, b in zip(*rows, strict=True)]
        for rows in zip(h, x, strict=True)
    ]
    made["block.quant_add"] = x
    sizes = [math.ceil(n / 2) for n in SHAPE]
    corners = {
        (place[0], *((c - o + 1) // 2 for c, o in zip(place[1:], offset, strict=True)))
        for place in places
        for offset in np.ndindex(3, 3, 3)
        if all((c - o + 1) % 2 == 0 for c, o in zip(place[1:], offset, strict=True))
    }
    below = sorted(c for c in corners if all(0 <= v < n for v, n in zip(c[1:], sizes, strict=True)))
    if net.up is None:
        sums, scales = loop_conv(x, down, places, below, "down")
        made["down.0"] = [[max(a, 0) * s for a, s in zip(r, scales, strict=True)] for r in sums]
        return made, below
    x = layer("down.0", x, places, below, "down", net.up._input_quantizer)
    sums, scales = loop_conv(x, net.up, below, places, "up")
    made["up"] = [[a * s for a, s in zip(row, scales, strict=True)] for row in sums]
    return made, places


def assert_equals_loops(net, inputs, backend="auto"):
    model = simulate(net, frame(0), backend=backend)
    assert model.float_fallbacks == ()
    _, recorded = model.run(inputs)
    made, _ = by_hand(net, *inputs[:2])
    for path, expected in made.items():
        value = recorded[path].value.numpy()
        wanted = np.array(expected, value.dtype).reshape(value.shape)
        assert int((value != wanted).sum()) == 0, path


def test_equals_loops_layer_by_layer(backend):
    assert_equals_loops(calibrated_net(), frame(7), backend)


def test_saturating_weights_and_inputs(backend):
    net = folded_net()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, spconv.SubMConv3d | spconv.SparseConv3d):
                flat = module.weight.view(-1)
                flat.copy_(torch.where(torch.arange(len(flat)) % 3 == 0, -1.0, 1.0))
    net = quantize_model(net, example_inputs=frame(0)).model
    calibrate(net, [frame(0)], forward=lambda m, b: m(*b), method="max")
    for module in net.modules():
        if hasattr(module, "_input_quantizer"):
            module._input_quantizer.amax.mul_(0.05)
    features, coords, batch_size = frame(3, share=0.5)
    signs = torch.where(torch.arange(features.numel()).view_as(features) % 2 == 0, -1e4, 1e4)
    assert_equals_loops(net, (signs, coords, batch_size), backend)


def test_follows_the_fake_quantized_model():
    net = calibrated_net(up=False)
    model = simulate(net, frame(0))
    inputs = frame(9)
    expected = net(*inputs).detach()
    got = model(*inputs)
    assert got.dtype == torch.float32
    assert got.shape == expected.shape
    noise = (got - expected).square().sum() / expected.square().sum()
    assert float(noise) < 1e-3


def test_other_batch_sizes_and_frozen_ranges():
    net = calibrated_net(up=False)
    model = simulate(net, frame(0))
    one = frame(4, batch_size=1)
    assert model(*one).shape[0] == 1
    freeze(net)
    assert torch.equal(simulate(net, one)(*one), model(*one))


def test_takes_and_returns_sparse_tensors():
    net = calibrated_net()

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.ModuleDict({"stem": net.stem, "block": net.block, "down": net.down})

        def forward(self, x):
            return self.net["down"](self.net["block"](self.net["stem"](x)))

    features, coords, batch_size = frame(2)
    x = spconv.SparseConvTensor(features, coords, SHAPE, batch_size)
    inner = Inner().eval()
    out = simulate(inner, x)(x)
    assert isinstance(out, SparseOutput)
    expected = inner(x)
    assert torch.equal(out.indices, expected.indices)
    assert out.features.shape == expected.features.shape
    assert out.dense().shape == (2, 12, *out.spatial_shape)


def test_a_dense_map_needs_the_grid_of_the_example_and_voxels_alone_do_not(tmp_path):
    """The graph has the map's sizes as numbers: a grid of as many cells gave another order."""

    class Map(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.stem, self.flat = net.stem, True

        def forward(self, x):
            x = self.stem(x)
            if not self.flat:
                return x
            dense = to_dense(x.features, x.indices, x.spatial_shape, x.batch_size)
            n, c, depth, height, width = dense.shape
            return dense.view(n, c * depth, height, width)

    features, coords, batch_size = frame(2)
    coords = coords.clone()
    x = spconv.SparseConvTensor(features, coords, SHAPE, batch_size)
    wider = spconv.SparseConvTensor(features, coords, [6, 8, 16], batch_size)
    fewer = [6, 16, 4]  # as many cells
    kept = coords[:, 3] < 4
    turned = spconv.SparseConvTensor(features[kept], coords[kept], fewer, batch_size)
    model = Map(calibrated_net()).eval()
    flat = simulate(model, x)
    assert flat(x).shape == model(x).shape
    flat.save(tmp_path / "flat")
    for integers in flat, IntegerModel.load(tmp_path / "flat"):
        for other in turned, wider:
            with pytest.raises(ValueError, match=r"spatial_shape: expected size 8 in axis \d"):
                integers(other)
    model.flat = False
    voxels = simulate(model, x)
    for other in turned, wider:
        difference = voxels(other).features - model(other).features  # of rounded biases
        assert difference.abs().max() < 1e-3


@pytest.mark.bits
def test_same_on_any_number_of_threads():
    model = simulate(calibrated_net(up=False), frame(0))
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results += [model(*frame(5)), model(*frame(5))]
    assert all(torch.equal(results[0], r) for r in results)


def test_every_tensor_stays_in_integers_between_layers():
    model = simulate(calibrated_net(up=False), frame(0))
    ops = [step.op for step in model.steps]
    assert ops.count("quantize") == 1
    assert ops.count("dequantize") == 0
    assert ops.count("sparse_conv") == 4
    assert model.float_fallbacks == ()


def test_values_stand_in_one_order_in_every_process():
    """A saved program is the same file, which sets of names are not."""
    model = simulate(calibrated_net(), frame(0), verify=False)
    hosts = [
        n for n, value in model.program.values.items() if value.form in ("coordinates", "number")
    ]
    assert len(hosts) > 3
    assert hosts == sorted(hosts)


def test_layers_left_float_are_listed_and_run():
    net = calibrated_net(QuantConfig(exclude=("block.conv1",)), up=False)
    model = simulate(net, frame(0))
    (fallback,) = model.float_fallbacks
    assert fallback.path == "block.conv1"
    coords = frame(0)[1]
    apart = (coords[:, None] - coords[None]).abs()
    pairs = int(((apart[..., 0] == 0) & (apart[..., 1:] <= 1).all(-1)).sum())
    counts = {model.program.operations[s.outputs[0]] for s in model.steps if "block.conv" in s.path}
    assert max(counts) == pairs * 8 * 8
    assert fallback.share == max(counts) / sum(model.program.operations.values())
    inputs = frame(3)
    expected = net(*inputs).detach()
    noise = (model(*inputs) - expected).square().sum() / expected.square().sum()
    assert float(noise) < 1e-3


def test_rulebooks_are_built_once_per_key(monkeypatch):
    from bevquant_int8sim.model import _coords

    built = []
    build = _coords.plan_rulebook
    monkeypatch.setattr(_coords, "plan_rulebook", lambda *a, **k: built.append(1) or build(*a, **k))
    model = simulate(calibrated_net(), frame(0), verify=False)
    model(*frame(1))
    assert len(built) == 2


def test_the_model_is_left_alone_and_left_behind():
    net = calibrated_net(up=False)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    model = simulate(net, frame(0))
    first = model(*frame(1))
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert torch.equal(model(*frame(1)), first)


def test_empty_frame():
    model = simulate(calibrated_net(up=False), frame(0))
    out = model(torch.zeros(0, 5), torch.zeros(0, 4, dtype=torch.int32), 1)
    assert float(out.abs().sum()) == 0


def test_a_call_equals_the_step_by_step_run():
    inputs = frame(8, share=0.3)
    for settings in ({"up": False}, {"up": True}):
        model = simulate(calibrated_net(**settings), frame(0))
        expected, recorded = model.run(inputs)
        got = model(*inputs)
        assert "block.conv2" in recorded
        if settings["up"]:
            assert torch.equal(got.indices, inputs[1])
            got, expected = got.features, expected.features
        assert torch.equal(got, expected)


def test_order_of_the_voxels_does_not_matter():
    model = simulate(calibrated_net(up=False), frame(0))
    features, coords, batch_size = frame(8, share=0.3)
    order = torch.randperm(len(coords))
    assert torch.equal(
        model(features[order], coords[order], batch_size), model(features, coords, batch_size)
    )


@pytest.mark.parametrize("place", [-1, 8, 2**30])
def test_coordinates_out_of_range_name_the_layer(place):
    model = simulate(calibrated_net(up=False), frame(0))
    features, coords, batch_size = frame(1)
    coords[3, 2] = place
    with pytest.raises(ValueError, match=r"stem\.0: indices\[3\]"):
        model(features, coords, batch_size)


def test_repeated_voxels_name_the_layer():
    model = simulate(calibrated_net(up=False), frame(0))
    features, coords, batch_size = frame(1)
    coords[3] = coords[7]
    with pytest.raises(ValueError, match=r"stem\.0: indices\[7\] .* repeats indices\[3\]"):
        model(features, coords, batch_size)


def test_features_that_do_not_fit_name_the_layer():
    model = simulate(calibrated_net(up=False), frame(0))
    features, coords, batch_size = frame(1)
    for rows in (features[:-1], torch.cat([features, features[:1]])):
        with pytest.raises(ValueError, match=r"stem\.0: expected features \["):
            model(rows, coords, batch_size)
    with pytest.raises(ValueError, match=r"stem\.0: .* features with 4 channels"):
        model(features[:, :4], coords, batch_size)
    with pytest.raises(ValueError, match=r"stem\.0: indices have dtype torch\.float32"):
        model(features, coords.float(), batch_size)


def simulated(*layers):
    """A model that takes a sparse tensor, its integer form, and such a tensor."""
    net = spconv.SparseSequential(*layers).eval()
    use_bevquant_kernels(net)
    features, coords, batch_size = frame(0)
    x = spconv.SparseConvTensor(features, coords, SHAPE, batch_size)
    net = quantize_model(net, example_inputs=(x,)).model
    calibrate(net, [(x,)], forward=lambda m, b: m(*b), method="max")
    return net, simulate(net, (x,)), x


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence:UserWarning")  # spconv's dense()
def test_transposed_convolutions_and_dense_ends():
    net, model, x = simulated(
        spconv.SubMConv3d(5, 8, 3, padding=1),
        nn.ReLU(),
        spconv.SparseConvTranspose3d(8, 6, 2, stride=2),
        spconv.ToDense(),
    )
    assert model.float_fallbacks == ()
    expected = net(x).detach()
    got = model(x)
    assert got.shape == expected.shape
    assert float((got - expected).norm() / expected.norm()) < 0.01


def test_sparse_pooling_runs_on_integers():
    net, model, x = simulated(
        spconv.SubMConv3d(5, 8, 3), spconv.SparseMaxPool3d(2, 2), spconv.SubMConv3d(8, 8, 3)
    )
    assert model.float_fallbacks == ()
    (pool,) = [step for step in model.steps if step.called == "sparse_max_pool"]
    assert model.program.values[pool.outputs[0]].form.bits == 8
    made, wanted = model(x), net(x)
    assert torch.equal(made.indices, wanted.indices)
    assert (made.features - wanted.features).abs().max() < 5e-3 * wanted.features.abs().max()


@pytest.mark.parametrize("kernel", [1, 3])
def test_coordinates_that_nothing_reads_are_saved(tmp_path, kernel):
    """The first layer may need no grid, and the last one's coordinates are no result."""

    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = spconv.SubMConv3d(5, 8, kernel, padding=kernel // 2)
            self.last = spconv.SparseConv3d(8, 4, 3, 2, padding=1)

        def forward(self, features, coords):
            return self.last(
                self.first(spconv.SparseConvTensor(features, coords, list(SHAPE), 2))
            ).features

    features, coords, _ = frame(0)
    net = Rows().eval()
    use_bevquant_kernels(net)
    quantized = quantize_model(net, example_inputs=(features, coords)).model
    calibrate(quantized, [(features, coords)])
    model = simulate(quantized, (features, coords))
    model.save(tmp_path / "saved")
    other = frame(1)[:2]
    wanted = model(*other)
    assert torch.equal(IntegerModel.load(tmp_path / "saved")(*other), wanted)
    assert (wanted - net(*other)).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("layers", [1, 2])
def test_kernels_of_1_alone_take_the_grid_of_their_tensor(tmp_path, layers):
    class Point(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(
                spconv.SubMConv3d(5 if i == 0 else 8, 8, 1) for i in range(layers)
            )

        def forward(self, features, coords):
            x = spconv.SparseConvTensor(features, coords, list(SHAPE), 2)
            for conv in self.convs:
                x = conv(x)
            return x.features

    given = frame(0)[:2]
    net = Point().eval()
    use_bevquant_kernels(net)
    quantized = quantize_model(net, example_inputs=given).model
    calibrate(quantized, [given])
    simulate(quantized, given).save(tmp_path / "saved")
    other = frame(1)[:2]
    wanted = quantized(*other)
    made = IntegerModel.load(tmp_path / "saved")(*other)
    assert (made - wanted).norm() < 0.02 * wanted.norm()


def test_a_pooling_that_nobody_has_is_no_average():
    features, indices, _ = frame(0)
    window = Geometry((2,) * 3, (2,) * 3, (0,) * 3, (1,) * 3, (0,) * 3, False, False, False)
    with pytest.raises(ValueError, match="'median' is no pooling over voxels: expected one of max"):
        pooled(features, Coords(indices, SHAPE, 2), "median", None, *window.numbers())


def test_an_inverse_without_its_convolution_names_the_layer():
    coords = frame(0)[1]
    coords = Coords(coords, SHAPE, 2)
    down = Geometry((3,) * 3, (2,) * 3, (1,) * 3, (1,) * 3, (0,) * 3, False, False, False)
    up = dataclasses.replace(down, inverse=True)
    with pytest.raises(ValueError, match="up: nothing to invert under indice_key='down'"):
        coords.convolved(up, "down", "up")
    _, lower = coords.convolved(down, "down", "down")
    assert lower.convolved(up, "down", "up")[1] is coords
    other = dataclasses.replace(up, kernel_size=(1, 3, 3))
    with pytest.raises(ValueError, match=r"up: its kernel size \(1, 3, 3\) is not the \(3, 3, 3\)"):
        lower.convolved(other, "down", "up")


@pytest.mark.parametrize("up", [False, True])
def test_fp8_layers_sum_over_voxels(tmp_path, up):
    net = calibrated_net(QuantConfig(num_bits=(4, 3)), up=up)
    given = frame(5)
    integer = simulate(net, given)
    found = {s.path: s.target for s in integer.steps if isinstance(s.target, Float8Layer)}
    assert len(found) == 4 + up
    with torch.no_grad():
        made, wanted = (getattr(t, "features", t) for t in (integer(*given), net(*given)))
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    integer.save(tmp_path / "saved")
    again = IntegerModel.load(tmp_path / "saved")(*given)
    assert torch.equal(getattr(again, "features", again), made)
    # The stem by hand: a loop over its kernel's cells in float64.
    layer = next(iter(found.values()))
    coords = Coords(given[1], SHAPE, 2)
    out, _ = layer(given[0], coords)
    q = (given[0] / layer.input_scale).clamp(-448, 448).to(torch.float8_e4m3fn).double()
    cells = {tuple(c): row for row, c in enumerate(given[1].tolist())}
    sums = torch.zeros(len(out), out.shape[1], dtype=torch.float64)
    for cell, row in cells.items():
        for k, offset in enumerate(np.ndindex(3, 3, 3)):
            near = (cell[0], *(c + o - 1 for c, o in zip(cell[1:], offset, strict=True)))
            if near in cells:
                sums[row] += q[cells[near]] @ layer.weight[k].double()
    wanted = sums * layer.weight_scale.double() * layer.input_scale + layer.bias.double()
    assert torch.equal(out, wanted.float())
    assert bool((layer.bound(given[0], coords) > 0).all())
