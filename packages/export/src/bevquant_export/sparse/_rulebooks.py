"""Keys under which convolutions share their pairs: that sharing is right."""

from __future__ import annotations

from bevquant_export.sparse._graph import Conv, Graph, Pool

__all__ = ["check_rulebooks"]


def check_rulebooks(graph: Graph) -> None:
    """Refuse keys shared by convolutions with different pairs, and inverse ones without a partner.

    The engine builds the pairs of a key once, for the first convolution that has it.

    Raises:
        ValueError: Both convolutions are named.
    """
    first: dict[str, Conv | Pool] = {}
    for node in graph.nodes:
        if not isinstance(node, Conv | Pool):
            continue
        known = first.get(node.rulebook) if node.rulebook else None
        if isinstance(node, Conv) and node.inverse:
            _check_inverse(node, known)
        elif known is None:
            first[node.rulebook] = node
        elif _pairs(known) != _pairs(node):
            raise ValueError(
                f"export_sparse_onnx: {known.path} and {node.path} share the indice_key "
                f"{node.rulebook!r} but differ in kernel, stride, padding, dilation, kind, grid or "
                "voxels; the engine would use the first one's pairs for both: give one of them "
                "another indice_key"
            )


def _pairs(conv: Conv | Pool) -> tuple[object, ...]:
    """What the pairs follow from; padding of a submanifold convolution is not used."""
    moved = None if conv.subm else (conv.stride, conv.padding)
    rows = conv.rows if isinstance(conv, Conv) else ()
    sizes = (conv.input_spatial_shape, conv.output_spatial_shape, rows)
    return (conv.kernel_size, conv.dilation, conv.subm, moved, sizes)


def _check_inverse(conv: Conv, partner: Conv | Pool | None) -> None:
    if partner is None or partner.subm or partner.kernel_size != conv.kernel_size:
        raise ValueError(
            f"export_sparse_onnx: {conv.path} is an inverse convolution under "
            f"indice_key={conv.rulebook!r}, and no strided convolution of kernel size "
            f"{conv.kernel_size} before it has that key"
        )
