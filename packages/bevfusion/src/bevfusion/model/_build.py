"""Building the model, or part of it, in the sizes of a configuration."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from bev_data.voxelize import Voxelization
from bevfusion.model._fuser import ConvFuser
from bevfusion.model._model import BEVFusion
from bevfusion.model._parts import PARTS, check_parts
from bevfusion.model._second import SECOND, SECONDFPN
from bevfusion.model._sizes import check_sizes

if TYPE_CHECKING:
    from bevfusion.model._config import BEVFusionConfig, CameraConfig, LidarConfig

__all__ = ["build_lidar_branch", "build_model"]


def build_model(config: BEVFusionConfig, parts: Iterable[str] = PARTS) -> BEVFusion:
    """A float model of the given sizes, in eval mode, that runs right on a CPU.

    The sparse modules are spconv's own classes by name, so that the tree reads as mit-bevfusion's
    does; they run on bevquant_sparse's kernels, because spconv's CPU build gives wrong results on
    more than one thread.

    Args:
        config: Sizes. A decoder without a fuser before it reads the one sensor's channels.
        parts: Any of "camera", "lidar", "fuser", "decoder", "head" that can run together: one
            sensor, or both with the fuser; then the decoder; then the head.

    Raises:
        InputError: Parts that cannot run together, or whose sizes contradict each other; or
            spconv is not installed and the LiDAR branch is asked for.

    Example:
        >>> from bevfusion.model import CONFIGS, build_model
        >>> model = build_model(CONFIGS["tiny"], ("lidar", "decoder"))
        >>> model.parts
        ('lidar', 'decoder')
    """
    chosen = check_parts(parts)
    check_sizes(config, chosen)
    camera = _camera(config.camera) if "camera" in chosen else None
    lidar = _lidar(config.lidar) if "lidar" in chosen else None
    fuser = ConvFuser(config.fuser) if "fuser" in chosen else None
    decoder = None
    if "decoder" in chosen:
        channels = _decoded_channels(config, chosen)
        decoder = {
            "backbone": SECOND(config.decoder, channels),
            "neck": SECONDFPN(config.decoder),
        }
    head = None
    if "head" in chosen:
        from bevfusion.model.head import TransFusionHead

        head = TransFusionHead(config.head)
    return _ready(BEVFusion(camera=camera, lidar=lidar, fuser=fuser, decoder=decoder, head=head))


def build_lidar_branch(config: LidarConfig) -> BEVFusion:
    """The LiDAR branch alone, in eval mode: `build_model(…, ("lidar",))` from its own sizes.

    Raises:
        InputError: spconv is not installed.

    Example:
        >>> from bevfusion.model import CONFIGS, build_lidar_branch
        >>> branch = build_lidar_branch(CONFIGS["tiny"].lidar)
        >>> sorted(name for name, _ in branch.lidar.named_children())
        ['backbone', 'voxelize']
    """
    return _ready(BEVFusion(lidar=_lidar(config)))


def _ready(model: BEVFusion) -> BEVFusion:
    if "lidar" in model.parts:
        from bevquant_sparse import use_bevquant_kernels

        use_bevquant_kernels(model)
    return model.eval()


def _camera(config: CameraConfig) -> dict[str, nn.Module]:
    from bevfusion.model.camera import DepthLSSTransform, GeneralizedLSSFPN, ResNet

    widths = tuple(4 * config.width * 2**stage for stage in (1, 2, 3))
    return {
        "backbone": ResNet(config.depths, config.width),
        "neck": GeneralizedLSSFPN(widths, config.neck_channels),
        "vtransform": DepthLSSTransform(config),
    }


def _lidar(config: LidarConfig) -> dict[str, nn.Module]:
    from bevfusion.model._encoder import SparseEncoder

    voxelize = Voxelization(
        voxel_size=list(config.voxel_size),
        point_cloud_range=list(config.point_cloud_range),
        max_num_points=config.max_num_points,
        max_voxels=config.max_voxels,
    )
    return {"voxelize": voxelize, "backbone": SparseEncoder(config)}


def _decoded_channels(config: BEVFusionConfig, parts: tuple[str, ...]) -> int:
    if "fuser" in parts:
        return config.fuser.out_channels
    return config.fuser.in_channels["lidar" in parts]
