"""A subclass with a forward of its own is followed or refused by everybody, never the base class.

Each layer of a family stands in a small network in three forms: as it is, as a subclass that adds
nothing, and as one whose forward does something else. What each consumer makes of the network must
be the network's own result, or an error that names the reason.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bevquant_fusion import fuse_model
from bevquant_int8sim import simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate, quantization_disabled

LAYERS: dict[type[nn.Module], tuple[Any, ...]] = {
    nn.BatchNorm2d: (6,),
    nn.Conv2d: (6, 6, 1),
    nn.ConvTranspose2d: (6, 6, 1),
    nn.ReLU: (),
    nn.ReLU6: (),
    nn.SiLU: (),
    nn.MaxPool2d: (1,),
    nn.AvgPool2d: (1,),
    nn.Dropout: (),
    nn.Identity: (),
    nn.Upsample: (None, 1),
    nn.Softmax: (1,),
    nn.GroupNorm: (2, 6),
    nn.LayerNorm: (8,),
    nn.Linear: (8, 8),
}


def own(cls: type[nn.Module]) -> nn.Module:
    def forward(self: Any, x: Any) -> Any:
        return 2.0 * cls.forward(self, x) - 0.5

    return type(f"Own{cls.__name__}", (cls,), {"forward": forward})(*LAYERS[cls])


def inherited(cls: type[nn.Module]) -> nn.Module:
    return type(f"Named{cls.__name__}", (cls,), {"extra_repr": lambda self: "mine"})(*LAYERS[cls])


def on_the_instance(cls: type[nn.Module]) -> nn.Module:
    module = cls(*LAYERS[cls])

    def forward(self: Any, x: Any) -> Any:
        return 2.0 * cls.forward(self, x) - 0.5

    module.forward = types.MethodType(forward, module)
    return module


FORMS: list[Callable[[type[nn.Module]], nn.Module]] = [own, inherited, on_the_instance]


def network(layer: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3), layer, nn.Conv2d(6, 4, 3))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return net.eval()


def picture() -> torch.Tensor:
    return torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(1))


def close(got: torch.Tensor, want: torch.Tensor, noise: float) -> bool:
    error = (got.double() - want.double()).square().sum() / want.double().square().sum()
    return float(error) < noise


def as_by_copy(net: nn.Module) -> nn.Module:
    """A copy; a forward bound to the old instance is bound to the new one."""
    made = copy.deepcopy(net)
    for module in made.modules():
        bound = vars(module).get("forward")
        if bound is not None:
            module.forward = types.MethodType(bound.__func__, module)
    return made


family = pytest.mark.parametrize("cls", LAYERS, ids=lambda c: c.__name__)
forms = pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)


@forms
@family
@torch.no_grad()
def test_fusion(cls: type[nn.Module], form: Callable[..., nn.Module]) -> None:
    net, x = network(form(cls)), picture()
    want = net(x)
    assert close(fuse_model(as_by_copy(net), (x,)).model(x), want, 1e-9)


@forms
@family
def test_quantizing_simulating_and_exporting(
    cls: type[nn.Module], form: Callable[..., nn.Module], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    from bevquant_export import export_qdq_onnx, open_onnx

    net, x = network(form(cls)), picture()
    want = net(x).detach()
    quantized = quantize_model(net, example_inputs=x).model
    with quantization_disabled(quantized), torch.no_grad():
        assert close(quantized(x), want, 1e-9)
    calibrate(quantized, [x])
    fake = quantized(x).detach()
    integer = simulate(quantized, x)
    assert close(integer(x), fake, 1e-3)
    # Files are written of both.
    for profile, source in (("tensorrt", integer), ("onnxruntime", quantized)):
        path = tmp_path / f"{profile}.onnx"
        # Not verified, so that it is the exporter that is tested here.
        try:
            file = export_qdq_onnx(source, x, path, profile, verify=False)
        except ValueError as error:
            assert "export_qdq_onnx: 1" in str(error)  # noqa: PT017 - refused by its path
            assert not path.exists()
            continue
        run = open_onnx(path, "onnxruntime" if profile == "onnxruntime" else None)
        (made,) = run({name: x for name in file.inputs}).values()
        assert close(made, fake, 1e-2), profile


@pytest.mark.parametrize("form", [own, on_the_instance], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("cls", "qat"),
    [(nn.Conv2d, "Conv2d"), (nn.ConvTranspose2d, "ConvTranspose2d"), (nn.Linear, "Linear"),
     (nn.AvgPool2d, "AvgPool2d"), (nn.Softmax, "Softmax"), (nn.GroupNorm, "GroupNorm")],
)  # fmt: skip
def test_a_qat_form_takes_over_no_code_of_a_subclass(
    cls: type[nn.Module], qat: str, form: Callable[..., nn.Module]
) -> None:
    from bevquant_hybrid.march import March, set_march
    from bevquant_hybrid.nn import qat as package
    from bevquant_hybrid.quantization import get_default_qat_qconfig

    set_march(March.BAYES)
    found = getattr(package, qat)
    with pytest.raises(TypeError, match=r"forward (of its own|was replaced on the instance)"):
        found.from_float(form(cls), get_default_qat_qconfig())
    assert isinstance(found.from_float(inherited(cls), get_default_qat_qconfig()), nn.Module)


@forms
@family
def test_preparing_for_a_bpu(cls: type[nn.Module], form: Callable[..., nn.Module]) -> None:
    from bevquant_hybrid.march import March, set_march
    from bevquant_hybrid.quantization import QuantStub, get_default_qat_qconfig, prepare_qat_fx

    set_march(March.BAYES)
    net, x = network(form(cls)), picture()
    want = net(x).detach()
    stubs = nn.Sequential(QuantStub(), *as_by_copy(net), torch.ao.quantization.DeQuantStub())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            qconfig = {"": get_default_qat_qconfig()}
            prepared = prepare_qat_fx(stubs, qconfig, hybrid=True)
            for module in prepared.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.momentum = 0.0  # ranges are to be seen, statistics to stay
            prepared.train()(x)
            got = prepared.eval()(x)
    except (TypeError, ValueError, NotImplementedError) as error:
        assert str(error)  # noqa: PT017 - refused, by name
        return
    assert close(torch.as_tensor(got.detach()), want, 0.1)
