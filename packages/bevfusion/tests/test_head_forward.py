"""The head against a plain float64 reference written from the formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevfusion.model.head import (
    DecoderLayer,
    HeadConfig,
    TransFusionHead,
    best_queries,
    local_maxima,
)

SMALL = HeadConfig(
    in_channels=6,
    hidden_channels=8,
    branch_channels=5,
    ffn_channels=12,
    num_heads=2,
    num_queries=7,
    classes=("car", "bus", "pedestrian"),
    point_classes=("pedestrian",),
    nms_classes=("pedestrian",),
    map_size=(9, 11),
)


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Fill every parameter and batch-norm statistic, none left at 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name.endswith(("bev_pos", "every_cell", "num_batches_tracked")):
                continue
            draw = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            tensor.copy_(draw.abs() + 0.5 if name.endswith("running_var") else 0.5 * draw)


def attention(state: dict[str, Tensor], path: str, heads: int, q: Tensor, kv: Tensor) -> Tensor:
    """Scaled dot-product attention of q [n, c] to kv [m, c], one query and one head at a time."""
    width = q.shape[1]
    size = width // heads
    weight, bias = state[f"{path}.in_proj_weight"], state[f"{path}.in_proj_bias"]
    parts = [slice(i * width, (i + 1) * width) for i in range(3)]
    queries, keys, values = (
        x @ weight[p].T + bias[p] for x, p in zip((q, kv, kv), parts, strict=True)
    )
    rows = []
    for query in queries:
        mixed = []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            energy = torch.stack([(query[own] * key[own]).sum() for key in keys]) / math.sqrt(size)
            share = energy.exp() / energy.exp().sum()
            mixed.append(sum(s * v[own] for s, v in zip(share, values, strict=True)))
        rows.append(torch.cat(mixed))
    return torch.stack(rows) @ state[f"{path}.out_proj.weight"].T + state[f"{path}.out_proj.bias"]


def batch_norm(state: dict[str, Tensor], path: str, x: Tensor) -> Tensor:
    """Columns of x [channels, n] normalised with the running statistics."""
    scale = state[f"{path}.weight"] / (state[f"{path}.running_var"] + 1e-5).sqrt()
    shift = state[f"{path}.bias"] - state[f"{path}.running_mean"] * scale
    return x * scale[:, None] + shift[:, None]


def layer_norm(state: dict[str, Tensor], path: str, x: Tensor) -> Tensor:
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).square().mean(1, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * state[f"{path}.weight"] + state[f"{path}.bias"]


def embedding(state: dict[str, Tensor], path: str, positions: Tensor) -> Tensor:
    """[n, 2] to [n, channels]."""
    path = f"{path}.position_embedding_head"
    hidden = state[f"{path}.0.weight"][..., 0] @ positions.T + state[f"{path}.0.bias"][:, None]
    hidden = batch_norm(state, f"{path}.1", hidden).clamp_min(0)
    return (state[f"{path}.3.weight"][..., 0] @ hidden + state[f"{path}.3.bias"][:, None]).T


def layer(
    state: dict[str, Tensor], prefix: str, heads: int,
    query: Tensor, key: Tensor, query_pos: Tensor, key_pos: Tensor,
) -> Tensor:  # fmt: skip
    """The decoder layer on query [n, c] and key [m, c]."""
    query_embedding = embedding(state, f"{prefix}self_posembed", query_pos)
    key = key + embedding(state, f"{prefix}cross_posembed", key_pos)
    q = query + query_embedding
    query = query + attention(state, f"{prefix}self_attn", heads, q, q)
    query = layer_norm(state, f"{prefix}norm1", query)
    q = query + query_embedding
    query = query + attention(state, f"{prefix}multihead_attn", heads, q, key)
    query = layer_norm(state, f"{prefix}norm2", query)
    hidden = query @ state[f"{prefix}linear1.weight"].T + state[f"{prefix}linear1.bias"]
    fed = hidden.clamp_min(0) @ state[f"{prefix}linear2.weight"].T
    return layer_norm(state, f"{prefix}norm3", query + fed + state[f"{prefix}linear2.bias"])


def chosen(scores: Tensor, count: int) -> list[tuple[int, int, int]]:
    """Class, x, y of the largest of scores [classes, x, y], ties by class, then x, then y."""
    places = [
        (-float(scores[c, i, j]), c, i, j)
        for c in range(scores.shape[0])
        for i in range(scores.shape[1])
        for j in range(scores.shape[2])
    ]
    return [place[1:] for place in sorted(places)[:count]]


def suppressed(scores: Tensor, points: set[int]) -> Tensor:
    """The largest of 3 × 3, one cell at a time; the border has none."""
    result = torch.zeros_like(scores)
    classes, width, depth = scores.shape
    for c in range(classes):
        for i in range(width):
            for j in range(depth):
                inner = 0 < i < width - 1 and 0 < j < depth - 1
                largest = inner and scores[c, i, j] == scores[c, i - 1 : i + 2, j - 1 : j + 2].max()
                if c in points or largest:
                    result[c, i, j] = scores[c, i, j]
    return result


def reference(state: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
    """Outputs for one map, [channels, x, y]."""
    features = F.conv2d(x[None], state["shared_conv.weight"], state["shared_conv.bias"], padding=1)
    hidden = F.conv2d(features, state["heatmap_head.0.conv.weight"], padding=1)[0]
    hidden = batch_norm(state, "heatmap_head.0.bn", hidden.flatten(1)).view_as(hidden).clamp_min(0)
    weight, bias = state["heatmap_head.1.weight"], state["heatmap_head.1.bias"]
    dense = F.conv2d(hidden[None], weight, bias, padding=1)[0]
    scores = suppressed(1 / (1 + (-dense).exp()), {2})
    places = chosen(scores, SMALL.num_queries)
    encoding = state["class_encoding.weight"][..., 0]
    query = torch.stack(
        [features[0, :, i, j] + encoding[:, c] + state["class_encoding.bias"] for c, i, j in places]
    )
    query_pos = torch.tensor([[i + 0.5, j + 0.5] for _, i, j in places], dtype=x.dtype)
    width, depth = SMALL.map_size
    cells = [[i + 0.5, j + 0.5] for i in range(width) for j in range(depth)]
    key = torch.stack([features[0, :, int(i), int(j)] for i, j in cells])
    key_pos = torch.tensor(cells, dtype=x.dtype)
    query = layer(state, "decoder.0.", SMALL.num_heads, query, key, query_pos, key_pos)
    outputs = {}
    for name in ("center", "height", "dim", "rot", "vel", "heatmap"):
        path = f"prediction_heads.0.{name}"
        inner = state[f"{path}.0.conv.weight"][..., 0] @ query.T
        inner = batch_norm(state, f"{path}.0.bn", inner).clamp_min(0)
        last = state[f"{path}.1.weight"][..., 0] @ inner
        outputs[name] = last + state[f"{path}.1.bias"][:, None]
    outputs["center"] = outputs["center"] + query_pos.T
    outputs["query_heatmap_score"] = torch.stack([scores[:, i, j] for _, i, j in places], 1)
    outputs["dense_heatmap"] = dense
    outputs["query_labels"] = torch.tensor([c for c, _, _ in places])
    return outputs


def test_attention_matches_the_formula() -> None:
    decoder = DecoderLayer(8, 2, 12, 0.1).double().eval()
    randomise(decoder)
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(5, 8, dtype=torch.float64, generator=generator)
    key = torch.randn(9, 8, dtype=torch.float64, generator=generator)
    state = decoder.state_dict()
    got = decoder.multihead_attn(query[:, None], key[:, None], key[:, None])[0][:, 0]
    want = attention(state, "multihead_attn", 2, query, key)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_decoder_layer_matches_the_formula_in_each_frame_of_a_batch() -> None:
    decoder = DecoderLayer(8, 2, 12, 0.1).double().eval()
    randomise(decoder)
    generator = torch.Generator().manual_seed(2)
    query, key, query_pos, key_pos = (
        torch.randn(3, *shape, dtype=torch.float64, generator=generator)
        for shape in ((8, 4), (8, 9), (4, 2), (9, 2))
    )
    got = decoder(query, key, query_pos, key_pos)
    for frame in range(3):
        want = layer(
            decoder.state_dict(), "", 2, query[frame].T, key[frame].T, query_pos[frame],
            key_pos[frame],
        )  # fmt: skip
        torch.testing.assert_close(got[frame], want.T, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", [0, 1])
def test_outputs_match_the_reference(seed: int) -> None:
    head = TransFusionHead(SMALL).double().eval()
    randomise(head, seed)
    x = torch.randn(2, 6, 9, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        got = head(x)
        for frame in range(2):
            want = reference(head.state_dict(), x[frame])
            assert set(got) == set(want)
            for name, tensor in want.items():
                torch.testing.assert_close(got[name][frame], tensor, rtol=1e-9, atol=1e-9)


def test_training_reaches_every_parameter() -> None:
    head = TransFusionHead(SMALL).train()
    outputs = head(torch.randn(2, 6, 9, 11, generator=torch.Generator().manual_seed(0)))
    sum(t.square().sum() for name, t in outputs.items() if name != "query_labels").backward()
    without = [name for name, p in head.named_parameters() if p.grad is None]
    assert without == []


def test_an_empty_map_has_ties_everywhere_and_one_answer() -> None:
    head = TransFusionHead(SMALL).eval()
    randomise(head)
    center = head.prediction_heads[0].center[1]
    with torch.no_grad():
        head.heatmap_head[1].weight.zero_()
        head.heatmap_head[1].bias.copy_(torch.tensor([0.0, 1.0, 0.0]))
        center.weight.zero_()
        center.bias.zero_()
        outputs = head(torch.zeros(1, 6, 9, 11))
    assert outputs["query_labels"].tolist() == [[1] * 7]
    # The first cells that are not on the border: x = 1, y = 1 to 7.
    assert outputs["center"][0].tolist() == [[1.5] * 7, [y + 0.5 for y in range(1, 8)]]


def test_of_equal_scores_the_lower_position_comes_first() -> None:
    scores = torch.zeros(1, 3, 40, 50)
    scores[0, 2, 5, 5] = scores[0, 1, 30, 2] = scores[0, 1, 30, 1] = 0.5
    scores[0, 2, 0, 0] = 0.75
    place = [(2 * 40 + 0) * 50 + 0, (40 + 30) * 50 + 1, (40 + 30) * 50 + 2, (2 * 40 + 5) * 50 + 5]
    assert best_queries(scores, 7).tolist() == [[*place, 0, 1, 2]]


def test_a_plateau_is_all_maxima_and_the_border_none() -> None:
    scores = torch.full((1, 2, 4, 5), 0.3)
    every_cell = torch.tensor([False, True]).view(1, 2, 1, 1)
    kept = local_maxima(scores, 3, every_cell)
    assert kept[0, 0, 1:-1, 1:-1].eq(0.3).all()
    assert int(kept[0, 0].count_nonzero()) == 2 * 3
    assert kept[0, 1].eq(0.3).all()


def test_nan_never_becomes_a_maximum() -> None:
    scores = torch.full((1, 2, 4, 5), 0.3)
    scores[0, :, 2, 2] = torch.nan
    kept = local_maxima(scores, 3, torch.tensor([False, True]).view(1, 2, 1, 1))
    assert kept[0, :, 2, 2].tolist() == [0.0, 0.0]
    assert kept.isfinite().all()
