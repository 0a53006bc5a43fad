"""torch's multi-head attention: its projections are quantized, and it attends as torch does."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bevquant_qnn as qnn
from bevquant_quantizers import calibrate, quantization_disabled


def masks(queries: int, keys: int, batch: int, heads: int):
    open_first = torch.rand(batch, keys) > 0.6
    open_first[:, 0] = False
    shut = torch.rand(queries, keys) > 0.7
    shut[:, 0] = False
    yield {}
    yield {"key_padding_mask": open_first}
    yield {"attn_mask": shut, "average_attn_weights": False}
    both = torch.randn(batch * heads, queries, keys), torch.randn(batch, keys)
    yield {"attn_mask": both[0], "key_padding_mask": both[1]}
    yield {"attn_mask": torch.randn(queries, keys), "need_weights": False}


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("width", [None, 6])
@pytest.mark.parametrize(
    "settings", [{}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}]
)
@torch.no_grad()
def test_without_quantizers_it_attends_as_torch_does(batch_first, width, settings) -> None:
    given = dict(batch_first=batch_first, kdim=width, vdim=width, **settings)
    plain = nn.MultiheadAttention(8, 2, **given).eval()
    attention = qnn.quantize_model(plain).model
    query, key = torch.randn(3, 3, 8), torch.randn(3, 3, width or 8)
    with quantization_disabled(attention):
        for mask in masks(3, 3, 3, 2):
            wanted, got = (m(query, key, key, **mask) for m in (plain, attention))
            torch.testing.assert_close(got, wanted)
        one = (query[0], key[0], key[0])
        torch.testing.assert_close(attention(*one), plain(*one))


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x, padding=None):
        y = self.encoder(x, src_key_padding_mask=padding)
        z = y + x
        return self.cross(z, z, y, need_weights=False)[0]


def test_readers_of_one_tensor_share_a_quantizer_and_names_stay() -> None:
    model, x = Coder().eval(), torch.randn(2, 4, 8)
    parameters = dict(model.named_parameters())
    result = qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert dict(model.named_parameters()) == parameters
    own, cross = model.encoder.layers[0].self_attn, model.cross
    assert own.q_proj._input_quantizer is own.v_proj._input_quantizer
    assert cross.q_proj._input_quantizer is cross.k_proj._input_quantizer
    assert cross.v_proj._input_quantizer is not cross.k_proj._input_quantizer
    assert {i.path for i in result.quantized if "cross" in i.path} == {
        f"cross.{name}_proj" for name in ("q", "k", "v", "out")
    }
    assert calibrate(model, [x]).quantizers
    other = copy.deepcopy(model)
    with torch.no_grad():
        wanted = model(x)
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), wanted)
        other.cross.in_proj_weight.zero_()
        assert not torch.equal(other(x), wanted)  # its projections read its own weight
        padding = torch.tensor([[False] * 4, [False, False, True, True]])
        assert model(x, padding).shape == x.shape  # no nested tensors


def test_weights_are_trained_through_the_quantizers() -> None:
    model, x = Coder(), torch.randn(2, 4, 8)
    qnn.quantize_model(model, example_inputs=x, inplace=True)
    calibrate(model.eval(), [x])
    model.train()(x).square().sum().backward()
    packed = model.cross.in_proj_weight
    assert packed.grad is not None
    assert bool((packed.grad.view(3, -1).abs().sum(1) > 0).all())
    before = model.cross.k_proj.weight.clone()
    torch.optim.SGD([packed], 0.1).step()
    assert not torch.equal(model.cross.k_proj.weight, before)


def test_rounding_writes_into_the_packed_weight() -> None:
    model, x = Coder().eval(), torch.randn(2, 4, 8)
    qnn.quantize_model(model, qnn.QuantConfig(weight_bits=4), x, inplace=True)
    calibrate(model, [x])
    before = model.cross.in_proj_weight.detach().clone()
    done = {layer.path for layer in qnn.round_weights(model, [x]).layers}
    assert done >= {"cross.q_proj", "cross.v_proj", "cross.out_proj"}
    changed = (model.cross.in_proj_weight != before).view(3, -1).any(1)
    assert changed.tolist() == [True, True, True]


class Borrowed(nn.Module):
    """As CLIP's pooling: a function of the layer's weights, which nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.attend = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x):
        a, y = self.attend, self.stem(x)
        return F.multi_head_attention_forward(
            y, y, y, 8, 2, a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0,
            a.out_proj.weight, a.out_proj.bias, need_weights=False,
        )[0]  # fmt: skip


def test_one_whose_weights_a_function_reads_stays_float() -> None:
    model, x = Borrowed().eval(), torch.randn(4, 2, 8)
    result = qnn.quantize_model(model, example_inputs=x, inplace=True)
    assert [item.path for item in result.quantized] == ["stem"]
    assert type(model.attend) is nn.MultiheadAttention
    assert "reads its weight" in next(s.reason for s in result.skipped if s.path == "attend")


