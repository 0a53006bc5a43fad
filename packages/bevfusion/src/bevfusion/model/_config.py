"""Sizes of the model: mit-bevfusion's own, and a small one for seconds-long runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from bevfusion.model.head import HeadConfig

Triple = tuple[int, int, int]
Bound = tuple[float, float, float]


@dataclass(frozen=True)
class LidarConfig:
    """Voxel grid and channel widths of the LiDAR branch.

    Axes are in the order x, y, z everywhere. `voxel_size` and `point_cloud_range` are in metres
    (the range as x, y, z of the low corner, then of the high one). `sparse_shape` counts voxels;
    its z extent is one more than the range holds, as SECOND-style encoders have it.

    Every stage of `encoder_channels` is residual blocks followed by a stride-2 convolution, whose
    width and padding come last in the stage; the final stage has residual blocks alone.

    With `zyx` the encoder's coordinates, kernels and map have the axes z, y, x, as mmdetection3d's
    SparseEncoder; the numbers here stay in the order x, y, z.
    """

    name: str
    voxel_size: tuple[float, float, float]
    sparse_shape: Triple
    point_cloud_range: tuple[float, float, float, float, float, float] = (
        -54.0, -54.0, -5.0, 54.0, 54.0, 3.0,
    )  # fmt: skip
    max_num_points: int = 10
    max_voxels: tuple[int, int] = (120000, 160000)
    in_channels: int = 5
    base_channels: int = 16
    encoder_channels: tuple[tuple[int, ...], ...] = (
        (16, 16, 32), (32, 32, 64), (64, 64, 128), (128, 128),
    )  # fmt: skip
    encoder_paddings: tuple[tuple[int | Triple, ...], ...] = (
        (0, 0, 1), (0, 0, 1), (0, 0, (1, 1, 0)), (0, 0),
    )  # fmt: skip
    output_channels: int = 128
    zyx: bool = False

    reads_points: ClassVar[bool] = False
    """Whether the encoder reads the points of a voxel instead of their mean."""

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Low x and y, then high x and y of the range [m]."""
        low_x, low_y, _, high_x, high_y, _ = self.point_cloud_range
        return low_x, low_y, high_x, high_y


@dataclass(frozen=True)
class CameraConfig:
    """Sizes of the camera branch: a backbone, an FPN, and lift-splat with LiDAR depth.

    Attributes:
        image_size: Height and width of the network's images, in pixels.
        depths: Blocks of each of the four stages; (3, 4, 6, 3) is ResNet-50, (2, 2, 6, 2) Swin-T.
        width: Channels of the stem or the patches. Stage i of a ResNet puts out 4 · 2^i · width
            channels, of a Swin transformer 2^i · width.
        feature_stride: Pixels per cell of the feature map that is lifted.
        neck_channels: Channels of that map.
        xbound: First edge, last edge and cell size of the pooled map along x, in metres.
        ybound: The same along y.
        zbound: The same along z; one cell.
        dbound: First depth, last depth (not included) and step of the frustum, in metres.
        out_channels: Channels of the bird's-eye view.
        downsample: Stride from the pooled map to the branch's output.
        backbone: "resnet", a bottleneck ResNet, or "swin", a Swin transformer.
    """

    image_size: tuple[int, int] = (256, 704)
    depths: tuple[int, int, int, int] = (3, 4, 6, 3)
    width: int = 64
    feature_stride: int = 8
    neck_channels: int = 256
    xbound: Bound = (-54.0, 54.0, 0.3)
    ybound: Bound = (-54.0, 54.0, 0.3)
    zbound: Bound = (-10.0, 10.0, 20.0)
    dbound: Bound = (1.0, 60.0, 0.5)
    out_channels: int = 80
    downsample: int = 2
    backbone: Literal["resnet", "swin"] = "resnet"

    @property
    def feature_size(self) -> tuple[int, int]:
        """Height and width of the feature map that is lifted."""
        height, width = self.image_size
        return height // self.feature_stride, width // self.feature_stride


@dataclass(frozen=True)
class FuserConfig:
    """Channels of the camera's and the LiDAR's map, and of the fused one."""

    in_channels: tuple[int, int] = (80, 256)
    out_channels: int = 256


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of SECOND and SECONDFPN.

    Attributes:
        in_channels: Channels of the fused map.
        layers: Convolutions of each stage after its first.
        channels: Channels of each stage.
        strides: Stride of the first convolution of each stage.
        upsample_channels: Channels that each stage contributes to the output.
        upsample_strides: Factor by which each stage is enlarged; 1 is a 1×1 convolution, 1/s a
            convolution of kernel and stride s.
    """

    in_channels: int = 256
    layers: tuple[int, ...] = (5, 5)
    channels: tuple[int, ...] = (128, 256)
    strides: tuple[int, ...] = (1, 2)
    upsample_channels: tuple[int, ...] = (256, 256)
    upsample_strides: tuple[float, ...] = (1, 2)


@dataclass(frozen=True)
class BEVFusionConfig:
    """Sizes of the whole model. The defaults are those of mit-bevfusion's ResNet-50 detector."""

    name: str
    lidar: LidarConfig
    camera: CameraConfig = CameraConfig()
    fuser: FuserConfig = FuserConfig()
    decoder: DecoderConfig = DecoderConfig()
    head: HeadConfig = field(default_factory=HeadConfig)

    @property
    def kind(self) -> str:
        """Name of the detector in `bevfusion.detectors.DETECTORS`."""
        return "bevfusion"


CONFIGS: dict[str, BEVFusionConfig] = {
    "nuscenes": BEVFusionConfig(
        "nuscenes", LidarConfig("nuscenes", (0.075, 0.075, 0.2), (1440, 1440, 41))
    ),
    "tiny": BEVFusionConfig(
        "tiny",
        LidarConfig(
            "tiny",
            (0.3375, 0.3375, 0.2),
            (320, 320, 41),
            base_channels=8,
            encoder_channels=((8, 8, 16), (16, 16, 32), (32, 32, 64), (64, 64)),
            output_channels=64,
        ),
        CameraConfig(
            image_size=(96, 256),
            depths=(1, 1, 1, 1),
            width=16,
            neck_channels=32,
            xbound=(-54.0, 54.0, 1.35),
            ybound=(-54.0, 54.0, 1.35),
            dbound=(1.0, 60.0, 1.0),
            out_channels=16,
        ),
        FuserConfig((16, 128), 32),
        DecoderConfig(32, (1, 1), (32, 64), upsample_channels=(32, 32)),
        HeadConfig(
            in_channels=64,
            hidden_channels=32,
            num_queries=100,
            ffn_channels=64,
            branch_channels=32,
            num_heads=4,
            map_size=(40, 40),
            voxel_size=(0.3375, 0.3375),
        ),
    ),
}
CONFIGS["nuscenes-swint"] = replace(
    CONFIGS["nuscenes"],
    name="nuscenes-swint",
    camera=CameraConfig(backbone="swin", depths=(2, 2, 6, 2), width=96),
)
"""mit-bevfusion's detector with Swin-T in place of ResNet-50."""

# For the weights of mmdetection3d's BEVFusion, whose head predicts the centre of boxes.
for _name in ("nuscenes", "nuscenes-swint"):
    CONFIGS[f"{_name}-mmdet3d"] = replace(
        CONFIGS[_name], name=f"{_name}-mmdet3d", head=HeadConfig(height="centre")
    )
