"""Sizes that a forward asks about: the integer model is right for others, or refuses them."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_int8sim import IntegerModel, simulate
from bevquant_int8sim.model._save import MANIFEST, PROGRAM, TENSORS, manifest_text
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.shape[2] % 2 or x.shape[3] % 2:
            x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        return self.second(x.relu() if x.shape[2] > 9 else x)


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return torch.stack([y[:, :, i] * i for i in range(y.shape[2])], 2)


def simulated(net: nn.Module, x: Tensor) -> tuple[nn.Module, IntegerModel]:
    model: Any = quantize_model(net.eval(), example_inputs=x).model
    calibrate(model, [x])
    return model, simulate(model, x)


def saved(model: IntegerModel, folder: Path) -> IntegerModel:
    model.save(folder)
    return IntegerModel.load(folder)


@pytest.mark.parametrize("kind", ["made", "copied", "saved"])
def test_other_sizes_are_right_or_refused(kind: str, tmp_path: Path) -> None:
    model, made = simulated(Net(), torch.randn(2, 3, 8, 6))
    run = {
        "made": lambda: made,
        "copied": lambda: copy.deepcopy(saved(made, tmp_path / "model")),
        "saved": lambda: saved(made, tmp_path / "model"),
    }[kind]()
    y = torch.randn(1, 3, 6, 4)
    wanted = model(y).detach()
    torch.testing.assert_close(run(y), wanted, rtol=0, atol=float(wanted.abs().max()) / 20)
    for size, asked in (((7, 6), r"shape\[2\] % 2 == 0"), ((12, 10), r"shape\[2\] <= 9")):
        refused = (
            rf"input x: expected x\.{asked}, as the forward asks in .*test_size_guards\.py:\d+"
        )
        with pytest.raises(ValueError, match=refused):
            run(torch.randn(2, 3, *size))
        with pytest.raises(ValueError, match=refused):
            run.run(torch.randn(2, 3, *size))


def test_a_size_that_is_fixed_is_named_where_a_step_fails() -> None:
    _, made = simulated(Rows(), torch.randn(2, 3, 8, 6))
    with pytest.raises(ValueError, match=r"input x: expected size 8 in axis 2, .*\.py:\d+"):
        made(torch.randn(2, 3, 5, 6))


def test_a_model_that_an_earlier_version_saved_keeps_its_fixed_sizes(tmp_path: Path) -> None:
    _, made = simulated(Rows(), torch.randn(2, 3, 8, 6))
    made.save(tmp_path / "model")
    document = json.loads((tmp_path / "model" / PROGRAM).read_text())
    del document["guards"]
    document["fixed"] = {"x": [[2, 8]]}
    content = {
        PROGRAM: json.dumps(document).encode(),
        TENSORS: (tmp_path / "model" / TENSORS).read_bytes(),
    }
    (tmp_path / "model" / PROGRAM).write_bytes(content[PROGRAM])
    (tmp_path / "model" / MANIFEST).write_text(manifest_text(content))
    with pytest.raises(ValueError, match="input x: expected size 8 in axis 2"):
        IntegerModel.load(tmp_path / "model")(torch.randn(2, 3, 9, 6))


class Kept(nn.Module):
    """A branch on the number of rows that a mask keeps, or a pool of one window."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        kept = self.first(x)[n > 3]
        return self.second(kept * 2 if kept.shape[0] % 2 == 0 and kept.numel() else kept)


def test_rows_of_a_mask_that_the_forward_asks_about(tmp_path: Path) -> None:
    x = torch.randn(10, 3), torch.arange(10)
    model: Any = quantize_model(Kept().eval(), example_inputs=x).model
    calibrate(model, [x])
    made = simulate(model, x)
    for run in (made, saved(made, tmp_path / "model")):
        assert run(x[0], torch.arange(10) % 8).shape == (4, 2)
        for n in (torch.arange(10) % 7, torch.zeros(10).long()):
            with pytest.raises(
                ValueError, match=r"test_size_guards\.py:\d+\), asked about in .*rows"
            ):
                run(x[0], n)


SAVED: dict[str, Any] = {
    "ceil": lambda x: F.pad(x, (0, math.ceil(x.shape[3] / 4) * 4 - x.shape[3])),
    "share": lambda x: x[:, :, : round(x.shape[2] * 0.6)],
    "places": lambda x: x + torch.arange(x.shape[3]) + torch.zeros(x.shape[2], 1),
    "sizes": lambda x: x / torch.as_tensor([[x.shape[2], x.shape[3]]]).prod(),
    "smaller": lambda x: x[..., : min(x.shape[2], x.shape[3])],
}


@pytest.mark.parametrize("name", SAVED)
def test_sizes_that_a_forward_computes_are_saved(name: str, tmp_path: Path) -> None:
    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(SAVED[name](self.first(x)))

    _, made = simulated(Between(), torch.randn(2, 3, 8, 6))
    y = torch.randn(1, 3, 5, 7)
    assert torch.equal(saved(made, tmp_path / "model")(y), made(y))


def test_a_fixed_window_names_the_size_that_fixes_it() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)
            self.last = nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.last(F.max_pool2d(y, (y.shape[2], 1)))

    _, made = simulated(Pooled(), torch.randn(2, 3, 8, 6))
    with pytest.raises(ValueError, match=r"expected size 8 in axis 2, .*test_size_guards\.py:\d+"):
        made(torch.randn(2, 3, 6, 6))


class Stops(nn.Module):
    """Layers until the result is sure, where this is switched on."""

    def __init__(self, confidence: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.confidence = confidence

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
            if self.confidence > 0 and x.mean() > self.confidence:
                break
        return x


def test_an_integer_model_refuses_frames_that_stop_elsewhere() -> None:
    torch.manual_seed(0)
    frames = [torch.randn(6, 8) for _ in range(3)]
    net = quantize_model(Stops().eval(), example_inputs=frames[0]).model
    calibrate(net, frames)
    model = simulate(net, frames[0])
    assert sum(step.op == "linear" for step in model.steps) == 3
    torch.testing.assert_close(model(frames[1]), net(frames[1]), atol=0.02, rtol=0.05)
    with pytest.raises(ValueError, match=r"only with self\.confidence > 0"):
        model(100 * frames[0])


class Share(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x)
        return made / x.numel()


def test_the_number_of_values_follows_the_batch() -> None:
    x = torch.randn(3, 6)
    model = quantize_model(Share().eval(), example_inputs=x).model
    calibrate(model, [torch.randn(64, 6)])
    integer = simulate(model, x)
    for rows in (1, 3, 8):
        other = torch.randn(rows, 6)
        with torch.no_grad():
            torch.testing.assert_close(integer(other), model(other), rtol=1e-3, atol=1e-4)
