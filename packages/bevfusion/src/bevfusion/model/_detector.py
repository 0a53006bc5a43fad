"""What quantization, deployment and evaluation read of any detector: its parts and their paths."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import nn

from bev_data import InputError


class Detector(nn.Module):
    """A model made of parts, called with the members of a `Batch`.

    The tables are keyed by the names in `PARTS`, in the order in which the parts run.

    Attributes:
        part_paths: The modules that hold each part; entries of a state dict begin with their paths.
        stages: The module whose output is the part's map, or of the head its dict.
    """

    part_paths: ClassVar[Mapping[str, tuple[str, ...]]]
    stages: ClassVar[Mapping[str, str]]

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that are built, in the order in which they run."""
        built = {path for path, _ in self.named_modules()}
        return tuple(part for part, paths in self.part_paths.items() if built.issuperset(paths))

    @property
    def lidar(self) -> Any:
        """The LiDAR branch by name: voxelize and backbone.

        Raises:
            LookupError: It is not built.
        """
        raise NotImplementedError

    @property
    def head(self) -> Any:
        """The detection head, whose `decode` turns the model's outputs into boxes.

        Raises:
            LookupError: It is not built.
        """
        raise NotImplementedError

    def paths_outside(self, chosen: Iterable[str]) -> tuple[str, ...]:
        """The modules of all parts but the chosen ones: `exclude` of `bevquant_qnn.QuantConfig`.

        Args:
            chosen: Parts to quantize.

        Raises:
            InputError: A chosen part that the model does not have.

        Example:
            >>> from bevfusion.model import CONFIGS, build_model
            >>> model = build_model(CONFIGS["tiny"], ("camera", "decoder", "head"))
            >>> model.paths_outside(("decoder",))
            ('encoders.camera', 'heads.object')
        """
        wanted = set(chosen)
        absent = sorted(wanted.difference(self.parts))
        if absent:
            raise InputError(
                f"parts {absent} cannot be quantized: the model has {', '.join(self.parts)} only"
            )
        left = (self.part_paths[part] for part in self.parts if part not in wanted)
        return tuple(path for paths in left for path in paths)
