"""QuantAdd, QuantConcat, and what the rewriting does to forwards that add and concatenate."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bevquant_qnn as qnn
from bevquant_quantizers import TensorQuantizer, calibrate
from bevquant_sparse import use_bevquant_kernels

floats = st.lists(st.integers(-1000, 1000), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(floats, floats)
def test_add_quantizes_both_operands_with_one_range(left, right):
    size = min(len(left), len(right))
    add = qnn.QuantAdd()
    add.input_quantizer.amax = 127.0
    a = torch.tensor(left[:size], dtype=torch.float32) / 8
    b = torch.tensor(right[:size], dtype=torch.float32) / 8
    clamp = [[max(-128, min(127, round(v))) for v in t.tolist()] for t in (a, b)]
    assert add(a, b).tolist() == list(map(operator.add, *clamp))


@settings(max_examples=40, deadline=None)
@given(st.lists(floats, min_size=1, max_size=4))
def test_concat_quantizes_each_operand_with_one_range(rows):
    concat = qnn.QuantConcat(dim=0)
    concat.input_quantizer.amax = 127.0
    tensors = [torch.tensor(row, dtype=torch.float32) / 8 for row in rows]
    expected = [max(-128, min(127, round(v))) for tensor in tensors for v in tensor.tolist()]
    assert concat(*tensors).tolist() == expected
    assert concat(tensors).tolist() == expected


def test_sparse_operands_stay_as_they_are(cloud):
    a = cloud(3)
    b = a.replace_feature(torch.randn_like(a.features))
    before = a.features.clone(), b.features.clone()
    total, joined = qnn.QuantAdd()(a, b), qnn.QuantConcat()(a, b)
    assert torch.equal(a.features, before[0])
    assert torch.equal(b.features, before[1])
    assert total.indices is a.indices
    assert joined.features.shape == (len(a.features), 6)
    largest = max(v.abs().max().item() for v in before)
    assert (total.features - sum(before)).abs().max() <= 1.01 * largest / 127


def test_operands_on_other_voxels_are_refused(cloud):
    a, b = cloud(3, seed=0), cloud(3, seed=1)
    assert len(a.features) != len(b.features)
    with pytest.raises(ValueError, match="do not lie on the same voxels"):
        qnn.QuantAdd()(a, b)
    with pytest.raises(ValueError, match="do not lie on the same voxels"):
        qnn.QuantConcat()(a, b)
    with pytest.raises(ValueError, match="nothing to concatenate"):
        qnn.QuantConcat()()


def _dense_block(forward):
    """Make a block of two convolutions with the given forward."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(4, 4, 3, padding=1)
            self.second = nn.Conv2d(4, 4, 3, padding=1)

    Block.forward = forward
    return Block()


def _plus(self, x):
    return self.second(self.first(x)) + x


def _plus_reversed(self, x):
    return x + self.second(self.first(x))


def _inplace(self, x):
    out = self.second(self.first(x))
    out += x
    return out.relu()


def _method(self, x):
    return self.second(self.first(x)).add_(x)


def _function(self, x):
    return torch.add(x, self.second(self.first(x)))


@pytest.mark.parametrize("forward", [_plus, _plus_reversed, _inplace, _method, _function])
@pytest.mark.parametrize("observed", [True, False])
def test_residual_quantizer_sits_on_the_identity_however_it_is_added(forward, observed):
    block = _dense_block(forward).eval()
    float_block, x = copy.deepcopy(block), torch.randn(2, 4, 6, 6)
    result = qnn.quantize_model(block, example_inputs=x if observed else None, inplace=True)
    assert isinstance(block.residual_quantizer, TensorQuantizer)
    assert block.residual_quantizer is block.first._input_quantizer
    assert block.second._input_quantizer is not block.first._input_quantizer
    assert ("residual_quantizer", "TensorQuantizer") in [
        (item.path, item.kind) for item in result.quantized
    ]
    amax = x.abs().max().item()
    quantized = block.first._input_quantizer(x)
    branch = block.second(block.first(x))
    expected = branch + quantized
    torch.testing.assert_close(block(x), expected.relu() if forward is _inplace else expected)
    assert (block(x) - float_block(x)).abs().max() < 0.2 * amax
    assert type(block).__name__ == "Block"


