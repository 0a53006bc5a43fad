"""How a checkpoint stores sparse weights, told from their shapes."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from bev_data import InputError
from bevquant_sparse import WeightLayout, layout_of, permute_weight

__all__ = ["LAYOUTS", "source_layout"]

LAYOUTS = ("RSCK", "KRSC", "KCRS")


def source_layout(
    convs: Mapping[str, nn.Module], given: Mapping[str, Tensor], layout: str
) -> tuple[WeightLayout, list[str]]:
    """The layout of the sparse weights, and a line for each one whose shape does not fit it.

    Args:
        convs: Sparse convolutions by the name of their weight.
        given: The file's tensors; every name of `convs` is in it.
        layout: One of `LAYOUTS`, or "auto".

    Raises:
        InputError: The shapes leave the layout open, or do not agree on one.
    """
    shapes = {name: _shapes(module) for name, module in convs.items()}
    fits = {
        name: {key for key, shape in shapes[name].items() if tuple(given[name].shape) == shape}
        for name in convs
    }
    said = f"with --weight-layout ({', '.join(LAYOUTS)}; mit-bevfusion's files are RSCK)"
    if layout == "auto":
        votes = [keys for keys in fits.values() if keys]
        common = set.intersection(*votes) if votes else {"RSCK"}
        if not common:
            raise InputError(
                f"the sparse weights' shapes do not agree on one layout: say how the file stores "
                f"them {said}"
            )
        open_names = [name for name, keys in fits.items() if len(keys) > 1]
        if open_names:
            raise InputError(
                f"the shape of {open_names[0]} ({list(given[open_names[0]].shape)}) fits more "
                f"than one weight layout ({', '.join(sorted(fits[open_names[0]]))}), so it cannot "
                f"be told from the file: say it {said}"
            )
        layout = common.pop()
    misfits = [
        f"misshapen: {name} should be {list(shapes[name][layout])} ({layout}), "
        f"is {list(given[name].shape)}"
        for name in convs
        if layout not in fits[name]
    ]
    return WeightLayout[layout], misfits


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of a convolution's weight in every layout a file may use."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    own = layout_of(module)
    return {
        key: tuple(permute_weight(weight.detach(), own, WeightLayout[key]).shape) for key in LAYOUTS
    }
