"""From a calibrated model to a QDQ file, and hb_mapper's settings to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from bevquant_export._cpu import mark_cpu
from bevquant_export._errors import QdqError
from bevquant_export._figures import Timing, figures_of, timed
from bevquant_export._size_guards import FRAMES_KEY, note_guards, open_guards, refuse_free_batch
from bevquant_export._taken_numbers import frame_tables
from bevquant_export._takes_float8 import is_float8, refuse_float8
from bevquant_export.dense._ports import Shape, named_inputs, named_outputs, with_names
from bevquant_export.dense._read_model import read_model
from bevquant_export.dense._source import Source, example_of, integer_model
from bevquant_export.dense._written import QdqFile
from bevquant_export.dense.nodes._at import TYPES
from bevquant_export.dense.nodes._emit import emit
from bevquant_export.dense.nodes._graph import Graph, TensorState
from bevquant_export.dense.nodes._profile import FP4_OPSET, INT16_OPSET, Profile, profile_of
from bevquant_export.dense.nodes._weighted import OPSET as FLOAT8_OPSET
from bevquant_export.dense.verify._compare import KnownErrors, tensors_by_input, verified
from bevquant_export.lint._model import VOXELS
from bevquant_export.lint._read import load_model
from bevquant_export.runtime._session import session
from bevquant_export.voxels._body import OPSET
from bevquant_graph import Guard, file_path, problem_of, reported_by
from bevquant_int8sim import IntegerModel
from bevquant_int8sim.program import PROGRAM_READERS, BlockLayer, Integers
from bevquant_quantizers import hb_mapper, quantization_disabled, write_whole


@reported_by("export_qdq_onnx")
def export_qdq_onnx(
    model: nn.Module | IntegerModel,
    args: Any,
    path: str | os.PathLike[str],
    profile: str = "tensorrt",
    *,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_batch: bool = False,
    weights: str = "auto",
    integer_sums: bool = False,
    march: str = "bayes",
    verify: bool = True,
    measure: bool = False,
) -> QdqFile:
    r"""Write a calibrated dense model as ONNX with QuantizeLinear and DequantizeLinear.

    .. math:: x_q = \operatorname{clamp}\bigl(\operatorname{round}(x / s) + z\bigr), \quad
              \hat x = (x_q - z) s

    rounded half to even, with one scale s per activation and one per output channel of a weight.
    The file has the steps of `bevquant_int8sim.simulate`: the same integers, the same scales (s =
    amax/127), and each ReLU fused into the layer in front of it. Models that `bevquant_hybrid`
    prepared, for a BPU or for BPU and CPU, are read by that package: one pair per fake quantizer (s
    = amax/127.5), trained batch norms folded, CPU parts without pairs.

    Nodes and values are named after modules (``layer1.0.conv1.Conv``), constants after parameters
    (``layer1.0.conv1.weight``). Other float operations are written by torch's exporter, one call at
    a time, in the profile's operator set (this needs onnxscript). Operations without a form there
    are refused with their name.

    Profiles (`bevquant_export.target_names` lists all):

    * ``"tensorrt10"``, or ``"tensorrt"``: opset 13, int8 with zero point 0, float bias. Weights are
      float numbers, each an integer times its scale, followed by a pair of their own, which every
      version since 8 reads. Transposed convolutions have one scale, or float weights.
    * ``"tensorrt11"``: the same pairs, with types for a strongly typed network: float32 between
      pairs; inputs, outputs and float operations are float16 where their values fit, according to
      constants, ranges of pairs and the largest values of all calibration frames
      (`bevquant_quantizers.float_ranges`). Values beyond ±65,504 or of unknown range, whole numbers
      beyond ±2,048, and quotients or logarithms with a guard below 2⁻¹⁷ are float32. The result's
      `notes` and the metadata ``float32`` give the reasons.
    * ``"onnxruntime"``: opset 13, uint8 with zero point 128, int32 bias, ReLU as Clip on integers.
      Convolutions, additions, concatenations and pooling run in integers. Transposed convolutions
      without overlap become a 1×1 convolution and DepthToSpace. Sparse convolutions on grids of one
      to three axes are possible: opset 18, any number of voxels, the number of frames of `args` or
      the one that the forward reads from the voxels; a sparse tensor is features and coordinates.
      Activations of 16 bits: opset 21, int16 pairs, and layers between them in float32. MXFP8:
      opset 21, FP8 pairs with a scale for each block, which the file computes for activations.
    * ``"openvino"``: the same with int8 weights, the only ones it takes as integers.
    * ``"horizon"``: opset 11, int8 with zero point 0, scales ⟨1⟩ or ⟨C⟩ without axis, as nodes of
      their own; nodes named ``<operator>_<place>``; no pair after an operation that keeps its
      input's scale; hb_mapper's settings beside the file, with the nodes that must stay in float.

    Args:
        model: A calibrated `bevquant_qnn` model in evaluation mode; the result of `simulate` for
            it, which saves a second capture; or a model from ``prepare_qat_fx``,
            ``prepare_calibration_fx`` or ``prepare_qat`` of `bevquant_hybrid`, written as it
            evaluates. It is not changed.
        args: A tuple of positional inputs, a dict of named inputs, or one input. float32, or
            float64 (tensors, numpy arrays, floats), which is float32 in the file where the results
            do not need its digits; except for horizon integers and booleans, which keep their type
            in the file (number of points and place of a pillar, a mask).
        path: The file. It is written to a temporary name and renamed.
        profile: One of the above, or the name of another `QdqTarget`.
        input_names: One name per tensor of `args` (default: the parameters' names).
        output_names: One name per returned tensor (default: keys and positions).
        dynamic_batch: Let the first axis of the inputs have any size. The model runs on twice the
            batch to find the sizes that follow it.
        weights: For onnxruntime and openvino. ``"auto"`` is the fastest form that is exact on this
            CPU (`cpu_at_hand`). ``"int8"`` is several times faster and saturates on x86 without
            VNNI. ``"uint8"`` is exact on every CPU. Weights from -64 to 64 (seven bits) never
            saturate and are always int8. The result and the metadata ``bevquant.cpu`` state on
            which CPUs the file is exact.
        integer_sums: For onnxruntime. A sum that reads a convolution's accumulators, as with a
            `residual_quantizer`, makes that convolution run in float, exactly. True rounds the
            accumulators to eight bits first, with their range on `args`, and both run in integers,
            as in ``simulate(integer_sums=True)``. Not needed for models with `QuantAdd`.
        march: For horizon: a march of hb_mapper, such as ``"bayes"``.
        verify: Before the file gets its name, compare the integer model with `model` and the file
            with the integer model, on `args`, in onnxruntime, or in ONNX's reference where that is
            not installed. The metadata ``verified`` names the runtime; ``"no"`` with False.
        measure: For engines on a CPU: run the file beside the same model in float32, written by the
            same exporter, and report both times in the result's `figures`.

    Returns:
        The file, its inputs and outputs, its size, and its float parts.

    Raises:
        TypeError: `model` is not a module.
        ValueError: An unknown profile; a model that is not calibrated, in training mode, cannot be
            captured or is converted already; activations in a format that the profile does not
            have; an operation without a form; a batch that cannot vary; or a file that computes
            other values than the model. The message names the module and what to do. No file is
            written then.

    Example:
        >>> import tempfile, torch
        >>> from torch import nn
        >>> from bevquant_qnn import quantize_model
        >>> from bevquant_quantizers import calibrate
        >>> x = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
        >>> quantized = quantize_model(net, example_inputs=x).model
        >>> _ = calibrate(quantized, [x])
        >>> file = export_qdq_onnx(quantized, x, f"{tempfile.mkdtemp()}/net.onnx")
        >>> file.inputs, file.outputs
        ({'input': (1, 3, 4, 4)}, {'output': (1, 4, 2, 2)})
    """
    chosen = profile_of(profile, weights)
    known = hb_mapper.marches() if chosen.name == "horizon" else ()
    if known and march not in known:
        raise QdqError(f"march={march!r}: expected one of {known}")
    if integer_sums and not chosen.integer_relu:
        raise QdqError(
            f"integer_sums=True with profile={profile!r}: expected 'onnxruntime'; "
            "the others add to accumulators themselves"
        )

    on_cpu_engine = chosen.runner != "plain"
    if measure and not (on_cpu_engine and _has_float_form(model)):
        raise QdqError(
            f"measure=True with profile={profile!r} and a "
            f"{type(model).__name__}: expected 'onnxruntime' or 'openvino', and a calibrated "
            "bevquant_qnn model, whose float32 form runs beside the file"
        )
    target = file_path(path, "ONNX file")
    if not target.parent.is_dir():
        raise QdqError(f"there is no folder {target.parent}; make it first")
    args = example_of(model, args)
    settings: dict[str, Any] = {
        "dynamic_batch": dynamic_batch, "voxels": chosen.voxels, "verify": verify,
        "integer_inputs": chosen.integer_inputs, "integer_sums": integer_sums,
        "decisions": chosen.runner == "onnxruntime",
    }  # fmt: skip
    source = read_model(model, args, rows=chosen.voxels and not dynamic_batch, **settings)
    inputs = named_inputs(source, input_names)
    outputs = named_outputs(source, output_names, inputs.values())
    for ref, name in outputs:
        if (dtype := source.dtype(ref)) not in TYPES:
            remedy = "its real and imaginary parts" if dtype.is_complex else "it as float32"
            raise QdqError(f"output {name} is {dtype}, which a file cannot return; return {remedy}")
    refuse_float8(source.program, chosen.float8, "export_qdq_onnx", f"profile {profile!r}")
    try:
        graph, made = _emitted(source, chosen, inputs, outputs, integer_sums)
    except QdqError as error:
        sizes = [size for ref in inputs for size in source.named(ref)]
        if source.sparse or not any(isinstance(size, str) for size in sizes) or dynamic_batch:
            raise
        fixed_rows = f"{problem_of(error)}: so the numbers of rows are the example's"
        integers = integer_model(source.integer)
        assert integers is not None
        source = read_model(integers, args, **settings)
        graph, made = _emitted(source, chosen, inputs, outputs, integer_sums)
        graph.notes.append(fixed_rows)
    shapes_in = {name: source.named(ref) for ref, name in inputs.items()}
    shapes_out = {name: source.named(ref) for ref, name in outputs}
    proto = _assemble(
        graph, shapes_in, shapes_out, [(made[ref].name, name) for ref, name in outputs],
        {name: source.dtype(ref) for ref, name in (*inputs.items(), *outputs)},
    )  # fmt: skip
    if on_cpu_engine:
        mark_cpu(proto)
    guards = _open_guards(source, inputs, shapes_in)
    if dynamic_batch:
        refuse_free_batch(guards, "export_qdq_onnx")
    named = {node.output[0]: node.name for node in proto.graph.node}
    on_cpu = tuple(named[node.output[0]] for node in graph.on_cpu)
    fixed = [f"{name}: is {value!r} in the file" for name, value in source.fixed.items()]
    fixed += [f"is right where {guard}" for guard in guards]
    fixed += [f"frames: {frames} of {grid}, in the file" for grid, frames in source.grids.values()]
    file = QdqFile(
        path=target,
        profile=profile,
        opset=graph.opset,
        inputs=shapes_in,
        outputs=shapes_out,
        integers={n: h.integers or h.flat for n, h in made.items() if h.integers or h.flat},
        float8={n: h.name for n, h in made.items() if h.float8},
        floats=tuple(f"{i.path}: {i.what}: {i.reason}" for i in source.program.float_fallbacks),
        notes=(*graph.notes, *fixed),
        run_on_cpu=on_cpu if chosen.name == "horizon" else (),
        sum_ranges=dict(source.sum_ranges),
        integer_model=integer_model(source.integer),
        signature=with_names(source, source.program.signature, inputs.values()),
        result=with_names(source, source.program.result, (name for _, name in outputs)),
    )
    errors: KnownErrors = {}
    if chosen.half:
        from bevquant_export.dense._half_trial import recorded, typed_file

        seen = recorded(model, source, made, inputs)
        typed = typed_file(
            file, proto, source, args, seen, verify=verify, sums=integer_sums, errors=errors
        )
        proto, file = typed.proto, replace(file, notes=(*file.notes, *typed.reasons))
    if verify:
        content = proto.SerializeToString()
        file = verified(
            file, content, source.integer, args, integer_sums=integer_sums, known=errors
        )
    proto.metadata_props.add(key="verified", value=file.verified)
    note_guards(proto, guards)
    tables = frame_tables(integer_model(source.integer))
    frames = {
        inputs[name]: int(source.hosts[number]) - past + 1
        for name, (number, past) in tables.items()
        if name in inputs
    }
    if frames:
        proto.metadata_props.add(key=FRAMES_KEY, value=json.dumps(frames))
    timing = None
    if measure and isinstance(model, nn.Module):
        with quantization_disabled(model):
            timing = beside_floats(proto, model, args, file)
    content = proto.SerializeToString(deterministic=True)
    file = replace(file, figures=figures_of(content, on_cpu=on_cpu_engine, timing=timing))
    write_whole(target, content)
    if chosen.name != "horizon":
        return file
    return replace(file, settings=hb_mapper.write_config(target, march, on_cpu))


def _emitted(
    source: Source, profile: Profile, inputs: dict[str, str], outputs: Sequence[tuple[str, str]],
    integer_sums: bool,
) -> tuple[Graph, dict[str, TensorState]]:  # fmt: skip
    """The program's nodes, and its values in the file."""
    graph = Graph(profile, _opset(source))
    for name in (*inputs.values(), *(name for _, name in outputs)):
        graph.unique(name)
    return graph, emit(source, graph, inputs, integer_sums=integer_sums)


def _opset(source: Source) -> int:
    """The least operator set for voxels, FP8, int16 or blocks, and FP4."""
    forms = [value.form for value in source.program.values.values()]
    wide = any(isinstance(form, Integers) and form.bits == 16 for form in forms)
    blocks = [s.target.form for s in source.program.steps if isinstance(s.target, BlockLayer)]
    float8 = any(map(is_float8, source.program.steps))
    wide |= bool(blocks)
    fp4 = FP4_OPSET * ("nvfp4" in blocks)
    return max(OPSET * source.sparse, FLOAT8_OPSET * float8, INT16_OPSET * wide, fp4)


def _has_float_form(model: Any) -> bool:
    """Whether it is a module that this package reads itself."""
    kinds = tuple(PROGRAM_READERS)
    return isinstance(model, nn.Module) and not any(isinstance(m, kinds) for m in model.modules())


def beside_floats(proto: Any, model: Any, args: Any, file: QdqFile) -> Timing:
    """The file and its model in float32, written by the same exporter, in turn on `args`."""
    with TemporaryDirectory() as folder:
        peer = export_qdq_onnx(
            model, args, Path(folder) / "float32.onnx", file.profile,
            input_names=list(file.inputs), verify=False,
        )  # fmt: skip
        floats = load_model(peer.path)
    given = tensors_by_input(file, args)
    arrays = {name: value.detach().cpu().numpy() for name, value in given.items()}
    open_session = partial(session, runner=profile_of(file.profile).runner, timed=True)
    return timed(proto, floats, arrays, open_session)


def _open_guards(
    source: Source, inputs: Mapping[str, str], shapes: Mapping[str, Shape]
) -> list[Guard]:
    """Conditions of the model on sizes that the file leaves free, by the file's inputs."""
    names = {**source.integer.names, **inputs}
    known: dict[str, Any] = {**source.fixed, **shapes}
    for name, coords in source.program.sparse_inputs.items():
        names[f"{coords}.indices"] = inputs[f"{name}.indices"]
        known[f"{coords}.spatial_shape"], known[f"{coords}.batch_size"] = source.grids[coords]
    return open_guards(source.program.guards, names, known)


def _assemble(
    graph: Graph,
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    made: Sequence[tuple[str, str]],
    types: Mapping[str, Any],
) -> Any:
    """The model, checked; inputs and outputs by name, to their shapes."""
    import onnx
    from onnx import helper, numpy_helper

    taken = set(inputs) | set(graph.constants)
    renamed: dict[str, str] = {}
    for tensor, name in made:
        if tensor in taken or tensor in renamed:
            unique = graph.unique(f"{name}.Identity")
            graph.nodes.append(helper.make_node("Identity", [tensor], [name], name=unique))
        else:
            renamed[tensor] = name
    for node in graph.nodes:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    used = {name for node in graph.nodes for name in node.input}
    opset, domains = helper.make_opsetid("", graph.opset), {node.domain for node in graph.nodes}
    proto = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "model",
            [helper.make_tensor_value_info(n, TYPES[types[n]], s) for n, s in inputs.items()],
            [helper.make_tensor_value_info(n, TYPES[types[n]], s) for n, s in outputs.items()],
            [numpy_helper.from_array(a, n) for n, a in graph.constants.items() if n in used],
            value_info=[helper.make_tensor_value_info(n, t, None) for n, t in graph.typed.items()],
        ),
        producer_name="bevquant_export",
        functions=_functions(graph),
        opset_imports=[opset, *(helper.make_opsetid(d, 1) for d in sorted(domains) if d)],
        ir_version=helper.find_min_ir_version_for([opset]),
    )
    if graph.profile.passes:
        proto = _finished(proto, graph.profile)
    try:
        onnx.checker.check_model(proto, full_check=graph.profile.axis)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        remedy = (
            ". A layer in float16 or bfloat16 is a probable cause: call model.float() before the "
            "model is quantized"
        )
        raise QdqError(
            f"onnx.checker refuses the model's file: {error}"
            f"{remedy if 'float16' in str(error) else ''}"
        ) from error
    return proto


def _finished(proto: Any, profile: Profile) -> Any:
    import onnx_ir as ir

    model = ir.from_proto(proto)
    for finish in profile.passes:
        finish(model)
    made = ir.to_proto(model)
    del made.graph.value_info[:]  # types of constants too
    made.graph.value_info.extend(proto.graph.value_info)
    return made


def _functions(graph: Graph) -> list[Any]:
    """The functions of voxels that the graph calls."""
    from bevquant_export.voxels._emit import FUNCTIONS, OPEN, opened

    found = [
        opened(FUNCTIONS[name.removesuffix(OPEN)]()) if name.endswith(OPEN) else FUNCTIONS[name]()
        for name in sorted(graph.functions)
    ]
    for function in found:
        function.domain = VOXELS
        for entry in function.opset_import:
            if not entry.domain:  # one set for the whole file
                entry.version = graph.opset
    return found
