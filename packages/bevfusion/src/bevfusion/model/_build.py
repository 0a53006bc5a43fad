"""Building the model, or part of it, and weights without a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from bev_data import InputError
from bev_data.voxelize import Voxelization
from bevfusion.model._model import PARTS, Batch, BEVFusion, Detector, check_parts
from bevfusion.model._second import SECOND, SECONDFPN, ConvFuser

if TYPE_CHECKING:
    from bevfusion.model._config import BEVFusionConfig, CameraConfig, LidarConfig
    from bevfusion.model._model import Detector, Sizes

# Weights without a checkpoint: those that come with the package, and seeded ones that behave.


def trained_weights(config: str) -> Path | None:
    """Path of the trained weights for the sizes of a configuration, or None.

    The file's metadata name the command, the training frames and the accuracy on other frames.

    Example:
        >>> trained_weights("nuscenes") is None
        True
    """
    path = Path(__file__).parent / "weights" / f"{config}.safetensors"
    return path if path.is_file() else None


def named_weights(weights: Path | str | None, config: str) -> Path | None:
    """The file that `--weights` means: "trained" the package's own, "random" none, else a path.

    Raises:
        InputError: "trained" for a configuration that the package has no weights for.
    """
    if weights is None or str(weights) == "random":
        return None
    if str(weights) != "trained":
        return Path(weights)
    path = trained_weights(config)
    if path is None:
        raise InputError(
            f"--weights trained: the package has none for config {config!r}; give a file that "
            "`bevfusion-quant train` wrote, or another checkpoint"
        )
    return path


def random_weights(model: Detector, *batch: Any, seed: int = 0) -> Any:
    """Fill `model` in place with random weights whose BatchNorms fit the given batch.

    Convolutions and linear layers are normal with the standard deviation √(2 / fan-in) of He et al.
    2015, attention projections √(1 / fan-in). Norm weights lie in [0.5, 1.5], BatchNorm biases are
    normal around 0.5 with deviation 0.1 (so that most values pass the ReLUs), other biases normal
    around 0 with deviation 0.1. The norms of dense layers, which are up to fifty in a row, are
    milder, [0.75, 1.25] and around 1.5: a random ReLU network enlarges every small difference from
    layer to layer, as a trained one does not, the more so the more of its values the ReLUs cut.
    Running mean and variance are those of the batch, layer after layer, in one forward pass. The
    same parts, seed and batch give the same weights.

    Args:
        model: Changed in place; left in eval mode.
        *batch: The members of a `Batch`; features and coords of one frame are enough for the
            LiDAR branch.
        seed: Any integer.

    Returns:
        The model's output for the batch, from that one pass with the final weights.
    """
    generator = torch.Generator().manual_seed(seed)
    # Features and coordinates alone are one frame's.
    one_frame = len(batch) == 2 and "batch_size" in signature(model.forward).parameters
    inputs = (*batch, 1) if one_frame else batch
    hooks = []
    with torch.no_grad():
        for module in model.modules():
            _fill(module, generator)
            if isinstance(module, _BatchNorm):
                hooks.append(module.register_forward_pre_hook(_fit))
        model.eval()
        try:
            return model(*inputs)
        finally:
            for hook in hooks:
                hook.remove()


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    """Draw the module's own parameters; geometry and parameters of other names stay."""
    own = module._parameters

    def normal(name: str, deviation: float, mean: float = 0.0) -> None:
        parameter = own.get(name)
        if parameter is not None:
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(draw * deviation + mean)

    if isinstance(module, _BatchNorm | nn.LayerNorm | nn.GroupNorm):
        weight, mild = own.get("weight"), isinstance(module, nn.BatchNorm2d)
        if weight is not None:
            spread = 0.5 if mild else 1.0
            weight.copy_(1 + (torch.rand(weight.shape, generator=generator) - 0.5) * spread)
        normal("bias", 0.1, 1.5 if mild else 0.5 if isinstance(module, _BatchNorm) else 0.0)
    elif isinstance(module, nn.MultiheadAttention):
        normal("in_proj_weight", 1 / math.sqrt(module.embed_dim))
        normal("in_proj_bias", 0.1)
    elif isinstance(weight := own.get("weight"), Tensor):
        normal("weight", math.sqrt(2.0 / _fan_in(module, weight)))
        normal("bias", 0.1)


