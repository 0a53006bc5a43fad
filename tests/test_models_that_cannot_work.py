"""Fifty idioms that stop other tools: each works and is right, or is told where and what to do.

Right is: the file was run by onnxruntime beside the integers, the integers beside the
fake-quantized model, and these outputs are near the float model's. Told is: one error, note or
entry of an account has the module's path, the file and the line (where a line of the model's code
is to blame), what was met, and a remedy. Never a wrong result in silence, never torch's bare words.
"""

from __future__ import annotations

import copy
import inspect
import random
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bevquant_export import export_qdq_onnx
from bevquant_fusion import fuse_model
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

X = torch.linspace(-1, 1, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Any) -> Any:
        return self.head(self.conv(x))


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).eval()


# What decides by values, and what cannot be traced


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if float(y.mean()) > 0:
            y = y * 2
        return self.head(y)


class Loops(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        while float(y.abs().max()) > 0.5:
            y = y / 2
        return self.head(y)


class CountsFloats(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.head(y)[:, :, : int(y.abs().sum().item()) % 3 + 1]


class ThroughNumpy(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.from_numpy(self.conv(x).detach().numpy() ** 2))


class SparseProduct(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.head(self.conv(x))[0, 0].to_sparse(), x[0, 0])


# What is not the same twice


class AlwaysDrops(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.conv(x), 0.5, training=True))


class Noise(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x) + torch.randn(4, 8, 8))


class PythonsRandom(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x) * random.random())


class BufferCounts(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.head(self.conv(x)) * self.n


class NumberCounts(Base):
    n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.head(self.conv(x)) * self.n


class NoisyPart(Base):
    def __init__(self) -> None:
        super().__init__()
        self.part = nn.ModuleList([Noise()])

    def forward(self, x: Tensor) -> Tensor:
        return self.part[0](x)


# What gives no tensors


class Scores:
    def __init__(self, scores: Tensor) -> None:
        self.scores = scores


class GivesObject(Base):
    def forward(self, x: Tensor) -> Scores:
        return Scores(self.head(self.conv(x)))


class GivesNothing(Base):
    def forward(self, x: Tensor) -> None:
        self.seen = self.head(self.conv(x)).detach()


class Generates(Base):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        yield self.head(self.conv(x))


class GivesLists(Base):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"label": "cat", "scores": self.head(self.conv(x)).tolist()}


# Types and numbers


class HalfPrecision(Base):
    def __init__(self) -> None:
        super().__init__()
        self.half()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.half())).float()


class DoublePrecision(Base):
    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.double())).float()


class ComplexConv(Base):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x.to(torch.complex64)).abs())


class Fourier(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.fft.ifft2(torch.fft.fft2(self.conv(x))).real)


def spoiled(value: float) -> nn.Module:
    net = plain()
    net.get_parameter("2.weight").data[0, 0, 0, 0] = value
    return net


class Divides(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x) / (x.sum() * 0))


# Errors of the model's own


class Raises(Base):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("there is no such scale")


# What looks impossible and works


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.conv.register_forward_hook(lambda *given: given[-1] * 2)


class TiedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.b(self.a(x)), self.a.weight.t())


