"""The head as a whole: heatmap, queries from its cells, decoder layer, prediction branches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from bev_data import InputError
from bev_data.boxes import Detections
from bevfusion.model.head._config import BRANCHES, ConvUnit, HeadConfig, PredictionBranches
from bevfusion.model.head._decode import decode

fx.wrap("best_queries")


class QueryPicker(nn.Module):
    """`best_queries` as a step of the model that a hook can replace.

    A hair's breadth in the heatmap changes which cells become queries and in which order, so that
    query 7 of a quantized head is another object than query 7 of the float one. To compare the
    layers behind the queries, let the quantized head look where the float one looks:

    Example:
        >>> import torch
        >>> from bevfusion.model.head import QueryPicker
        >>> picked = []
        >>> first, second = QueryPicker(2), QueryPicker(2)
        >>> _ = first.register_forward_hook(lambda module, args, out: picked.append(out))
        >>> _ = second.register_forward_hook(lambda module, args, out: picked.pop())
        >>> first(torch.tensor([[[[0.1, 0.4, 0.3]]]])).tolist()
        [[1, 2]]
        >>> second(torch.tensor([[[[0.1, 0.3, 0.4]]]])).tolist()
        [[1, 2]]
    """

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, scores: Tensor) -> Tensor:
        """Positions, int64 [batch, count], of the largest of float [batch, classes, x, y]."""
        return best_queries(scores, self.count)


def local_maxima(scores: Tensor, kernel: int, every_cell: Tensor) -> Tensor:
    """`scores` where they are the largest of their surroundings, 0 elsewhere.

    Cells closer to the border than half the kernel are never local maxima, as in mit-bevfusion.
    NaN is never a maximum.

    Args:
        scores: float [batch, classes, x, y], none negative.
        kernel: Side of the square, odd.
        every_cell: bool [1, classes, 1, 1]: classes in which every cell counts as a maximum.
    """
    margin = kernel // 2
    largest = F.pad(F.max_pool2d(scores, kernel, stride=1), (margin,) * 4)
    kept = (scores == largest) | (every_cell & (scores >= 0))
    return scores.masked_fill(~kept, 0.0)


def best_queries(scores: Tensor, count: int) -> Tensor:
    """The positions of the `count` largest scores, best first, int64 [batch, count].

    A position numbers class, x and y, in this order of significance. Of equal scores the lower
    position comes first, on every machine; torch.topk and an unstable sort promise no order.

    Args:
        scores: float [batch, classes, x, y].
        count: At most classes · x · y.
    """
    order = scores.flatten(1).sort(dim=-1, descending=True, stable=True).indices
    return order[:, :count]


@fx.wrap
def add_in_float(a: Tensor, b: Tensor) -> Tensor:
    """Return `a + b`; no tracer looks inside, and no quantizer touches it."""
    # Behind a convolution `a + b` looks like the end of a residual block, whose operands are
    # rounded to 8 bits. Here attention in float reads the sum, or it holds centres in cells, and
    # 180 cells in 127 steps would be 0.85 m each.
    return a + b


class DecoderLayer(nn.Module):
    """mit-bevfusion's TransformerDecoderLayer (TransFusion, Bai et al. 2022), same names.

    Post-norm, as in the original transformer: q ← norm1(q + A(q', q', q')), q ← norm2(q + A(q', k',
    k')), q ← norm3(q + linear2(relu(linear1(q)))), A the attention and x' = x + position embedding.
    The position goes into the values too, which is unusual.

    The attention is torch's; mit-bevfusion's copy of it has the same parameters under the same
    names and computes the same.

    Args:
        channels: Width of queries and map.
        num_heads: Attention heads.
        ffn_channels: Width between linear1 and linear2.
        dropout: Share of values dropped in training.
    """

    def __init__(self, channels: int, num_heads: int, ffn_channels: int, dropout: float) -> None:
        super().__init__()
        self.self_attn = nn.MultiheadAttention(channels, num_heads, dropout=dropout)
        self.multihead_attn = nn.MultiheadAttention(channels, num_heads, dropout=dropout)
        self.linear1 = nn.Linear(channels, ffn_channels)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(ffn_channels, channels)
        self.norm1 = nn.LayerNorm(channels)
        self.norm2 = nn.LayerNorm(channels)
        self.norm3 = nn.LayerNorm(channels)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        self.dropout3 = nn.Dropout(dropout)
        self.activation = nn.ReLU()
        self.self_posembed = PositionEmbedding(channels)
        self.cross_posembed = PositionEmbedding(channels)

    def forward(self, query: Tensor, key: Tensor, query_pos: Tensor, key_pos: Tensor) -> Tensor:
        """Update the queries.

        Args:
            query: float [batch, channels, queries].
            key: float [batch, channels, cells], the map.
            query_pos: float [batch, queries, 2], in cells.
            key_pos: float [1 or batch, cells, 2], in cells.

        Returns:
            float [batch, channels, queries].
        """
        # Attention wants [sequence, batch, channels].
        query_embedding = self.self_posembed(query_pos).permute(2, 0, 1)
        key_embedding = self.cross_posembed(key_pos).permute(2, 0, 1)
        query = query.permute(2, 0, 1)
        # As rows: of a permuted map torch multiplies each cell on its own, fifteen times slower,
        # and two hundred times where threads sleep while they wait.
        key = add_in_float(key.permute(2, 0, 1), key_embedding).contiguous()

        q = add_in_float(query, query_embedding)
        attended = self.self_attn(q, q, q, need_weights=False)[0]
        query = self.norm1(add_in_float(query, self.dropout1(attended)))

        q = add_in_float(query, query_embedding)
        attended = self.multihead_attn(q, key, key, need_weights=False)[0]
        query = self.norm2(add_in_float(query, self.dropout2(attended)))

        fed = self.linear2(self.dropout(self.activation(self.linear1(query))))
        query = self.norm3(add_in_float(query, self.dropout3(fed)))
        return query.permute(1, 2, 0)


class PositionEmbedding(nn.Module):
    """mit-bevfusion's learned position embedding: 1×1 conv, batch norm, ReLU, 1×1 conv."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.position_embedding_head = nn.Sequential(
            nn.Conv1d(2, channels, 1),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, positions: Tensor) -> Tensor:
        """Positions, float [batch, n, 2] in cells, to float [batch, channels, n]."""
        embedding: Tensor = self.position_embedding_head(positions.transpose(1, 2).contiguous())
        return embedding


# Tracers see that it is called and do not look inside.
fx.wrap("local_maxima")


class TransFusionHead(nn.Module):
    """mit-bevfusion's detection head with one decoder layer, its parameters' names and shapes.

    Example:
        >>> import torch
        >>> from bevfusion.model.head import HeadConfig, TransFusionHead
        >>> config = HeadConfig(in_channels=4, hidden_channels=16, num_queries=50, map_size=(9, 9))
        >>> head = TransFusionHead(config).eval()
        >>> with torch.no_grad():
        ...     outputs = head(torch.zeros(1, 4, 9, 9))
        >>> {name: list(t.shape) for name, t in outputs.items() if name in ("center", "vel")}
        {'center': [1, 2, 50], 'vel': [1, 2, 50]}
        >>> len(head.decode(outputs))
        1
    """

    bev_pos: Tensor
    every_cell: Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        width, classes = config.hidden_channels, config.num_classes
        self.shared_conv = nn.Conv2d(config.in_channels, width, 3, padding=1)
        self.heatmap_head = nn.Sequential(
            ConvUnit(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
            nn.Conv2d(width, classes, 3, padding=1),
        )
        self.query_picker = QueryPicker(config.num_queries)
        self.class_encoding = nn.Conv1d(classes, width, 1)
        self.decoder = nn.ModuleList(
            [DecoderLayer(width, config.num_heads, config.ffn_channels, config.dropout)]
        )
        self.prediction_heads = nn.ModuleList(
            [PredictionBranches(width, config.branch_channels, {**BRANCHES, "heatmap": classes})]
        )
        for parameter in self.decoder.parameters():
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        # Neither is in a state dict: mit-bevfusion makes its bev_pos anew as well.
        self.register_buffer("bev_pos", _cell_centres(*config.map_size), persistent=False)
        every_cell = torch.tensor([name in config.point_classes for name in config.classes])
        self.register_buffer("every_cell", every_cell.view(1, -1, 1, 1), persistent=False)

    @property
    def heatmap_layers(self) -> tuple[Any, ...]:
        """The layers that make the logits of classes."""
        branches: Any = self.prediction_heads[0]
        return self.heatmap_head[1], branches.heatmap[1]

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """From the bird's-eye view to what `decode` reads.

        Args:
            x: float [batch, in_channels, x, y], the axes of `map_size`.

        Returns:
            mit-bevfusion's outputs, each float [batch, …, queries]: center (2, in cells), height
            (1, the top of the box [m]), dim (3, ln of width, length, height [m]), rot (2, sine and
            cosine), vel (2 [m/s]), heatmap (classes, before the sigmoid), query_heatmap_score
            (classes, the suppressed heatmap at the query); dense_heatmap, float [batch, classes,
            x, y], before the sigmoid; and query_labels, int64 [batch, queries], the classes that
            the queries were picked for, which mit-bevfusion keeps as an attribute of the head.

        Raises:
            InputError: `x` has other channels or another size than the configuration.
        """
        _check_map(x, self.config)
        features = self.shared_conv(x)
        dense_heatmap = self.heatmap_head(features)
        # No gradient: which cells become queries is no smooth function of the heatmap.
        scores = dense_heatmap.detach().sigmoid()
        scores = local_maxima(scores, self.config.nms_kernel, self.every_cell)
        positions = self.query_picker(scores)
        labels, cells = split_positions(positions, scores)

        features = features.flatten(2)
        encoding = self.class_encoding(one_hot(labels, features, self.config.num_classes))
        query = add_in_float(at_cells(features, cells), encoding)
        key_pos = positions_for(features, self.bev_pos)
        query_pos = self.bev_pos[0][cells]

        query = self.decoder[0](query, features, query_pos, key_pos)
        predicted = self.prediction_heads[0](query)
        return {
            **{name: predicted[name] for name in (*BRANCHES, "heatmap")},
            "center": add_in_float(predicted["center"], query_pos.transpose(1, 2)),
            "query_heatmap_score": at_cells(scores.flatten(2), cells),
            "dense_heatmap": dense_heatmap,
            "query_labels": labels,
        }

    def decode(
        self, outputs: dict[str, Tensor], *, score_threshold: float | None = None
    ) -> list[Detections]:
        """Boxes of each frame; see `bevfusion.model.head.decode`."""
        return decode(outputs, self.config, score_threshold=score_threshold)


def _cell_centres(size_x: int, size_y: int) -> Tensor:
    """X and y of every cell's centre, in cells, float [1, x · y, 2], y innermost."""
    x, y = torch.meshgrid(torch.arange(size_x), torch.arange(size_y), indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], 1)[None] + 0.5


@fx.wrap
def _check_map(x: Tensor, config: HeadConfig) -> None:
    wanted = (config.in_channels, *config.map_size)
    if x.ndim != 4 or tuple(x.shape[1:]) != wanted:
        raise InputError(
            f"the head takes a map [batch, {', '.join(map(str, wanted))}] (channels, x, y), not "
            f"{list(x.shape)}; use the configuration that the map was made with"
        )


# What follows is wrapped because it only moves values: a tracer needs to see that it happens, not
# how, and sizes that depend on the input stay out of its way.
@fx.wrap
def positions_for(features: Tensor, centres: Tensor) -> Tensor:
    """`centres`, [1, cells, 2], once per frame of `features`: float [batch, cells, 2]."""
    # Made from the features in a tracer's eyes: a convolution that reads a constant has no input
    # whose batch norm could be folded or whose range could be watched.
    return centres.to(features.dtype).expand(len(features), -1, -1)


@fx.wrap
def split_positions(positions: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Class and cell of each position, int64 [batch, queries] each."""
    cells = scores.shape[2] * scores.shape[3]
    return positions // cells, positions % cells


@fx.wrap
def one_hot(labels: Tensor, like: Tensor, classes: int) -> Tensor:
    """1 in the row of the query's class: dtype of `like`, [batch, classes, queries]."""
    return nn.functional.one_hot(labels, classes).transpose(1, 2).to(like.dtype)


@fx.wrap
def at_cells(values: Tensor, cells: Tensor) -> Tensor:
    """The columns of `values`, float [batch, rows, cells], that `cells`, [batch, n], names."""
    index = cells[:, None, :].expand(-1, values.shape[1], -1)
    return values.gather(2, index)