def _fan_in(module: nn.Module, weight: Tensor) -> float:
    """Number of inputs that one output sums."""
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        # [in, out / groups, *kernel]: of the kernel, an output sees one tap in each stride.
        return weight[:, 0].numel() / (math.prod(module.stride) * module.groups)
    return weight[0].numel()  # dense [out, in, *kernel], and spconv 2 stores [out, *kernel, in]


def _fit(norm: Any, inputs: tuple[Tensor]) -> None:
    """Take mean and variance of the values about to be normalised."""
    (x,) = inputs
    mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    # A channel that is constant on this batch (one voxel, or nothing but zeros) keeps a spread
    # comparable to the others, so that it does not blow up on the next one.
    floor = variance.mean() * 1e-3
    floor = floor if bool(floor > 0) else mean.square().mean().clamp_min(1e-3)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance.clamp_min(float(floor)))


Built = TypeVar("Built", bound=Detector)


def build_model(config: BEVFusionConfig, parts: Iterable[str] = PARTS) -> BEVFusion:
    """A float model of the given sizes, in eval mode, that runs right on a CPU.

    The sparse modules are spconv's own classes by name, so that the tree reads as mit-bevfusion's
    does; they run on bevquant_sparse's kernels, because spconv's CPU build gives wrong results on
    more than one thread. Without spconv, bevquant_sparse stands in for it.

    Args:
        config: Sizes. A decoder without a fuser before it reads the one sensor's channels.
        parts: Any of "camera", "lidar", "fuser", "decoder", "head" that can run together: one
            sensor, or both with the fuser; then the decoder; then the head.

    Raises:
        InputError: Parts that cannot run together, or whose sizes contradict each other; or an
            installed spconv cannot be imported and the LiDAR branch is asked for.

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
        decoder = {"backbone": SECOND(config.decoder, channels), "neck": SECONDFPN(config.decoder)}
    head = None
    if "head" in chosen:
        from bevfusion.model.head import TransFusionHead

        head = TransFusionHead(config.head)
    return prepared(BEVFusion(camera=camera, lidar=lidar, fuser=fuser, decoder=decoder, head=head))


def build_lidar_branch(config: LidarConfig) -> BEVFusion:
    """The LiDAR branch alone, in eval mode: `build_model(…, ("lidar",))` from its own sizes.

    Raises:
        InputError: An installed spconv cannot be imported.

    Example:
        >>> from bevfusion.model import CONFIGS, build_lidar_branch
        >>> branch = build_lidar_branch(CONFIGS["tiny"].lidar)
        >>> sorted(name for name, _ in branch.lidar.named_children())
        ['backbone', 'voxelize']
    """
    return prepared(BEVFusion(lidar=_lidar(config)))


def prepared(model: Built) -> Built:
    """A model that was just built, on bevquant_sparse's kernels and in eval mode."""
    if "lidar" in model.parts:
        from bevquant_sparse import use_bevquant_kernels

        use_bevquant_kernels(model)
    for weight in model.parameters():
        if weight.dim() == 4:
            # Of a dense convolution: maps then lie channels last too, as oneDNN and the integer
            # kernels read them.
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    return model.eval()


