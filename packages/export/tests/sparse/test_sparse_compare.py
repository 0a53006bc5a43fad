"""The comparison counts what differs, where it starts, and refuses another model's file."""

import pytest
import torch

from bevquant_export import compare_sparse_onnx, export_sparse_onnx, load_sparse_onnx


@pytest.mark.parametrize("order", ["xyz", "zyx"])
def test_no_difference_in_either_order(nets, tmp_path, order):
    model = nets.switch_off(nets.encoder(), "encoder_layers.encoder_layer2.0.conv1")
    export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx", order=order)
    file = load_sparse_onnx(tmp_path / "a.onnx")
    inputs = nets.frame(8, batch_size=2)
    rows = compare_sparse_onnx(file, model, inputs, reversed_axes=order == "zyx")
    assert len(rows) == 11 + 4 + 1
    assert {row.form for row in rows} == {"int8", "float"}
    integers = [row for row in rows if row.form == "int8"]
    assert len(integers) > 10
    assert all(row.elements > 0 for row in rows)
    if order == "xyz":
        assert {row.different for row in rows} == {0}
    else:  # float sums run over the kernel in another order
        assert max(row.largest for row in rows if row.form == "float") < 1e-4


def test_differences_start_at_the_layer_that_differs(nets, tmp_path):
    model = nets.encoder()
    export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx")
    changed = model.encoder_layers.encoder_layer1[1].conv2
    changed.bias.data[3] += 0.5
    file = load_sparse_onnx(tmp_path / "a.onnx")
    rows = {row.node: row for row in compare_sparse_onnx(file, model, nets.frame(0))}
    assert [rows[f"conv{i}"].different for i in range(4)] == [0] * 4
    first = rows["conv4"]
    assert first.path == "encoder_layers.encoder_layer1.1.conv2"
    step = float(model.encoder_layers.encoder_layer1[1].quant_add._input_quantizer.amax) / 127
    # One channel of eight, moved by 0.5 within a step.
    assert 0 < first.different <= first.elements // 8
    assert abs(first.largest - 0.5 / step) <= 1
    assert rows["output"].different > 0


def test_a_sparse_result_and_a_sparse_input(nets, tmp_path):
    model = nets.hourglass()
    export_sparse_onnx(model, nets.frame(0), tmp_path / "a.onnx", order="zyx")
    file = load_sparse_onnx(tmp_path / "a.onnx")
    rows = compare_sparse_onnx(file, model, nets.frame(1), reversed_axes=True)
    assert [row.node for row in rows] == ["conv0", "conv1", "conv2", "conv3", "conv4", "output"]
    assert {row.different for row in rows} == {0}


def test_the_file_of_another_model(nets, tmp_path):
    export_sparse_onnx(nets.hourglass(), nets.frame(0), tmp_path / "a.onnx")
    file = load_sparse_onnx(tmp_path / "a.onnx")
    with pytest.raises(ValueError, match=r"conv0 makes .* 'stem\.0'; is the file that of this"):
        compare_sparse_onnx(file, nets.encoder(), nets.frame(0))
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        compare_sparse_onnx(file, nets.hourglass(), torch.zeros(1, 5))
