"""Batches as loaders give them, from folding to the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bevquant_export import export_float_onnx
from bevquant_export.dense import compare_qdq_onnx, export_qdq_onnx
from bevquant_fusion import fuse_model
from bevquant_int8sim import compare, simulate
from bevquant_qnn import QatTrainer, compare_layers, quantize_model
from bevquant_quantizers import calibrate


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, image: Any) -> Any:
        return self.norm(self.conv(image)).relu()


def named(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"image": batch[0], "label": batch[1]}


@pytest.mark.parametrize("form", [list, tuple, named])
def test_one_batch_goes_through_every_step(form: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(4, 3, 6, 6), torch.arange(4))
    batches = [form(batch) for batch in DataLoader(data, batch_size=2)]
    net, first = Named().eval(), batches[0]
    fused = fuse_model(net, first)
    assert fused.max_error is not None
    quantized = quantize_model(fused.model, example_inputs=first).model
    calibrate(quantized, (batch for batch in batches))
    integer = simulate(quantized, first)
    for given in (quantized, integer):
        table = compare(fused.model, given, (batch for batch in batches))
        assert not table.wrong
    assert compare_layers(fused.model, quantized, batches)
    file = export_qdq_onnx(quantized, first, tmp_path / "net.onnx", "onnxruntime")
    assert list(file.inputs.values()) == [(2, 3, 6, 6)]
    assert not any(row.unexplained for row in compare_qdq_onnx(file, integer, batches[1]))


def test_a_loader_of_single_tensors_is_compared() -> None:
    loader = DataLoader(TensorDataset(torch.randn(4, 3, 6, 6)), batch_size=2)
    (first,) = next(iter(loader))
    quantized = quantize_model(Named().eval(), example_inputs=first).model
    calibrate(quantized, loader)
    assert not compare(quantized, simulate(quantized, first), loader).wrong


@pytest.mark.parametrize("form", [list, tuple, named])
def test_a_float_file_takes_the_image_of_a_batch(form: Any, tmp_path: Path) -> None:
    batch = form([torch.randn(2, 3, 6, 6), torch.arange(2)])
    net = Named().eval()
    file = export_float_onnx(net, batch, tmp_path / "net.onnx", frames=[batch], half=True)
    assert file.inputs == {"image": (2, 3, 6, 6)}


@pytest.mark.parametrize("form", [list, tuple, named])
def test_training_begins_with_the_images_of_batches(form: Any) -> None:
    image = torch.randn(2, 3, 6, 6)
    quantized = quantize_model(Named().eval(), example_inputs=image).model
    calibrate(quantized, [image])
    trainer = QatTrainer(quantized, lambda sample: [quantized(image).sum()], lambda step: 0.1)
    trainer.begin([form([image, torch.arange(2)])])
    assert len(trainer.step(0)) == 1
