"""What has no form in the dialect is refused by module, and nothing is written."""

import copy

import pytest
import torch
from torch import nn

from bevquant_export import export_sparse_onnx, with_half_constants
from bevquant_qnn import QuantConfig
from bevquant_quantizers import calibrate


@pytest.fixture
def refuse(nets, tmp_path):
    def check(model, message, **settings):
        with pytest.raises(ValueError, match=message):
            export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx", **settings)
        assert list(tmp_path.iterdir()) == []

    return check


def small(nets, *members, config=None):
    """A stem, then `members` on its sparse tensor; calibrated."""
    torch.manual_seed(0)

    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nets.spconv.SubMConv3d(5, 8, 3, indice_key="a")
            self.rest = nets.spconv.SparseSequential(*members)

        def forward(self, features, coords, batch_size):
            x = nets.spconv.SparseConvTensor(features, coords, [12, 10, 9], batch_size)
            return self.rest(self.stem(x))

    return nets.calibrated(Small(), [nets.frame(0)], config)


@pytest.mark.parametrize("constant", ["weight", "bias"])
def test_overflow_of_half_precision_names_the_layer(nets, refuse, constant):
    model = nets.encoder()
    layer = model.encoder_layers.encoder_layer2[0].conv1
    with torch.no_grad():
        getattr(layer, constant).view(-1)[3] = 7e4
    layer._weight_quantizer.amax = torch.full_like(layer._weight_quantizer.amax, 7e4)
    refuse(model, rf"encoder_layers\.encoder_layer2\.0\.conv1\.{constant}: .*70000.*float16")


def test_overflow_in_a_layer_that_is_not_quantized(nets, refuse):
    model = nets.switch_off(nets.encoder(), "conv_input.0")
    model.conv_input[0].weight.data[0, 0, 0, 0, 0] = -1e5
    refuse(model, r"conv_input\.0\.weight: .*100000 overflows float16")
    with pytest.raises(ValueError, match=r"conv_input\.0\.weight"):
        with_half_constants(model)


def test_values_beyond_half_precision_in_a_later_frame(nets, refuse, tmp_path):
    member = nets.spconv.SubMConv3d(8, 8, 3, indice_key="a")
    model = nets.switch_off(small(nets, member), "stem")
    features, coords, batch_size = nets.frame(0)
    calibrate(model, [nets.frame(0), (1e6 * features, coords, batch_size)])
    refuse(model, r"read the tensor 'stem:float' with a range of .*, beyond float16")
    refuse(
        nets.switch_off(copy.deepcopy(model), "rest.0"),
        r"stem: its values reach .* in a calibration frame, beyond float16",
    )
    calibrate(model, [nets.frame(0), nets.frame(1)])
    export_sparse_onnx(model, nets.frame(0), tmp_path / "b.onnx")


@pytest.mark.parametrize("level", [60000.0, 500.0])
def test_a_sum_beyond_half_precision(nets, tmp_path, level):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nets.spconv.SubMConv3d(5, 5, 3, padding=1, indice_key="a", bias=False)
            self.b = nets.spconv.SubMConv3d(5, 5, 3, padding=1, indice_key="a", bias=False)
            for conv in (self.a, self.b):
                conv.weight.data.zero_()
                conv.weight.data[:, 1, 1, 1, :] = torch.eye(5)

        def forward(self, features, coords, batch_size):
            x = nets.spconv.SparseConvTensor(features, coords, [12, 10, 9], batch_size)
            made = self.b(self.a(x))
            return made.replace_feature(made.features + made.features)

    frame = nets.frame(0)
    model = nets.calibrated(Residual(), [frame])
    features, coords, batch_size = frame
    calibrate(model, [frame, (features / features.abs().max() * level, coords, batch_size)])
    nets.switch_off(model, "b")
    if level < 32752:
        export_sparse_onnx(model, frame, tmp_path / "a.onnx")
        return
    with pytest.raises(ValueError, match=r"may reach 1(19|20)\d+, by its operands"):
        export_sparse_onnx(model, frame, tmp_path / "a.onnx")


def test_factors_that_half_precision_makes_zero(nets, refuse):
    model = nets.switch_off(nets.encoder(), "conv_input.0")
    model.conv_input[0].weight.data.mul_(1e-7)
    refuse(model, r"conv_input\.0\.weight: the largest value is .* too few digits")


def test_a_range_below_half_precision(nets, refuse):
    model = nets.encoder()
    layer = model.conv_out[0]
    layer.bias.data.zero_()
    layer.weight.data.mul_(1e-6)
    layer._weight_quantizer.amax = layer._weight_quantizer.amax * 1e-6
    refuse(model, r"conv_out\.0\.weight: channel \d+ has a range of .*too small for float16")


def test_not_a_number(nets, refuse):
    model = nets.encoder()
    model.conv_out[0].bias.data[2] = float("nan")
    refuse(model, r"conv_out\.0\.bias: a value is NaN")


def test_uncalibrated_quantizers_are_listed(nets, refuse):
    model = nets.encoder()
    del model.conv_out[0]._input_quantizer._amax
    refuse(model, r"conv_out\.0\._input_quantizer")


def test_readers_with_several_ranges(nets, refuse):
    model = nets.encoder()
    block = model.encoder_layers.encoder_layer1[0]
    own = copy.deepcopy(block.conv1._input_quantizer)
    own.amax = float(own.amax) * 2
    block.conv1._input_quantizer = own
    refuse(model, r"encoder_layer1\.0\.conv1.*different ranges.*one range per tensor")


