"""What the file computes, against the integer model of the same encoder: no value differs."""

import pytest
import torch
from torch import nn

from bevquant_export import (
    export_sparse_onnx,
    load_sparse_onnx,
    lower_to_portable,
    with_half_constants,
)
from bevquant_quantizers import quantization_disabled


def both(nets, model, path, inputs, **settings):
    """``(output, dump, wanted output, wanted records)``."""
    example = nets.frame(0)
    export_sparse_onnx(model, example, path, **settings)
    reference = nets.simulate(with_half_constants(model), example)
    return *load_sparse_onnx(path).run(*inputs), *reference.run(inputs)


@pytest.mark.parametrize(
    "off",
    [
        (),
        ("conv_input.0",),
        ("encoder_layers.encoder_layer1.0.conv1",),
        ("encoder_layers.encoder_layer1.0.conv2", "conv_out.0"),
    ],
    ids=["all int8", "first fp16", "block input fp16", "conv2 and last fp16"],
)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_every_layer_of_the_encoder(nets, tmp_path, off, batch_size):
    model = nets.switch_off(nets.encoder(), *off)
    inputs = nets.frame(7, batch_size=batch_size)
    out, dump, wanted, records = both(nets, model, tmp_path / "a.onnx", inputs)
    assert torch.equal(out, wanted)
    found = nets.mismatches(dump, records)
    assert len(found) == 11 + 4  # convolutions and sums
    assert set(found.values()) == {0}


def test_inverse_convolutions_return_to_the_voxels(nets, tmp_path):
    inputs = nets.frame(3)
    out, dump, wanted, records = both(nets, nets.hourglass(), tmp_path / "a.onnx", inputs)
    assert torch.equal(out.features, wanted.features)
    assert torch.equal(out.indices, inputs[1])
    assert nets.mismatches(dump, records) == dict.fromkeys([f"conv{i}" for i in range(5)], 0)


def test_a_convolution_of_one_cell_keeps_the_rows_and_one_of_its_stride_does_not(nets, tmp_path):
    inputs = nets.frame(3)
    out, dump, wanted, records = both(nets, nets.small_kernels(), tmp_path / "a.onnx", inputs)
    assert len(dump["conv1"].value) == len(inputs[0]) > len(out.features)
    assert torch.equal(out.features, wanted.features)
    assert torch.equal(out.indices, wanted.indices)
    assert nets.mismatches(dump, records) == dict.fromkeys([f"conv{i}" for i in range(3)], 0)


