"""Eager quantization, module by module."""

from __future__ import annotations

import copy
import warnings
from typing import Any

from torch import nn
from torch.ao.quantization import FakeQuantizeBase

from bevquant_graph import called, check_kind
from bevquant_hybrid._convert import convert_in_place, refuse_converted
from bevquant_hybrid._fake_quant._fake_quantize import CalibFakeQuantize, FakeQuantize
from bevquant_hybrid._fx._graph_module import GraphModuleWithAttr
from bevquant_hybrid._fx._scales import adopt_scales, calibrated_scales, unify_cat_scales
from bevquant_hybrid._fx._settings import Settings
from bevquant_hybrid._fx._tracer import trace
from bevquant_hybrid.march import JOINS_AT_ONE_SCALE, require_march
from bevquant_hybrid.nn.qat import QatForms, float_form
from bevquant_hybrid.nn.qat._base import expect_pictures, first_prepared, take_over
from bevquant_hybrid.quantization.quantize_fx import convert_fx
from bevquant_hybrid.undisturbed import positional, undisturbed


def prepare_qat(
    model: nn.Module,
    mapping: dict[Any, Any] | None = None,
    inplace: bool = False,
    optimize_graph: bool = False,
    hybrid: bool = False,
    optimize_kwargs: dict[str, Any] | None = None,
    example_inputs: Any = None,
    verbose: int = 0,
) -> nn.Module:
    """Replace the modules of a model by QAT modules.

    A module without a ``qconfig`` attribute inherits its parent's. None leaves it float.

    Args:
        model: Float model with stubs, fused as wanted, or a calibrated model.
        mapping: Exact float classes to the user's classes, with precedence over this package's.
            Their ``from_float(module)`` gets a module with the qconfig as attribute.
        inplace: Change the model itself.
        optimize_graph: On BERNOULLI2, one scale for inputs and output of each concatenation. The
            model must then be traceable by torch.fx.
        hybrid: Let float operators accept quantized tensors (as floats), and quantized operators
            float tensors, instead of raising.
        optimize_kwargs: None; the documented restrictions of `optimize_graph` are not supported.
        example_inputs: Arguments of the forward, or one tensor; the prepared model is run on them
            once, unobserved, to find errors early.
        verbose: Above 0, print the replacement of each module.

    Raises:
        RuntimeError: No march is set.
        ValueError: The model is prepared already, or a qconfig does not fit.

    Example:
        >>> import torch
        >>> from bevquant_hybrid.march import March, set_march
        >>> from bevquant_hybrid.quantization import QuantStub, get_default_qat_qconfig
        >>> set_march(March.BAYES)
        >>> model = nn.Sequential(QuantStub(scale=1 / 128), nn.Conv2d(1, 1, 1))
        >>> model.qconfig = get_default_qat_qconfig()
        >>> prepare_qat(model)(torch.ones(1, 1, 2, 2)).dtype
        qint8
    """
    if optimize_kwargs:
        raise ValueError(
            f"prepare_qat: optimize_kwargs={sorted(optimize_kwargs)}: not offered; "
            "optimize_graph=True ties inputs and outputs of every FloatFunctional.cat"
        )
    made = _prepare(model, inplace, hybrid, "prepare_qat", optimize_graph, mapping)
    if verbose:
        for path, module in made.named_modules():
            if "_prepared_with" in module.__dict__:
                print(f"prepare_qat: {path} is a {type(module).__name__}")
    if example_inputs is not None:
        run_once(made, example_inputs)
    return made


def prepare_calibration(model: nn.Module, inplace: bool = False) -> nn.Module:
    """Replace the modules of a model by modules that collect statistics.

    Args:
        model: Float model whose ``qconfig`` is a calibration qconfig.
        inplace: Change the model itself.
    """
    return _prepare(model, inplace, False, "prepare_calibration")


def _prepare(
    model: nn.Module,
    inplace: bool,
    hybrid: bool,
    caller: str,
    optimize_graph: bool = False,
    mapping: dict[Any, Any] | None = None,
) -> nn.Module:
    march = require_march(caller)
    refuse_converted(model, caller)
    kinds = {type(m) for m in model.modules()}
    if any(issubclass(kind, FakeQuantize) for kind in kinds):
        raise ValueError(
            f"{caller}: {first_prepared(model)} is quantized: the model is prepared already; pass "
            "the float model, or a calibrated one"
        )
    scales = None
    made = model if inplace else copy.deepcopy(model)
    if any(issubclass(kind, CalibFakeQuantize) for kind in kinds):
        # Back to the float model first: only the scales are kept of a calibration.
        scales = calibrated_scales(made)
        made = _replaced(made, "", lambda path, module: float_form(module))
    settings = Settings(made, None)
    if not settings.any:
        warnings.warn(
            f"{caller}: no module has a qconfig, so the model stays float; set one before, as in "
            "model.qconfig = get_default_qat_qconfig()",
            UserWarning,
            stacklevel=3,
        )
    forms = QatForms()
    own: dict[nn.Module, nn.Module] = {}  # modules of the user's classes, to their QAT modules

    def form(path: str, module: nn.Module) -> nn.Module:
        qconfig = settings.of(path)
        kind = (mapping or {}).get(type(module))
        if kind is not None and qconfig is not None:
            if module not in own:
                own[module] = _made_of(kind, module, qconfig)
            return own[module]
        prepared = forms.of(module, qconfig, path)
        # In a hybrid model, what runs on the CPU hands on floats.
        part: Any
        for part in prepared.modules() if hybrid and prepared is not module else ():
            part.lenient = True
        return prepared

    # All modules are made before the first is replaced: a failure leaves the model unchanged.
    graph = trace(made, caller) if optimize_graph and march in JOINS_AT_ONE_SCALE else None
    planned = {
        path: form(path, module) for path, module in made.named_modules(remove_duplicate=False)
    }
    made = _replaced(made, "", lambda path, module: planned.get(path, module))
    if scales is not None:
        adopt_scales(made, scales)
    expect_pictures(made, march, hybrid)
    if graph is not None:
        unify_cat_scales(graph, made, march, caller)
    return made