class Louder(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        made, weights = super().forward(*args, **kwargs)
        return 2 * made, weights


@pytest.mark.parametrize(
    ("attention", "exclude", "left"),
    [
        (nn.MultiheadAttention(8, 2), ("0",), {"0", "0.out_proj"}),
        (nn.MultiheadAttention(8, 2), ("0.out_proj",), {"0.out_proj"}),
        (Louder(8, 2), (), {"0", "0.out_proj"}),
    ],
    ids=["excluded", "its output excluded", "its own forward"],
)
def test_what_is_left_out_is_said(attention, exclude, left) -> None:
    model = nn.ModuleList([attention])
    result = qnn.quantize_model(model, qnn.QuantConfig(exclude=exclude))
    assert {item.path for item in result.skipped} >= left
    wanted = product(["0"], [".q_proj", ".k_proj", ".v_proj"]) if left == {"0.out_proj"} else ()
    assert {i.path for i in result.quantized} == {"".join(path) for path in wanted}


def test_causal_without_a_mask_is_refused() -> None:
    attention = qnn.quantize_model(nn.MultiheadAttention(8, 2)).model
    x = torch.randn(3, 1, 8)
    with pytest.raises(ValueError, match="without attn_mask"):
        attention(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match=r"expects MultiheadAttention, got .*forward of its own"):
        qnn.QuantMultiheadAttention.from_float(Louder(8, 2))


class Embedded(nn.Module):
    """Keys are features plus a position embedding, as in PETR."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.places = nn.Linear(16, 64), nn.Linear(12, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, queries, image, rays) -> torch.Tensor:
        memory = self.features(image)
        found, _ = self.attention(queries, memory + self.places(rays), memory, need_weights=False)
        return queries + found

    @torch.no_grad()
    def widen(self) -> None:
        """Multiply one channel in sixteen of features and positions; the function stays."""
        for layer in (self.features, self.places):
            layer.weight[::16] *= 64
            layer.bias[::16] *= 64
        self.attention.in_proj_weight[64:, ::16] /= 64


@torch.no_grad()
def test_keys_and_values_in_float_restore_an_attention_with_wide_channels() -> None:
    torch.manual_seed(0)
    net = Embedded().eval()
    frame = torch.randn(1, 32, 64), torch.randn(1, 200, 16), torch.rand(1, 200, 12) - 0.5
    wanted = net(*frame)
    net.widen()
    assert torch.equal(net(*frame), wanted)
    model = qnn.quantize_model(net, example_inputs=frame).model
    calibrate(model, [frame])
    plan = {"attention.k_proj": "float", "attention.v_proj": "float"}
    found = []
    for _ in range(2):
        rows = {row.layer: row.sqnr_db for row in qnn.compare_layers(net, model, [frame])}
        found.append(rows["attention"])
        qnn.apply_precision(model, qnn.PrecisionPlan.by_hand(model, plan))
    assert found[0] < 20
    assert found[1] > found[0] + 15


class Rays(Embedded):
    """PETR's position encoder on log(p / (1 − p)) of 16 points of each pixel's ray."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Sequential(nn.Linear(48, 256), nn.ReLU(), nn.Linear(256, 64))
        # A trained encoder reads the ray's direction: differences of neighbouring points.
        apart = torch.eye(48)[3:] - torch.eye(48)[:-3]
        self.places[0].weight.data = torch.randn(256, 45) @ apart / 2
        self.places[2].weight.data *= 64  # embeddings wider than features, as in trained PETRs

    def forward(self, queries, image, points) -> torch.Tensor:
        return super().forward(queries, image, torch.logit(points, 1e-5))


def ray_frame() -> tuple[torch.Tensor, ...]:
    rays = nn.functional.normalize(torch.randn(1, 200, 1, 3), dim=-1)
    points = rays * torch.linspace(1, 60, 16)[:, None] * torch.tensor([1, 1, 0.1])
    places = points / torch.tensor([122.4, 122.4, 20.0]) + 0.5
    return torch.randn(1, 32, 64), torch.randn(1, 200, 16), places.flatten(2)


@torch.no_grad()
def test_a_position_encoder_in_float_restores_the_attention() -> None:
    torch.manual_seed(0)
    net = Rays().eval()
    *frames, other = [ray_frame() for _ in range(5)]
    model = qnn.quantize_model(net, example_inputs=frames[0]).model
    calibrate(model, frames)
    found, plan = [], {}
    for more in ({}, {"places.0": "float"}, {"places.2": "float", "attention.k_proj": "float"}):
        plan |= more
        qnn.apply_precision(model, qnn.PrecisionPlan.by_hand(model, plan))
        rows = {row.layer: row.sqnr_db for row in qnn.compare_layers(net, model, [other])}
        found.append((rows["places.2"], rows["attention"]))
    (encoder, attention), repaired, whole = found
    assert max(encoder, attention) < 20
    assert repaired[0] > encoder + 10
    assert repaired[1] > attention + 10
    assert whole[1] > repaired[1] + 3