def _statement(self, x):
    x = x.clone()
    x.add_(self.second(self.first(x)).relu())
    return x


def _other_name(self, x):
    kept = out = x + 1
    out += self.second(self.first(x))
    return kept


def _half(self, x):
    out = x.clone()
    out[:, :2].add_(self.second(self.first(x))[:, :2])
    return out


@pytest.mark.parametrize("forward", [_statement, _other_name, _half])
@pytest.mark.parametrize("observed", [True, False])
def test_addition_in_place_reaches_what_is_read_under_another_name(forward, observed):
    """Lane detectors (RESA, SCNN) add slices to one map in statements of their own."""
    block, x = _dense_block(forward).eval(), torch.randn(2, 4, 6, 6)
    result = qnn.quantize_model(block, example_inputs=x if observed else None)
    assert isinstance(result.model.residual_quantizer, TensorQuantizer)
    assert (result.model(x) - block(x)).abs().max() < 0.1
    result.model(x).sum().backward()
    assert result.model.first.weight.grad.abs().max() > 0


def _criss_cross(self, x):
    query, key = self.first(x).flatten(2), self.second(x).flatten(2)
    energy = query.mT @ key
    mask = torch.diag(torch.full((energy.shape[-1],), torch.inf))
    return torch.cat([energy - 1, energy + torch.where(mask > 0, -mask, 0.0)], 2).softmax(2)


def test_a_mask_of_infinities_is_added_and_joined_in_floats():
    """Criss-cross attention (CCNet, V2VAM) leaves out a position's own column."""
    block, x = _dense_block(_criss_cross).eval(), torch.randn(1, 4, 6, 6)
    result = qnn.quantize_model(block, example_inputs=x)
    reasons = [item.reason for item in result.skipped]
    assert sum("infinite values, as a mask of an attention: left" in r for r in reasons) == 2
    calibrate(result.model, [x])
    assert (result.model(x) - block(x)).abs().max() < 0.02


def test_identity_is_the_shallower_of_two_convolution_branches(nets):
    block = nets.Bottleneck(4, 4, 8).eval()
    qnn.quantize_model(block, example_inputs=torch.randn(1, 4, 6, 6), inplace=True)
    seen = []
    block.residual_quantizer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.randn(1, 4, 6, 6)
    block(x)
    assert torch.equal(seen[0], block.downsample(x))


class _PlainAdd(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.offset = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x):
        height = x.shape[2] + x.shape[3]
        return self.conv(x) + self.offset + 1, height


def test_additions_of_parameters_constants_and_sizes_are_no_residuals():
    model = _PlainAdd()
    result = qnn.quantize_model(model, example_inputs=torch.randn(1, 3, 4, 4), inplace=True)
    assert [item.path for item in result.quantized] == ["conv"]
    assert type(model) is _PlainAdd


class _Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return self.conv(x) + x if float(x.sum()) > 0 else x


def test_forward_that_branches_on_data_is_reported():
    result = qnn.quantize_model(_Gated(), example_inputs=torch.ones(1, 3, 4, 4))
    (note,) = [item for item in result.skipped if item.path == ""]
    assert "additions and concatenations" in note.reason
    assert "branches on the value" in note.reason


class _Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x, scale=None):
        out = self.conv(x) + x
        return out if scale is None else out * scale


