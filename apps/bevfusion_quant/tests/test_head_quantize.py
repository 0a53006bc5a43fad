"""Folding and quantizing the head: what is taken, what stays float, and that it says so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bevfusion.model.head import HeadConfig, TransFusionHead
from bevquant_fusion import fuse_model
from bevquant_graph import capture
from bevquant_qnn import QuantizeResult, freeze, quantize_model
from bevquant_quantizers import calibrate

CONFIG = HeadConfig(
    in_channels=64,
    hidden_channels=32,
    branch_channels=32,
    ffn_channels=64,
    num_heads=4,
    num_queries=50,
    map_size=(45, 45),
    voxel_size=(0.3, 0.3),
)
BRANCHES = ("center", "height", "dim", "rot", "vel", "heatmap")


@pytest.fixture(scope="module")
def feature_map() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, CONFIG.in_channels, *CONFIG.map_size, generator=generator).relu()


@pytest.fixture(scope="module")
def head(feature_map: torch.Tensor) -> TransFusionHead:
    """A head whose batch norms fit the map, so that no layer is dead."""
    torch.manual_seed(0)
    made = TransFusionHead(CONFIG).eval()

    def fit(norm: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        axes = [axis for axis in range(inputs[0].ndim) if axis != 1]
        norm.running_mean.copy_(inputs[0].mean(axes))
        norm.running_var.copy_(inputs[0].var(axes) + 1e-6)

    norms = [m for m in made.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(fit) for norm in norms]
    with torch.no_grad():
        made(feature_map)
    for hook in hooks:
        hook.remove()
    return made


def test_the_whole_forward_can_be_followed(
    head: TransFusionHead, feature_map: torch.Tensor
) -> None:
    assert capture(head, (feature_map,)).opaque == {}


@pytest.mark.parametrize("verified", [False, True])
def test_every_batch_norm_is_folded(
    head: TransFusionHead, feature_map: torch.Tensor, verified: bool
) -> None:
    result = fuse_model(head, (feature_map,) if verified else None)
    assert result.skipped == ()
    folded = {pair.bn for pair in result.fused}
    assert folded == {
        "heatmap_head.0.bn",
        "decoder.0.self_posembed.position_embedding_head.1",
        "decoder.0.cross_posembed.position_embedding_head.1",
        *(f"prediction_heads.0.{name}.0.bn" for name in BRANCHES),
    }
    if verified:
        assert result.max_error < 1e-5


@pytest.fixture(scope="module", params=[True, False], ids=["watched", "followed"])
def quantized(
    request: pytest.FixtureRequest, head: TransFusionHead, feature_map: torch.Tensor
) -> QuantizeResult:
    fused = fuse_model(copy.deepcopy(head)).model
    return quantize_model(fused, example_inputs=(feature_map,) if request.param else None)


def test_convolutions_linears_and_projections_are_quantized_and_nothing_else(
    quantized: QuantizeResult,
) -> None:
    taken = {item.path: item.kind for item in quantized.quantized}
    embeddings = [
        f"decoder.0.{name}_posembed.position_embedding_head.{i}"
        for name in ("self", "cross")
        for i in (0, 3)
    ]
    units = [f"prediction_heads.0.{name}.{i}" for name in BRANCHES for i in ("0.conv", "1")]
    attention = [f"decoder.0.{name}" for name in ("self_attn", "multihead_attn")]
    projections = [f"{path}.{name}_proj" for path in attention for name in "qkv"]
    linears = [
        "decoder.0.linear1",
        "decoder.0.linear2",
        *(f"{path}.out_proj" for path in attention),
    ]
    assert taken == {
        **dict.fromkeys(("shared_conv", "heatmap_head.0.conv", "heatmap_head.1"), "QuantConv2d"),
        **dict.fromkeys(("class_encoding", *embeddings, *units), "QuantConv1d"),
        **dict.fromkeys(linears, "QuantLinear"),
        **dict.fromkeys(projections, "QuantProjection"),
    }


def test_the_account_says_that_attention_itself_stays_float(quantized: QuantizeResult) -> None:
    notes = {item.path: item.reason for item in quantized.skipped}
    for name in ("self_attn", "multihead_attn"):
        assert "attention itself" in notes[f"decoder.0.{name}"]
    assert not {item.path for item in quantized.quantized} & set(notes)


def test_what_reads_one_tensor_shares_its_range(
    quantized: QuantizeResult, request: pytest.FixtureRequest
) -> None:
    groups = {f"prediction_heads.0.{name}.0.conv._input_quantizer" for name in BRANCHES}
    shared = [set(group.readers) for group in quantized.shared]
    assert groups in shared
    if "watched" in request.node.name:
        for name, own in (("self_attn", "qkv"), ("multihead_attn", "kv")):
            assert {f"decoder.0.{name}.{x}_proj._input_quantizer" for x in own} in shared
        assert len(shared) == 3
    else:
        assert len(shared) == 1


def test_a_calibrated_head_finds_what_the_float_one_finds(
    head: TransFusionHead, feature_map: torch.Tensor, quantized: QuantizeResult
) -> None:
    model = copy.deepcopy(quantized.model)
    calibrate(model, [(feature_map,)], method="mse")
    freeze(model)
    with torch.no_grad():
        want, got = head(feature_map), model(feature_map)
    assert set(got) == set(want)
    noise = (want["dense_heatmap"] - got["dense_heatmap"]).square().mean()
    sqnr = 10 * torch.log10(want["dense_heatmap"].square().mean() / noise)
    assert 15 < float(sqnr) < 60  # quantized, and not broken
    assert len(model.decode(got)[0].boxes) == len(head.decode(want)[0].boxes)


def test_centres_are_not_rounded_to_the_steps_of_a_range(
    head: TransFusionHead, feature_map: torch.Tensor, quantized: QuantizeResult
) -> None:
    """A residual quantizer on cell positions would move centres by up to 0.7 cells."""
    model = copy.deepcopy(quantized.model)
    calibrate(model, [(feature_map,)], method="max")
    freeze(model)
    for branch in (head, model):
        with torch.no_grad():
            outputs = branch(feature_map)
            cells = outputs["center"] - offsets(branch, feature_map)
        torch.testing.assert_close(cells % 1, torch.full_like(cells, 0.5), rtol=0, atol=1e-4)


def offsets(model: nn.Module, feature_map: torch.Tensor) -> torch.Tensor:
    """What the center branch adds to the cell of each query."""
    kept = []
    hook = model.prediction_heads[0].center.register_forward_hook(
        lambda *call: kept.append(call[2])
    )
    model(feature_map)
    hook.remove()
    return kept[0]


def test_the_layers_behind_the_queries_compare_when_both_heads_look_at_the_same_cells(
    head: TransFusionHead, feature_map: torch.Tensor, quantized: QuantizeResult
) -> None:
    model = copy.deepcopy(quantized.model)
    calibrate(model, [(feature_map,)], method="mse")
    freeze(model)
    picked: list[torch.Tensor] = []
    with torch.no_grad():
        hook = head.query_picker.register_forward_hook(lambda *call: picked.append(call[2]))
        want = head(feature_map)
        hook.remove()
        alone = model(feature_map)
        model.query_picker.register_forward_hook(lambda *call: picked[0])
        got = model(feature_map)
    assert torch.equal(want["query_labels"], got["query_labels"])

    def error(outputs: dict[str, torch.Tensor]) -> float:
        return float((outputs["dim"] - want["dim"]).norm() / want["dim"].norm())

    assert error(got) < 0.2
    assert error(got) < 0.7 * error(alone)


class Wrapped(nn.Module):
    """A head behind a branch on data, which no tracer follows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if x.abs().max() > 1e6 or float(x.abs().sum()) > 1e12:
            x = x / 1e6
        return self.inner(x)


def test_a_forward_that_cannot_be_followed_is_reported(
    head: TransFusionHead, feature_map: torch.Tensor
) -> None:
    fusion = fuse_model(Wrapped(copy.deepcopy(head)), (feature_map,))
    assert "branches on the values of a tensor" in fusion.untraced[""]
    assert len(fusion.fused) == 9
    result = quantize_model(fusion.model)
    assert any(item.path == "" and "branches on" in item.reason for item in result.skipped)
    assert len(result.quantized) == 30
