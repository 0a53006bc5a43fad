"""The places in a model that hold a quantizer of an activation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from bevquant_graph import check_kind
from bevquant_quantizers import TensorQuantizer


@dataclass(frozen=True, eq=False)
class Holder:
    """One place: the child `name` of `owner`, at `path` in the model."""

    path: str
    owner: nn.Module
    name: str

    @property
    def owner_path(self) -> str:
        """Path of the module that reads through this quantizer."""
        return self.path.rpartition(".")[0]

    @property
    def quantizer(self) -> TensorQuantizer:
        """The quantizer held now."""
        quantizer: TensorQuantizer = self.owner._modules[self.name]  # type: ignore[assignment]
        return quantizer

    def put(self, quantizer: TensorQuantizer) -> None:
        """Hold another quantizer."""
        self.owner._modules[self.name] = quantizer


def activation_quantizers(model: nn.Module) -> Iterator[Holder]:
    """Yield the holders in model order; one with two paths comes twice."""
    check_kind(model, nn.Module, "a torch module")
    for path, owner in model.named_modules(remove_duplicate=False):
        for name, child in owner._modules.items():
            # The state-dict format fixes the names of weight quantizers.
            if isinstance(child, TensorQuantizer) and "weight" not in name:
                yield Holder(f"{path}.{name}" if path else name, owner, name)
