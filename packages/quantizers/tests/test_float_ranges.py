"""What modules read and return over all calibration frames."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bevquant_quantizers import (
    FloatRange,
    QuantDescriptor,
    TensorQuantizer,
    calibrate,
    float_ranges,
    load_ranges,
    save_ranges,
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.quantizer = TensorQuantizer(QuantDescriptor(calib_method="histogram"))

    def forward(self, x: Tensor, given: dict[str, list[Tensor]]) -> tuple[Tensor, Tensor]:
        made = self.quantizer(self.relu(x))
        return made, given["ids"][0] * 2


def frame(largest: float, cell: float) -> tuple[Tensor, dict[str, list[Tensor]]]:
    return torch.tensor([-largest, 0.5]), {"ids": [torch.tensor([cell])]}


FRAMES = [frame(2.0, 7.0), frame(9.5, 4001.0), frame(1.0, 3.0)]


def test_every_frame_counts() -> None:
    model = Net()
    calibrate(model, FRAMES)
    found = float_ranges(model)
    assert found[""] == {
        "x": FloatRange(9.5, False),
        "given['ids'][0]": FloatRange(4001.0, True),
        "output": FloatRange(8002.0, False),
    }
    assert found["relu"] == {"input": FloatRange(9.5, False), "output": FloatRange(0.5, False)}
    assert "quantizer" not in found
    assert float_ranges(copy.deepcopy(model)) == found
    calibrate(model, FRAMES[:1])
    assert float_ranges(model)[""]["x"].largest == 2.0


def test_they_are_saved_with_the_ranges(tmp_path: Path) -> None:
    model, other, path = Net(), Net(), tmp_path / "ranges.json"
    calibrate(model, [*FRAMES, (torch.tensor([1.0, 2.0]), {"ids": [torch.tensor([math.inf])]})])
    save_ranges(model, path)
    load_ranges(other, path)
    assert float_ranges(other) == float_ranges(model)
    assert float_ranges(other)[""]["output"].largest == math.inf
    document = json.loads(path.read_text())
    document["floats"]["nowhere"] = document["floats"].pop("relu")
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="unexpected: nowhere has float ranges"):
        load_ranges(other, path)
    del document["floats"]
    path.write_text(json.dumps(document))
    load_ranges(other, path)
    assert float_ranges(other) == {}


def test_an_interrupted_calibration_counts_the_frames_before(tmp_path: Path) -> None:
    model = Net()

    def stopping(model: nn.Module, batch: tuple[Tensor, dict[str, list[Tensor]]]) -> None:
        if float(batch[0][0]) == -1.0:
            raise KeyboardInterrupt
        model(*batch)

    with pytest.raises(KeyboardInterrupt):
        calibrate(model, FRAMES, stopping, resume=tmp_path / "collected.npz")
    calibrate(model, FRAMES, resume=tmp_path / "collected.npz")
    assert float_ranges(model)[""]["x"].largest == 9.5


def test_a_tensor_that_is_changed_in_place_is_read_again() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Identity(), nn.Identity()
            self.quantizer = TensorQuantizer(QuantDescriptor(calib_method="histogram"))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            x.mul_(2)
            return self.quantizer(self.second(x))

    model = Doubled()
    calibrate(model, [torch.tensor([1.5, 3.25])])
    found = float_ranges(model)
    assert (found["first"]["output"].largest, found["second"]["input"].largest) == (3.25, 6.5)


def test_a_layer_in_vmap_is_refused_by_name() -> None:
    class Mapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(TensorQuantizer(QuantDescriptor()), nn.Linear(2, 2))

        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(self.inner)(x)

    with pytest.raises(ValueError, match=r"inner is called in torch\.vmap"):
        calibrate(Mapped().eval(), [torch.ones(2, 3, 2)])
