"""Where a query or a cell is, as features."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["PositionEmbedding"]


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
