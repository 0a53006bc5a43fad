"""2:4 sparsity: the mask by a loop, kept by training, rounding and folding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevquant_fusion import fuse_model
from bevquant_qnn import (
    QatTrainer,
    QuantConfig,
    keep_sparsity,
    quantize_model,
    round_weights,
    sparsify,
)
from bevquant_quantizers import calibrate
from bevquant_sparse import WeightLayout, layout_of, permute_weight


def by_channel(module: Any) -> Tensor:
    """The weight as [out, in, …]."""
    weight, layout = module.weight.detach(), layout_of(module)
    if layout is WeightLayout.KCRS:
        return weight
    size = tuple(module.kernel_size)
    return permute_weight(weight, layout, WeightLayout.KCRS, kernel_size=size)


def is_sparse(module: Any) -> bool:
    """At most two of four, and half of all are zero."""
    weight = by_channel(module).movedim(1, -1)
    fours = (weight != 0).reshape(-1, 4).sum(1)
    return bool((fours <= 2).all()) and bool((fours == 2).any())


def by_loop(weight: Tensor) -> Tensor:
    """The two largest of four input channels, one place after the other."""
    kept = torch.zeros_like(weight)
    flat, out = weight.flatten(2), kept.flatten(2)
    for o in range(flat.shape[0]):
        for k in range(flat.shape[2]):
            for i in range(0, flat.shape[1], 4):
                four = [(-abs(float(flat[o, j, k])), j) for j in range(i, i + 4)]
                for _, j in sorted(four)[:2]:
                    out[o, j, k] = flat[o, j, k]
    return out.view_as(weight)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(8, 6, 3), nn.Conv1d(4, 3, 2), nn.Conv3d(4, 2, 2), nn.Conv2d(16, 8, 1, groups=2)],
    ids=["2d", "1d", "3d", "groups"],
)
def test_the_mask_is_that_of_a_loop(layer: Any) -> None:
    wanted = by_loop(layer.weight.detach())
    (row,) = sparsify(layer).layers
    assert torch.equal(layer.weight, wanted)
    assert row.zeros == 0.5
    assert 0.5 < row.energy < 1


def test_linear_layers_and_ties() -> None:
    layer = nn.Linear(8, 2)
    nn.init.ones_(layer.weight)
    (row,) = sparsify(layer).layers
    assert torch.equal(layer.weight, torch.tensor([[1.0, 1, 0, 0, 1, 1, 0, 0]] * 2))
    assert row.energy == 0.5


@pytest.mark.parametrize("quantized", [False, True])
def test_sparse_convolutions_along_input_channels(quantized: bool) -> None:
    spconv: Any = pytest.importorskip("spconv.pytorch")
    layer = spconv.SubMConv3d(4, 6, 3, padding=1, indice_key="a")
    net: Any = spconv.SparseSequential(layer)
    if quantized:
        net = quantize_model(net.eval()).model
    wanted = by_loop(by_channel(net[0]))
    assert [row.path for row in sparsify(net).layers] == ["0"]
    assert torch.equal(by_channel(net[0]), wanted)


def test_layers_that_stay_dense_are_named() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.ConvTranspose2d(8, 8, 2),
        nn.Conv2d(8, 4, 1),
    )
    report = sparsify(net, exclude=["3"])
    assert not report.layers
    assert dict(report.skipped) == {
        "0": "its 3 input channels are no multiple of 4",
        "1": "its 1 input channels are no multiple of 4",
        "2": "it is a transposed convolution, for which engines have no such form",
        "3": "excluded",
    }
    with pytest.raises(ValueError, match="no layer is named by exclude"):
        sparsify(net, exclude=["conv"])


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1),
    ).eval()  # fmt: skip


X = torch.randn(8, 4, 12, 12, generator=torch.Generator().manual_seed(0))


def layers_of(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


def test_training_keeps_the_zeros(net: Any) -> None:
    sparsify(net)
    model = quantize_model(fuse_model(net, X).model, example_inputs=X).model
    assert all(map(is_sparse, layers_of(model)))  # behind folding
    calibrate(model, [X], progress=False)
    before = copy.deepcopy(model.state_dict())
    trainer = QatTrainer(
        model, lambda i: [model(X[i % 8 :][:1]).square().mean()], lambda _: 1e-2, weight_decay=0.1
    )
    for step in range(4):
        trainer.step(step)
    trained = trainer.finish()
    assert all(map(is_sparse, layers_of(trained)))
    assert not torch.equal(trained.state_dict()["3.weight"], before["3.weight"])


def test_without_the_hook_training_fills_them(net: Any) -> None:
    sparsify(net)
    for keeps in (True, False):
        model = copy.deepcopy(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        if keeps:
            assert keep_sparsity(model, optimizer) == ("0", "3", "5")
        for _ in range(2):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            optimizer.step()
        assert all(map(is_sparse, layers_of(model))) is keeps


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_keeps_and_chooses_zeros(net: Any, bits: int) -> None:
    exact = fuse_model(net, X).model
    errors = {}
    for name in ("magnitude, nearest", "magnitude, gptq", "gptq chooses"):
        model = quantize_model(exact, QuantConfig(weight_bits=bits), X).model
        if "magnitude" in name:
            sparsify(model)
        calibrate(model, [X], progress=False)
        if "gptq" in name:
            round_weights(model, [X], correct_bias=False, sparsity="chooses" in name)
        assert all(map(is_sparse, layers_of(model))), name
        with torch.no_grad():
            errors[name] = float((model(X) - exact(X)).square().mean())
    assert errors["gptq chooses"] < 0.9 * errors["magnitude, nearest"]


def test_other_layers_are_rounded_as_before(net: Any) -> None:
    exact = fuse_model(net, X).model
    models = [quantize_model(exact, QuantConfig(weight_bits=4), X).model for _ in range(2)]
    for model, sparsity in zip(models, (False, True), strict=True):
        calibrate(model, [X], progress=False)
        round_weights(model, [X], sparsity=sparsity)
    assert not any(map(is_sparse, layers_of(models[0])))
    assert all(map(is_sparse, layers_of(models[1])))
