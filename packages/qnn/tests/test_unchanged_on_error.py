"""Where `quantize_model` raises, the caller's model is as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bevquant_qnn as qnn
from bevquant_quantizers import quantization_disabled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Any, scale: float = 1.0, **kwargs: Any) -> Any:
        if kwargs.get("doubled"):
            x = x * 2
        return self.conv(x) * scale + x


class Net(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second, self.options = Block(), Block(), options
        self.head = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 2, 1))

    def forward(self, x: Any) -> Any:
        return self.head(self.second(self.first(x), **self.options))


def state(model: nn.Module) -> list[Any]:
    return [
        (path, module, type(module), dict(vars(module)), list(module._modules.items()))
        for path, module in model.named_modules()
    ]


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Any) -> Any:
        raise ValueError("does not run")


@pytest.mark.parametrize(
    "stage", ["replace_layers", "quantize_functional_ops", "observe", "float_layers"]
)
def test_an_error_at_any_stage_leaves_the_model_as_it_was(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = Net().eval(), torch.randn(1, 4, 6, 6)
    before, wanted = state(net), net(x)
    module = __import__("bevquant_qnn._quantize_model", fromlist=["_"])
    kept = getattr(module, stage)

    def late(*args: Any, **kwargs: Any) -> Any:
        kept(*args, **kwargs)
        raise RuntimeError("late")

    monkeypatch.setattr(module, stage, late)
    with pytest.raises(RuntimeError, match="late"):
        qnn.quantize_model(net, example_inputs=x, inplace=True)
    assert state(net) == before
    assert torch.equal(net(x), wanted)


def test_a_model_that_does_not_run_is_as_it_was() -> None:
    net = nn.Sequential(Block(), nn.Conv2d(4, 4, 1), Broken())
    before = state(net)
    with pytest.raises(ValueError, match="does not run") as caught:
        qnn.quantize_model(net, example_inputs=torch.randn(1, 4, 6, 6), inplace=True)
    assert state(net) == before
    assert "as it was before" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("options", [{}, {"doubled": True}, {"unused": 3}, {"scale": 2.0}])
def test_residual_blocks_that_take_further_arguments(options: dict[str, Any]) -> None:
    net, x = Net(**options).eval(), torch.randn(1, 4, 6, 6)
    wanted = copy.deepcopy(net)(x)
    result = qnn.quantize_model(net, example_inputs=x, inplace=True)
    with quantization_disabled(net):
        torch.testing.assert_close(net(x), wanted)
    added = {item.path for item in result.quantized}
    assert {"first.residual_quantizer", "second.residual_quantizer"} <= added
