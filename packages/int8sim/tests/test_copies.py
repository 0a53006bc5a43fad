"""Integer models are copied and pickled; they take the frames that a loader makes."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn

from bevquant_fusion import fuse_model
from bevquant_int8sim import IntegerModel, compare, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate


class Decides(nn.Module):
    def forward(self, x):
        return x if x.sum() > 1e9 else x * 1.5


class Net(nn.Module):
    """A layer, a sum, a concatenation, torch's operators, and a module that is one node."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)
        self.more, self.decides = nn.Conv2d(4, 4, 3, padding=1), Decides()

    def forward(self, x):
        y = self.bn(self.conv(x)).relu()
        y = self.decides(y + self.more(y))
        return {"map": torch.cat([y, y.tanh()], 1), "mean": y.mean((2, 3)), "name": "net"}


def made(net, x):
    fused = fuse_model(net.eval(), x).model
    model = quantize_model(copy.deepcopy(fused), example_inputs=x).model
    calibrate(model, [x])
    return fused, model


def saved(model):
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "both": lambda model: copy.deepcopy(pickle.loads(pickle.dumps(model))),
    "torch": saved,
}


@pytest.fixture(scope="module")
def whole():
    """The folded net, the quantized one and its integers, and their input: nobody changes them."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    fused, model = made(Net(), x)
    return fused, model, simulate(model, x), x


@pytest.mark.parametrize("how", COPIES)
def test_copies_compute_the_same(how, whole):
    _, model, integers, x = whole
    for each in (model, integers):
        with torch.no_grad():
            wanted, got = each(x), COPIES[how](each)(x)
        assert got["name"] == "net"
        assert torch.equal(got["map"], wanted["map"])
        assert torch.equal(got["mean"], wanted["mean"])


def test_a_copy_has_weights_of_its_own_and_is_compared_as_the_first(whole):
    fused, model, _, x = whole
    integers = simulate(model, x, integer_sums=True)
    other = copy.deepcopy(integers)
    assert other.sum_ranges == integers.sum_ranges
    assert compare(fused, other, [x]).wrong == compare(fused, integers, [x]).wrong
    wanted = integers(x)["map"]
    for step in other.steps:
        for tensor in step.tensors.values():
            tensor.zero_()
    assert torch.equal(integers(x)["map"], wanted)


def test_what_was_pickled_is_as_a_loaded_model(tmp_path):
    x = torch.randn(1, 3, 8, 8)
    _, model = made(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sigmoid()), x)
    integers = simulate(model, x)
    integers.save(tmp_path / "model")
    loaded = IntegerModel.load(tmp_path / "model")
    for each in (pickle.loads(pickle.dumps(integers)), pickle.loads(pickle.dumps(loaded))):
        assert each.source is None
        assert torch.equal(each(x), integers(x))
        each.save(tmp_path / "again")


class Neck(nn.Module):
    """In OpenPCDet's manner: what it makes goes into the dict that it gets."""

    def __init__(self):
        super().__init__()
        self.conv, self.head, self.frames = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), 0

    def forward(self, batch_dict):
        self.frames += 1
        batch_dict["features"] = self.conv(batch_dict["image"]).relu()
        batch_dict["boxes"] = self.head(batch_dict["features"])
        return batch_dict["boxes"]


def test_a_forward_that_writes_to_its_frame_takes_new_frames():
    def loader(seed):
        image = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(seed))
        return {"batch_dict": {"image": image, "frame_id": seed}}

    frames = [loader(seed) for seed in range(3)]
    fused, model = made(Neck(), frames[0])
    calibrate(model, frames)
    integers = simulate(model, frames[0])
    compare(fused, integers, frames)
    assert [list(frame["batch_dict"]) for frame in frames] == [["image", "frame_id"]] * 3
    assert model.frames == fused.frames == 0
    with torch.no_grad():
        wanted, got = model(**loader(9)), integers(**loader(9))
    assert (wanted - got).square().sum() < 1e-3 * wanted.square().sum()


def test_a_model_runs_while_another_thread_simulates_it():
    x = torch.randn(1, 3, 8, 8)
    _, model = made(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1)), x)
    wanted, found, stop = model(x).detach(), [], threading.Event()

    def run():
        while not stop.is_set():
            try:
                found.append(model(x).detach())
            except Exception as error:
                found.append(error)

    threads = [threading.Thread(target=run), *(
        threading.Thread(target=lambda: found.append(simulate(model, x)(x))) for _ in range(2)
    )]  # fmt: skip
    integers = simulate(model, x)(x)
    for thread in threads:
        thread.start()
    for thread in threads[1:]:
        thread.join()
    stop.set()
    threads[0].join()
    assert all(type(value) is torch.Tensor for value in found)
    assert all(torch.equal(value, wanted) or torch.equal(value, integers) for value in found)
