"""`quantize_model` leaves the float model alone unless it is asked to change it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import bevquant_qnn as qnn
from bevquant_graph import capture
from bevquant_quantizers import calibrate
from bevquant_sparse import use_bevquant_kernels


def net() -> nn.Sequential:
    made = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    made.append(nn.ModuleDict({"unused": made[0]}))  # one layer in two places
    made[4].forward = lambda x: x
    return made.eval()


def owned(model: nn.Module) -> set[int]:
    """Modules, and memory of tensors, that a model holds."""
    tensors = [*model.parameters(), *model.buffers()]
    return {*map(id, model.modules())} | {t.untyped_storage().data_ptr() for t in tensors}


@pytest.mark.parametrize("given", ["nothing", "inputs", "graph"])
def test_the_float_model_stays_float(given: str) -> None:
    model, x = net(), torch.randn(2, 3, 8, 8)
    kinds, wanted = [type(m) for m in model.modules()], model(x)
    options: dict[str, Any] = {} if given == "nothing" else {"example_inputs": x}
    if given == "graph":
        options["graph"] = capture(model, x)
    result = qnn.quantize_model(model, **options)
    calibrate(result.model, [x])
    assert [type(m) for m in model.modules()] == kinds
    assert torch.equal(model(x), wanted)
    assert not torch.equal(result.model(x), wanted)
    assert not owned(model) & owned(result.model)
    assert result.model[4]["unused"] is result.model[0]


def test_in_place_parameters_are_the_same_objects() -> None:
    model = net()
    before = dict(model.named_parameters())
    result = qnn.quantize_model(model, inplace=True)
    assert result.model is model
    assert all(model.get_parameter(name) is value for name, value in before.items())


def test_in_place_takes_a_model_that_cannot_be_copied() -> None:
    model = net()
    model[2].lock = threading.Lock()
    with pytest.raises(ValueError, match=r"'lock' .* of 2 \(ReLU\) cannot be copied.*inplace=True"):
        qnn.quantize_model(model)
    assert qnn.quantize_model(model, inplace=True).quantized


def test_hooks_and_kernels_of_sparse_layers_come_along() -> None:
    spconv = pytest.importorskip("spconv.pytorch")
    model = spconv.SparseSequential(spconv.SubMConv3d(2, 4, 3, indice_key="a")).eval()
    use_bevquant_kernels(model)
    seen: list[Any] = []
    model[0].register_forward_hook(lambda module, args, out: seen.append(module))
    indices = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2]], dtype=torch.int32)
    x = spconv.SparseConvTensor(torch.randn(2, 2), indices, [8, 8, 8], 1)
    made = qnn.quantize_model(model, example_inputs=x).model
    calibrate(made, [x])
    seen.clear()
    assert made(x).features.shape == (2, 4)
    assert seen
    assert not [module for module in seen if module in set(model.modules())]
    assert not owned(model) & owned(made)
