"""Models that were folded, calibrated or exported wrong elsewhere, and nobody was told."""

from __future__ import annotations

import onnx
import pytest
import torch
from torch import nn

from bevquant_export import (
    compare_sparse_onnx,
    export_sparse_onnx,
    load_sparse_onnx,
    lower_to_portable,
)
from bevquant_export.targets.autoware import export_autoware_onnx
from bevquant_fusion import fuse_model
from bevquant_int8sim import simulate
from bevquant_qnn import QuantSparseConvolution, quantize_model
from bevquant_quantizers import calib, calibrate


def uncalibrated(model, frame, tmp_path, amax):
    layer = model.get_submodule("encoder_layers.encoder_layer1.0.conv1")
    if amax is None:
        del layer._input_quantizer._amax
    else:
        layer._input_quantizer._amax.fill_(amax)
    with pytest.raises(ValueError, match=r"encoder_layer1\.0") as raised:
        export_sparse_onnx(model, frame, tmp_path / "a.onnx")
    assert not (tmp_path / "a.onnx").exists()
    return str(raised.value)


def test_a_range_that_is_missing(encoders, tmp_path):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#98: amax is None, "no attribute 'cpu'".

    Cause: a quantizer that no batch has reached.
    Command: `calibrate` reports it; export refuses and names it.
    """
    said = uncalibrated(encoders.encoder(), encoders.frame(0), tmp_path, None)
    assert "calibrat" in said


def test_another_range_that_is_missing(encoders):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#243: the same, no layer was calibrated.

    Cause: no batch was calibrated at all.
    Command: `simulate` names every quantizer.
    """
    net = encoders.folded(encoders.Encoder((8, 12)), encoders.frame(0))
    model = quantize_model(net, example_inputs=encoders.frame(0)).model
    with pytest.raises(ValueError, match=r"conv_input\.0\._input_quantizer \(not calibrated\)"):
        simulate(model, encoders.frame(0))


def test_a_range_of_nan(encoders, tmp_path):
    """NVIDIA/TensorRT#2126: after calibration every result is NaN.

    Cause: NaN among the values that were calibrated.
    Command: export names the quantizer.
    """
    said = uncalibrated(encoders.encoder(), encoders.frame(0), tmp_path, float("nan"))
    assert "nan" in said.lower()


def test_more_voxels_than_the_bound(encoders, tmp_path):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#267: a denser frame than any before loses its far voxels.

    Cause: `output_bound` is less than the frame has.
    Command: `load_sparse_onnx(file)(…)` names the layer; write with `batches=…, head_room=…`.
    """
    file = export_sparse_onnx(
        encoders.encoder(), encoders.frame(0, share=0.01), tmp_path / "a.onnx"
    )
    assert file.layers[0].output_bound == 1000
    dense = encoders.frame(1, share=0.99)
    assert len(dense[0]) > 1000
    with pytest.raises(ValueError, match=r"output_bound is 1000.*head_room"):
        load_sparse_onnx(file.path)(*dense)


def test_where_a_file_differs(encoders, tmp_path):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#300: boxes differ, and nobody can say from which layer on.

    Cause: one layer's weights are not the model's.
    Command: `compare_sparse_onnx(file, model, frame)`: the first row that differs.
    """
    model, frame = encoders.encoder(), encoders.frame(0)
    export_sparse_onnx(model, frame, tmp_path / "a.onnx")
    proto = onnx.load(tmp_path / "a.onnx")
    node = next(n for n in proto.graph.node if n.name == "conv3")
    weight = next(t for t in proto.graph.initializer if t.name == node.input[1])
    weight.raw_data = bytes(len(weight.raw_data))
    onnx.save(proto, tmp_path / "a.onnx")
    rows = compare_sparse_onnx(load_sparse_onnx(tmp_path / "a.onnx"), model, frame)
    first = next(row for row in rows if row.different)
    assert (first.node, first.path) == ("conv3", node.doc_string)


def test_a_file_that_no_checker_takes(encoders, tmp_path):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#153: "No Op registered for SparseConvolution".

    Cause: the operators are the engine's own.
    Command: `load_sparse_onnx` reads it, `lower_to_portable` writes standard operators.
    """
    file = export_sparse_onnx(encoders.encoder(), encoders.frame(0), tmp_path / "a.onnx")
    with pytest.raises(onnx.checker.ValidationError, match="SparseConvolution"):
        onnx.checker.check_model(onnx.load(file.path))
    assert len(load_sparse_onnx(file.path).nodes) > 11
    portable = lower_to_portable(file.path, tmp_path / "b.onnx")
    onnx.checker.check_model(onnx.load(portable.path), full_check=True)


def test_an_engine_without_inverse_convolutions(encoders, tmp_path):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#100: inverse convolutions fail once the engine is built.

    Cause: the engine has no pairs for it.
    Command: `export --target …` names the module before anything is built.
    """
    with pytest.raises(ValueError, match=r"up is an inverse convolution.*portable"):
        export_autoware_onnx(encoders.hourglass(), encoders.frame(0), tmp_path / "a.onnx")


class Block(nn.Module):
    """A residual block under names of its own."""

    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return (x + self.second(self.norm(self.first(x)).relu())).relu()


def readers_of_one_tensor(make):
    x = torch.rand(1, 8, 8, 8)
    net = fuse_model(nn.Sequential(nn.Conv2d(8, 8, 1), make(8), make(8)).eval(), x).model
    quantized = quantize_model(net, example_inputs=x).model
    calibrate(quantized, [x])
    program = simulate(quantized, x).program
    forms: dict[str, set[float]] = {}
    for step in program.steps:
        for name in step.inputs:
            form = program.values[name].form
            if not isinstance(form, str):
                forms.setdefault(name, set()).add(float(form.scale))
    assert forms
    return forms


