"""Plan and estimate of a prepared graph: the layers by name, all entries of a batch counted."""

from __future__ import annotations

import torch
from torch import nn

from bevquant_hybrid.march import March, set_march
from bevquant_hybrid.quantization import (
    DeQuantStub,
    QuantStub,
    convert_fx,
    fuse_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
)
from bevquant_hybrid_tools.by_layer import estimate_by_layer, node_labels, plan_by_layer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv2(self.conv1(x)) + x)


def test_layers_have_their_names_and_all_entries_count() -> None:
    set_march(March.BAYES)
    net = nn.Sequential(QuantStub(), Block(), nn.Conv2d(4, 2, 1), DeQuantStub()).eval()
    hybrid = {"hybrid": True, "hybrid_dict": {"module_name": ["2"]}}
    fused = fuse_fx(net)
    counting = prepare_calibration_fx(fused, {"": get_default_calib_qconfig()}, **hybrid).eval()
    counting(torch.randn(1, 4, 8, 8))
    fake = prepare_qat_fx(counting, {"": get_default_qat_qconfig()}, **hybrid).eval()
    shapes = [(6, 4, 8, 8)]

    labels = node_labels(fake, "neck.")
    told = [(v.path, v.operator) for v in labels.values() if not v.operator.endswith("Stub")]
    assert told[0] == ("neck.1.conv1", "Conv2d")
    assert told[1][0] == "neck.1.conv2"
    assert "add" in told[1][1]  # the sum is computed with the layer before it
    assert told[-1] == ("neck.2", "Conv2d")

    plan = plan_by_layer(fake, "bayes", shapes, prefix="neck.", on_cpu={"2": "a user said so"})
    nodes = {node.path: node for node in plan.nodes if node.kind == "operator"}
    assert (nodes["neck.1.conv1"].place, nodes["neck.1.conv1"].shape) == ("BPU", (6, 4, 8, 8))
    assert (nodes["neck.2"].place, nodes["neck.2"].reason) == ("CPU", "a user said so")
    names = {node.name for node in plan.nodes}
    assert all(names.issuperset(node.inputs) for node in plan.nodes)

    layers, violations = estimate_by_layer(convert_fx(fake), labels, "bayes", shapes)
    assert [layer.path for layer in layers] == ["neck.1.conv1", "neck.1.conv2"]
    assert layers[0].operations == 6 * 64 * 4 * 4 * 9 * 2
    assert violations == ()
