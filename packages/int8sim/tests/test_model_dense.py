"""simulate() on dense networks, against plain int64 arithmetic written out by hand."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bevquant_int8sim import simulate
from bevquant_qnn import QuantAdd, QuantConfig, quantize_model
from bevquant_quantizers import calibrate


class Block(nn.Module):
    def __init__(self, width, addition):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=2)
        self.relu = nn.ReLU()
        self.addition = addition
        self.add = QuantAdd() if addition == "QuantAdd" else None

    def forward(self, x):
        out = self.conv2(self.relu(self.conv1(x)))
        if self.add is not None:
            out = self.add(out, x)
        elif self.addition == "+=":
            out += x
        else:
            out = out + x
        return self.relu(out)


class Net(nn.Module):
    """Residual blocks, a stride, a pyramid joined by resizing, a transposed convolution, a head."""

    def __init__(self, addition="+"):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.block = Block(8, addition)
        self.down = nn.Conv2d(8, 12, 3, 2, 1)
        self.up = nn.ConvTranspose2d(12, 6, 2, 2)
        self.out = nn.Conv2d(26, 8, 1)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        x = self.block(self.stem(x))
        y = F.relu(self.down(x))
        wide = F.interpolate(y, size=x.shape[-2:], mode="nearest")
        x = torch.cat([x, wide, F.relu(self.up(y))], 1)
        x = F.relu6(self.out(x))
        return self.head(torch.flatten(self.pool(x), 1))


def images(seed, batch=2):
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def calibrated(net, x=None, config=None, method="mse"):
    quantized = quantize_model(net, config, example_inputs=images(0)).model
    calibrate(quantized, [images(0) if x is None else x], method=method)
    return quantized


def float_net(**settings):
    torch.manual_seed(1)
    return Net(**settings).eval()


# The same networks by hand: int64 sums over kernel elements, Python's own rounding.


def rounded(values, low=-128, high=127):
    out = np.empty(values.shape, np.int64)
    for place in np.ndindex(*values.shape):
        out[place] = max(low, min(high, round(Fraction(float(values[place])))))
    return out


def scale_of(module):
    return float(getattr(module, "_input_quantizer", module).amax) / 127


def weights(module, axis):
    scales = np.array([float(a) / 127 for a in module._weight_quantizer.amax.flatten()])
    shape = [-1 if i == axis else 1 for i in range(module.weight.dim())]
    q = rounded(module.weight.detach().double().numpy() / scales.reshape(shape))
    steps = scale_of(module) * scales
    bias = rounded(module.bias.detach().double().numpy() / steps, -(2**31), 2**31)
    return q, bias, steps


def conv(x, module):
    """(accumulators, their scales) of a convolution of integers [n, c, h, w]."""
    w, bias, steps = weights(module, 0)
    (k, s, p), groups = (module.kernel_size[0], module.stride[0], module.padding[0]), module.groups
    x = np.pad(x, ((0, 0), (0, 0), (p, p), (p, p)))
    rows, columns = ((n - k) // s + 1 for n in x.shape[2:])
    out = np.zeros((len(x), len(w), rows, columns), np.int64) + bias[:, None, None]
    ins, outs = x.shape[1] // groups, len(w) // groups
    for c, i, u, v in itertools.product(range(len(w)), range(ins), range(k), range(k)):
        window = x[:, c // outs * ins + i, u : u + s * rows : s, v : v + s * columns : s]
        out[:, c] += window[..., :rows, :columns] * w[c, i, u, v]
    return out, steps[:, None, None]


def transposed(x, module):
    w, bias, steps = weights(module, 1)
    s = module.stride[0]
    n, _, rows, columns = x.shape
    out = np.zeros((n, w.shape[1], s * rows, s * columns), np.int64) + bias[:, None, None]
    for i, c, u, v in itertools.product(*(range(size) for size in w.shape)):
        out[:, c, u::s, v::s] += x[:, i] * w[i, c, u, v]
    return out, steps[:, None, None]


def requantized(acc, steps, scale, relu=False, high=127):
    return rounded(acc * (steps / scale), 0 if relu else -128, high)


def max_pool(x):
    rows, columns = ((n - 1) // 2 + 1 for n in x.shape[2:])
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-128)
    out = np.full((*x.shape[:2], rows, columns), -128, np.int64)
    for u, v in itertools.product(range(3), range(3)):
        out = np.maximum(out, x[:, :, u : u + 2 * rows - 1 : 2, v : v + 2 * columns - 1 : 2])
    return out


def by_hand(net, image):
    """Integers by module path, and the result."""
    made = {}
    stem, pool, block = net.stem[0], net.stem[2], net.block
    x = rounded(image.double().numpy() / scale_of(stem))
    x = made["stem.0"] = requantized(*conv(x, stem), scale_of(pool), relu=True)
    pooled = {
        s: max_pool(rounded(x * (scale_of(pool) / s)))
        for s in {scale_of(block.conv1), scale_of(block.add or block.conv1)}
    }
    x = pooled[scale_of(block.conv1)]
    if len(pooled) == 1:
        made["stem.2"] = x
    h = requantized(*conv(x, block.conv1), scale_of(block.conv2), relu=True)
    made["block.conv1"] = h
    acc, steps = conv(h, block.conv2)
    join = net.quant_concat
    if block.add is None:  # the convolution's own accumulators are added to
        forms = {
            s: rounded(acc * (steps / s) + x * (scale_of(block.conv1) / s), low=0)
            for s in (scale_of(net.down), scale_of(join))
        }
    else:  # its operands have one range of their own
        x = pooled[scale_of(block.add)]
        h = made["block.conv2"] = requantized(acc, steps, scale_of(block.add))
        forms = {
            s: rounded((h + x) * (scale_of(block.add) / s), low=0)
            for s in (scale_of(net.down), scale_of(join))
        }
    x = forms[scale_of(net.down)]
    acc, steps = conv(x, net.down)
    y = requantized(acc, steps, scale_of(net.up), relu=True)
    wide = requantized(acc, steps, scale_of(join), relu=True).repeat(2, 2).repeat(2, 3)
    v = made["up"] = requantized(*transposed(y, net.up), scale_of(join), relu=True)
    x = made["quant_concat"] = np.concatenate([forms[scale_of(join)], wide, v], 1)
    s = scale_of(net.pool)
    x = made["out"] = requantized(*conv(x, net.out), s, relu=True, high=min(127, round(6 / s)))
    n, c, rows, columns = x.shape
    sums = x.reshape(n, c, 2, rows // 2, 2, columns // 2).sum((3, 5))
    count = rows // 2 * columns // 2
    x = made["pool"] = rounded(sums * (s / scale_of(net.head)) / count)
    w, bias, steps = weights(net.head, 0)
    acc = x.reshape(n, -1) @ w.T + bias
    return made, (acc * steps).astype(np.float32)


def assert_equals_by_hand(net, image, backend="auto"):
    model = simulate(net, image, backend=backend)
    assert model.float_fallbacks == ()
    result, recorded = model.run(image)
    made, expected = by_hand(net, image)
    for path, wanted in made.items():
        got = recorded[path].value.numpy()
        assert got.shape == wanted.shape
        assert int((got != wanted).sum()) == 0, path
    assert (result.numpy() == expected).all()


@pytest.mark.parametrize("addition", ["+", "+=", "QuantAdd"])
def test_equals_int64_arithmetic(backend, addition):
    assert_equals_by_hand(calibrated(float_net(addition=addition)), images(5), backend)


def test_saturating_weights_and_inputs(backend):
    net = float_net()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                flat = module.weight.view(-1)
                flat.copy_(torch.where(torch.arange(len(flat)) % 3 == 0, -1.0, 1.0))
    quantized = calibrated(net, method="max")
    for module in quantized.modules():
        if hasattr(module, "_input_quantizer"):
            module._input_quantizer.amax.mul_(0.3)
    image = torch.where(torch.arange(2 * 3 * 32 * 32).view(2, 3, 32, 32) % 2 == 0, -1e4, 1e4)
    assert_equals_by_hand(quantized, image, backend)


def test_follows_the_fake_quantized_model():
    quantized = calibrated(float_net())
    image = images(8)
    expected = quantized(image).detach()
    error = (simulate(quantized, image)(image) - expected).square().sum()
    assert float(error / expected.square().sum()) < 1e-3


def test_other_image_sizes_and_batches():
    quantized = calibrated(float_net())
    model = simulate(quantized, images(0))
    image = torch.randn(3, 3, 32, 32)
    assert torch.equal(model(image)[1:2], model(image[1:2]))


def test_activations_without_integer_form_are_islands():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.LeakyReLU(0.1), nn.Conv2d(8, 8, 3), nn.SiLU(), nn.Conv2d(8, 2, 1)
    )
    quantized = calibrated(net.eval())
    model = simulate(quantized, images(0))
    assert [fallback.path for fallback in model.float_fallbacks] == ["1", "3"]
    assert all("no integer form" in fallback.reason for fallback in model.float_fallbacks)
    image = images(3)
    expected = quantized(image).detach()
    assert float((model(image) - expected).abs().max() / expected.abs().max()) < 0.05


def test_the_share_of_the_operations_in_float_is_told():
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3),
        nn.SiLU(),
        nn.ConvTranspose2d(8, 4, 2, 2),
        nn.Flatten(),
        nn.Linear(64, 5),
    )
    x = torch.randn(3, 2, 4, 4)
    quantized = quantize_model(net.eval(), QuantConfig(exclude=("4",)), example_inputs=x).model
    calibrate(quantized, [x])
    model = simulate(quantized, x)
    paths = {step.outputs[0]: (step.path, step.op) for step in model.steps}
    counted = {paths[name]: count for name, count in model.program.operations.items()}
    conv, up, linear = 3 * 2 * 2 * 8 * 2 * 9, 3 * 2 * 2 * 8 * 4 * 4, 3 * 64 * 5
    assert counted["0", "conv"] == conv
    assert counted["1", "float"] == 3 * 8 * 2 * 2
    assert counted["2", "conv_transpose"] == up
    assert counted["4", "float"] == linear
    assert counted["3", "layout"] == 0
    total = sum(model.program.operations.values())
    shares = {fallback.path: fallback.share for fallback in model.float_fallbacks}
    assert shares == {"1": 96 / total, "4": linear / total}
    assert f"2 float fallbacks with {100 * (96 + linear) / total:.2g} % of the operations" in repr(
        model
    )
    unseen = simulate(quantized, x, verify=False)
    assert {fallback.share for fallback in unseen.float_fallbacks} == {None}
    assert "of the operations" not in repr(unseen)


def test_layers_excluded_from_quantization_are_islands():
    quantized = calibrated(float_net(), config=QuantConfig(exclude=("down", "head")))
    model = simulate(quantized, images(0))
    assert {fallback.path for fallback in model.float_fallbacks} == {"down", "head"}
    expected = quantized(images(1)).detach()
    assert torch.allclose(model(images(1)), expected, atol=0.02 * float(expected.abs().max()))


def test_modules_that_cannot_be_followed_are_islands():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.conv(x) if bool(x.mean() > -1e9) else x

    quantized = calibrated(
        nn.Sequential(nn.Conv2d(3, 4, 3), Branching(), nn.Conv2d(4, 2, 1)).eval()
    )
    model = simulate(quantized, images(0))
    (fallback,) = model.float_fallbacks
    assert fallback.path == "1"
    assert "fake-quantized" in fallback.reason
    expected = quantized(images(2)).detach()
    assert torch.allclose(model(images(2)), expected, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("bits", [4, 6, 8, 16])
def test_other_bit_widths_of_activations(bits):
    quantized = calibrated(float_net())
    for name, module in quantized.named_modules():
        if name.endswith("_input_quantizer"):
            module.num_bits = bits
    model = simulate(quantized, images(0))
    image = images(4)
    _, recorded = model.run(image)
    value = recorded["block.conv1"].value
    top = 2 ** (bits - 1) - 1
    assert int(value.max()) <= top
    assert value.dtype == (torch.int8 if bits <= 8 else torch.int16)
    expected = quantized(image).detach()
    assert float((model(image) - expected).norm() / expected.norm()) < 0.02 + 2.0 ** (2 - bits)


def test_bilinear_resize_behind_a_relu():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1)

        def forward(self, x):
            x = F.interpolate(self.conv(x), scale_factor=2.0, mode="bilinear", align_corners=True)
            return self.out(F.relu(x))

    quantized = calibrated(Net().eval())
    model = simulate(quantized, images(0))
    assert model.float_fallbacks == ()
    expected = quantized(images(1)).detach()
    assert float((model(images(1)) - expected).norm() / expected.norm()) < 0.03


@pytest.mark.bits
def test_same_on_any_number_of_threads():
    model = simulate(calibrated(float_net()), images(0))
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results += [model(images(5)), model(images(5))]
    assert all(torch.equal(results[0], r) for r in results)


def test_channel_of_zeros_keeps_its_bias():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()
    with torch.no_grad():
        net[0].weight[1] = 0
        net[0].bias[1] = 0.7
    quantized = calibrated(net)
    model = simulate(quantized, images(0))
    _, recorded = model.run(images(1))
    got = recorded["0"].dequantized()[:, 1]
    assert torch.allclose(got, torch.tensor(0.7), atol=recorded["0"].scale)
    expected = quantized(images(1)).detach()
    assert torch.allclose(model(images(1)), expected, atol=0.02 * float(expected.abs().max()))


class Inverted(nn.Module):
    """A residual without an activation behind it, as in MobileNetV2."""

    def __init__(self):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU6())
        self.project = nn.Sequential(nn.Conv2d(16, 8, 1), nn.Identity(), nn.Dropout(0.1))
        self.add = QuantAdd()

    def forward(self, x):
        return self.add(x, self.project(self.expand(x)))


def test_sums_behind_folded_batch_norms_and_sums_are_integers():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), Inverted(), Inverted(), nn.Conv2d(8, 2, 1))
    quantized = calibrated(net.eval())
    model = simulate(quantized, images(0))
    assert model.float_fallbacks == ()
    adds = [step for step in model.program.steps if step.op == "add"]
    # The first sum is read by the next block's layer and by its sum.
    assert {step.path for step in adds} == {"1.add", "2.add"}
    image = images(3)
    expected = quantized(image).detach()
    assert float((model(image) - expected).abs().max() / expected.abs().max()) < 0.05


def test_padding_set_after_a_convolution_was_made():
    net = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3))
    for conv in (net[0], net[2]):  # as backbones are dilated
        conv.stride, conv.dilation, conv.padding = (1, 1), (2, 2), (2, 2)
    model, x = calibrated(net.eval()), images(1)
    made = simulate(model, x)(x)
    assert made.shape == net(x).shape == x[:, :1].expand(-1, 4, -1, -1).shape
    torch.testing.assert_close(made, model(x), rtol=0, atol=float(made.abs().max()) / 64)


class _SetAnew(nn.Module):
    """One convolution with other settings in each call, as HITNet's and shared dilated ones."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(3, 4, 2, 2)

    def forward(self, x):
        made = [self.conv(x)]
        self.conv.stride = (2, 1)
        made.append(self.conv(x))
        self.conv.stride, self.conv.dilation, self.conv.padding = (1, 1), (2, 2), (2, 2)
        made.append(self.conv(x))
        self.conv.dilation, self.conv.padding = (1, 1), "same"
        made.append(self.conv(x))
        self.conv.padding = (1, 1)
        made.append(self.up(x))
        self.up.output_padding = (1, 0)
        made.append(self.up(x))
        self.up.output_padding = (0, 0)
        return made


