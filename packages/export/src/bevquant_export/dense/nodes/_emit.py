"""An integer program as ONNX nodes, step by step."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from bevquant_export._errors import QdqError
from bevquant_export._taken_numbers import counts_frames, decisions
from bevquant_export.dense._source import Source, integer_model, location, tuple_of
from bevquant_export.dense.nodes._at import At
from bevquant_export.dense.nodes._blocks import nvfp4_pair, nvfp4_product
from bevquant_export.dense.nodes._floats import as_layer, float_operation
from bevquant_export.dense.nodes._graph import Graph, TensorState
from bevquant_export.dense.nodes._grid import average_pool, max_pool, resize
from bevquant_export.dense.nodes._layout_ops import (
    keeps_scale,
    moved,
    pads,
    reads_positions,
    selects,
)
from bevquant_export.dense.nodes._numbers import Numbers
from bevquant_export.dense.nodes._sample import attention_plugin, einsum_call, sampling_call
from bevquant_export.dense.nodes._torch_form import torch_form
from bevquant_export.dense.nodes._voxels import Voxels
from bevquant_export.dense.nodes._weighted import (
    as_weighted,
    block_of,
    block_tensor,
    float8_pair,
    unflattened,
    weighted_layer,
)
from bevquant_export.lint._graph import Node
from bevquant_export.voxels._body import INT64
from bevquant_graph import op_spec, own_code, problem_of
from bevquant_int8sim.program import (
    Add,
    AvgPool,
    BlockLayer,
    Call,
    Constant,
    Coordinates,
    Dense,
    Dequantize,
    Float8Layer,
    FloatCall,
    FloatRelu,
    GridSample,
    Integers,
    LayoutCall,
    Matmul,
    MaxPool,
    NumberCall,
    Quantize,
    Ref,
    Relu,
    Requantize,
    Resize,
    Sample,
    SparseConv,
    Step,
    blocks_round,
    float8_round,
    integers_of,
    is_active,
    names_in,
    replaced,
)
from bevquant_qnn import QuantAdd, QuantConcat

Made = TypeVar("Made", str, str | None, str | list[str])
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_IS_RANDOM = torch.Tag.nondeterministic_seeded
_MOST = 1 << 20  # elements of a constant that is computed while a file is written


def emit(
    source: Source, graph: Graph, inputs: dict[str, str], *, integer_sums: bool = False
) -> dict[str, TensorState]:
    """Add every step of the program; returns the tensors of its values in the file.

    The arguments are those of `Emitter`.
    """
    emitter = Emitter(source, graph, inputs, integer_sums)
    asked = {name for step in decisions(integer_model(source.integer)) for name in step.outputs}
    read, steps = {*map(tuple_of, (*asked, *names_in(source.program.result)))}, list[Step]()
    for step in reversed(source.program.steps):
        # What only an author's check reads decides nothing, and an engine may not import it.
        if isinstance(step, Coordinates) or not read.isdisjoint(map(tuple_of, step.outputs)):
            read.update(map(tuple_of, step.inputs))
        elif not isinstance(step, NumberCall):
            continue
        steps.append(step)
    for step in reversed(steps):
        emitter.add(step)
    for name in names_in(source.program.result):  # coordinates among them
        emitter.give(name)
    emitter.require_answers()
    return emitter.states


class Emitter:
    """Writes the steps of a program into a graph, in order.

    `integer_sums`: quantize accumulators in front of a sum, to their range on the example.
    """

    def __init__(
        self, source: Source, graph: Graph, inputs: dict[str, str], integer_sums: bool
    ) -> None:
        self.integer_sums = integer_sums
        self.source = source
        self.graph = graph
        self.states = {name: TensorState(tensor) for name, tensor in inputs.items()}
        self.several: dict[str, list[TensorState]] = {}
        self._constants: dict[str, Constant] = {}  # written where something reads them
        self._called: Step  # as the program has it
        self.numbers = Numbers(source, graph, self.read)
        self.voxels = Voxels(self.numbers, inputs)

    def add(self, step: Step) -> None:
        """Write a step; its inputs are written already."""
        made = step.outputs[0]
        if isinstance(step, NumberCall):
            self.numbers.note(step)
            self.voxels.host(step)
            return
        if isinstance(step, Coordinates):
            self.voxels.place(step)
            return
        if isinstance(step, Constant):
            self._constants[made] = step
            return
        folded = self._folded(step)
        if folded is not None:
            self._constants[made] = folded
            return
        self._called = step
        if isinstance(step, FloatCall):
            step = as_layer(step, self._values())
        placed = reads_positions(step)
        for name in step.inputs:
            constant = self._constants.get(name)
            if constant is None or name in self.states:
                continue
            if placed or constant.value.is_floating_point():
                self._write(constant)
        written = len(self.graph.nodes)
        try:
            self._write(step)
            self._refuse_absent(step, written)
        except ValueError as error:
            line = location(self.source.integer, step)
            if isinstance(error, QdqError) and (error.located or not line):
                raise
            raise QdqError(problem_of(error) + (f" ({line})" if line else "")) from error

    def _refuse_absent(self, step: Step, first: int) -> None:
        """Refuse nodes, from `first` on, of operators that the engine does not import."""
        profile = self.graph.profile
        nodes = (Node(node, 0) for node in self.graph.nodes[first:])
        met = profile.absent.intersection(node.reducing for node in nodes)
        if met:
            raise QdqError(
                f"{step.path or 'the model'} ({step.label}) is "
                f"{', '.join(sorted(met))} in ONNX, which {profile.name} does not import. Compute "
                "it in front of this model and give the result as an input, or write the file for "
                "'onnxruntime'"
            )

    def _folded(self, step: Step) -> Constant | None:
        """A step on constants and fixed sizes as a constant, as the mask of shifted windows.

        Several results (`unique`) are a tuple, which only folded steps read.
        """
        target, hosts = step.target, self.source.hosts
        if isinstance(target, torch._ops.OpOverload):
            # Each run of the file draws numbers of its own.
            if _IS_RANDOM in target.tags:
                return None
        elif target is not operator.getitem:
            return None
        if self.source.form(step.outputs[0]) != "float" or len(step.outputs) > 1:
            return None
        for name in step.inputs:
            # A size that the second run has too is no free one.
            fixed = name in hosts and self.source.wider_hosts.get(name) == hosts[name]
            if not fixed and name not in self._constants:
                return None
        values = self._values()
        given = self.source.constants(step.path, (step.args, dict(step.kwargs)))
        args, kwargs = replaced(given, lambda ref: values[ref.name])
        with torch.no_grad():
            made: Any = target(*args, **kwargs)
        # Constants of a file are float32, and large ones stay computations.
        for part in made if isinstance(made, tuple) else (made,):
            if not isinstance(part, Tensor) or part.dtype == torch.float64 or part.numel() > _MOST:
                return None
        path = f"{step.path}.constant" if step.path else "constant"
        value: Any = made if isinstance(made, tuple) else made.contiguous()
        return Constant(path, (), step.outputs, value=value)

    def give(self, name: str) -> None:
        """Write returned values that no step reads: coordinates, constants."""
        if name in self._constants and name not in self.states:
            self._write(self._constants[name])
        for found in (name, f"{name}.indices"):
            self._write_coords(found)

    def require_answers(self) -> None:
        """Stop a run of the file in which the forward would decide unlike on the example."""
        steps = list(decisions(integer_model(self.source.integer)))
        graph, zeros = self.graph, list[str]()
        engine = graph.profile.runner != "onnxruntime"
        for step in steps:
            frames = counts_frames(self.source.program, step)
            more = "the engine does not check it, open_onnx does" if engine else "others end a run"
            asked = "the number of frames" if frames else "the forward's decision by it"
            note = f"{step.args[1]}: {asked} is the example's; {more}"
            graph.notes += [] if note in graph.notes else [note]
            if engine:
                continue
            # No standard operator checks, but ONNX Runtime checks the bounds of every Gather: 0 is
            # read at position 0 of one entry, or at position 1 where the decision is another.
            met = self.numbers.holds("decision", step)
            place = graph.node("Cast", "decision", [graph.node("Not", "decision", [met])], to=INT64)
            called = f"{'the_number_of_frames' if frames else step.args[1]} is the example's"
            zeros.append(graph.node("Gather", called, [graph.numbers([0]), place]))
        if not zeros:
            return
        name = next(n for n in names_in(self.source.program.result) if n in self.states)
        joined = graph.node("Concat", "decision", zeros, axis=0)
        zero = graph.node("ReduceSum", "decision", [joined], axes=[0], keepdims=0)
        state = self.states[name]
        # The result is read at the sum of these zeros, so no run leaves them out.
        made = graph.node("Unsqueeze", "decision", [state.name, graph.numbers([0])])
        self.states[name] = replace(state, name=graph.node("Gather", "decision", [made, zero]))

    def _write_coords(self, name: str) -> None:
        coords = self.voxels.indices(name) if name not in self.states else None
        if coords is not None:
            self.states[name] = TensorState(coords)

    def _values(self) -> dict[str, Tensor]:
        return {name: step.value for name, step in self._constants.items()}

    def _write(self, step: Step) -> None:
        made = step.outputs[0]
        if self._is_member(step):
            self.states[made] = self.several[step.args[0].name][step.args[1]]
            return
        before = len(self.graph.nodes)
        result = self._result(step)
        form = self.source.form(made)
        if isinstance(result, list):
            self.several[made] = [self._finished(step, TensorState(part), form) for part in result]
            self.states.update({f"{made}[{i}]": h for i, h in enumerate(self.several[made])})
        else:
            state = (
                TensorState(result, low=self._least(step, form))
                if isinstance(result, str)
                else result
            )
            state = self._finished(step, state, form)
            self.states[made] = unflattened(self.graph, step, state, self.source)
        if step.on_cpu:
            self._leave_on_cpu(step, before)

    def _leave_on_cpu(self, step: Step, before: int) -> None:
        """List the step's nodes that read quantized tensors."""
        read = {self.states[name].name for name in step.inputs if name in self.states}
        added = [node for node in self.graph.nodes[before:] if read.intersection(node.input)]
        self.graph.on_cpu += [node for node in added if node not in self.graph.on_cpu]

    def _finished(self, step: Step, state: TensorState, form: Any) -> TensorState:
        return self.graph.finished(
            step.path, state, form, step.clamps,
            kept=self._is_kept(step, form), block=block_of(self.graph, step),
        )  # fmt: skip

    def _least(self, step: Step, form: Any) -> int | None:
        """Lower bound of the result's integers, from those it is moved or selected from."""
        first = self.states.get(step.inputs[0]) if step.inputs else None
        if first is None or not selects(step) or self.source.form(step.inputs[0]) != form:
            return None
        return first.low

    def _is_kept(self, step: Step, form: Any) -> bool:
        """Whether the result keeps its input's scale and the runtime needs no pair for it."""
        if self.graph.profile.repeats or not step.inputs or not keeps_scale(step):
            return False
        first = self.states.get(step.inputs[0])
        return first is not None and isinstance(form, Integers) and first.form == form

    def _is_member(self, step: Step) -> bool:
        first = step.args[0] if step.args else None
        return getattr(first, "name", None) in self.several and (
            step.called == "getitem" and isinstance(step.args[1], int)
        )

    def _result(self, step: Step) -> str | TensorState | list[str]:
        """Result of a step's operator, before its conversion into the step's form."""
        graph, path = self.graph, step.path
        if isinstance(step, SparseConv):
            return self.voxels.convolution(step, self.states[step.args[0].name])
        if isinstance(step, Requantize) and (state := self.voxels.requantized(step)) is not None:
            return state
        # Their pair is that of the result's form (`_finished`).
        if isinstance(step, Quantize | Requantize | Dequantize | Relu):
            return self.states[step.args[0].name]
        if isinstance(step, Constant):
            return self._constant(step)
        if isinstance(step, Dense):
            x, form = self.states[step.args[0].name], self.source.form(step.outputs[0])
            return weighted_layer(graph, step, x, form, self.source)
        if isinstance(step, Add):
            return graph.node("Add", path, [self._addend(step, ref.name) for ref in step.args])
        if isinstance(step, MaxPool | AvgPool | Resize):
            return self._grid(step)
        if isinstance(step, Sample) or step.called.endswith("deformable_attention"):
            if not isinstance(step, GridSample) and graph.profile.plugins:
                return attention_plugin(graph, step, self.read, self._values())
            self._called = step = sampling_call(step, self._values())
            return self._float(step, lambda: self._torch_form(step))
        if isinstance(step, Matmul):
            if not step.equation:
                return graph.node("MatMul", path, [self.read(ref.name) for ref in step.args])
            self._called = step = einsum_call(step)
            return self._float(step, lambda: self._torch_form(step))
        if not isinstance(step, LayoutCall | FloatCall):
            self._refuse(step)
        if step.function is float8_round:
            return float8_pair(graph, path, self.read(step.args[0].name), *step.args[1:])
        if step.function is blocks_round:
            shape = self.source.shapes[step.args[0].name]
            if step.args[2] == "nvfp4":
                named = self.source.named(step.args[0].name)
                return nvfp4_pair(graph, path, self.read(step.args[0].name), named, step.args[1:])
            axis = step.args[3] % len(shape)
            return block_tensor(graph, path, self.read(step.args[0].name), axis, shape[axis])
        if isinstance(step.module, Float8Layer):
            return self._float8_layer(step, step.module)
        rows = self.voxels.written(step) or self.numbers.sized(step)
        if rows is not None:
            return rows
        made = None
        floats = self._reads_floats(step)
        if floats or (not pads(step) and self._all_states(step)):
            joins = op_spec(step.name).kind == "concat"
            made = moved(self._at(step, self._joined(step) if joins else self.read))
        if made is None and isinstance(step, FloatCall) and floats:
            made = self._float(step, lambda: self._listed(step))
        return self._float(step, lambda: self._torch_form(step)) if made is None else made

    def _float8_layer(self, step: Call, layer: Float8Layer) -> str | TensorState | list[str]:
        if layer.op == "sparse_conv":
            rows = self.voxels.written(replace(step, module=layer.in_float()))
            return self._refuse(step) if rows is None else rows
        if isinstance(layer, BlockLayer) and layer.form == "nvfp4":
            given = self.read(step.args[0].name)
            return nvfp4_product(self.graph, step, layer, given, self.source)
        weighted = as_weighted(step, layer)
        self.read(step.args[0].name)
        x = self.states[step.args[0].name]
        made = weighted_layer(self.graph, weighted, x, "float", self.source)
        return unflattened(self.graph, weighted, TensorState(made), self.source)

    def _all_states(self, step: Step) -> bool:
        known = (self.states, self.several)
        return all(any(n in k for k in known) for n in step.inputs if n not in self.source.hosts)

    def _reads_floats(self, step: Step) -> bool:
        """Whether inputs and outputs are float32; integers and masks go to torch's exporter.

        The mask of an attention is an exception.
        """
        values = self._values()
        names = [n for n in step.inputs if n not in self.source.hosts]
        types = [values[n].dtype if n in values else self.source.dtype(n) for n in names]
        if step.outputs[0] not in self.several and step.outputs[0] not in self.source.hosts:
            types.append(self.source.dtype(step.outputs[0]))
        masked = op_spec(step.called).product == "attention"
        known = (torch.float32, torch.float64, *((torch.bool,) if masked else ()))
        return all(dtype in known for dtype in types)

    def _torch_form(self, step: Step) -> str | list[str]:
        try:
            number = partial(self.numbers.scalar, step.path)
            return torch_form(
                self.graph, self._called, self.read, number, self.source, self._values()
            )
        except ImportError as error:
            raise ImportError(
                f"export_qdq_onnx: {step.path or 'the model'}: {step.called} is "
                "written by torch's exporter, which needs a package that is missing "
                f"({error.__cause__ or error}): pip install onnxscript"
            ) from error
        except ValueError as error:
            self._refuse(step, problem_of(error))

    def _addend(self, step: Step, name: str) -> str:
        """An operand of a sum: a convolution's accumulators, quantized where requested."""
        largest = self.source.ranges.get(name)
        if largest and self.graph.profile.integer_relu and not self.integer_sums:
            self.graph.notes.append(
                f"{step.path or 'a sum'}: reads the sums of a layer, which runs in float for that; "
                "integer_sums=True rounds them to eight bits, and both run in integers"
            )
        if not self.integer_sums or not largest:
            return self.read(name)
        made = f"{step.path}.addend" if step.path else "addend"
        return self.graph.quantized(
            made, self.read(name), Integers(largest / 127, 8, -128, 127)
        ).name

    def _joined(self, step: Step) -> Callable[[str], str]:
        """Inputs of a concatenation, in the result's scale where the runtime needs one scale."""
        form = self.source.form(step.outputs[0])
        if not self.graph.profile.one_scale or not isinstance(form, Integers):
            return self.read

        def read(name: str) -> str:
            self.read(name)
            return self.graph.finished(step.path, self.states[name], form).name

        return read

    def read(self, name: str) -> str:
        """The tensor of a value, in float for integers."""
        if name in self.several:
            raise QdqError(
                f"the tuple {name.partition(':')[0]!r} is read as a whole, which "
                "cannot be written; unpack it in the forward, as in `a, b = x.chunk(2)`"
            )
        if name not in self.states and name in self._constants:
            self._write(self._constants[name])
        self._write_coords(name)
        if name not in self.states:
            raise QdqError(
                f"{self._called.path or 'the model'}: it reads {name}, which has "
                "no form in this file; export the part that does not read it"
            )
        return self.states[name].name

    def _join(self, step: Step) -> str | None:
        """A `QuantAdd` or `QuantConcat` in float; None for other modules.

        Also those whose operands the simulator does not know: pairs in front of an Add or Concat.
        """
        module, graph = step.target, self.graph
        if not isinstance(module, QuantAdd | QuantConcat) or own_code(module) or step.kwargs:
            return None
        operands = step.args[0] if len(step.args) == 1 else step.args
        if not isinstance(operands, Ref | list | tuple):
            return None
        refs = [operands] if isinstance(operands, Ref) else operands
        read = [s for ref in refs for s in self.several.get(ref.name) or [self.states[ref.name]]]
        if is_active(module.input_quantizer):
            form = integers_of(module.input_quantizer, step.path)
            read = [graph.finished(step.path, each, form) for each in read]
        names = [each.name for each in read]
        if isinstance(module, QuantAdd):
            return graph.node("Add", step.path, names)
        axis = module.dim % len(self.source.shapes[step.outputs[0]])
        return graph.node("Concat", step.path, names, axis=axis)

    def _constant(self, step: Constant) -> str:
        value = step.value.cpu()
        array = (value.float() if value.is_floating_point() else value).numpy()
        return self.graph.constant(step.path or "constant", array, array.dtype)

    def _grid(self, step: Step) -> str:
        at = self._at(step, self.read)
        # The sizes of a resized tensor are taken from the run where the batch is fixed.
        given = self.source.constants(step.path, dict(step.kwargs))
        if isinstance(step, MaxPool):
            return max_pool(at, given)
        if not isinstance(step, AvgPool):
            return resize(at, given)
        x = at.name(step.args[0])
        if not isinstance(self.source.form(step.outputs[0]), Integers):
            x = self.graph.float_average_operand(step.path, x)
        return average_pool(at, x, given)

    def _listed(self, step: Step) -> str | None:
        if isinstance(step, FloatRelu):
            return self.read(step.args[0].name)
        return self._join(step) or float_operation(self._at(step, self.read))

    def _at(self, step: Step, read: Callable[[str], str]) -> At:
        return At(self.graph, step, read, self.source)

    def _float(self, step: Step, write: Callable[[], Made]) -> Made:
        """Result of `write`; products of integers and float weights run on the CPU."""
        before = len(self.graph.nodes)
        made = write()
        operands = [self.states[name].name for name in step.inputs if name in self.states]
        bare = not isinstance(self.source.form(step.outputs[0]), Integers)
        if bare and any(self.graph.is_quantized(name) for name in operands):
            added = self.graph.nodes[before:]
            self.graph.on_cpu += [node for node in added if node.op_type in _PRODUCTS]
        return made

    def _refuse(self, step: Step, more: str = "") -> NoReturn:
        what = step.label
        line = location(self.source.integer, step)
        why = ", ".join(filter(None, (f"value {step.outputs[0]}", line, step.reason, more)))
        whole = isinstance(self.source.form(step.outputs[0]), Integers)
        dtype = self.source.dtype(step.outputs[0])
        whole = whole or not (dtype.is_floating_point or dtype.is_complex)
        kind = "masks" if dtype == torch.bool else "integers" if whole else "floats"
        raise QdqError(
            f"{step.path or 'the model'}: {what} of {kind} has no form in profile "
            f"{self.graph.profile.name!r} ({why}); replace it by layers, or export the parts "
            "before and behind it, each a module of its own",
            located=bool(line),
        )
