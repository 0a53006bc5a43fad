"""Other quantization settings than the default: the file still computes what the model does."""

import pytest
import torch
from torch import nn

from bevquant_export import compare_sparse_onnx, export_sparse_onnx, lint_onnx, load_sparse_onnx
from bevquant_qnn import QuantConfig, freeze


@pytest.fixture
def same(nets, tmp_path):
    """Write `model`, compare on a frame, return what was written."""

    def check(model, layers):
        written = export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx")
        rows = compare_sparse_onnx(load_sparse_onnx(written.path), model, nets.frame(9))
        assert len(rows) == layers + 1
        assert {row.different for row in rows} == {0}
        return written

    return check


def made(nets, **settings):
    torch.manual_seed(0)
    return nets.calibrated(nets.Encoder(), [nets.frame(0)], QuantConfig(**settings))


def test_one_range_for_a_whole_weight(nets, same):
    same(made(nets, weight_per_channel=False), 15)


def test_additions_that_are_not_quantized(nets, same):
    written = same(made(nets, quantize_add=False), 15)
    adds = [layer for layer in written.layers if layer.name.startswith("add")]
    assert [layer.precision for layer in adds] == ["fp16"] * 4
    # What an addition in fp16 reads is fp16, though a convolution reads it too.
    before = [layer for layer in written.layers if layer.path.endswith("conv2")]
    assert {layer.output_precision for layer in before} == {"fp16"}


def test_channels_without_weights(nets, same):
    model = nets.encoder()
    for path in ("conv_input.0", "encoder_layers.encoder_layer2.0.conv1"):
        layer = model.get_submodule(path)
        layer.weight.data[2] = 0
        layer._weight_quantizer.amax.view(-1)[2] = 0
    written = same(model, 15)
    ranges = load_sparse_onnx(written.path).nodes[0].weight_ranges
    assert len(ranges) == 8
    assert min(ranges) > 0


def test_layers_that_were_never_quantized(nets, same):
    written = same(made(nets, exclude=("encoder_layers.encoder_layer2.*",)), 15)
    inside = [layer for layer in written.layers if "encoder_layer2" in layer.path]
    convs = [layer.precision for layer in inside if layer.name.startswith("conv")]
    assert convs == ["fp16"] * 4
    assert len([text for text in written.floats if text.startswith(inside[0].path)]) == 1
    assert all(": fp16: its input or weight is not quantized" in text for text in written.floats)
    assert written.notes == ()
    bounds = [layer.output_bound for layer in written.layers if layer.output_bound]
    assert written.voxel_bound == max(bounds)


def test_frozen_models_give_the_same_file(nets, tmp_path):
    model = nets.encoder()
    export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx")
    freeze(model)
    export_sparse_onnx(model, nets.frame(0), tmp_path / "b.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


@pytest.mark.parametrize("order", ["xyz", "zyx"])
def test_the_linter_has_nothing_to_say(nets, tmp_path, order):
    """As NVIDIA's own files: the first convolution reads the features in fp16."""
    model = made(nets, quantize_first_layer=False)
    export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx", order=order)
    assert list(lint_onnx(tmp_path / "a.onnx", "libspconv")) == []


def test_the_model_is_left_alone(nets, tmp_path):
    model = nets.encoder()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx")
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_convolution_without_bias_gets_zeros(nets, same):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nets.spconv.SubMConv3d(5, 8, 3, bias=False, indice_key="a")
            self.b = nets.spconv.SparseConv3d(8, 4, 3, stride=2, bias=False)

        def forward(self, features, coords, batch_size):
            x = nets.spconv.SparseConvTensor(features, coords, [12, 10, 9], batch_size)
            return self.b(self.a(x))

    torch.manual_seed(0)
    written = same(nets.calibrated(Plain(), [nets.frame(0)]), 2)
    for node in load_sparse_onnx(written.path).nodes:
        assert node.bias.tolist() == [0.0] * node.out_channels