class _Caller(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = _Optional()

    def forward(self, x):
        return self.inner(x, scale=0.0)


def test_module_called_with_an_option_keeps_its_forward():
    model, x = _Caller().eval(), torch.randn(1, 3, 4, 4)
    result = qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert "inner.residual_quantizer" in [item.path for item in result.quantized]
    assert model(x).abs().max().item() == 0
    assert model.inner(x, scale=2.0).abs().max().item() > 0
    alone = _Optional().eval()
    qnn.quantize_model(alone, example_inputs=x, inplace=True)
    assert hasattr(alone, "residual_quantizer")


def test_settings_switch_additions_and_concatenations_off(nets):
    config = qnn.QuantConfig(quantize_add=False, quantize_concat=False)
    model = nets.ResNetFPN()
    qnn.quantize_model(model, config, torch.randn(1, 3, 64, 64), inplace=True)
    names = [name.rpartition(".")[2] for name, _ in model.named_modules()]
    assert not {"residual_quantizer", "quant_add", "quant_concat"} & set(names)


def test_sparse_add_and_concat_by_any_spelling(spconv, cloud):
    class Joins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = spconv.SubMConv3d(3, 3, 3, indice_key="k")
            self.b = spconv.SubMConv3d(3, 3, 3, indice_key="k")
            self.c = spconv.SubMConv3d(6, 3, 3, indice_key="k")

        def forward(self, x):
            y = self.a(x) + x
            z = y.replace_feature(self.b(y).features + y.features)
            return self.c(z.replace_feature(torch.cat((z.features, y.features), dim=1)))

    model = Joins().eval()
    result = qnn.quantize_model(model, example_inputs=cloud(3), inplace=True)
    assert [(i.path, i.kind) for i in result.quantized][3:] == [
        ("quant_add", "QuantAdd"),
        ("quant_add_1", "QuantAdd"),
        ("quant_concat", "QuantConcat"),
    ]
    assert result.skipped == ()
    # y is read by the second addition and the concatenation, z by the concatenation: all agree.
    first = model.a._input_quantizer
    assert model.quant_add._input_quantizer is first
    second = model.b._input_quantizer
    for child in (model.quant_add_1, model.quant_concat, model.c):
        assert child._input_quantizer is second
    assert second is not first
    assert torch.isfinite(model(cloud(3)).features).all()


class _OldSparseTensor:
    """A sparse tensor as in spconv 1: its features are assigned to."""

    def __init__(self, features, indices, spatial_shape, batch_size):
        self.features, self.indices = features, indices
        self.spatial_shape, self.batch_size, self.indice_dict = spatial_shape, batch_size, {}


def test_block_that_assigns_features_as_in_spconv_1(spconv, cloud):
    class SparseBasicBlock(spconv.SparseModule):
        def __init__(self):
            super().__init__()
            self.conv1 = spconv.SubMConv3d(3, 3, 3, indice_key="k")
            self.conv2 = spconv.SubMConv3d(3, 3, 3, indice_key="k")
            self.relu = nn.ReLU()

        def forward(self, x):
            identity = x.features
            out = self.conv1(x)
            out.features = self.relu(out.features)
            out = self.conv2(out)
            out.features += identity
            out.features = self.relu(out.features)
            return out

    made = cloud(3)
    block = SparseBasicBlock().eval()
    x = _OldSparseTensor(made.features, made.indices, made.spatial_shape, made.batch_size)
    result = qnn.quantize_model(block, example_inputs=x, inplace=True)
    assert [item.path for item in result.quantized] == ["conv1", "conv2", "quant_add"]
    assert block.quant_add._input_quantizer is block.conv1._input_quantizer
    before = x.features.clone()
    quantizer, middle = block.conv1._input_quantizer, block.conv1(x)
    middle.features = middle.features.relu()
    expected = (quantizer(block.conv2(middle).features) + quantizer(x.features)).relu()
    assert torch.equal(block(x).features, expected)
    assert torch.equal(x.features, before)


class _CountingNeck(nn.Module):
    """Counts its inputs, as the necks of mmdetection do."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(6, 3, 1) for _ in range(2))

    def forward(self, inputs):
        assert len(inputs) == len(self.convs) + 1
        maps = [inputs[i] for i in range(len(inputs))]
        for i in range(len(maps) - 2, -1, -1):
            maps[i] = self.convs[i](torch.cat([maps[i], maps[i + 1]], dim=1))
        return tuple(maps)


class _Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.neck = nn.Conv2d(3, 3, 1), _CountingNeck()

    def forward(self, x):
        y = self.stem(x)
        return self.neck((x, y, y.relu()))


def test_forward_that_counts_a_list_is_followed_with_example_inputs():
    model, x = _Around().eval(), torch.randn(1, 3, 4, 4)
    reference = model(x)
    result = qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert [i.path for i in result.quantized][-2:] == ["neck.quant_concat", "neck.quant_concat_1"]
    assert result.skipped == ()
    for got, expected in zip(model(x), reference, strict=True):
        assert (got - expected).abs().max() < 0.1
    # The first operand of the last concatenation is what the stem reads.
    assert model.neck.quant_concat_1._input_quantizer is model.stem._input_quantizer
    maps = [torch.randn(1, 3, 4, 4) for _ in range(4)]
    kept = list(maps)
    model.neck(maps[:3])
    assert all(a is b for a, b in zip(maps, kept, strict=True))
    with pytest.raises(AssertionError):  # the neck's own
        model.neck(maps)
    assert copy.deepcopy(model)(x)[0].shape == (1, 3, 4, 4)
    assert qnn.quantize_model(model, example_inputs=x).quantized == ()


def test_forward_that_counts_a_list_is_reported_without_example_inputs():
    model = nn.ModuleDict({"neck": _CountingNeck()})
    result = qnn.quantize_model(model, inplace=True)
    assert "Pass example_inputs" in next(i.reason for i in result.skipped if i.path == "neck")
    assert type(model["neck"]) is _CountingNeck
    # Where the module around says how many there are, that is enough.
    assert hasattr(qnn.quantize_model(_Around()).model.neck, "quant_concat_1")


def test_sparse_addition_in_place_is_replaced_only_where_the_result_is_used(spconv, cloud):
    class Block(spconv.SparseModule):
        def __init__(self):
            super().__init__()
            self.conv = spconv.SubMConv3d(3, 3, 3, indice_key="k")

    class Lost(Block):
        def forward(self, x):
            out = self.conv(x)
            features = out.features
            features += x.features
            return out

    class Kept(Block):
        def forward(self, x):
            out = self.conv(x)
            features = out.features
            features += x.features
            return out.replace_feature(features)

    for cls, replaced in ((Lost, False), (Kept, True)):
        block, x = cls().eval(), cloud(3)
        expected = block.conv
        use_bevquant_kernels(block)
        with torch.no_grad():
            reference = block(x).features
        result = qnn.quantize_model(block, example_inputs=x, inplace=True)
        assert hasattr(block, "quant_add") == replaced
        notes = [i.reason for i in result.skipped]
        assert replaced == (not any("read under another name" in note for note in notes))
        with torch.no_grad():
            assert (block(x).features - reference).abs().max() < 0.1
        assert block.conv.weight is expected.weight


def test_concatenated_outputs_of_the_model_stay_float():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.boxes, self.scores = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 2, 1)

        def forward(self, x):
            return torch.cat([self.boxes(x), self.scores(x)], dim=1)

    result = qnn.quantize_model(Head(), example_inputs=torch.randn(1, 3, 4, 4))
    assert [item.path for item in result.quantized] == ["boxes", "scores"]
    assert "is an output of the model" in result.skipped[0].reason


def test_what_is_joined_with_nothing_is_no_concatenation():
    class Cache(nn.Module):
        def __init__(self):
            super().__init__()
            self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(torch.cat([torch.tensor([]), self.key(x)], dim=-2))

    model, x = Cache(), torch.randn(1, 3, 4)
    result = qnn.quantize_model(model, example_inputs=x)
    assert [item.path for item in result.quantized] == ["key", "out"]
    assert "joins one tensor with nothing" in result.skipped[0].reason
    assert result.model(x).shape == (1, 3, 4)


def test_integers_beside_floats_are_not_quantized():
    class Points(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = nn.Linear(4, 4), nn.Linear(5, 4)

        def forward(self, x, frames):
            return self.out(torch.cat([frames, self.embed(x)], 1))

    inputs = torch.randn(3, 4), torch.tensor([[0], [0], [1]])
    result = qnn.quantize_model(Points(), example_inputs=inputs)
    assert [item.path for item in result.quantized] == ["embed", "out"]
    assert "joins integers" in result.skipped[0].reason
    calibrate(result.model, [inputs])
    assert result.model(*inputs).shape == (3, 4)


def test_boxes_that_a_part_concatenates_for_the_caller_stay_float():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.both, self.mix = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 1)

        def forward(self, x):
            y = self.mix(torch.cat([self.both(x)[:, :3], x], 1))
            boxes = torch.cat([y[:, :2] * 100, y[:, 2:4].exp()], 1)
            return torch.cat([boxes, y[:, 4:].sigmoid()], 1), y

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.detect = nn.Conv2d(3, 3, 1), Decoder()

        def forward(self, x):
            return self.detect(self.stem(x))

    result = qnn.quantize_model(Detector().eval(), example_inputs=torch.randn(1, 3, 4, 4))
    joins = [item.path for item in result.quantized if "concat" in item.path]
    assert joins == ["detect.quant_concat"]  # the one that a convolution reads
    notes = [note.reason for note in result.skipped if note.path == "detect"]
    assert sum("that no layer reads" in note for note in notes) == 2


def test_what_only_tells_places_stays_float():
    class Lift(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.offsets = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 2, 1)
            self.out = nn.Conv2d(4, 2, 1)

        def forward(self, x, points):
            y = self.net(x)
            cells = torch.cat([points[:, :1] * 7, points[:, 1:] * 7], 1).long()
            canvas = torch.zeros(1, 4, 8, 8)
            canvas[0, :, cells[:, 0], cells[:, 1]] = y[0].flatten(1)
            shift = self.offsets(x).tanh()
            grid = torch.cat([shift[:, :1], shift[:, 1:]], 1).permute(0, 2, 3, 1)
            return self.out(torch.nn.functional.grid_sample(canvas, grid, align_corners=False))

    given = torch.randn(1, 3, 4, 4), torch.rand(16, 2)
    result = qnn.quantize_model(Lift().eval(), example_inputs=given)
    assert [item.path for item in result.quantized] == ["net", "offsets", "out", "sample_quantizer"]
    assert sum("or places" in note.reason for note in result.skipped) == 2


class StaticSwish(nn.Module):
    @staticmethod
    def forward(x):
        return x * torch.sigmoid(x) + x


class ClassSwish(nn.Module):
    @classmethod
    def forward(cls, x):
        return x * torch.sigmoid(x) + x


@pytest.mark.parametrize("kind", [StaticSwish, ClassSwish])
def test_forwards_without_self_are_quantized_as_others(kind):
    net, x = nn.Sequential(nn.Linear(2, 4), kind(), nn.Linear(4, 2)).eval(), torch.randn(3, 2)
    made = qnn.quantize_model(net, example_inputs=(x,)).model
    with torch.no_grad():
        calibrate(made, [(x,)])
        assert not torch.equal(made(x), net(x))
        torch.testing.assert_close(made(x), net(x), atol=0.1, rtol=0)


class Attends(nn.Module):
    """Cross attention in a copy of torch 1's, which asks whether key and value are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.place = nn.Conv2d(3, 8, 3), nn.Conv2d(2, 8, 1)
        self.both, self.key, self.value = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)

    def placed(self, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        return x + place

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, bool]:
        memory = self.stem(x).flatten(2).mT
        place = self.place(places).flatten(2).mT
        key, value = self.placed(memory, place), self.placed(memory, place)
        same = torch.equal(key, value)
        k, v = self.both(key).chunk(2, -1) if same else (self.key(key), self.value(value))
        return (k @ k.mT).softmax(-1) @ v, same


def test_sums_that_a_forward_compares_have_one_quantizer() -> None:
    model = Attends().eval()
    x = torch.randn(2, 3, 6, 6), torch.randn(2, 2, 4, 4)
    result = qnn.quantize_model(model, example_inputs=x)
    assert [m.path for m in result.quantized if "quantizer" in m.path] == ["residual_quantizer"]
    calibrate(result.model, [x])
    assert result.model(*x)[1]


class Added(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        return x + self.conv(x)


@pytest.mark.parametrize("observed", [False, True])
def test_a_trace_of_torch_fx_reports_its_additions(observed):
    traced = torch.fx.symbolic_trace(Added().eval()).eval()
    example = torch.ones(1, 3, 4, 4) if observed else None
    result = qnn.quantize_model(traced, example_inputs=example)
    (note,) = [note.reason for note in result.skipped if "additions" in note.reason]
    assert "torch.fx wrote it; quantize the model that was traced" in note
