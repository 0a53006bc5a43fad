"""The set of files of the whole model: names, shapes, what is quantized, the files in a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
pytest.importorskip("onnxscript", reason="onnxscript is not installed")
import onnx
from bpu_split import small_frame

from bevfusion.deployment import (
    FilePart,
    bpu_files,
    nvidia_files,
    nvidia_pieces,
    outputs_of,
    walk,
    watching,
)
from bevfusion.model import CONFIGS, PARTS, BEVFusion, build_model, random_weights
from bevfusion_quant import InputError
from bevfusion_quant.export import ExportedSet, export_model, export_text
from bevfusion_quant.ptq import (
    FrameBatches,
    calibrate_branch,
    example_batch,
    fuse_branch,
    quantize_branch,
)
from bevfusion_quant.run import Clock
from bevquant_export import cpu_at_hand, lint_onnx

TINY = CONFIGS["tiny"]
Models = tuple[BEVFusion, BEVFusion, FrameBatches]


@pytest.fixture(scope="module")
def models() -> Models:
    """Folded, quantized, and a frame."""
    model = build_model(TINY)
    batches = FrameBatches([small_frame()], TINY, model)
    random_weights(model, *batches[0], seed=0)
    example = example_batch(TINY)
    fused = fuse_branch(model, example).model
    quantized = quantize_branch(fused, example, "all", method="max").model
    calibrate_branch(quantized, batches, method="max")
    return fused, quantized, batches


@pytest.fixture(scope="module")
def made(models: Models, tmp_path_factory: pytest.TempPathFactory) -> ExportedSet:
    folder = tmp_path_factory.mktemp("set") / "onnx"
    fused, quantized, batches = models
    return export_model(fused, quantized, batches, Clock(), folder, target="tensorrt")


def test_the_set_is_cuda_bevfusions(made: ExportedSet) -> None:
    """Names and shapes of Lidar_AI_Solution's export scripts, in this model's sizes."""
    height, width = TINY.camera.image_size
    rows, columns = TINY.camera.feature_size
    bins, channels = 59, TINY.camera.out_channels
    x, y = TINY.head.map_size
    middle, queries = TINY.head.in_channels, TINY.head.num_queries
    wanted = {
        "camera.backbone.onnx": (
            {"img": (1, 6, 3, height, width), "depth": (1, 6, 1, height, width)},
            {
                "camera_feature": (6, rows, columns, channels),
                "camera_depth_weights": (6, bins, rows, columns),
            },
        ),
        "camera.vtransform.onnx": (
            {"feat_in": (1, channels, 2 * x, 2 * y)},
            {"feat_out": (1, channels, x, y)},
        ),
        "lidar.backbone.xyz.onnx": (None, None),
        "fuser.onnx": (
            {"camera": (1, channels, x, y), "lidar": (1, 128, x, y)},
            {"middle": (1, middle, x, y)},
        ),
        "head.bbox.onnx": (
            {"middle": (1, middle, x, y)},
            {
                "score": (1, 10, queries), "rot": (1, 2, queries), "dim": (1, 3, queries),
                "reg": (1, 2, queries), "height": (1, 1, queries), "vel": (1, 2, queries),
            },
        ),
    }  # fmt: skip
    assert [file.name for file in made.files] == list(wanted)
    for file in made.files:
        inputs, outputs = wanted[file.name]
        if inputs is None:
            continue
        assert {port.name: port.shape for port in file.inputs} == inputs
        assert {port.name: port.shape for port in file.outputs} == outputs
        assert {port.dtype for port in (*file.inputs, *file.outputs)} == {"float32"}


def test_every_file_is_right_and_keeps_the_rules(made: ExportedSet) -> None:
    assert made.failures == ()
    for file in made.files:
        target = "libspconv" if file.kind == "sparse" else "tensorrt"
        assert lint_onnx(made.folder / file.name, target) == []
        assert file.findings == ()
    quantized = [layer for layer in made.layers if layer.form == "int8"]
    assert len(quantized) > 70
    assert max(layer.largest for layer in quantized) <= 1
    sparse = [layer for layer in made.layers if layer.file.startswith("lidar")]
    assert {layer.largest for layer in sparse} == {0}
    for layer in quantized:
        if layer.op in ("layout", "max_pool"):
            assert layer.different == 0, layer
        assert layer.different == layer.ties, layer
    assert [file.unexplained for file in made.files] == [0] * len(made.files)


def test_layers_stand_beside_the_other_executions(made: ExportedSet) -> None:
    convs = [layer for layer in made.layers if layer.op in ("conv", "sparse_conv")]
    told = [layer for layer in convs if layer.integer_sqnr_db is not None]
    assert len(told) == len(convs)
    for layer in told:
        assert layer.fake_sqnr_db == pytest.approx(layer.integer_sqnr_db, abs=1.5)
    paths = {layer.path for layer in convs}
    assert "encoders.camera.backbone.layer1.0.conv1" in paths
    assert "encoders.lidar.backbone.conv_input.0" in paths
    assert "fuser.0" in paths


def test_the_sparse_file_bounds_its_voxels(made: ExportedSet, models: Models) -> None:
    (file,) = (file for file in made.files if file.kind == "sparse")
    voxels = len(models[2][0].features)
    assert file.voxel_bound is not None
    assert voxels * 1.5 <= file.voxel_bound
    assert file.inputs[0].dtype == "float16"
    assert "spconv::Precision::Int8" in file.build


def test_nodes_carry_the_models_paths(made: ExportedSet) -> None:
    graph = onnx.load(made.folder / "camera.backbone.onnx").graph
    names = {node.name for node in graph.node}
    assert "encoders.camera.vtransform.depthnet.6.Conv" in names
    graph = onnx.load(made.folder / "head.bbox.onnx").graph
    assert any(node.name.startswith("heads.object.decoder.0.norm1.") for node in graph.node)


def test_the_files_in_a_row_are_as_near_to_float_as_the_integers(made: ExportedSet) -> None:
    assert [stage.tensor for stage in made.stages] == ["camera", "lidar", "middle"]
    for stage in made.stages:
        assert stage.onnx_sqnr_db == pytest.approx(stage.integer_sqnr_db, abs=0.5)
    assert [row.distance for row in made.agreement] == [0.5, 1.0, 2.0]
    last = made.agreement[-1]
    assert last.matched >= 0.5 * last.float_detections


@pytest.mark.parametrize("target", ["tensorrt11", "openvino"])
def test_other_engines_take_the_same_model(target: str, models: Models, tmp_path: Path) -> None:
    if target == "openvino":
        pytest.importorskip("openvino", reason="openvino is not installed")
    fused, quantized, batches = models
    made = export_model(
        fused, quantized, batches, Clock(), tmp_path / "onnx",
        target=target, cpu=cpu_at_hand(),
    )  # fmt: skip
    assert made.failures == ()
    for file in made.files:
        # Without VNNI its weights are uint8, which OpenVINO runs in float.
        in_float = target == "openvino" and cpu_at_hand() == "any"
        assert all("OVN001" in finding for finding in file.findings if in_float)
        assert in_float or file.findings == ()
        assert bool(file.unverified) == (target == "tensorrt11")
    # The sparse file for libspconv has half inputs in every set.
    ports = {p.dtype for f in made.files if f.kind != "sparse" for p in (*f.inputs, *f.outputs)}
    assert ports == {"float16" if target == "tensorrt11" else "float32"}
    told = "\n".join(export_text(made))
    assert ("--int8" in told) is False


def test_the_text_names_files_engines_and_the_verdict(made: ExportedSet) -> None:
    text = "\n".join(export_text(made))
    for file in made.files:
        assert file.name in text
    assert "Verified: " in text
    assert "trtexec --onnx=fuser.onnx --fp16 --int8 --inputIOFormats=fp16:chw,fp16:chw " in text
    assert "trtexec --onnx=head.bbox.onnx --fp16 --inputIOFormats=fp16:chw " in text
    assert 'load_engine_from_onnx("lidar.backbone.xyz.onnx"' in text


def test_the_parts_in_a_row_are_the_model(models: Models) -> None:
    fused, quantized, batches = models
    pieces = nvidia_pieces(fused, quantized)
    known = {piece.file.name: piece for piece in pieces}
    _, tensors = walk(
        [piece.file for piece in pieces],
        lambda file, args: known[file.name].in_float(args),
        batches[0],
        fused,
    )
    with torch.no_grad():
        wanted = fused(*batches[0])
    torch.testing.assert_close(tensors["reg"], wanted["center"], rtol=0, atol=0)
    labels = wanted["query_labels"][:, None]
    score = wanted["heatmap"].sigmoid() * wanted["query_heatmap_score"]
    torch.testing.assert_close(tensors["score"].amax(1), score.gather(1, labels)[:, 0])


@pytest.mark.parametrize("side", [0, 1])
def test_what_the_models_own_run_made_is_not_made_again(models: Models, side: int) -> None:
    files = nvidia_files(PARTS)
    model, batch = models[side], models[2][0]
    ran: list[str] = []

    def execute(file: FilePart, args: tuple[Any, ...]) -> Sequence[Tensor]:
        ran.append(file.name)
        return outputs_of(file.module(model), args)

    inputs, wanted = walk(files, execute, batch, model)
    assert ran == [file.name for file in files]
    with watching(model) as known, torch.no_grad():
        model(*batch)
        first = dict(known)
        model(*models[2][0]._replace(features=batch.features * 2))
    assert known == first  # of the first run alone
    assert set(known) == {"pooled", "camera", "lidar", "middle"}
    assert all(torch.equal(value, wanted[name]) for name, value in known.items())

    ran.clear()
    read, made = walk(files, execute, batch, model, known=known, wanted=["middle"])
    assert ran == []
    assert torch.equal(made["middle"], wanted["middle"])
    assert read.keys() == inputs.keys()  # each file's inputs are there, that of the head too
    for name, args in read.items():
        assert all(
            torch.equal(a, b) for a, b in zip(args, inputs[name], strict=True) if torch.is_tensor(a)
        )


def test_a_cpus_file_ends_with_the_quantizer_of_the_next_one(models: Models) -> None:
    """ONNX Runtime convolves in integers only where the result is quantized."""
    fused, quantized, batches = models
    made = {}
    for target in ("tensorrt", "onnxruntime"):
        known = {p.file.name: p for p in nvidia_pieces(fused, quantized, target)}
        files = [piece.file for piece in known.values()]
        made[target] = walk(
            files, lambda f, a, known=known: known[f.name].fake(a), batches[0], fused
        )[1]
        path, quantizer = next(
            (path, child)
            for path, child in known["fuser"].fake_module.named_modules()
            if path.endswith("_input_quantizer")
        )
        ends = dict(known["camera.vtransform"].fake_module.named_modules())
        assert (ends.get(path) is quantizer) == (target == "onnxruntime")
    plain, read = made["tensorrt"], made["onnxruntime"]
    assert torch.equal(read["camera"], quantizer(plain["camera"]))
    assert not torch.equal(read["camera"], plain["camera"])
    for name in ("lidar", "middle", "score", "reg"):
        assert torch.equal(read[name], plain[name]), name


def test_a_quantized_head_is_refused(models: Models) -> None:
    fused, _, _ = models
    example = example_batch(TINY)
    quantized = quantize_branch(fused, example, "head").model
    with pytest.raises(InputError, match=r"head is quantized.*float alone.*--quantize-head"):
        nvidia_pieces(fused, quantized)


def test_what_a_branch_leaves_float_is_a_float_file(models: Models) -> None:
    fused, _, _ = models
    quantized = quantize_branch(fused, example_batch(TINY), "fuser").model
    kinds = {piece.file.name: piece.kind for piece in nvidia_pieces(fused, quantized)}
    assert kinds == {
        "camera.backbone": "float", "camera.vtransform": "float", "lidar.backbone.xyz": "sparse",
        "fuser": "int8", "head.bbox": "float",
    }  # fmt: skip


def test_sets_of_other_branches() -> None:
    def names(files: object) -> list[str]:
        return [file.name for file in files]

    assert names(nvidia_files(("camera",))) == ["camera.backbone", "camera.vtransform"]
    assert names(nvidia_files(("lidar",))) == ["lidar.backbone.xyz"]
    assert names(nvidia_files(("camera", "decoder", "head"))) == [
        "camera.backbone", "camera.vtransform", "decoder", "head.bbox",
    ]  # fmt: skip
    front = ["camera.backbone", "camera.depth", "camera.vtransform", "lidar.backbone.xyz"]
    assert names(bpu_files(PARTS, ("fuser", "decoder"))) == [*front, "fuser", "head.bbox"]
    assert names(bpu_files(PARTS, ("camera", "fuser"))) == [
        *front, "fuser", "decoder", "head.bbox",
    ]  # fmt: skip
