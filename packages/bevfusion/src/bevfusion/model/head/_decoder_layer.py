"""The transformer decoder layer: queries look at each other, then at the map."""

from __future__ import annotations

from torch import Tensor, fx, nn

from bevfusion.model.head._add import add_in_float

__all__ = ["DecoderLayer"]

fx.wrap("add_in_float")


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
        key = add_in_float(key.permute(2, 0, 1), key_embedding)

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
    """mit-bevfusion's learned position embedding: 1×1 conv, batch norm, ReLU, 1×1 conv.

    Args:
        channels: Width of the embedding.
    """

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
