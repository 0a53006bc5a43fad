"""A dense unit in its forms: fused float, calibrating, fake-quantized, integers."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from torch import Tensor, fx, nn

from bevfusion.model import BEVFusion
from bevfusion_quant._errors import InputError
from bevfusion_quant.bpu._units import PREFIXES
from bevfusion_quant.steps import expand_patterns
from bevquant_hybrid.march import get_march, set_march
from bevquant_hybrid.quantization import (
    FakeQuantState,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    observer,
    prepare_calibration_fx,
    prepare_qat_fx,
    set_fake_quantize,
)
from bevquant_hybrid_tools.by_layer import NodeLabel, node_labels

_OBSERVERS = {
    "percentile": observer.CalibObserver,
    "max": observer.MinMaxObserver,
    "mse": observer.MSEObserver,
    "entropy": observer.KLObserver,
}


@dataclass(frozen=True, eq=False)
class Forms:
    """One unit three times, node by node the same graph, and what was warned of on the way.

    `prefix` stands before its modules' paths in the model.
    """

    float_graph: fx.GraphModule
    fake_graph: fx.GraphModule
    integer_graph: fx.GraphModule
    warnings: tuple[str, ...] = ()
    prefix: str = ""

    @cached_property
    def labels(self) -> dict[str, NodeLabel]:
        """The names that its nodes have in the model."""
        return node_labels(self.fake_graph, self.prefix)


@contextmanager
def for_march(march: str) -> Iterator[None]:
    """Set the march for a block; an earlier one comes back.

    Raises:
        InputError: No such march.
    """
    before = get_march()
    try:
        set_march(march)
    except ValueError as error:
        raise InputError(f"--march {march}: {error}") from error
    try:
        yield
    finally:
        if before is not None:
            set_march(before)


def names_on_cpu(
    model: BEVFusion, units: Mapping[str, nn.Module], exclude: Iterable[str]
) -> dict[str, list[str]]:
    """Modules of each unit that `exclude` names, as paths within the unit.

    Raises:
        InputError: A pattern that names nothing on the BPU.
    """
    found: dict[str, list[str]] = {name: [] for name in units}
    for given in exclude:
        before = sum(map(len, found.values()))
        for pattern in expand_patterns(model, [given]):
            for name, unit in units.items():
                found[name] += [
                    path
                    for path, _ in unit.named_modules()
                    if path and fnmatchcase(PREFIXES[name] + path, pattern)
                ]
        if sum(map(len, found.values())) == before:
            raise InputError(
                f"--exclude {given}: it names nothing that runs on the BPU; bevfusion-quant tree "
                "prints the modules' paths"
            )
    return found


def calibrating_form(fused: nn.Module, method: str, on_cpu: Iterable[str]) -> Any:
    """The form that counts activations while float values pass through it.

    Args:
        fused: From `fuse_fx`.
        method: "percentile", "max", "mse" or "entropy".
        on_cpu: Paths of modules to run on the CPU.

    Raises:
        InputError: Another method.
    """
    if method not in _OBSERVERS:
        raise InputError(
            f"--method {method}: no observer of a BPU finds ranges so; choose one of "
            f"{', '.join(_OBSERVERS)}"
        )
    qconfig = get_default_calib_qconfig(calib_qkwargs={"observer": _OBSERVERS[method]})
    names = {"module_name": list(on_cpu)}
    return prepare_calibration_fx(fused, {"": qconfig}, hybrid=True, hybrid_dict=names).eval()


def finished_forms(
    fused: Any,
    calibrated: Any,
    on_cpu: Iterable[str],
    state: Mapping[str, Tensor] | None = None,
    prefix: str = "",
) -> Forms:
    """Fake-quantized, for evaluation, and in integers.

    Args:
        fused: From `fuse_fx`.
        calibrated: From `calibrating_form`, after its batches.
        on_cpu: As that had it.
        state: Of the fake-quantized form, instead of what was calibrated.
        prefix: What stands before its modules' paths in the model.
    """
    names = {"module_name": list(on_cpu)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fake = prepare_qat_fx(
            calibrated, {"": get_default_qat_qconfig()}, hybrid=True, hybrid_dict=names
        ).eval()
        if state is not None:
            caught.clear()  # of ranges that were still missing
            fake.load_state_dict(state)
        set_fake_quantize(fake, FakeQuantState.VALIDATION)
        integers = convert_fx(fake)
    told = dict.fromkeys(str(item.message) for item in caught)
    return Forms(fused.eval(), fake, integers, tuple(told), prefix)
