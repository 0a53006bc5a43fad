"""Print an estimate, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from ._estimate import LayerEstimate

__all__ = ["render_layers"]


def render_layers(layers: Sequence[LayerEstimate]) -> str:
    """A table of the layers: operations, bytes, operations per byte, time, and what bounds it.

    Example:
        >>> layer = LayerEstimate("conv", "torch.nn.Conv2d", 2_000_000, 900, 100, 2e-6, 1e-6, "")
        >>> print(render_layers([layer]))
        layer  operator         operations  bytes  op/byte  time (us)  bound
        conv   torch.nn.Conv2d   2,000,000  1,000   2000.0        2.0  compute
        total                    2,000,000  1,000   2000.0        2.0
        An estimate, not a measurement.
    """
    rows = [["layer", "operator", "operations", "bytes", "op/byte", "time (us)", "bound"]]
    for layer in layers:
        rows.append(
            [
                *(layer.path, layer.operator, f"{layer.operations:,}"),
                f"{layer.loaded_bytes + layer.stored_bytes:,}",
                *(f"{layer.intensity:.1f}", f"{layer.seconds * 1e6:.1f}"),
                f"with {layer.fused_into}" if layer.fused_into else layer.bound,
            ]
        )
    operations = sum(layer.operations for layer in layers)
    moved = sum(layer.loaded_bytes + layer.stored_bytes for layer in layers)
    seconds = sum(layer.seconds for layer in layers)
    intensity = f"{operations / moved:.1f}" if moved else "0.0"
    rows.append(
        ["total", "", f"{operations:,}", f"{moved:,}", intensity, f"{seconds * 1e6:.1f}", ""]
    )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.rjust(width) if 2 <= i <= 5 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "An estimate, not a measurement."])
