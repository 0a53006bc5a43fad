"""The dense parts of a detector between quantization stubs, as a BPU runs them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.ao.quantization import DeQuantStub, QuantStub

from bevfusion.deployment._files import CenterPart, DecodedPart, FusedPart
from bevfusion.model import Detector

UNIT_PREFIXES = {"camera": "encoders.camera.", "bev": ""}
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


class FusedUnit(FusedPart):
    """Fuser, and the decoder downstream if it is quantized too."""

    def __init__(self, model: Any, *, decoder: bool) -> None:
        super().__init__(model, decoder=decoder)
        self.quant_camera_map, self.quant_lidar_map = QuantStub(), QuantStub()
        self.dequant_map = DeQuantStub()

    def forward(self, camera_map: Tensor, lidar_map: Tensor) -> Any:
        """Two bird's-eye-view maps → one."""
        maps = self.quant_camera_map(camera_map), self.quant_lidar_map(lidar_map)
        return self.dequant_map(super().forward(*maps))


class DecoderUnit(DecodedPart):
    """SECOND and SECONDFPN."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.quant_fused_map, self.dequant_map = QuantStub(), DeQuantStub()

    def forward(self, fused_map: Tensor) -> Any:
        """The fused map → the decoded one."""
        return self.dequant_map(super().forward(self.quant_fused_map(fused_map)))


class CenterUnit(CenterPart):
    """CenterPoint's decoder, head or both; of the head one tensor for each map."""

    def __init__(self, model: Detector, parts: Sequence[str]) -> None:
        super().__init__(model, parts)
        self.quant_map = QuantStub()
        names = model.head.output_names if "head" in parts else ("map",)
        self.dequant = nn.ModuleDict({name: DeQuantStub() for name in names})

    def forward(self, spatial_features: Tensor) -> Any:
        """A map to the decoder's map, or to the head's maps in their order."""
        made = super().forward(self.quant_map(spatial_features))
        stubs = self.dequant.values()
        if isinstance(made, tuple):
            return tuple(stub(value) for stub, value in zip(stubs, made, strict=True))
        (stub,) = stubs
        return stub(made)


def bpu_units(model: Detector, parts: Sequence[str]) -> dict[str, nn.Module]:
    """The BPU's units of the model: "camera", "bev" or both.

    Args:
        model: In float; the units' layers are its own.
        parts: What runs on the BPU: any of "camera", "fuser" and "decoder"; of CenterPoint any of
            "decoder" and "head".
    """
    units: dict[str, nn.Module] = {}
    built: Any = model
    if model.kind != "bevfusion":
        units["bev"] = CenterUnit(model, parts)
    elif "fuser" in parts:
        units["bev"] = FusedUnit(built, decoder="decoder" in parts)
    elif "decoder" in parts:
        units["bev"] = DecoderUnit(built)
    if "camera" in parts:
        units = {"camera": CameraUnit(built.camera), **units}
    return {name: unit.eval() for name, unit in units.items()}
