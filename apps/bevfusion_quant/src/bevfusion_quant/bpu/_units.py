"""The dense parts of the model as modules of their own, each between its stubs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub, QuantStub

from bevfusion_quant.bpu._config import bpu_parts

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion

__all__ = ["PREFIXES", "bpu_units"]

PREFIXES = {"camera": "encoders.camera.", "bev": ""}
"""Unit → what stands before its modules' paths in the model."""


class CameraUnit(nn.Module):
    """Backbone and neck: images to the feature map that the view transform lifts."""

    def __init__(self, camera: nn.ModuleDict) -> None:
        super().__init__()
        self.quant_images = QuantStub()
        self.backbone = camera["backbone"]
        self.neck = camera["neck"]
        self.dequant_features = DeQuantStub()

    def forward(self, images: Tensor) -> Any:
        """Float [images, 3, height, width] → float [images, channels, rows, columns]."""
        return self.dequant_features(self.neck(self.backbone(self.quant_images(images)))[0])


class FusedUnit(nn.Module):
    """Fuser, and the decoder behind it where that is quantized too."""

    def __init__(self, fuser: nn.Module, decoder: nn.ModuleDict | None) -> None:
        super().__init__()
        self.quant_camera_map, self.quant_lidar_map = QuantStub(), QuantStub()
        self.fuser = fuser
        self.decoder = decoder
        self.dequant_map = DeQuantStub()

    def forward(self, camera_map: Tensor, lidar_map: Tensor) -> Any:
        """Two bird's-eye-view maps → one."""
        x = self.fuser(self.quant_camera_map(camera_map), self.quant_lidar_map(lidar_map))
        if self.decoder is not None:
            x = self.decoder["neck"](self.decoder["backbone"](x))
        return self.dequant_map(x)


class DecoderUnit(nn.Module):
    """SECOND and SECONDFPN."""

    def __init__(self, decoder: nn.ModuleDict) -> None:
        super().__init__()
        self.quant_fused_map = QuantStub()
        self.decoder = decoder
        self.dequant_map = DeQuantStub()

    def forward(self, fused_map: Tensor) -> Any:
        """The fused map → the decoded one."""
        x = self.quant_fused_map(fused_map)
        return self.dequant_map(self.decoder["neck"](self.decoder["backbone"](x)))


def bpu_units(model: BEVFusion, branch: str) -> dict[str, nn.Module]:
    """The units that `branch` puts on the BPU, "camera", "bev" or both; their layers are `model`'s.

    Raises:
        InputError: The branch has no part that a BPU could run.
    """
    parts = bpu_parts(branch)
    units: dict[str, nn.Module] = {}
    if "camera" in parts:
        units["camera"] = CameraUnit(model.camera)
    if "fuser" in parts:
        assert model.fuser is not None
        units["bev"] = FusedUnit(model.fuser, model.decoder if "decoder" in parts else None)
    elif "decoder" in parts:
        assert model.decoder is not None
        units["bev"] = DecoderUnit(model.decoder)
    return {name: unit.eval() for name, unit in units.items()}