def run_once(model: nn.Module, example_inputs: Any) -> None:
    """Run a model in evaluation mode without observing."""
    with undisturbed(model):
        called(model, positional(model, example_inputs))


def _replaced(module: nn.Module, path: str, form: Any) -> nn.Module:
    made: nn.Module = form(path, module)
    if made is not module:
        return made
    for name, child in list(module._modules.items()):
        if child is not None:
            below = f"{path}.{name}" if path else name
            module._modules[name] = _replaced(child, below, form)
    return module


def convert(
    module: nn.Module,
    mapping: dict[Any, Any] | None = None,
    inplace: bool = False,
    remove_qconfig: bool = True,
    fast_mode: bool = False,
    rounding: str = "half_up",
) -> nn.Module:
    """Convert a QAT model to integers.

    Args:
        module: Result of `prepare_qat` or `prepare_qat_fx`.
        mapping: Exact classes of the user's QAT modules to their converted classes, by
            ``from_float(module)``, with precedence over this package's.
        inplace: Change the model itself.
        remove_qconfig: Remove the qconfig attributes.
        fast_mode: Accepted for old scripts.
        rounding: Ties of integer operations: ``"half_up"`` or ``"half_even"``.

    Returns:
        The converted model in evaluation mode.

    Raises:
        RuntimeError: No march is set.
        ValueError: A calibration model, or settings that a BPU does not execute.

    Warns:
        UserWarning: A scale was never observed, or nothing was prepared.
    """
    check_kind(module, nn.Module, "a torch module")
    made = module if inplace else copy.deepcopy(module)
    if mapping:
        require_march("convert")
        made = _replaced(
            made,
            "",
            lambda path, part: (
                mapping[type(part)].from_float(part) if type(part) in mapping else part
            ),
        )
    if isinstance(made, GraphModuleWithAttr):
        return convert_fx(made, True, None, remove_qconfig, fast_mode, rounding)
    prepared = mapping or any(isinstance(part, FakeQuantizeBase) for part in made.modules())
    converted = convert_in_place(made, "convert", remove_qconfig, rounding)
    if not prepared:
        warnings.warn(
            "convert: no module of the model was prepared, so it stays float; give what "
            "prepare_qat returned",
            UserWarning,
            stacklevel=2,
        )
    return converted


def _made_of(kind: Any, module: nn.Module, qconfig: Any) -> nn.Module:
    """Make a user's QAT module from a float module, which is not changed."""
    source = take_over(type(module), module)
    source.qconfig = qconfig
    made: nn.Module = kind.from_float(source)
    return made


def load_observer_params(src: nn.Module, dst: nn.Module) -> None:
    """Copy ranges and scales between models, by the names of their fake quantizers.

    Args:
        src: A prepared model with observed ranges.
        dst: Another prepared model; fake quantizers without a counterpart in `src` do not change.

    Raises:
        ValueError: The two have no fake quantizer in common.

    Example:
        >>> src, dst = nn.Sequential(FakeQuantize()), nn.Sequential(FakeQuantize())
        >>> src[0].set_qparams(0.5)
        >>> load_observer_params(src, dst)
        >>> dst[0].scale
        tensor([0.5000])
    """
    for model in (src, dst):
        check_kind(model, nn.Module, "a torch module")
    found = {n: m for n, m in src.named_modules() if isinstance(m, FakeQuantize)}
    taken = {n: m for n, m in dst.named_modules() if isinstance(m, FakeQuantize) and n in found}
    if not taken:
        raise ValueError(
            "load_observer_params: the models have no fake quantizer of the same name; prepare "
            "both, and from the same float model"
        )
    switches = ("fake_quant_enabled", "observer_enabled")
    for name, module in taken.items():
        state = {k: v for k, v in found[name].state_dict().items() if k not in switches}
        module.load_state_dict(state, strict=False)