def test_settings_of_each_call() -> None:
    torch.manual_seed(0)
    quantized = calibrated(_SetAnew().eval())
    made = simulate(quantized, images(0))(images(1))
    expected = quantized(images(1))
    assert [x.shape for x in made] == [x.shape for x in expected]
    for x, y in zip(made, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0.05)


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
def test_other_padding_modes_are_a_pad_and_an_integer_layer(mode: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode),
        nn.ReLU(),
        nn.Conv2d(4, 4, (3, 4), padding="same", padding_mode=mode),
    )
    quantized = calibrated(net.eval())
    model = simulate(quantized, images(0))
    assert [step.op for step in model.program.steps].count("conv") == 2
    torch.testing.assert_close(model(images(1)), quantized(images(1)), rtol=0, atol=0.05)


def test_an_empty_stride_is_the_kernels() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.behind = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pooled = nn.functional.max_pool2d(self.before(x), 2, ceil_mode=True)
            made: torch.Tensor = self.behind(pooled)
            return made

    x = torch.randn(1, 3, 7, 7)
    model = quantize_model(Pooled().eval(), example_inputs=x).model
    calibrate(model, [x], method="max")
    integer = simulate(model, x)
    assert [step.op for step in integer.steps] == ["quantize", "conv", "max_pool", "conv"]
    torch.testing.assert_close(integer(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_list_of_one_is_for_every_axis_of_a_pool() -> None:
    def net(*kernels: Any) -> nn.Module:
        largest, mean = nn.MaxPool2d(kernels[0], kernels[1], kernels[2]), nn.AvgPool2d(kernels[1])
        return nn.Sequential(nn.Conv2d(3, 4, 1), largest, mean, nn.Conv2d(4, 2, 1)).eval()

    x = torch.randn(1, 3, 16, 16)
    made = []
    for kernels in ((3, 2, 1), ([3], [2], [1])):
        torch.manual_seed(0)
        model = quantize_model(net(*kernels), example_inputs=x).model
        calibrate(model, [x], method="max")
        made.append(simulate(model, x)(x))
    assert torch.equal(*made)


@pytest.mark.parametrize("places", [False, True])
def test_a_pool_without_a_batch_or_with_places_is_float(places: bool) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.behind = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.before(x)
            if places:
                y, at = F.max_pool2d(y, 2, return_indices=True)
                y = F.max_unpool2d(y, at, 2)
            else:
                y = F.max_pool2d(y[0], 2)[None]
            made: torch.Tensor = self.behind(y)
            return made

    x = torch.randn(1, 3, 8, 8)
    model = quantize_model(Pooled().eval(), example_inputs=x).model
    calibrate(model, [x], method="max")
    torch.testing.assert_close(simulate(model, x)(x), model(x), rtol=1e-4, atol=1e-4)


class Found(NamedTuple):
    scores: torch.Tensor
    boxes: list[torch.Tensor]


class NamedHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.boxes = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> Found:
        return Found(scores=self.scores(x), boxes=[self.boxes(x)])


def test_a_named_tuple_is_answered_as_one() -> None:
    x = torch.randn(1, 3, 4, 4)
    model = quantize_model(NamedHeads().eval(), example_inputs=x).model
    calibrate(model, [x])
    got, wanted = simulate(model, x)(x), model(x)
    assert type(got) is Found
    assert torch.allclose(got.scores, wanted.scores, atol=0.02)
    assert got.boxes[0].shape == wanted.boxes[0].shape


class Codes(nn.Module):
    """Rows in the order of a code of their cells, made of bytes, as Hilbert codes are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x, cells):
        lowest = cells.long().view(torch.uint8).reshape(len(cells), -1, 8)[..., :1]
        code = torch.cat([lowest, lowest.new_zeros(len(cells), 8 - cells.shape[1], 1)], 1)
        return self.layer(x)[torch.argsort(code.view(len(cells), 8).view(torch.int64)[:, 0])]


def test_bits_seen_as_other_numbers():
    torch.manual_seed(0)
    example, other = (
        (torch.randn(rows, 3), torch.randint(0, 256, (rows, 3), dtype=torch.int32))
        for rows in (7, 12)
    )
    net = quantize_model(Codes().eval(), example_inputs=example).model
    calibrate(net, [example, other])
    with torch.no_grad():
        wanted = net(*other)
    assert torch.allclose(simulate(net, example)(*other), wanted, atol=0.1)


class Up(nn.Module):
    """A transposed convolution to the size of the input."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 8, 3, 2, 1), nn.ConvTranspose2d(8, 4, 3, 2, 1)

    def forward(self, x):
        return self.up(F.relu(self.down(x)), output_size=x.shape[-2:])


def test_output_size_of_a_transposed_convolution():
    x = torch.randn(1, 3, 10, 12)
    model = quantize_model(Up().eval(), example_inputs=x).model
    calibrate(model, [x])
    integers = simulate(model, x)
    other = torch.randn(2, 3, 14, 8)
    wanted = model(other)
    assert (integers(other) - wanted).abs().max() < 0.01 * wanted.abs().max()
    with pytest.raises(ValueError, match=r"expected .*x\.shape\[2\].* == 1"):
        integers(torch.randn(1, 3, 9, 12))  # of another output padding


class Scratch(nn.Module):
    """A counter and a map that each call writes before it reads it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.register_buffer("frames", torch.zeros((), dtype=torch.long))
        self.register_buffer("map", torch.zeros(1, 8, 6, 6))

    def forward(self, x):
        self.frames += 1
        self.map.zero_()
        self.map[..., 1:5] += self.first(x)[..., 1:5]
        return self.second(self.map.relu())


def test_buffers_that_no_later_call_reads_may_be_written():
    torch.manual_seed(0)
    x, other = torch.randn(2, 1, 3, 6, 6)
    model = quantize_model(Scratch().eval(), example_inputs=x).model
    calibrate(model, [x, other])
    wanted = [model(frame).detach() for frame in (x, other)]
    run = simulate(model, x)
    for frame, want in zip((x, other, x), (*wanted, wanted[0]), strict=True):
        assert float((run(frame) - want).norm()) < 0.02 * float(want.norm())
