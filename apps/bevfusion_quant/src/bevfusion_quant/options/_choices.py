"""The names that options take.

Engines and kinds of data are entry points, and marches are rows of a table: their names are read
without importing the packages. Other names belong to code that imports torch, which `--help` must
not wait for. For these the help lists the names known here, the parser takes any name, and
`unknown_name` asks the owner before anything is read. tests/test_choices.py compares the help with
the owners.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec


@dataclass(frozen=True)
class _Owned(PrimitiveConstructorSpec[str]):
    """Names whose known values the help lists."""

    # All of them, from their owner; None if the code that uses the name checks it.
    names: Callable[[], Iterable[str]] | None = None


def _known(names: Iterable[str], owner: Callable[[], Iterable[str]] | None = None) -> _Owned:
    return _Owned(
        nargs=1,
        metavar="{" + ",".join(names) + "}",
        instance_from_str=lambda given: given[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda name: [name],
        names=owner,
    )


def _installed(group: str) -> _Owned:
    """Names of a group of entry points, for the help."""
    # The parser takes any name, since a program may have registered one; the registry refuses
    # others.
    return _known(dict.fromkeys(entry.name for entry in entry_points(group=group)))


def _marches_with_figures() -> Iterable[str]:
    """Marches with figures in `bevquant_hybrid_tools`, read from its table, for the help."""
    package = find_spec("bevquant_hybrid_tools")
    assert package is not None  # a dependency
    assert package.origin is not None
    table = Path(package.origin).parent / "performance" / "figures.toml"
    return tomllib.loads(table.read_text(encoding="utf-8"))


def unknown_name(hint: Any, value: Any) -> str:
    """The error text for an unknown name, or one of several; "" if all are known."""
    given = [value] if isinstance(value, str) else value if isinstance(value, tuple) else ()
    for names in _owners(hint) if given else ():
        there = tuple(names())
        for name in given:
            if name not in there:
                return f"{name}: expected one of {', '.join(there)}"
    return ""


def _owners(hint: Any) -> Iterator[Callable[[], Iterable[str]]]:
    for part in getattr(hint, "__metadata__", ()):
        if isinstance(part, _Owned) and part.names is not None:
            yield part.names
    for inner in get_args(hint):
        yield from _owners(inner)


def _methods() -> Iterable[str]:
    from bevquant_quantizers.calib import METHODS

    return METHODS


def _roundings() -> Iterable[str]:
    from bevquant_qnn import round_weights

    return get_args(get_type_hints(round_weights)["rounding"])


def _precisions() -> Iterable[str]:
    from bevfusion.quantization import plan_precisions

    return plan_precisions()


def _marches() -> Iterator[str]:
    """Marches with public figures of their chips, which the estimate needs."""
    from bevquant_hybrid.march import KNOWN
    from bevquant_hybrid_tools.performance import load_chip_figures

    for march in KNOWN:
        try:
            load_chip_figures(march)
        except ValueError:
            continue
        yield march


def _cpus() -> Iterable[str]:
    from bevquant_export.targets import CPUS

    return CPUS


ConfigName = Literal[
    "nuscenes",
    "tiny",
    "nuscenes-swint",
    "nuscenes-mmdet3d",
    "nuscenes-swint-mmdet3d",
    "nuscenes-voxel01",
    "waymo",
    "autoware",
]
"""The sizes in `bevfusion.detectors.DETECTORS`; which of them a model has is asked later."""

PartBranch = Literal["camera", "lidar", "fuser", "decoder", "head", "all"]
Branch = Literal[PartBranch, "lidar-detector", "camera-detector"]
"""What is quantized; `ptq._branches` says which parts that means."""

TrainedBranch = Literal["lidar", "camera", "all"]

if TYPE_CHECKING:
    ModelName: TypeAlias = str
    AnyModelName: TypeAlias = str
    DatasetKind: TypeAlias = str
    ExportTarget: TypeAlias = str
    Method: TypeAlias = str
    Rounding: TypeAlias = Literal["nearest", "gptq"]  # as `round_weights` is typed
    Precision: TypeAlias = str
    MarchName: TypeAlias = str
    Backend: TypeAlias = str
    Cpu: TypeAlias = str
else:
    # `stages.sizes_of` and `bevfusion.detectors.is_foreign` refuse unknown models.
    _OWN = ("bevfusion", "centerpoint", "centerpoint-pillars")
    _FOREIGN = ("mmdet3d:CONFIG.py", "openpcdet:CONFIG.yaml", "package.module:function")
    ModelName = Annotated[str, _known(_OWN)]
    AnyModelName = Annotated[str, _known((*_OWN, *_FOREIGN))]
    DatasetKind = Annotated[str, _installed("bevquant.datasets")]
    ExportTarget = Annotated[str, _installed("bevquant.targets")]
    Method = Annotated[str, _known(("mse", "max", "entropy", "percentile"), _methods)]
    Rounding = Annotated[str, _known(("nearest", "gptq"), _roundings)]
    Precision = Annotated[str, _known(("int4", "int8", "int16", "w4a4", "fp8"), _precisions)]
    MarchName = Annotated[str, _known(_marches_with_figures(), _marches)]
    Backend = Annotated[str, _known(("auto", "amx", "vnni", "portable", "torch"))]
    Cpu = Annotated[str, _known(("vnni", "any"), _cpus)]

WeightLayout = Literal["auto", "RSCK", "KRSC", "KCRS"]
"""Of `bevquant_sparse.WeightLayout` those that checkpoints of BEVFusion have."""

SensitivityMetric = Literal["sqnr", "kl", "mAP"]
SensitivityOutput = Literal["map", "heatmap"]

Target = Literal["nvidia", "bpu"]
