"""Swin transformer: mmdet's numbers, its own formula, and INT8 of a detector that has it."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from bev_data import InputError
from bevfusion.deployment import export_files
from bevfusion.deployment._files import FeaturesPart
from bevfusion.detectors import example_of
from bevfusion.evaluation import FrameBatches
from bevfusion.model import CONFIGS, BEVFusion, build_model, random_weights
from bevfusion.model.camera import SwinTransformer
from bevfusion.quantization import calibrate_detector, fuse_detector, quantize_detector
from bevquant_export import compare_qdq_onnx, export_qdq_onnx
from bevquant_int8sim import LayerComparison, simulate

scenes = pytest.importorskip("bev_scenes", reason="frames are streets of bev_scenes")
DEPTHS = (2, 2, 2, 1)
CAMERA = dataclasses.replace(
    CONFIGS["tiny"].camera, backbone="swin", depths=(2, 1, 1, 1), width=32, image_size=(64, 176)
)
TINY = dataclasses.replace(CONFIGS["tiny"], name="tiny-swin", camera=CAMERA)


def settle(net: nn.Module) -> None:
    """Weights that leave no bias zero and no norm at its start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            deviation = 0.5 if parameter.ndim == 1 else 1.5 / parameter[0].numel() ** 0.5
            parameter.copy_(draw * deviation + (parameter.ndim == 1))


def mmdets_swin(**settings: Any) -> nn.Module:
    pytest.importorskip("mmdet", reason="needs mmdet 3.3.0 with mmcv-lite and mmengine")
    if "mmcv._ext" not in sys.modules:  # compiled operators, which a Swin transformer never calls
        absent = types.ModuleType("mmcv._ext")
        absent.__getattr__ = lambda name: None  # type: ignore[method-assign]
        sys.modules["mmcv._ext"] = absent
    from mmdet.models.backbones.swin import SwinTransformer as Theirs

    net: nn.Module = Theirs(out_indices=(1, 2, 3), **settings)
    return net


@pytest.mark.filterwarnings("ignore")  # of mmdet's imports, on a newer torch
@pytest.mark.parametrize(
    ("size", "depths", "width", "heads"),
    [
        ((256, 704), (2, 2, 6, 2), 96, (3, 6, 12, 24)),
        ((64, 176), DEPTHS, 32, (1, 2, 4, 8)),  # an odd number of columns is merged
        ((224, 224), DEPTHS, 32, (1, 2, 4, 8)),  # whole windows
    ],
)
def test_numbers_are_those_of_mmdet(
    size: tuple[int, int],
    depths: tuple[int, int, int, int],
    width: int,
    heads: tuple[int, int, int, int],
) -> None:
    theirs = mmdets_swin(embed_dims=width, depths=depths, num_heads=heads)
    theirs.eval()
    settle(theirs)
    ours = SwinTransformer(size, depths, width).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(images)
        for got, other in zip(ours(images), wanted, strict=True):
            assert other.std() > 0.1
            torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-5)


def test_windows_see_each_other_only_through_the_shift() -> None:
    """A pixel of the image reaches its own window without a shift, its neighbours with one."""
    size, pixel = (112, 112), (0, slice(None), 40, 40)
    for depth, reached in ((1, 7), (2, 14)):
        net = SwinTransformer(size, (depth, 1, 1, 1), 32)
        settle(net)
        images = torch.zeros(1, 3, *size, requires_grad=True)
        stage, _ = net.stages[0](net.patch_embed(images))  # type: ignore[operator, misc]
        other = images.detach().clone()
        other[pixel] = 1.0
        moved, _ = net.stages[0](net.patch_embed(other))  # type: ignore[operator, misc]
        cells = (moved - stage).abs().sum(-1)[0] > 1e-6
        rows = cells.any(1).nonzero()
        assert int(rows.max() - rows.min()) + 1 == reached


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="width is 48: a Swin transformer has heads of 32"):
        SwinTransformer((64, 64), DEPTHS, 48)
    with pytest.raises(InputError, match=r"image_size is \(64, 90\): .* multiples of 4"):
        SwinTransformer((64, 90), DEPTHS, 32)
    camera = dataclasses.replace(CAMERA, backbone="vit")
    with pytest.raises(InputError, match=r"camera\.backbone is 'vit': use 'resnet' or 'swin'"):
        build_model(dataclasses.replace(TINY, camera=camera), ("camera",))


class Quantized(NamedTuple):
    fused: BEVFusion
    model: Any
    batches: FrameBatches


@pytest.fixture(scope="module")
def quantized() -> Quantized:
    frames = [scenes.street_frame(seed, size="tiny", cameras="tiny") for seed in (0, 1)]
    model = build_model(TINY, ("camera",))
    batches = FrameBatches(frames, TINY, model, cameras=("CAM_FRONT", "CAM_BACK"))
    random_weights(model, *batches[0])
    example = example_of(TINY, batches[0])
    fused: Any = fuse_detector(model, example).model
    made = quantize_detector(fused, example, ["camera"], method="max")
    linear = {item.path for item in made.quantized if item.kind == "QuantLinear"}
    backbone = {name for name, module in fused.camera["backbone"].named_modules()
                if isinstance(module, nn.Linear)}  # fmt: skip
    assert linear == {f"encoders.camera.backbone.{name}" for name in backbone}
    calibrate_detector(made.model, batches, method="max")
    return Quantized(fused, made.model, batches)


def test_integers_are_those_of_the_quantized_model_on_another_frame(quantized: Quantized) -> None:
    integers = simulate(quantized.model, tuple(quantized.batches[0]))
    comparison = LayerComparison(quantized.fused, integers, verify=True)
    comparison.add(comparison.measure(tuple(quantized.batches[1])))
    table = comparison.table()
    assert table.wrong == ()
    swin = [row for row in table.rows if row.path.startswith("encoders.camera.backbone.stages.")]
    assert sum(row.peak_bits is not None for row in swin) >= 4 * 5
    assert table.rows[-1].fake_sqnr_db is not None
    assert table.rows[-1].fake_sqnr_db > 15


@pytest.mark.parametrize("profile", ["tensorrt11", "onnxruntime"])
def test_a_file_of_the_backbone_computes_the_integers(
    quantized: Quantized, tmp_path: Path, profile: str
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    net = FeaturesPart(quantized.model).eval()
    first, other = (batch.images[0, :1] for batch in quantized.batches)  # type: ignore[index]
    file = export_qdq_onnx(net, first, tmp_path / "swin.onnx", profile)
    rows = compare_qdq_onnx(file, net, other)
    assert len(rows) > 20
    assert sum(row.unexplained for row in rows) == 0


def test_the_detectors_files_take_the_whole_image(quantized: Quantized, tmp_path: Path) -> None:
    """Other backbones are captured on the middle of an image, which has other windows."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    made = export_files(
        quantized.fused, quantized.model, quantized.batches, tmp_path / "onnx",
        target="tensorrt",
    )  # fmt: skip
    assert made.failures == ()
    assert made.files[0].name == "camera.backbone.onnx"
    assert [file.unexplained for file in made.files] == [0] * len(made.files)