class WritesInput(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        return self.head(self.conv(x)), x


class WritesView(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        y[:, 1:3].mul_(2)
        return self.head(y)


class GivesNoElements(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x))[:, :0]


class Prints(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        print("mean", y.mean())
        return self.head(y)


class Hyper(Base):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.made = nn.Identity(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return F.conv2d(y, self.made(y.mean((2, 3)))[:, :, None, None])


class LeavesOut(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cell = nn.Conv2d(3, 4, 1), nn.GRUCell(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows, state = self.conv(x).mean(2), x.new_zeros(x.shape[0], 5)
        for i in range(2):
            state = self.cell(rows[:, :, i], state)
        return state


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class OwnFunction(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(Square.apply(self.conv(x)))


class SwitchesMode(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.train()
        y = self.head(self.conv(x))
        self.eval()
        return y


class TakesList(Base):
    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        return [self.head(self.conv(x)) for x in xs]


class Normed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.utils.parametrizations.weight_norm(self.conv)


def odd_transpose() -> nn.Module:
    odd = nn.ConvTranspose2d(4, 6, 3, stride=3, padding=2, output_padding=1, dilation=2, groups=2)
    return nn.Sequential(nn.Conv2d(3, 4, 1), odd)


def nested() -> nn.Module:
    inner = quantize_model(plain(), example_inputs=X).model
    calibrate(inner, [X])
    return nn.Sequential(inner, nn.ReLU(), nn.Conv2d(2, 2, 1))


def distributed() -> nn.Module:
    """A wrapper without its process group, which no error needs."""
    kind = nn.parallel.DistributedDataParallel
    wrapper = kind.__new__(kind)
    nn.Module.__init__(wrapper)
    wrapper.module = plain()
    return wrapper.eval()


def quantized_inside() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), torch.ao.nn.quantized.Conv2d(4, 2, 1))


class Told(NamedTuple):
    """What one entry says: module, what was met, remedy; and whether a line is to blame."""

    path: str
    met: str
    remedy: str
    line: bool = True


KEEP_OUT = r"keep decisions on the values of tensors out of its forward"
VALUES = r"branches on the values of a tensor, or needs them as a number"
TWICE = r"other values in a second run on the same inputs"
KEEPS = r"keeps \w+ from call to call"
TENSORS = r"Return tensors, alone or in tuples"
INPUTS = r"[Gg]ive inputs"
FLOAT = r"Call model\.float\(\)"

CASES: dict[str, tuple[Callable[[], Any], Told | None]] = {
    "branches": (Branches, Told("Branches", VALUES, KEEP_OUT)),
    "loops": (Loops, Told("Loops", VALUES, KEEP_OUT)),
    "counts_floats": (CountsFloats, Told("CountsFloats", VALUES, KEEP_OUT)),
    "numpy": (
        ThroughNumpy,
        Told("ThroughNumpy", "hands a tensor to numpy", "compute that with torch"),
    ),
    "sparse_product": (SparseProduct, Told("SparseProduct", "_to_sparse", KEEP_OUT)),
    "always_drops": (AlwaysDrops, Told("AlwaysDrops", TWICE, "make that an input")),
    "noise": (Noise, Told("Noise", TWICE, "make that an input")),
    "pythons_random": (PythonsRandom, Told("PythonsRandom", TWICE, "make that an input")),
    "buffer_counts": (BufferCounts, Told("BufferCounts", KEEPS, "with_memory")),
    "number_counts": (NumberCounts, Told("NumberCounts", KEEPS, "with_memory")),
    "noisy_part": (NoisyPart, Told(r"part\.0 \(Noise", TWICE, "make that an input")),
    "object": (GivesObject, Told("GivesObject", "returns no tensor", TENSORS)),
    "nothing": (GivesNothing, Told("GivesNothing", "returns no tensor", TENSORS)),
    "generator": (Generates, Told("Generates", "returns no tensor", TENSORS)),
    "lists": (GivesLists, Told("GivesLists", "returns no tensor", TENSORS)),
    "half": (HalfPrecision, Told(r"conv\.weight", "float16", FLOAT, line=False)),
    "double": (DoublePrecision, Told(r"conv\.weight", "float64", FLOAT, line=False)),
    "complex": (ComplexConv, Told(r"conv\.weight", "is complex", "as channels", line=False)),
    "fourier": (Fourier, None),
    "nan_weight": (
        lambda: spoiled(float("nan")),
        Told(r"2\.weight", "1 NaN or infinite", "load a checkpoint", line=False),
    ),
    "infinite_weight": (
        lambda: spoiled(float("inf")),
        Told(r"2\.weight", "1 NaN or infinite", "load a checkpoint", line=False),
    ),
    "divides_by_zero": (Divides, Told("the model|head", "NaN or infinite", INPUTS)),
    "raises": (Raises, Told("Raises", "RuntimeError", INPUTS)),
    "wrong_channels": (plain, Told("0", "RuntimeError", INPUTS, line=False)),
    "wrong_count": (plain, Told("Sequential", "TypeError", INPUTS, line=False)),
    "no_inputs": (plain, Told("Sequential", "TypeError", INPUTS, line=False)),
    "integers_in": (plain, Told("0", "RuntimeError", INPUTS, line=False)),
    "nan_in": (plain, Told("example inputs", "NaN", INPUTS, line=False)),
    "empty_batch": (plain, Told(r"0\._input", "no usable range", "calibrate with", line=False)),
    "meta": (lambda: plain().to("meta"), Told(r"0\.weight", "meta", "load weights", line=False)),
    "training": (
        lambda: plain().train(),
        Told("the model", "training mode", r"call model\.eval\(\)", line=False),
    ),
    "scripted": (lambda: torch.jit.script(plain()), Told("the model", "scripted", "Python", False)),
    "traced": (lambda: torch.jit.trace(plain(), X), Told("the model", "scripted", "Python", False)),
    "compiled": (
        lambda: torch.compile(plain()),
        Told("the model", "is compiled", "give the module", line=False),
    ),
    "distributed": (
        distributed,
        Told("the model", "in several processes", r"give the model itself \(\.module\)", False),
    ),
    "quantized_by_torch": (
        quantized_inside,
        Told(r"1 \(Conv2d\)", "quantized by torch", "give the float model", line=False),
    ),
    "hooked": (Hooked, None),
    "tied_twice": (TiedTwice, None),
    "writes_input": (WritesInput, None),
    "writes_view": (WritesView, None),
    "no_elements": (GivesNoElements, None),
    "prints": (Prints, None),
    "recurrent": (Recurrent, None),
    "leaves_out": (LeavesOut, None),
    "hyper": (Hyper, None),
    "own_function": (OwnFunction, None),
    "switches_mode": (SwitchesMode, None),
    "takes_list": (TakesList, None),
    "weight_norm": (Normed, None),
    "odd_transpose": (odd_transpose, None),
    "nested": (nested, None),
    "data_parallel": (lambda: nn.DataParallel(plain()), None),
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)), None),
}
INPUT: dict[str, Any] = {
    "wrong_channels": torch.ones(2, 5, 8, 8),
    "wrong_count": (X, X),
    "no_inputs": (),
    "integers_in": X.to(torch.uint8),
    "nan_in": X * float("nan"),
    "empty_batch": X[:0],
    "takes_list": ([X, X],),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_works_or_is_told_where_and_what_to_do(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, told = CASES[name]
    entries: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scripting and torch's quantizers
        net = make()
    if isinstance(net, nn.Module) and name != "training":
        net.eval()
    given = INPUT.get(name, X)
    if told is None:
        file = taken(net, given, entries, tmp_path)
        assert file.verified != "no"
        return
    try:
        taken(net, given, entries, tmp_path)
    except (TypeError, ValueError, RuntimeError) as error:
        entries += ["\n".join([str(error), *getattr(error, "__notes__", ())])]
    assert any(says(told, entry, net) for entry in entries), entries


def taken(net: Any, given: Any, entries: list[str], folder: Path) -> Any:
    """The way of a user from a float model to a file; entries of all accounts on it."""
    fused = fuse_model(net, copy.deepcopy(given))
    entries += fused.untraced.values()
    wanted = called(fused.model, given)
    result = quantize_model(fused.model, example_inputs=copy.deepcopy(given))
    entries += [f"{note.path}: {note.reason}" for note in result.skipped]
    calibrate(result.model, [copy.deepcopy(given)])
    integers = simulate(result.model, copy.deepcopy(given))
    for one, other in zip(wanted, called(integers, given), strict=True):
        if one.numel():
            noise = (one - other).double().square().mean()
            assert one.double().square().mean() > 30 * noise  # 15 dB
    return export_qdq_onnx(result.model, copy.deepcopy(given), folder / "net.onnx")


def called(model: Any, given: Any) -> list[Tensor]:
    args = copy.deepcopy(given if isinstance(given, tuple) else (given,))
    with torch.no_grad():
        made = torch.utils._pytree.tree_leaves(model(*args))
    return [value for value in made if isinstance(value, Tensor)]


def says(told: Told, entry: str, net: Any) -> bool:
    """Whether one entry has everything, and a line of the model's own code."""
    lines = re.findall(rf"{re.escape(__file__)}:(\d+)", entry)
    codes = [inspect.getsourcelines(type(m)) for m in modules(net)]
    own = any(first <= int(n) < first + len(code) for n in lines for code, first in codes)
    wanted = (told.path, told.met, told.remedy)
    return all(re.search(text, entry) for text in wanted) and (own or not told.line)


def modules(net: Any) -> list[nn.Module]:
    inside = net.modules() if isinstance(net, nn.Module) else ()
    return [m for m in inside if type(m).__module__ == __name__]
