"""Compiled models as text, and traced models saved and loaded."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

import bevquant_hybrid as horizon
from bevquant_hybrid.quantization import (
    QuantStub,
    compile_model,
    convert,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    prepare_qat,
)

deprecated = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

X = torch.rand(1, 2, 4, 4, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.dequant = QuantStub(scale=1 / 128), horizon.quantization.DeQuantStub()
        self.conv, self.head = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 2, 1)
        self.head.qconfig = get_default_qat_out_qconfig()

    def forward(self, image):
        shared = self.conv(self.quant(image))
        return {"score": self.dequant(self.head(shared)), "shared": shared}


@pytest.fixture
def model() -> nn.Module:
    made = Net()
    made.qconfig = get_default_qat_qconfig()
    qat = prepare_qat(made)
    qat(X)
    qat.conv.activation_post_process.set_qparams(0.03125)
    return convert(qat.eval())


def test_a_compiled_model_prints_its_program(model, tmp_path) -> None:
    compile_model(model, X, hbm=tmp_path / "net.hbm")
    made = horizon.runtime.load(tmp_path / "net.hbm")
    size = sum(tensor.nbytes for tensor in made.program.constants.values())
    expected = f"""\
Net: 5 operators for bayes, 8 constants of {size} bytes
integers for bevquant_hybrid.runtime, no binary for a BPU
inputs
  image: float32[1, 2, 4, 4], scale 0.0078125
operators
  %1: int8[1, 2, 4, 4] = quantize(x=image, scale=0.0078125, axis=-1, bits=8, rounding=half_up)\
  # quant
  %2: int32[1, 3, 4, 4] = conv(x=%1, weight=conv.weight int8[3, 2, 3, 3], bias=conv.bias int32[3],\
 stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, transposed=False,\
 output_padding=[0, 0])  # conv
  %3: int8[1, 3, 4, 4] = requantize(acc=%2, multiplier=conv.multiplier float64[3], axis=1, bits=8,\
 low=-128, high=127, rounding=half_up)  # conv
  %4: int32[1, 2, 4, 4] = conv(x=%3, weight=head.weight int8[2, 3, 1, 1], bias=head.bias int32[2],\
 stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, transposed=False,\
 output_padding=[0, 0])  # head
  %5: float32[1, 2, 4, 4] = dequantize(x=%4, scale=dequant.scale float32[2], axis=1)  # dequant
outputs
  score: float32[1, 2, 4, 4], scale dequant.scale = %5
  shared: int8[1, 3, 4, 4], qint8, scale 0.03125 = %3"""
    assert str(made) == repr(made) == expected


@deprecated
def test_saved_traced_models_compute_the_same_and_compile(model, tmp_path) -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, image):
            return self.net(image)["score"]

    traced = torch.jit.trace(Scores(), X)
    extra = {"labels.txt": "cat,dog"}
    horizon.jit.save(traced, tmp_path / "net.pt", _extra_files=extra)
    assert extra == {"labels.txt": "cat,dog"}
    wanted = {"labels.txt": ""}
    loaded = horizon.jit.load(tmp_path / "net.pt", map_location="cpu", _extra_files=wanted)
    assert wanted == {"labels.txt": b"cat,dog"}
    assert torch.equal(loaded(X), model(X)["score"])
    compile_model(loaded, X, hbm=tmp_path / "net.hbm")
    assert torch.equal(horizon.runtime.load(tmp_path / "net.hbm")(X), model(X)["score"])


@deprecated
def test_other_versions_are_warned_of(monkeypatch) -> None:
    traced, file = torch.jit.trace(nn.ReLU(), X), io.BytesIO()
    monkeypatch.setattr(horizon.jit, "__version__", "9.8.7")
    horizon.jit.save(traced, file)
    monkeypatch.undo()
    file.seek(0)
    with pytest.warns(UserWarning, match=r"saved by version 9\.8\.7 .* this is version 0\.2\.0"):
        horizon.jit.load(file)
    plain = io.BytesIO()
    torch.jit.save(traced, plain)
    plain.seek(0)
    with pytest.warns(UserWarning, match=r"saved by torch\.jit\.save"):
        horizon.jit.load(plain)
    with pytest.raises(TypeError, match=r"jit\.save: m is a ReLU: expected what torch\.jit\.trace"):
        horizon.jit.save(nn.ReLU(), file)
