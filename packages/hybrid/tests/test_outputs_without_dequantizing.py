"""Indices, and what filter picks: outputs that are no quantized values, in every stage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bevquant_hybrid as horizon
from bevquant_hybrid.quantization import (
    QuantStub,
    convert,
    get_default_qat_qconfig,
    prepare_qat,
    prepare_qat_fx,
    set_fake_quantize,
)

OUTPUTS = {
    "torch.argmax": lambda x: torch.argmax(x, 1),
    "Tensor.argmax": lambda x: x.argmax(1, keepdim=True),
    "functional.argmax": lambda x: horizon.functional.argmax(x, 1),
    "index of max": lambda x: torch.max(x, 1)[1],
    "filter": lambda x: horizon.functional.filter(x, threshold=0.1, idx_range=(1, 3)),
}


class Net(nn.Module):
    def __init__(self, output) -> None:
        super().__init__()
        self.quant, self.conv = QuantStub(scale=1 / 128), nn.Conv2d(2, 4, 1)
        self.output = output

    def forward(self, x: torch.Tensor):
        return self.output(self.conv(self.quant(x)))


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("name", OUTPUTS)
def test_plain_results_in_every_stage(name: str, traced: bool) -> None:
    model = Net(OUTPUTS[name])
    model.qconfig = get_default_qat_qconfig()
    made = prepare_qat_fx(model) if traced else prepare_qat(model)
    x = torch.rand(2, 2, 8, 8)
    made(x)
    set_fake_quantize(made, "validation")
    scores = made.conv(made.quant(x)).dequantize()
    fixed = convert(made)
    integer_scores = fixed.conv(fixed.quant(x)).dequantize()
    for result, values in ((made(x), scores), (fixed(x), integer_scores)):
        flat = torch.utils._pytree.tree_leaves(result)
        expected = torch.utils._pytree.tree_leaves(OUTPUTS[name](values))
        assert all(type(item) is torch.Tensor for item in flat)
        assert all(torch.equal(a, b) for a, b in zip(flat, expected, strict=True))


def test_filter_keeps_the_pixels_above_the_threshold() -> None:
    scores, boxes = torch.rand(3, 5, 4, 6), torch.randn(3, 2, 4, 6)
    found = horizon.nn.functional.filter(scores, boxes, threshold=0.9, idx_range=(2, 5))
    assert len(found) == 3
    for sample, (largest, channel, pixels, picked, box) in enumerate(found):
        places = [
            (row, column)
            for row in range(4)
            for column in range(6)
            if scores[sample, 2:, row, column].max() > 0.9
        ]
        assert pixels.tolist() == [list(place) for place in places]
        for i, (row, column) in enumerate(places):
            assert largest[i] == scores[sample, 2:, row, column].max()
            assert channel[i] == scores[sample, 2:, row, column].argmax()
            assert torch.equal(picked[i], scores[sample, :, row, column])
            assert torch.equal(box[i], boxes[sample, :, row, column])
    with pytest.raises(ValueError, match="of the same N, H and W"):
        horizon.functional.filter(scores, boxes[:1], threshold=0.5)