def test_sharing_under_other_names():
    """NVIDIA-AI-IOT/Lidar_AI_Solution#135: quantizers are shared by name, `layer3` is not found.

    Cause: readers of one tensor have a range each.
    Command: `quantize_model(…, example_inputs=…)` shares by data flow.
    """
    assert {len(scales) for scales in readers_of_one_tensor(Block).values()} == {1}


def test_sharing_in_another_backbone():
    """NVIDIA-AI-IOT/Lidar_AI_Solution#275: the recipe fits ResNet-50, another backbone fails.

    Cause: a list of attribute names decides.
    Command: `quantize_model(…, example_inputs=…)` shares by data flow.
    """

    class Parallel(Block):
        def forward(self, x):
            return self.first(x) + self.second(x)

    assert {len(scales) for scales in readers_of_one_tensor(Parallel).values()} == {1}


def test_sparse_convolutions_are_quantized(encoders):
    """traveller59/spconv#571: torch.fx inserts no fake quantization at sparse convolutions.

    Cause: a leaf for torch.fx is not looked into.
    Command: `quantize_model` knows sparse modules.
    """
    model = encoders.encoder()
    layers = [m for m in model.modules() if isinstance(m, QuantSparseConvolution)]
    assert len(layers) == 11
    assert all(m._input_quantizer.amax is not None for m in layers)
    ops = [step.op for step in simulate(model, encoders.frame(0)).steps]
    assert ops.count("sparse_conv") == 11


def test_blocks_with_a_forward_of_their_own(encoders):
    """traveller59/spconv#626: a residual block cannot be traced, and stays float unnoticed.

    Cause: the block's forward cannot be traced.
    Command: `quantize_model` lists what it quantized and passed over.
    """
    net = encoders.folded(encoders.Encoder((8, 12)), encoders.frame(0))
    result = quantize_model(net, example_inputs=encoders.frame(0))
    paths = [path for path, m in result.model.named_modules()
             if isinstance(m, QuantSparseConvolution)]  # fmt: skip
    assert sum(".conv1" in path or ".conv2" in path for path in paths) == 8


def test_rows_in_another_order(encoders, tmp_path):
    """traveller59/spconv#638: a sparse result differs from PyTorch's, but not in every row.

    Cause: rows are compared by place, not by voxel.
    Command: `compare_sparse_onnx` matches rows by their voxels.
    """
    model, (features, coords, batch) = encoders.hourglass(), encoders.frame(0)
    file = export_sparse_onnx(model, encoders.frame(0), tmp_path / "a.onnx")
    order = torch.randperm(len(coords))
    loaded = load_sparse_onnx(file.path)
    turned = loaded(features[order], coords[order], batch)
    straight = loaded(features, coords, batch)
    assert not torch.equal(turned.features, straight.features)
    rows = compare_sparse_onnx(loaded, model, (features[order], coords[order], batch))
    assert [row.node for row in rows if row.different] == []


def test_the_other_order_of_axes(encoders, tmp_path):
    """NVIDIA-AI-IOT/Lidar_AI_Solution#282: the same weights, and other features at every layer.

    Cause: the file is in x, y, z and the model in z, y, x.
    Command: `export_sparse_onnx(order=…)`, `compare_sparse_onnx(reversed_axes=True)`.
    """
    model, frame = encoders.encoder(), encoders.frame(0)
    file = export_sparse_onnx(model, frame, tmp_path / "a.onnx", order="zyx")
    loaded = load_sparse_onnx(file.path)
    rows = compare_sparse_onnx(loaded, model, frame, reversed_axes=True)
    assert [row.node for row in rows if row.different] == []
    with pytest.raises(ValueError, match=r"coordinate|voxels|grid"):
        compare_sparse_onnx(loaded, model, frame)


def test_counts_of_a_histogram():
    """NVIDIA/TensorRT#2757: HistogramCalibrator counts in float32: a percentile of 316, not 1.

    Cause: counts beyond 2²⁴ in float32.
    Command: `HistogramCalibrator` counts in int64.
    """
    collector = calib.HistogramCalibrator(8, None, False)
    collector.collect(torch.arange(2048).float())
    collector.collect(torch.full((22_000_000,), 0.5))  # beyond 2²⁴ in one bin
    assert 0 < float(collector.compute_amax("percentile", percentile=99.99)) <= 1


def test_an_outlier_in_a_histogram():
    """NVIDIA/TensorRT#4023: entropy calibration is very slow: the histogram grows with outliers.

    Cause: bins are added for as long as values grow.
    Command: `HistogramCalibrator`: bins are bounded.
    """
    collector = calib.HistogramCalibrator(8, None, False)
    collector.collect(torch.linspace(0, 0.05, 1000))
    collector.collect(torch.tensor([50.0]))
    assert 0 < float(collector.compute_amax("entropy")) <= 50
    held = [v for v in vars(collector).values() if isinstance(v, torch.Tensor)]
    assert all(value.numel() < 100_000 for value in held)


def test_a_range_of_zeros():
    """NVIDIA/TensorRT#1826: calibration gives scales of 0, and TensorRT does not parse the file.

    Cause: a dead layer, or frames that miss it.
    Command: `calibrate` warns: dead, and gives the range 1, which every engine takes.
    """
    x = torch.zeros(1, 2, 4, 4)
    net = quantize_model(nn.Sequential(nn.Conv2d(2, 2, 1)).eval(), example_inputs=x).model
    assert "0._input_quantizer: dead: every value it saw was zero" in str(calibrate(net, [x]))
    assert net[0]._input_quantizer.amax == 1
    torch.testing.assert_close(simulate(net, x)(x), net(x), atol=1e-4, rtol=0)
