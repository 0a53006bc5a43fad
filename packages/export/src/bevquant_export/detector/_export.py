"""A whole detector in one call: its sparse file, its dense file, and the check of both."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from torch import Tensor, nn

from bevquant_export._errors import UnsplitError
from bevquant_export._taken_numbers import refuse_decisions
from bevquant_export.dense import QdqFile, TensorDifference
from bevquant_export.dense._export import beside_floats
from bevquant_export.dense._source import program_of
from bevquant_export.dense.verify._compare import verified
from bevquant_export.detector._chain import (
    DetectorExport,
    DetectorMap,
    FrameCheck,
    OutputCheck,
    WholeRun,
    by_name,
    chosen_outputs,
    counted,
    refuse_other,
    same_frame,
    sqnr_db,
)
from bevquant_export.detector._one_file import one_file
from bevquant_export.detector._parts import Parts, parts_of, quantize_first
from bevquant_export.lint import Finding, lint_onnx
from bevquant_export.lint._read import load_model
from bevquant_export.runtime import open_onnx
from bevquant_export.sparse import SparseExport, load_sparse_onnx
from bevquant_export.sparse._compare import compared
from bevquant_export.sparse._export import DIALECTS, ORDERS, write_sparse
from bevquant_export.sparse._half_precision import half_constants_of
from bevquant_export.sparse._verify import refuse_departures
from bevquant_export.targets import find_target
from bevquant_export.targets.qdq import QdqTarget
from bevquant_graph import (
    Graph,
    arguments,
    as_example,
    capture,
    checked_batches,
    file_path,
    named_results,
    part_of,
    reported_by,
)
from bevquant_int8sim import IntegerModel, simulate
from bevquant_int8sim.program import PROGRAM_READERS, LayoutCall, Program, Quantize, Relu, names_in
from bevquant_quantizers import quantization_disabled


def export_detector(
    model: nn.Module,
    example_inputs: Any,
    folder: str | os.PathLike[str],
    target: str = "tensorrt",
    *,
    dialect: str | None = None,
    model_order: str = "xyz",
    order: str | None = None,
    batches: Iterable[Any] = (),
    head_room: float = 1.5,
    verify: bool = True,
    measure: bool = False,
    **options: Any,
) -> DetectorExport:
    r"""Write a calibrated detector, from voxels to outputs, as the files that its engines take.

    An engine for sparse convolutions ends with ``dense()``. The model's graph is split there:
    ``sparse.onnx`` has the layers on voxels and the permute and reshape of their map;
    ``dense.onnx`` has the rest, with parts that do not read voxels (a camera branch). A map that
    both files have is named ``spatial_features`` in both (``spatial_features_0``, … for several).

    A map has one range. The dense file begins with QuantizeLinear, whose scale is amax/127. The
    sparse file returns the map unrounded (libspconv: in float16), so it is rounded to eight bits
    once, by the dense file. A value that float16 moves across the middle of two steps differs by
    one step there; `FrameCheck.maps` counts these, and other differences are refused.

    The example and the first of `batches` run through the files before these get their names.
    Compared with the integer model that was not split are each layer of the sparse file, the
    integers of the maps, each operation of the dense file on these maps, and the outputs.

    A model that cannot be split (an operation on voxels without a form in sparse files or that
    reads a map, a branch on values) is one file for ``"onnxruntime"``, ``dense.onnx``, from voxels
    to outputs; its first note names the operation. Each operation is compared.

    Args:
        model: A calibrated `bevquant_qnn` model in evaluation mode. It is not changed.
        example_inputs: Arguments of one call: a tuple of positional inputs, a dict of named inputs,
            or one input. The dense file has this number of frames; libspconv gives one per call.
        folder: Created where it does not exist. All files appear in it, or none.
        target: Engine of the dense file, a name of `find_target`.
        dialect: Form of the sparse file, ``"libspconv"`` or ``"portable"`` (default: the target's).
        model_order: Order of the coordinate columns after the batch, see `export_sparse_onnx`.
        order: Order of the coordinate columns in the sparse file (default: the model's).
        batches: Further inputs. `output_bound` counts the voxels of all of them.
        head_room: See `export_sparse_onnx`.
        verify: False writes the files without running them.
        measure: For engines on a CPU: run each file beside its part in float32, in the same
            runtime, and report both times in its `figures`.
        **options: Options of the target's `export_qdq_onnx`: ``output_names``, ``dynamic_batch``,
            ``weights``, ``integer_sums``, ``march``.

    Returns:
        The files, the maps between them, the file and output of each result, and the checks. A
        model without voxels, or in one file, has no sparse one; a model that returns sparse tensors
        or maps has no dense one.

    Raises:
        TypeError: `model` is not a module, or the target does not have an option.
        ValueError: An operation has no form in a file, an operation on voxels reads a map, or a
            file computes other values than the model. The message names module, file, line and
            remedy.

    Example:
        >>> def write(model, frames):
        ...     files = export_detector(model, frames[0], "onnx", "tensorrt11", batches=frames)
        ...     print(files)
    """
    whole = file_path(folder, "folder")
    if not isinstance(model, nn.Module):
        raise TypeError(f"export_detector: expected a module, got {type(model).__name__}")
    if whole.exists() and not whole.is_dir():
        raise ValueError(f"export_detector: {whole} is a file; give the folder of the files")
    engine = find_target(target)
    if not isinstance(engine, QdqTarget) or engine.kind != "dense":
        raise ValueError(
            f"export_detector: target={target!r}: expected an engine for dense files, such as "
            "'tensorrt', 'onnxruntime' or 'horizon'; dialect= says what the sparse file is"
        )
    if measure and engine.runner == "plain":
        raise ValueError(
            f"export_detector: measure=True with target={target!r}: expected 'onnxruntime' or "
            "'openvino', whose files run on this CPU"
        )
    if "input_names" in options:
        raise TypeError(
            "export_detector: input_names: inputs are called as the sparse file's outputs and the "
            "parameters of the model"
        )
    dialect = dialect or engine.sparse or "libspconv"
    if dialect not in DIALECTS:
        raise ValueError(f"export_detector: dialect={dialect!r}: expected one of {DIALECTS}")
    for name, value in (("model_order", model_order), ("order", order or model_order)):
        if value not in ORDERS:
            raise ValueError(f"export_detector: {name}={value!r}: expected one of {ORDERS}")
    if any(isinstance(m, kind) for m in model.modules() for kind in PROGRAM_READERS):
        raise ValueError(
            "export_detector: the model is another package's (bevquant_hybrid); its dense part is "
            "written by export_qdq_onnx"
        )
    axes = {"model_order": model_order, "order": order or model_order}
    example = as_example(model, example_inputs)
    others = [as_example(model, b) for b in checked_batches(batches)]
    own = {"verify": verify, "measure": measure}

    def write(folder: Path) -> DetectorExport:
        try:
            writer = _Writer(model, example, engine, dialect, axes, options, **own)
            return writer.write(folder, others, head_room)
        except UnsplitError as error:
            if not engine.form.voxels or dialect != "portable":
                raise
            path = folder / _DENSE
            return one_file(model, [example, *others], engine, path, error, **own, **options)

    whole.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=whole, prefix=".writing-") as unseen:
        made = write(Path(unseen))
        for file in sorted(Path(unseen).iterdir()):
            file.replace(whole / file.name)
    made = _moved(made, whole)
    if made.sparse is not None and made.sparse.begins_behind and dialect != "portable":
        warnings.warn(f"export_detector: {made.sparse.path}: {made.sparse.beginning}", stacklevel=2)
    return made


def _moved(made: DetectorExport, folder: Path) -> DetectorExport:
    """The result with the files' final paths."""
    sparse, dense = made.sparse, made.dense
    if sparse is not None:
        sparse = replace(sparse, path=folder / sparse.path.name)
    if dense is not None:
        settings = dense.settings and folder / dense.settings.name
        dense = replace(dense, path=folder / dense.path.name, settings=settings)
    return replace(made, folder=folder, sparse=sparse, dense=dense)


_SPARSE, _DENSE = "sparse.onnx", "dense.onnx"


class _Writer:
    """Writes and runs both parts of a model; made of the arguments of `export_detector`.

    `axes` are the orders of the coordinate columns.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        engine: QdqTarget,
        dialect: str,
        axes: Mapping[str, str],
        options: Mapping[str, Any],
        *,
        verify: bool,
        measure: bool,
    ) -> None:
        self.example, self.engine, self.dialect = example, engine, dialect
        self.axes, self.options = axes, options
        self.verify, self.measure = verify, measure
        self.sums = bool(options.get("integer_sums"))
        self.rounded, self.graph, self.parts = _cut(model, example)
        if self.graph.decided:  # the parts below are without its requirements
            whole = simulate(self.rounded, example, graph=self.graph, verify=False)
            refuse_decisions(whole, "export_detector")
        parts = self.parts
        results = named_results(self.graph)
        # A map that is read goes by what its readers have of it.
        alone = [name for name, port in parts.of_sparse.items() if port not in parts.given]
        returned = {name: results[name] for name in (*alone, *parts.of_dense)}
        self.whole = simulate(
            self.rounded, example, graph=part_of(self.graph, returned), verify=verify,
            integer_sums=self.sums,
        )  # fmt: skip
        self.run = WholeRun(self.whole, parts, example)
        self.sparse_integers = None if parts.sparse is None else self._simulated(parts.sparse)
        self.dense_integers: Any = None
        if parts.dense is not None:
            for name in parts.maps.keys() & parts.given.keys():
                if (form := self.run.maps[name].integers()) is not None:
                    quantize_first(parts.dense, name, form)
            given = self._given(self.run.own_maps(), example)
            self.dense_integers = self._simulated(parts.dense, given)

    def _simulated(self, graph: Graph, inputs: Any = None) -> IntegerModel:
        """A part in integers; the whole is compared with the model, the parts with the whole."""
        given = self.example if inputs is None else inputs
        sums = self.sums and inputs is not None
        return simulate(self.rounded, given, graph=graph, verify=False, integer_sums=sums)

    def _given(self, maps: Mapping[str, Tensor], inputs: Any) -> dict[str, Any]:
        """Inputs of the dense part: maps, and the frame's other inputs."""
        leaves = dict(zip(self.graph.placeholders, self.graph.leaves(inputs), strict=True))
        return {
            name: maps[name] if name in maps else leaves[node]
            for name, node in self.parts.given.items()
        }

    def _handed_on(self, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Maps in the form of the sparse file's engine."""
        half = self.dialect == "libspconv"
        maps = {name: outputs[name] for name in self.parts.maps if name in outputs}
        return {name: x.half().float() if half else x for name, x in maps.items()}

    def write(self, folder: Path, batches: list[Any], head_room: float) -> DetectorExport:
        """Write the files into a folder, lint them, and send frames through both."""
        parts, findings = self.parts, list[Finding]()
        sparse, dense, outputs = None, None, dict[str, Any]()
        if self.sparse_integers is not None:
            sparse, outputs = self._sparse_file(folder / _SPARSE, batches, head_room)
            findings += lint_onnx(sparse.path, self.dialect)
        maps = self._handed_on(outputs)
        if self.dense_integers is not None:
            given = self._given(maps, self.example)
            dense = self.engine.write(
                self.dense_integers, given, folder / _DENSE, verify=self.verify, **self.options
            )
            findings += lint_onnx(dense.path, self.engine.name)
            if self.measure:
                dense = self._timed(dense, given)

        def outputs_of(dense: QdqFile | None) -> dict[str, tuple[str, str]]:
            pairs = zip(parts.of_dense, dense.outputs if dense else (), strict=True)
            of_sparse = {name: (_SPARSE, port) for name, port in parts.of_sparse.items()}
            return of_sparse | {name: (_DENSE, port) for name, port in pairs}

        made = DetectorExport(
            folder=folder,
            target=self.engine.name,
            sparse=sparse,
            dense=dense,
            maps=tuple(self._map(name, outputs) for name in parts.maps),
            outputs=outputs_of(dense),
            left_out=parts.left_out,
            findings=tuple(findings),
        )
        return replace(made, checks=self._checks(made, maps, batches)) if self.verify else made

    def _sparse_file(
        self, path: Path, batches: list[Any], head_room: float
    ) -> tuple[SparseExport, dict[str, Any]]:
        integers = self.sparse_integers
        assert integers is not None
        portable = self.dialect == "portable"
        ports: dict[str, Any] = integers.program.result
        sparse, outputs = write_sparse(
            self.rounded, integers, self.example, path, dialect=self.dialect, **self.axes,
            batches=batches, head_room=head_room, all_layers=False, verify=self.verify,
            measure=self.measure and portable,
            weights=self.options.get("weights", "auto") if portable else "auto",
            names={names_in(ref)[0]: port for port, ref in ports.items()},
        )  # fmt: skip
        if not self.verify:
            args, kwargs = arguments(self.example)
            outputs = integers(*args, **kwargs)
        return sparse, outputs

    def _timed(self, dense: QdqFile, given: dict[str, Any]) -> QdqFile:
        """With the time of the file beside the same part in float32."""
        with quantization_disabled(self.rounded):
            graph = _cut(self.rounded, self.example)[2].dense
            floats = simulate(self.rounded, given, graph=graph, verify=False)
            timing = beside_floats(load_model(dense.path), floats, given, dense)
        assert dense.figures is not None  # of every file that is written
        return replace(dense, figures=replace(dense.figures, timing=timing))

    def _map(self, name: str, outputs: Mapping[str, Any]) -> DetectorMap:
        amax = None
        if self.dense_integers is not None and name in self.parts.given:
            amax = _range(self.dense_integers.program, name)
        place = self.graph.describe(self.parts.maps[name])
        return DetectorMap(name, tuple(outputs[name].shape), amax, place)

    # Frames through both files

    def _checks(
        self, made: DetectorExport, maps: Mapping[str, Tensor], batches: list[Any]
    ) -> tuple[FrameCheck, ...]:
        """The example, and the first of the other frames that the dense file takes."""
        rows = made.sparse.differences if made.sparse else ()
        returned = made.sparse.returned if made.sparse else {}
        tensors = made.dense.differences if made.dense else ()
        ran = _Ran("example", self.example, self.run, rows, returned, maps, tensors)
        checks = [self._checked(made, ran)]
        others = {
            f"batches[{i}]": b
            for i, b in enumerate(batches)
            if not same_frame(self.graph, b, self.example)
        }
        for frame, inputs in others.items():
            run = WholeRun(self.whole, self.parts, inputs)
            if other := _other_sizes(made.dense, self._given(run.own_maps(), inputs)):
                checks[1:] = [FrameCheck(frame, not_run=other)]
                continue  # perhaps another one fits
            rows, returned, maps = self._layers(made, frame, inputs)
            tensors = self._tensors(made, self._given(maps, inputs))
            ran = _Ran(frame, inputs, run, rows, returned, maps, tensors)
            checks[1:] = [self._checked(made, ran)]
            break
        return tuple(checks)

    def _layers(
        self, made: DetectorExport, frame: str, inputs: Any
    ) -> tuple[tuple[TensorDifference, ...], dict[str, Any], dict[str, Tensor]]:
        """Each layer of the sparse file, the result of its integers, and the maps."""
        if made.sparse is None or self.sparse_integers is None:
            return (), {}, {}
        ran = made.sparse.verified
        file = load_sparse_onnx(
            made.sparse.path, backend="onnxruntime" if ran == "onnxruntime" else "auto"
        )
        other = self.axes["order"] != self.axes["model_order"]
        rows, returned, outputs = compared(file, self.sparse_integers, inputs, reversed_axes=other)
        refuse_departures(rows, f"export_detector: when {ran} runs the file on {frame}, ")
        return rows, returned, self._handed_on(outputs)

    def _tensors(
        self, made: DetectorExport, given: Mapping[str, Any]
    ) -> tuple[TensorDifference, ...]:
        """Each operation of the dense file."""
        if made.dense is None or self.dense_integers is None:
            return ()
        program = program_of(self.dense_integers, given, self.sums, verify=False)
        content = made.dense.path.read_bytes()
        return verified(made.dense, content, program, given, integer_sums=self.sums).differences

    def _checked(self, made: DetectorExport, ran: _Ran) -> FrameCheck:
        """Check of the maps and of the outputs."""
        half, run = self.dialect == "libspconv", ran.run
        run.check_sparse(self.parts, ran.returned)
        maps = tuple(run.check_map(name, value, half=half) for name, value in ran.maps.items())
        outputs = () if made.dense is None else self._outputs(made.dense, ran)
        integers = [row for row in ran.rows if row.form == "int8"]
        return FrameCheck(ran.frame, counted(integers), maps, counted(ran.tensors), outputs)

    def _outputs(self, file: QdqFile, ran: _Ran) -> tuple[OutputCheck, ...]:
        """Outputs of the dense file on these maps; none where no runtime is installed."""
        run, integers = ran.run, self.dense_integers
        run.check_dense(self.parts, by_name(integers(**self._given(run.own_maps(), ran.inputs))))
        given = self._given(ran.maps, ran.inputs)
        try:
            got = open_onnx(file.path, self.engine.name)(given)
        except ImportError:
            return ()
        same, chosen = by_name(integers(**given)), chosen_outputs(file.path)
        outputs = []
        for name, port in zip(self.parts.of_dense, file.outputs, strict=True):
            wanted = run.returned[name]
            if port not in chosen:
                refuse_other(ran.frame, port, same[name], got[port])
            db, fake = sqnr_db(wanted, got[port]), sqnr_db(wanted, run.fake[name])
            outputs.append(OutputCheck(port, db, fake, port in chosen))
        return tuple(outputs)


class _Ran(NamedTuple):
    """A frame, and the results of the files."""

    frame: str
    inputs: Any
    run: WholeRun
    rows: Iterable[TensorDifference]
    returned: Mapping[str, Any]
    maps: Mapping[str, Tensor]
    tensors: Iterable[TensorDifference]


@reported_by("export_detector")
def _cut(model: nn.Module, example: Any) -> tuple[nn.Module, Graph, Parts]:
    """The model with the sparse file's constants, its graph, and the split."""
    graph = capture(model, example)
    parts = parts_of(graph)
    if parts.sparse is None:
        return model, graph, parts
    rounded = half_constants_of(model, parts.sparse.called)
    graph = capture(rounded, example)
    return rounded, graph, parts_of(graph)


def _other_sizes(file: QdqFile | None, given: Mapping[str, Any]) -> str:
    """The input of the dense file that has other sizes in a frame; "" if none has."""
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    for (name, sizes), value in zip(file.inputs.items() if file else (), tensors, strict=False):
        pairs = zip(sizes, value.shape, strict=True)
        if any(isinstance(size, int) and size != n for size, n in pairs):
            return f"{name} is {list(value.shape)}, in the file {list(sizes)}"
    return ""


def _range(program: Program, name: str) -> float | None:
    """Range of a named input's quantizer, also after a layout operator."""
    moved = set(names_in(program.signature[1][name]))
    for step in program.steps:
        if not moved.intersection(step.inputs):
            continue
        if isinstance(step, Quantize):
            return step.integers.scale * step.integers.high
        if isinstance(step, LayoutCall | Relu):
            moved.update(step.outputs)
    return None
