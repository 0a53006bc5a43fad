"""Every stage of a random model, and the arithmetic that its results are checked with."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from fuzz.session import clean
from torch import Tensor, nn

from bevquant_export import (
    export_qdq_onnx,
    find_target,
    load_sparse_onnx,
    open_onnx,
    target_names,
)
from bevquant_export.dense import QdqFile
from bevquant_fusion import fuse_model
from bevquant_hybrid.march import March, set_march
from bevquant_hybrid.quantization import (
    FakeQuantState,
    convert_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    prepare_calibration_fx,
    prepare_qat_fx,
    set_fake_quantize,
)
from bevquant_int8sim import IntegerModel, compare, simulate
from bevquant_qnn import quantize_model
from bevquant_quantizers import calibrate

KINDS = ("dense", "sparse", "hybrid")
OUTCOMES = ("ok", "refused", "RAW", "SILENT")
HYBRID_PROFILES = ("horizon", "onnxruntime")


class WrongResult(Exception):
    """A stage gave a wrong result and said nothing."""


@dataclass(frozen=True)
class Found:
    """How a stage of a model ended: one of `OUTCOMES`, and what was said."""

    stage: str
    outcome: str
    text: str = ""


def leaves(value: Any) -> list[Tensor]:
    """The tensors of a result; of sparse tensors the features, by their coordinates."""
    if isinstance(value, Tensor):
        return [value.detach()]
    if hasattr(value, "features"):
        indices = value.indices.long()
        key = indices[:, 0]
        for axis, size in enumerate(value.spatial_shape, 1):
            key = key * int(size) + indices[:, axis]
        return [value.features.detach()[key.argsort()]]
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)]


def as_double(value: Any) -> Any:
    """Inputs with their floats in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: as_double(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(as_double(item) for item in value)
    if hasattr(value, "replace_feature"):
        return value.replace_feature(value.features.double())
    return value


def check(got: Any, wanted: Any, allowed: Sequence[float] | float, what: str) -> None:
    """Refuse results that are further apart than `allowed`, norms of the difference.

    Raises:
        WrongResult: They are.
    """
    pairs = list(zip(leaves(got), leaves(wanted), strict=True))
    limits = [allowed] * len(pairs) if isinstance(allowed, float) else allowed
    for index, ((mine, other), limit) in enumerate(zip(pairs, limits, strict=True)):
        if mine.shape != other.shape:
            raise WrongResult(f"{what}: shape {tuple(mine.shape)}, not {tuple(other.shape)}")
        apart = float((mine.double() - other.double()).norm())
        if not apart <= limit:
            raise WrongResult(f"{what}: result {index} is {apart:.3g} off, {limit:.3g} explained")


def bounds(fake: Any, clean_result: Any) -> list[float]:
    """Norms by which integers may leave the fake-quantized result.

    Rounding at ties moves a value by a step where quantization moves all by up to half of one, so
    that their difference is well below the quantization's own noise.
    """
    return [
        float((q.double() - f.double()).norm()) + 0.02 * float(f.double().norm()) + 1e-4
        for q, f in zip(leaves(fake), leaves(clean_result), strict=True)
    ]


class Stages:
    """Runs the stages of one model and notes how each ends."""

    def __init__(self, kind: str, seed: int, skipped: Collection[int] = ()) -> None:
        self.kind, self.seed = kind, seed
        self.found: list[Found] = []
        module = import_module(f"random_models.{kind}")
        self.net, self.batches = module.make(seed, skipped)

    def stage(self, name: str, run: Callable[[], Any]) -> Any:
        """The result of `run`; None where it ends on an error, which is noted."""
        try:
            result = run()
        except WrongResult as error:
            self.found.append(Found(name, "SILENT", str(error)))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            # What a QTensor does not do is a NotImplementedError, as the package says.
            documented = self.kind == "hybrid" and isinstance(error, NotImplementedError)
            outcome = "refused" if documented or clean(error, types=True) else "RAW"
            self.found.append(Found(name, outcome, text))
        else:
            self.found.append(Found(name, "ok"))
            return result if result is not None else True
        return None

    @torch.no_grad()
    def run(self, targets: Sequence[str]) -> list[Found]:
        """All stages."""
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            if self.kind == "hybrid":
                self._hybrid(Path(folder), targets)
            else:
                self._integers(Path(folder), targets)
        return self.found

    def _call(self, model: Any, batch: tuple[Any, ...]) -> Any:
        return model(*copy.deepcopy(batch))

    def _others(self) -> Iterator[tuple[Any, ...]]:
        """The batches behind the example that the float model itself takes."""
        for batch in self.batches[1:]:
            try:
                self._call(self.net, batch)
            except (RuntimeError, ValueError, IndexError):
                continue
            yield batch

    def _folds(self) -> None:
        """Folding in float64, where it is exact but for the last digits."""
        double = copy.deepcopy(self.net).double()
        folded = fuse_model(double, as_double(self.batches[0])).model
        batch = as_double(self.batches[1])
        wanted = self._call(double, batch)
        allowed = [1e-9 * (1 + float(leaf.norm())) for leaf in leaves(wanted)]
        check(self._call(folded, batch), wanted, allowed, "folded against float, in float64")

    def _integers(self, folder: Path, targets: Sequence[str]) -> None:
        example = self.batches[0]
        fused = self.stage("fuse", lambda: fuse_model(self.net, example).model)
        if fused is None:
            return
        self.stage("folded", self._folds)
        quantized = self.stage(
            "quantize", lambda: quantize_model(fused, example_inputs=example).model
        )
        if quantized is None or not self.stage("calibrate", lambda: self._calibrated(quantized)):
            return
        integers = self.stage("simulate", lambda: simulate(quantized, example))
        if integers is not None:
            for batch in self._others():
                self.stage("integers", lambda b=batch: self._holds(integers, quantized, b))
            self.stage("save", lambda: self._saved(integers, folder / "saved"))
            self.stage("compare", lambda: self._compared(fused, integers))
        for name in targets:
            self.stage(name, lambda n=name: self._file(n, quantized, folder))

    def _calibrated(self, quantized: nn.Module) -> None:
        calibrate(quantized, copy.deepcopy(self.batches[:2]), method="max")

    def _holds(self, model: Any, quantized: nn.Module, batch: tuple[Any, ...]) -> None:
        fake = self._call(quantized, batch)
        allowed = bounds(fake, self._call(self.net, batch))
        check(self._call(model, batch), fake, allowed, "integers against fake quantization")

    def _saved(self, integers: IntegerModel, folder: Path) -> None:
        integers.save(folder)
        wanted = self._call(integers, self.batches[1])
        check(self._call(IntegerModel.load(folder), self.batches[1]), wanted, 0.0, "loaded")

    def _compared(self, fused: nn.Module, integers: IntegerModel) -> None:
        table = compare(fused, integers, [copy.deepcopy(self.batches[1])])
        if table.wrong:
            raise WrongResult(f"compare: {table.wrong[0].path} is off: {table}")

    def _file(self, name: str, quantized: nn.Module, folder: Path) -> None:
        target = find_target(name)
        made = target.write(quantized, copy.deepcopy(self.batches[0]), folder / f"{name}.onnx")
        if isinstance(made, QdqFile):
            file = open_onnx(made.path, name)
            for batch in self._others() if self.kind == "dense" else ():
                if _fits(made, batch):
                    self._runs(file, made, quantized, batch)
        elif hasattr(made, "path") and self.kind == "sparse":
            batch = copy.deepcopy(self.batches[1])
            batch = _columns(batch) if name == "autoware" else batch
            rows = target.compare(made, quantized, batch)
            wrong = [row for row in rows if row.different and not _is_tie(row)]
            if wrong:
                raise WrongResult(f"{name}: {wrong[0]}")
            # A file that begins behind the model's first layers takes other features.
            if name in ("portable", "libspconv") and not made.begins_behind:
                self._sparse_file(made.path, quantized)

    def _sparse_file(self, path: Path, quantized: nn.Module) -> None:
        """Values of each result in their order of size: which voxel they lie on is not asked."""
        batch = self.batches[1]
        features, coords, size = _columns(batch)
        file = load_sparse_onnx(path)
        if list(file.grid or ()) != [9, 8, 7]:
            return  # with its axes turned: `compare` has checked it
        got = [leaf.double().flatten().sort()[0] for leaf in leaves(file(features, coords, size))]
        fake, exact = (_once(self._call(m, batch), len(got)) for m in (quantized, self.net))
        wanted = [leaf.double().flatten().sort()[0] for leaf in leaves(fake)]
        check(got, wanted, bounds(fake, exact), "file against fake quantization, sorted")

    def _runs(self, file: Any, made: QdqFile, model: Any, batch: tuple[Any, ...]) -> None:
        got = list(file(dict(zip(made.inputs, leaves(batch), strict=True))).values())
        fake, exact = (_once(self._call(m, batch), len(got)) for m in (model, self.net))
        allowed = [2 * limit for limit in bounds(fake, exact)]
        check(got, fake, allowed, f"{made.profile} file, {batch[0].shape}")

    def _hybrid(self, folder: Path, targets: Sequence[str]) -> None:
        set_march(March.BAYES)
        hybrid = self.seed % 4 != 0
        calibrated = self.stage(
            "prepare", lambda: prepare_calibration_fx(self.net, _calib(), hybrid=hybrid).eval()
        )
        if calibrated is None or not self.stage("calibrate", lambda: self._observed(calibrated)):
            return
        qat = self.stage("qat", lambda: prepare_qat_fx(calibrated, _qat(), hybrid=hybrid).eval())
        if qat is None or not self.stage("trained", lambda: self._trained(qat)):
            return
        integers = self.stage("convert", lambda: convert_fx(qat).eval())
        if integers is not None:
            for batch in self._others():
                self.stage("integers", lambda b=batch: self._holds(integers, qat, b))
        for name in HYBRID_PROFILES:
            self.stage(name, lambda n=name: self._hybrid_file(n, qat, folder))

    def _observed(self, calibrated: nn.Module) -> None:
        for batch in self.batches[:2]:
            wanted = self._call(self.net, batch)
            allowed = [1e-4 * (1 + float(leaf.norm())) for leaf in leaves(wanted)]
            check(self._call(calibrated, batch), wanted, allowed, "calibration against float")

    def _trained(self, qat: nn.Module) -> None:
        qat.train()
        with torch.enable_grad():
            floats = [leaf for leaf in _outputs(qat(*self.batches[0])) if leaf.requires_grad]
            if floats:
                sum((leaf.square().mean() for leaf in floats), torch.zeros(())).backward()
        qat.eval()
        set_fake_quantize(qat, FakeQuantState.VALIDATION)  # eval() alone leaves scales moving

    def _hybrid_file(self, name: str, qat: nn.Module, folder: Path) -> None:
        path = folder / f"{name}.onnx"
        made = export_qdq_onnx(qat, copy.deepcopy(self.batches[0]), path, name)
        file = open_onnx(made.path, name)
        for batch in self._others():
            if _fits(made, batch):
                self._runs(file, made, qat, batch)


def _columns(frame: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Features, coordinates and batch size of a frame in any form."""
    given = frame[0]
    if len(frame) == 3:
        return frame
    if isinstance(given, dict):
        return given["features"], given["coords"], given["batch_size"]
    return given.features, given.indices, given.batch_size


def _calib() -> dict[str, Any]:
    return {"": get_default_calib_qconfig()}


def _qat() -> dict[str, Any]:
    return {"": get_default_qat_qconfig()}


def _outputs(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for v in value for leaf in _outputs(v)]


def _once(value: Any, count: int) -> list[Any]:
    """Results: a file may return one that a model returns twice once."""
    items = list(value) if isinstance(value, tuple) else [value]
    if len(items) == count:
        return items
    found: list[Any] = []
    for item in items:
        if all(item is not other for other in found):
            found.append(item)
    return found


def _is_tie(row: Any) -> bool:
    return bool(getattr(row, "behind_functions", False)) or row.different <= 0.02 * row.elements


def _fits(made: QdqFile, batch: tuple[Any, ...]) -> bool:
    """Whether a file's sizes let a batch in."""
    shapes = zip(made.inputs.values(), (leaf.shape for leaf in leaves(batch)), strict=True)
    return all(
        isinstance(size, str) or size == given
        for shape, other in shapes
        for size, given in zip(shape, other, strict=True)
    )


def targets_of(kind: str) -> tuple[str, ...]:
    """Targets that take models of a kind, each once."""
    names = dict.fromkeys(find_target(name).name for name in target_names())
    if kind == "hybrid":
        return HYBRID_PROFILES
    return tuple(n for n in names if kind == "sparse" or find_target(n).kind == "dense")


def run(kind: str, seed: int, targets: Sequence[str], skipped: Collection[int] = ()) -> list[Found]:
    """The stages of one model."""
    return Stages(kind, seed, skipped).run(targets)


def smallest(kind: str, seed: int, targets: Sequence[str], found: Found) -> tuple[set[int], str]:
    """Steps that can be left out so that a stage still ends so, and the names of the others."""
    count, skipped = len(Stages(kind, seed).net.steps), set[int]()
    for step in reversed(range(count)):
        trial = skipped | {step}
        try:
            again = run(kind, seed, [n for n in targets if n == found.stage], trial)
        except Exception:
            continue  # the float model itself does not run
        said = found.text.partition(":")[0]
        if any(f.stage == found.stage and f.text.startswith(said) for f in again if _is_bad(f)):
            skipped = trial
    steps = Stages(kind, seed).net.steps
    kept = (f"{i}:{step.name}{list(step.sources)}" for i, step in enumerate(steps))
    return skipped, ", ".join(text for i, text in enumerate(kept) if i not in skipped)


def _is_bad(found: Found) -> bool:
    return found.outcome in ("RAW", "SILENT")
