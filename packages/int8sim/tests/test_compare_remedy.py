"""A comparison of a useless model says which layers to leave in float."""

from __future__ import annotations

import torch
from torch import nn

from bevquant_int8sim import compare
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


def test_compare_names_the_layer_whose_float_form_repairs_the_result() -> None:
    torch.manual_seed(0)
    sizes = (8, 8, 8, 64, 64)
    net = nn.Sequential(*map(nn.Linear, sizes[:-1], sizes[1:])).eval()
    x = torch.randn(64, 8)
    for spoiled in (False, True):
        if spoiled:  # the second layer reads a large channel that it does not use
            with torch.no_grad():
                net[0].weight[0] *= 3000
                net[1].weight[:, 0] = 0
        model = quantize_model(net, example_inputs=x).model
        calibrate(model, [x], method="max")
        said = [note for note in compare(net, model, [x]).notes if "NOT usable" in note]
        assert ["dict.fromkeys(['1'], \"float\")" in note for note in said] == [True] * spoiled