def _camera(config: CameraConfig) -> dict[str, nn.Module]:
    from bevfusion.model.camera import DepthLSSTransform, GeneralizedLSSFPN, ResNet, SwinTransformer

    if config.backbone not in ("resnet", "swin"):
        raise InputError(f"camera.backbone is {config.backbone!r}: use 'resnet' or 'swin'")
    backbone = (
        SwinTransformer(config.image_size, config.depths, config.width)
        if config.backbone == "swin"
        else ResNet(config.depths, config.width)
    )
    return {
        "backbone": backbone,
        "neck": GeneralizedLSSFPN(backbone.out_channels, config.neck_channels),
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


Map = tuple[int, int, int]


def lidar_map(config: LidarConfig) -> Map:
    """Channels and cells along x and y of the LiDAR branch's map.

    Each stage but the last ends in a convolution of kernel 3 and stride 2, n → ⌊(n + 2p − 3) / 2⌋
    + 1; the last one folds z by kernel 3 and stride 2 without padding.

    Example:
        >>> from bevfusion.model import CONFIGS
        >>> lidar_map(CONFIGS["nuscenes"].lidar)
        (256, 180, 180)
    """
    shape = list(config.sparse_shape)
    # The last stage does not halve the grid.
    for paddings in config.encoder_paddings[:-1]:
        last = paddings[-1]
        padding = (last,) * 3 if isinstance(last, int) else last
        shape = [(n + 2 * p - 3) // 2 + 1 for n, p in zip(shape, padding, strict=True)]
    x, y, z = shape
    return config.output_channels * ((z - 3) // 2 + 1), x, y


def camera_map(config: CameraConfig) -> Map:
    """Channels and cells along x and y of the camera branch's map.

    Example:
        >>> from bevfusion.model import CONFIGS
        >>> camera_map(CONFIGS["nuscenes"].camera)
        (80, 180, 180)
    """
    x, y, z = (
        round((high - low) / step)
        for low, high, step in (config.xbound, config.ybound, config.zbound)
    )
    stride = config.downsample
    return config.out_channels * z, math.ceil(x / stride), math.ceil(y / stride)


def check_sizes(config: BEVFusionConfig, parts: tuple[str, ...]) -> None:
    """Refuse a configuration whose parts cannot read each other's maps."""
    maps = {"camera": camera_map(config.camera), "lidar": lidar_map(config.lidar)}
    if "fuser" in parts:
        got = tuple(maps[sensor][0] for sensor in ("camera", "lidar"))
        expect(config, "fuser.in_channels", config.fuser.in_channels, "the sensors' maps", got)
        expect(config, "camera's map", maps["camera"][1:], "the LiDAR's", maps["lidar"][1:])
    if "decoder" not in parts:
        return
    decoder = config.decoder
    if "fuser" in parts:
        channels = config.fuser.out_channels
        expect(config, "decoder.in_channels", decoder.in_channels, "the fused map", channels)
    cells = maps["lidar" if "lidar" in parts else "camera"][1:]
    total = math.prod(decoder.strides)
    if any(n % total for n in cells):
        raise InputError(
            f"config {config.name!r}: a map of {cells} cells does not divide by the decoder's "
            f"strides, {decoder.strides}: choose a grid whose cells are a multiple of {total}"
        )
    if "head" in parts:
        channels = sum(decoder.upsample_channels)
        expect(config, "head.in_channels", config.head.in_channels, "the decoder's map", channels)
        expect(config, "head.map_size", config.head.map_size, "the decoder's map", cells)


def expect(config: Sizes, name: str, stated: object, source: str, got: object) -> None:
    """Refuse a size that contradicts what the parts upstream make."""
    if stated != got:
        raise InputError(
            f"config {config.name!r}: {name} is {stated}, {source} {got}: make them one"
        )


def example_batch(config: BEVFusionConfig) -> Batch:
    """A few voxels in the middle of the grid and one grey picture: enough to trace a model with.

    A frame's six cameras and all its voxels would do as well; one camera keeps the memory of
    tracing, where every activation is held, to a sixth.
    """
    lidar, camera = config.lidar, config.camera
    x, y, z = (n // 2 for n in lidar.sparse_shape)
    steps = torch.arange(8, dtype=torch.int32)
    coords = torch.stack([steps * 0, x + steps, y + steps % 3, z + steps % 2], dim=1)
    features = torch.linspace(-1, 1, 8 * lidar.in_channels).reshape(8, lidar.in_channels)
    images = torch.linspace(-1, 1, 3 * camera.image_size[0] * camera.image_size[1])
    images = images.reshape(1, 1, 3, *camera.image_size)
    depth = images[:, :, :1].abs() * camera.dbound[1]
    rows, columns = camera.feature_size
    points = len(torch.arange(*camera.dbound)) * rows * columns
    (low, high, step), (first, last, width) = camera.xbound, camera.ybound
    cells = round((high - low) / step) * round((last - first) / width)
    # A stride prime to the number of cells spreads the points over all of them.
    spread = torch.arange(points) * 7919 % cells
    return Batch(features, coords.contiguous(), 1, images, depth, spread)