def uneven(nets):
    """Another stride, padding and dilation along each axis."""

    class Uneven(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nets.spconv.SparseConv3d(5, 4, (3, 1, 3), (1, 2, 3), (0, 1, 3), (2, 1, 1))

        def forward(self, features, coords, batch_size):
            tensor = nets.spconv.SparseConvTensor(features, coords, list(nets.GRID), batch_size)
            return self.conv(tensor).dense()

    return nets.calibrated(Uneven().eval(), [nets.frame(0)])


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # spconv's own
@pytest.mark.parametrize("tail", ["xyz", "none", "uneven"])
def test_reversed_coordinates_give_the_same_grid(nets, tmp_path, tail):
    model = uneven(nets) if tail == "uneven" else nets.encoder(tail=tail)
    features, coords, _ = nets.frame(5)
    for order in ("xyz", "zyx"):
        export_sparse_onnx(model, nets.frame(0), tmp_path / f"{order}.onnx", order=order)
    plain = load_sparse_onnx(tmp_path / "xyz.onnx")(features, coords)
    turned = load_sparse_onnx(tmp_path / "zyx.onnx")
    assert torch.equal(turned(features, coords[:, [0, 3, 2, 1]]), plain)
    assert next(n for n in turned.nodes if n.name == "scatter0").format == "zyx"


def test_zyx_model_to_xyz_file(nets, tmp_path):
    model = nets.encoder()
    features, coords, _ = nets.frame(5)
    path = tmp_path / "a.onnx"
    export_sparse_onnx(model, nets.frame(0), path, model_order="zyx", order="xyz")
    wanted = nets.simulate(with_half_constants(model), nets.frame(0))(features, coords, 1)
    assert torch.equal(load_sparse_onnx(path)(features, coords[:, [0, 3, 2, 1]]), wanted)


def test_floats_are_those_of_the_model(nets, tmp_path):
    model = with_half_constants(nets.encoder())
    for module in model.modules():
        if hasattr(module, "_weight_quantizer"):
            module.weight.data.copy_(module.quantized_weight().half().float())
    inputs = nets.frame(4)
    export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx")
    made = load_sparse_onnx(tmp_path / "a.onnx")(*inputs, mode="float")
    with quantization_disabled(model), torch.no_grad():
        torch.testing.assert_close(made, model(*inputs), rtol=1e-3, atol=1e-3)


def test_quantized_differs_from_float(nets, tmp_path):
    """The two modes are two computations."""
    export_sparse_onnx(nets.encoder(), nets.frame(0), tmp_path / "a.onnx")
    model = load_sparse_onnx(tmp_path / "a.onnx")
    exact, rounded = model(*nets.frame(4), mode="float"), model(*nets.frame(4))
    error = float((exact - rounded).norm() / exact.norm())
    assert 1e-4 < error < 0.1


def test_more_voxels_than_the_bound_is_an_error(nets, tmp_path):
    path = tmp_path / "a.onnx"
    written = export_sparse_onnx(nets.encoder(), nets.frame(0), path, head_room=1.0)
    assert {layer.output_bound for layer in written.layers} == {1000, None}
    full = nets.frame(0, share=1.0)
    assert len(full[0]) == 1080
    with pytest.raises(ValueError, match=r"conv0: a frame has 1080 output voxels.*head_room"):
        load_sparse_onnx(path)(*full)
    lower_to_portable(path, tmp_path / "any.onnx")  # which takes any number
    anywhere = load_sparse_onnx(tmp_path / "any.onnx")(*full)
    export_sparse_onnx(nets.encoder(), nets.frame(0), path, batches=[full])
    assert torch.equal(load_sparse_onnx(path)(*full), anywhere)


def test_half_constants_are_all_that_changes(nets):
    model = nets.encoder()
    rounded = with_half_constants(model)
    for (name, old), (_, new) in zip(
        model.named_parameters(), rounded.named_parameters(), strict=True
    ):
        wanted = old.half().float() if name.endswith("bias") else old
        assert torch.equal(new, wanted), name
        assert new is not old


@pytest.mark.parametrize("quantized", [False, True], ids=["float model", "all switched off"])
def test_float_models_become_fp16_files(nets, tmp_path, quantized):
    torch.manual_seed(0)
    model = nets.encoder() if quantized else nets.folded(nets.Encoder(), nets.frame(0))
    path, inputs = tmp_path / "a.onnx", nets.frame(4)
    with quantization_disabled(model), torch.no_grad():
        written = export_sparse_onnx(model, nets.frame(0), path)
        wanted = with_half_constants(model)(*inputs)
    assert {(layer.precision, layer.output_precision) for layer in written.layers} == {
        ("fp16", "fp16")
    }
    loaded = load_sparse_onnx(path)
    torch.testing.assert_close(loaded(*inputs), wanted, rtol=1e-4, atol=1e-5)
    assert torch.equal(loaded(*inputs), loaded(*inputs, mode="float"))


def test_a_model_that_takes_a_sparse_tensor(nets, tmp_path):
    class Inner(torch.nn.Module):
        def __init__(self, encoder):
            super().__init__()
            self.first, self.second = encoder.conv_input, encoder.encoder_layers

        def forward(self, x):
            return self.second(self.first(x))

    def tensor(seed):
        features, coords, batch_size = nets.frame(seed)
        return nets.spconv.SparseConvTensor(features, coords, [12, 10, 9], batch_size)

    model = Inner(nets.encoder()).eval()
    export_sparse_onnx(model, tensor(0), tmp_path / "a.onnx")
    wanted = nets.simulate(with_half_constants(model), tensor(0))(tensor(6))
    made = load_sparse_onnx(tmp_path / "a.onnx")(*nets.frame(6))
    assert torch.equal(made.features, wanted.features)
    assert torch.equal(made.indices, wanted.indices)
