"""Whole dense nets in integers against onnxruntime's fused uint8 × int8 kernels and torch's float.

Part of `python benchmarks/int8sim.py`. BEVFusion's BEV decoder and its ResNet-50, BN folded,
random weights, ranges from one pass. onnxruntime gets the very integers of our model, as a graph
of QLinearConv, QLinearAdd and MaxPool with all its optimisations. "int8 to int8" starts and ends
with integers on either side; "float to float" quantizes the input and dequantizes the output too,
as a call of an IntegerModel does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from _int8_onnx import Session
from _int8_timing import Runs, interleave, peak
from torch import Tensor, nn

from bevfusion.model import CONFIGS, build_model
from bevquant_fusion import fuse_model
from bevquant_int8sim import IntegerModel, backend_report, simulate
from bevquant_int8sim.program import (
    Dequantize,
    Quantize,
    Ref,
    Step,
    Weighted,
    replaced,
)
from bevquant_qnn import quantize_model
from bevquant_quantizers import TensorQuantizer, calibrate
from bevquant_quantizers.tensor_quant import QuantDescriptor


class Whole(nn.Module):
    """Some modules in a row, with a range for every output, so that these are integers too."""

    def __init__(self, outputs: int, *modules: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*modules)
        self.ranges = nn.ModuleList(TensorQuantizer(QuantDescriptor()) for _ in range(outputs))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Float in, the quantized outputs."""
        y = self.net(x)
        outputs = y if isinstance(y, tuple) else (y,)
        return tuple(r(v) for r, v in zip(self.ranges, outputs, strict=True))


@dataclass(frozen=True)
class Net:
    """One net in float and in integers, and its input."""

    name: str
    float_net: nn.Module
    model: IntegerModel
    x: Tensor


def nets() -> list[Net]:
    model = build_model(CONFIGS["nuscenes"]).eval()
    torch.manual_seed(0)
    image, fused = torch.randn(1, 3, 256, 704), torch.randn(1, 256, 180, 180).relu_()
    decoder, resnet = model.decoder, model.encoders["camera"]["backbone"]
    return [
        prepare("BEV decoder", fused, 1, decoder["backbone"], decoder["neck"]),
        prepare("ResNet-50", image, 3, resnet),
        prepare("ResNet-50, six images", torch.randn(6, 3, 256, 704), 3, resnet),
    ]


def prepare(name: str, x: Tensor, outputs: int, *modules: nn.Module) -> Net:
    whole = Whole(outputs, *modules)
    for module in whole.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    fused = fuse_model(whole.net, (x,)).model
    whole.net = fused
    quantized = quantize_model(whole, example_inputs=(x,)).model.eval()
    calibrate(quantized, [(x,)], method="max")
    return Net(name, fused, simulate(quantized, (x,)), x)


def integers_only(model: IntegerModel, backend: str) -> tuple[IntegerModel, float]:
    """The model from the integers of its input to those of its outputs, and the input's scale."""
    program = model.program
    names: dict[str, str] = {}
    steps: list[Step] = []

    def read(ref: Any) -> Any:
        return Ref(names.get(ref.name, ref.name))

    first = program.steps[0]
    assert isinstance(first, Quantize)
    for step in program.steps[1:]:
        if isinstance(step, Dequantize):
            names[step.outputs[0]] = read(step.args[0]).name
        else:
            steps.append(replace(step, args=replaced(step.args, read)))
    whole = replace(
        program,
        signature=((Ref(first.outputs[0]),), {}),
        steps=tuple(steps),
        result=replaced(program.result, read),
    )
    return IntegerModel(whole, backend=backend), first.integers.scale


def multiplications(model: IntegerModel, x: Tensor) -> float:
    """GMAC of one call."""
    total = 0

    def see(step: Step, given: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        nonlocal total
        if isinstance(step, Weighted):
            total += step.cost(given, made, 0)

    model.run((x,), record=False, observe=see)
    return total / 1e9


def print_tables(rounds: int) -> None:
    backends = [s.name for s in backend_report() if s.available]
    for net in nets():
        _print_net(net, backends, rounds)


def _print_net(net: Net, backends: list[str], rounds: int) -> None:
    models = {name: integers_only(net.model, name) for name in backends}
    scale = models[backends[0]][1]
    q = torch.clamp(torch.round(net.x / scale), -128, 127).to(torch.int8)
    outputs = {name: model(q) for name, (model, _) in models.items()}
    reference = outputs["torch"]
    equal = {
        name: all(torch.equal(a, b) for a, b in zip(made, reference, strict=True))
        for name, made in outputs.items()
    }
    bare = Session(models[backends[0]][0], q, floats=False)
    whole = Session(models[backends[0]][0], q, floats=True)
    shifted = bare.shifted(q)
    kernel = backends[0]
    runs: Runs = {
        "onnxruntime u8s8, int8 to int8": (2, lambda: bare.run(shifted)),
        "onnxruntime u8s8, float to float": (2, lambda: whole.run(net.x)),
        "torch fp32": (2, lambda: net.float_net(net.x)),
    }
    for name in backends:
        if name != "torch":
            runs[f"{name}, int8 to int8"] = (2, lambda n=name: models[n][0](q))
    net.model.backend = kernel
    runs[f"{kernel}, float to float"] = (2, lambda: net.model(net.x))
    at_peak = peak(kernel) if kernel != "torch" else None
    if at_peak is not None:
        work = at_peak()
        runs["peak"] = (2, at_peak)
    times = interleave(runs, rounds)
    gmac = multiplications(net.model, net.x)
    print(f"{net.name}, input {list(net.x.shape)}, {gmac:.1f} GMAC, 2 threads\n")
    print("| run | ms | best | onnxruntime's over this | at best | torch's over this |"
          " equal to torch's integers |")  # fmt: skip
    print("|---|---:|---:|---:|---:|---:|---|")
    for name, (ms, best) in times.items():
        if name == "peak":
            continue
        bar = times["onnxruntime u8s8, " + ("float to float" if "float" in name else
                                            "int8 to int8")]  # fmt: skip
        fp32 = times["torch fp32"]
        same = str(equal.get(name.split(",")[0], "–"))
        print(
            f"| {name} | {ms:.1f} | {best:.1f} | {bar[0] / ms:.2f}× | {bar[1] / best:.2f}× | "
            f"{fp32[0] / ms:.1f}× | {same} |"
        )
    if at_peak is not None:
        bound = gmac / (work / times["peak"][1])
        print(f"\n{kernel} peak {gmac / bound * 1e3:.0f} GMAC/s: {bound:.1f} ms")
    theirs = bare.integers(bare.run(shifted))
    apart = [(a - b.int()).abs() for a, b in zip(theirs, outputs[kernel], strict=True)]
    share = sum(int((d > 0).sum()) for d in apart) / sum(d.numel() for d in apart)
    most = max(int(d.max()) for d in apart)
    print(f"onnxruntime's integers: {share:.2%} others than ours, at most {most} steps apart\n")