def test_narrow_integers(nets, refuse):
    model = small(nets, config=QuantConfig(narrow_range=True))
    refuse(model, r"stem .*narrow_range=False")


def test_bits(nets, refuse):
    refuse(small(nets, config=QuantConfig(num_bits=4)), r"stem .*4 bits.*num_bits=8")


def test_half_quantized_layers(nets, refuse):
    model = nets.encoder()
    model.conv_out[0]._weight_quantizer.disable()
    refuse(model, r"conv_out\.0 quantizes its input or its weight, not both")


def test_relu6(nets, refuse):
    refuse(small(nets, nn.ReLU6()), r"stem .*ReLU6")


def test_other_activations(nets, refuse):
    refuse(
        small(nets, nn.LeakyReLU(0.1)),
        r"rest\.0 \(leaky_relu\) \(.*test_sparse_refusals\.py:\d+\) has no operator",
    )


@pytest.mark.filterwarnings("ignore:Using a non-tuple")
def test_batch_norm_that_was_not_folded(nets, refuse):
    model = small(nets, nets.spconv.SubMConv3d(8, 8, 3, indice_key="a"), nets.spconv.ToDense())
    model.rest.add_module("norm", nn.BatchNorm3d(8).eval())
    refuse(model, r"rest\.norm \(batch_norm\).*fuse_model folds .*on a dense grid has no form")


def test_transposed_convolution(nets, refuse):
    up = nets.spconv.SparseConvTranspose3d(8, 8, 2, 2, indice_key="up")
    refuse(small(nets, up), r"rest\.0 .*transposed.*SparseInverseConv3d")


def test_one_key_for_different_pairs(nets, refuse):
    model = small(nets, nets.spconv.SubMConv3d(8, 8, (1, 3, 3), indice_key="b"))
    model.rest[0].indice_key = "a"
    refuse(model, r"indice_key='a' holds the rulebook", verify=False)


def test_training_mode(nets, refuse):
    refuse(nets.encoder().train(), "training mode")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dialect": "tensorrt"}, "dialect='tensorrt'"),
        ({"order": "yxz"}, "order='yxz'"),
        ({"model_order": ""}, "model_order=''"),
        ({"head_room": 0.5}, "head_room=0.5"),
        ({"head_room": float("nan")}, "head_room=nan"),
    ],
)
def test_settings(nets, refuse, settings, message):
    refuse(nets.encoder(), message, **settings)


def test_folder_that_is_not_there(nets, tmp_path):
    with pytest.raises(ValueError, match=r"folder .* does not exist"):
        export_sparse_onnx(nets.encoder(), nets.frame(0), tmp_path / "no" / "a.onnx")
    with pytest.raises(ValueError, match="it is a folder"):
        export_sparse_onnx(nets.encoder(), nets.frame(0), tmp_path)


@pytest.mark.parametrize("dialect", ["libspconv", "portable"])
def test_a_model_in_half_precision(nets, tmp_path, dialect):
    """It was refused for a conversion, or for quantizers of 8 bits."""
    model = nets.encoder().half()
    features, coords, batch_size = nets.frame(0)
    with pytest.raises(ValueError, match=r"is torch.float16; expected float32.*model.float\(\)"):
        export_sparse_onnx(
            model, (features.half(), coords, batch_size), tmp_path / "a.onnx", dialect=dialect
        )


def test_not_a_module(tmp_path):
    with pytest.raises(TypeError, match="expected a module, got dict"):
        export_sparse_onnx({}, (), tmp_path / "a.onnx")


def test_a_dense_layer_behind_the_grid(nets, refuse):
    class WithHead(nn.Module):
        def __init__(self, encoder):
            super().__init__()
            self.encoder, self.head = encoder, nn.Conv2d(32, 4, 1)

        def forward(self, features, coords, batch_size):
            return self.head(self.encoder(features, coords, batch_size))

    where = r"head \(conv2d\) \(.*test_sparse_refusals\.py:\d+\) has no operator in the dialect"
    model = WithHead(nets.encoder()).eval()
    refuse(model, rf"{where} libspconv.*dialect='portable' has pooling.*export_detector")
    refuse(model, rf"{where} portable.*pooling.*Instead, export_detector", dialect="portable")


def test_frames_without_voxels_say_no_bound(nets, tmp_path):
    model = nets.calibrated(nets.encoder(), [nets.frame(0)])
    features, coords, batch_size = nets.frame(0)
    nothing = (features[:0], coords[:0], batch_size)
    with pytest.raises(ValueError, match=r"conv_input.*made no voxel.*output_bound"):
        export_sparse_onnx(model, nothing, tmp_path / "a.onnx")
    export_sparse_onnx(model, nothing, tmp_path / "a.onnx", batches=[nets.frame(0)])


def test_coordinates_that_are_rounded_for_the_first_layer_alone(nets, refuse):
    spconv = nets.spconv

    class Rounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = spconv.SubMConv3d(5, 8, 3), spconv.SubMConv3d(8, 4, 3)

        def forward(self, features, coords, batch_size):
            near, grid = coords.half().int(), list(nets.GRID)
            x = self.first(spconv.SparseConvTensor(features, near, grid, batch_size))
            return self.second(spconv.SparseConvTensor(x.features, coords, grid, batch_size))

    torch.manual_seed(0)
    model = nets.calibrated(Rounded(), [nets.frame(0)])
    refuse(model, "'coords' through a type that rounds", dialect="portable")
