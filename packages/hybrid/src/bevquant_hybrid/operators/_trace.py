"""Run a model once and record every operator call, with shapes and dtypes.

The model runs on the example inputs, so control flow may depend on shapes or values. A module with
a row in the table is one call; between modules, torch's functions and tensor methods are recorded
one by one.

A model traced by torch keeps its modules' classes, buffers and calls, but not their settings, which
are arguments of its operations. Its graphs are run node by node (`_read_script`). A module is one
call there too; between modules each operation is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import inf, isclose, prod
from typing import Any

import torch
from torch import Tensor, fx, nn

from bevquant_graph import Followed, own_inputs, state_kept
from bevquant_hybrid.undisturbed import positional, undisturbed

from ._attributes import (
    function_attributes,
    module_attributes,
    parameter_counts,
    shape_of,
    tensors_in,
    weight_attributes,
)
from ._expressions import OperatorCall
from ._recorder import DtypeOf, Recorder
from ._script_runner import ScriptRunner, Step, find_module, learn, row_of_script, settings_of
from ._table import find_row

_PACKAGE = __package__.partition(".")[0]
_STORED = {
    **{torch.int8: "qint8", torch.int16: "qint16", torch.int32: "qint32"},
    **{torch.int64: "qint32", torch.bool: "qbool"},
}
# Names of functions that fixed-point operations and indices are listed under.
_FUNCTIONS = {
    **{"resize": "interpolate", "max_pool": "max_pool2d", "avg_pool": "avg_pool2d"},
    **dict.fromkeys(("slice", "select", "index"), "getitem"),
    "grid_sample_integers": "grid_sample",
}
_SAME_VALUE = (
    *("alias", "detach", "contiguous", "clone", "to", "_to_copy", "lift_fresh", "dequantize"),
    *("accumulate", "requantize"),
)


def trace_calls(
    model: nn.Module,
    example_inputs: Any,
    *,
    input_dtype: str = "float32",
    dtype_of: DtypeOf | None = None,
) -> list[OperatorCall]:
    """List the operator calls of one run of ``model``, in the order of execution.

    Args:
        model: A module or `torch.fx.GraphModule`. It runs in eval mode, without gradients and
            observers, which are restored afterwards. Or a converted model that `torch.jit.trace`
            has traced.
        example_inputs: One tensor, or a tuple or list of the forward's arguments.
        input_dtype: Dtype of the inputs: ``"qint8"`` for a part of a model that starts on the BPU.
        dtype_of: Function from path and module (None for a function) to the dtype of each output.
            None: from the model: a quantize stub makes ``qint8``, a dequantize stub ``float32``, a
            layer whose qconfig has no activation ``qint32``, a module with an
            ``activation_post_process`` its dtype, and all others keep the dtype of their input.

    Raises:
        RuntimeError: If the model does not run on ``example_inputs``.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> calls = trace_calls(model, torch.ones(1, 3, 8, 8), input_dtype="qint8")
        >>> [(call.path, call.operator, call.output_shape) for call in calls]
        [('0', 'torch.nn.Conv2d', (1, 8, 6, 6)), ('1', 'torch.nn.ReLU', (1, 8, 6, 6))]
    """
    inputs = own_inputs(positional(model, example_inputs))
    if isinstance(model, torch.jit.ScriptModule):
        return _read_script(model, inputs, input_dtype)
    recorder = Recorder(model, dtype_of)
    for value in tensors_in(inputs):
        recorder.know(value, input_dtype, "")
    with ExitStack() as stack:
        stack.enter_context(state_kept(model))
        stack.enter_context(undisturbed(model))
        stack.callback(recorder.detach)
        recorder.attach_all()
        stack.enter_context(recorder)
        try:
            if isinstance(model, fx.GraphModule):
                recorder.graph = Followed(model)
            outputs = (recorder.graph.run if recorder.graph else model)(*inputs)
        except Exception as error:
            where = recorder.scope or "the model"
            raise RuntimeError(
                f"{where} does not run on the example inputs: {type(error).__name__}: {error}"
            ) from error
    return recorder.finish(outputs)


def _read_script(
    model: torch.jit.ScriptModule, inputs: Sequence[Any], input_dtype: str
) -> list[OperatorCall]:
    """List the operator calls of a traced model, run on ``inputs``."""
    reader = _Reader(model)
    for value in tensors_in(inputs):
        reader.calls.know(value, input_dtype, "")
    with torch.no_grad():
        outputs = reader.runner.run(*inputs)
    return reader.calls.finish(outputs)


class _Reader:
    """Records the operators of a traced model, which runs node by node."""

    def __init__(self, model: torch.jit.ScriptModule) -> None:
        # Of integers `_put` knows the dtype; a traced model has no fake quantizers to ask.
        self.calls = Recorder(nn.Module(), lambda path, module: self._dtype)
        self.runner = ScriptRunner(model, self.step, self.enter)
        self._model = model
        self._dtype: str | None = None
        self._scope = ""  # path of the innermost module that is no operator
        self._inside: nn.Module | None = None  # settings of the operator that is running
        self._adds = False  # whether it adds a second input
        self._real: dict[int, tuple[Any, set[str]]] = {}  # float64: source value, operations
        self._transposed: dict[int, Any] = {}  # the value whose transpose it is
        self._from_zero: set[int] = set()  # clamped at zero from below
        self._requesters: dict[int, str] = {}  # the module that made a rescaled value

    def enter(
        self, path: str, module: nn.Module, given: Sequence[Any], run: Callable[[], Any]
    ) -> Any:
        """Run the call of a module; write it down if it is an operator."""
        row = "" if self._inside is not None else row_of_script(module)
        if not row:
            outside = self._scope
            self._scope = path
            result = run()
            self._scope = outside
            return result
        self._inside = settings = settings_of(module)
        self._adds = False
        try:
            result = run()
        finally:
            self._inside = None
        inputs = [v for v in tensors_in(given) if id(v) in self.calls.dtypes]
        if self._adds and len(inputs) == 1:
            inputs *= 2  # a value that is added to its own convolution is passed once
        if row.endswith(".MultiheadAttention"):
            inputs += inputs[-1:] * (3 - len(inputs))  # as one that is key and value
        self._write(path, row, settings, inputs, result)
        return result

    def step(self, step: Step) -> None:
        """Take note of one operation."""
        if self._inside is not None:
            learn(self._inside, step.arguments, weights=False)
            self._adds |= step.name == "accumulate"
            return
        data = [v for v in tensors_in(step.values) if id(v) in self.calls.dtypes]
        if not data or not isinstance(step.result, Tensor | tuple | list):
            return
        if step.name in ("accumulate", "requantize") and self._continues(step, data):
            return
        inner = self._real.get(id(data[0]))
        if step.name == "quantize" and inner is not None:
            self._with_number(step, *inner)
        elif step.name in _SAME_VALUE or inner is not None:
            self._follow(step, data[0], inner)
        elif step.space == _PACKAGE:
            self._compute(step, data)
        else:
            self._function(step, data)

    def _follow(self, step: Step, source: Any, inner: tuple[Any, set[str]] | None) -> None:
        """The result is the same value, or a step on the way to one."""
        for value in tensors_in(step.result):
            self.calls.know(value, self.calls.dtypes[id(source)], self.calls.makers[id(source)])
            # In float64 it is on the way to integers again, and part of the call that makes those.
            if value.dtype == torch.float64:
                first, made = inner or (source, set())
                self._real[id(value)] = (first, made | {step.name})
            requester = str(step.arguments["name"]) if step.name == "requantize" else ""
            self._requesters[id(value)] = requester or self._requesters.get(id(source), "")

    def _continues(self, step: Step, data: list[Any]) -> bool:
        """Whether the step completes the call that made its first input; then it is noted there."""
        maker = self.calls.makers[id(data[0])]
        draft = self.calls.drafts.get(maker)
        if draft is None or draft["output_dtype"] != "qint32":
            return False
        if step.name == "accumulate":
            draft["attributes"]["sumin"] = True
            draft["input_shapes"] += (shape_of(data[1]),)
            draft["input_dtypes"] += (self.calls.dtypes[id(data[1])],)
            draft["inputs"] += (self.calls.makers[id(data[1])],)
        else:
            draft["output_dtype"] = _STORED[step.result.dtype]
            if draft["operator"] == "torch.sum":
                maker = self.calls.rename(maker, str(step.arguments["name"]))
                if self._divides(draft, step.arguments):
                    draft["operator"] = "torch.mean"
        self.calls.know(step.result, draft["output_dtype"], maker)
        return True

    def _divides(self, draft: dict[str, Any], arguments: dict[str, Any]) -> bool:
        """Whether a sum is scaled down by how many it adds up: whether it is a mean."""
        output, source = self._scale(str(arguments["name"])), self._scale(draft["inputs"][0])
        count = prod(draft["input_shapes"][0]) / max(1, prod(draft["output_shape"]))
        if output is None or source is None:
            return False
        return isclose(float(arguments["multiplier"]), source / output / count, rel_tol=1e-6)

    def _scale(self, path: str) -> float | None:
        """Scale of what a call returned: its module's, or that of what it read."""
        while path:
            scale = getattr(find_module(self._model, path), "scale", None)
            if isinstance(scale, Tensor) and scale.numel() == 1:
                return float(scale)
            draft = self.calls.drafts.get(path)
            path = draft["inputs"][0] if draft and draft["inputs"] else ""
        return None

    def _with_number(self, step: Step, source: Any, made: set[str]) -> None:
        """A number was added to the real values, or they were multiplied by it: one call."""
        name = "add" if made & {"add", "sub", "rsub"} else "mul"
        attributes = {"method": f"{name}_scalar", "scalars": 1}
        path = self.runner.owner(step.arguments["scale"]) or self._place(f"{name}_scalar")
        self._put(path, f"torch.{name}", attributes, [source], step.result)

    def _place(self, name: str) -> str:
        return f"{self._scope}.{name}" if self._scope else name

    def _compute(self, step: Step, data: list[Any]) -> None:
        settings = nn.Module()
        learn(settings, step.arguments)
        # What a module asked for that was called by a method (FloatFunctional, a fused addition)
        # and is on no record.
        found = find_row(f"{_PACKAGE}::{step.name}")
        row = found.name if found else step.name
        if step.name == "matmul":
            data = [self._before_transposing(value) for value in data]
        if step.name == "conv":
            rank = step.arguments["weight"].dim() - 2
            row = "torch.nn.ConvTranspose2d" if step.arguments["transposed"] else (
                f"torch.nn.Conv{rank}d"
            )  # fmt: skip
        path = str(step.arguments.get("name", ""))
        path = path or self._place(_FUNCTIONS.get(step.name, step.name))
        if step.name == "sum_over":
            named = {"dim": step.arguments["dim"]}
            shapes = [shape_of(v) for v in data]
            attributes = function_attributes(row, "sum", data, named, shapes)
            self._put(path, row, attributes, data, step.result)
        elif step.name == "grid_sample_integers":
            inputs = list(tensors_in(step.values))
            self._put(path, row, module_attributes(row, settings, []), inputs, step.result)
        else:
            self._write(path, row, settings, data, step.result)

    def _before_transposing(self, value: Any) -> Any:
        """What a matrix product transposed for itself; that is no call of its own."""
        source = self._transposed.get(id(value))
        if source is None:
            return value
        self.calls.forget(self.calls.makers[id(value)])
        return source

    def _bound(self, step: Step, value: Any) -> None:
        """A bound above or below: a rectifier or clamp, or the begin or end of another call."""
        draft = self.calls.drafts.get(self.calls.makers[id(value)]) or {}
        maker = draft.get("operator", "")
        name = "clamp"
        if step.name.startswith("clamp") and step.arguments.get("max") is None:
            low = step.arguments.get("min")
            # abs begins with the one, and add_relu ends with the other
            if low in (-127, -32767) or (low == 0 and maker == "torch.add"):
                return self._follow(step, value, None)
            name = "relu" if low == 0 else name
        elif step.name == "minimum" and maker == "torch.clamp":
            self._follow(step, value, None)
            if id(value) in self._from_zero and self._is_six(value, step.values[1]):
                path = self.calls.rename(self.calls.makers[id(value)], self._place("relu6"))
                self.calls.know(step.result, self.calls.dtypes[id(value)], path)
                draft["operator"] = "torch.nn.functional.relu6(fused)"
            return
        row = find_row(f"torch.{name}") or find_row(f"torch.nn.functional.{name}")
        self._put(self._place(name), row.name if row else name, {}, [value], step.result)
        if step.name == "maximum" and not step.values[1].any():
            self._from_zero.add(id(step.result))

    def _is_six(self, value: Any, bound: Tensor) -> bool:
        """Whether an upper bound is the integer nearest to 6, or the largest one below it."""
        largest = {"qint8": 127, "qint16": 32767}.get(self.calls.dtypes[id(value)], inf)
        if float(bound.max()) >= largest:
            return True
        scale = self._scale(self.calls.makers[id(value)])
        return scale is not None and bool((bound.double() * scale - 6).abs().max() <= scale)

    def _function(self, step: Step, data: list[Any]) -> None:
        name = step.name
        if name == "slice" and step.result.shape == data[0].shape:
            return self._follow(step, data[0], None)
        if name in ("clamp", "clamp_min", "maximum", "minimum") and len(data) == 1:
            return self._bound(step, data[0])
        tensors = [v for v in tensors_in(step.values)]
        spaces = ("aten::", "torch.", "torch.Tensor.", "torch.nn.functional.")
        rows = [found for space in spaces if (found := find_row(space + name))]
        row = rows[0].name if rows else f"torch.{name}"
        shapes = [shape_of(v) for v in tensors]
        values = list(step.values)
        attributes = function_attributes(row, name, values, {}, shapes)
        path = self._requesters.get(id(data[-1])) or self._place(_FUNCTIONS.get(name, name))
        self._put(path, row, attributes, tensors, step.result)
        if name == "mT":
            self._transposed[id(step.result)] = data[0]

    def _write(
        self, path: str, row: str, settings: Any, inputs: Sequence[Any], result: Any
    ) -> None:
        known = [v for v in inputs if id(v) in self.calls.dtypes]
        attributes = module_attributes(row, settings, [shape_of(v) for v in known])
        dtype = self.calls.dtypes[id(known[0])] if known else ""
        attributes |= weight_attributes(settings, settings, dtype)
        if row in ("torch.add", "torch.mul", "torch.sub"):
            attributes |= {"method": row.rpartition(".")[2], "scalars": 0}
        self._put(path, row, attributes, known, result, settings)

    def _put(
        self,
        path: str,
        row: str,
        attributes: dict[str, Any],
        inputs: list[Any],
        result: Any,
        settings: Any = None,
    ) -> None:
        outputs = list(tensors_in(result))
        found = find_row(row)
        kinds = {support.output for support in found.support.values()} if found else set()
        if kinds != {("float32",)}:  # else boxes go before their classes
            # A layer whose accumulator leaves it returns their scales as well.
            outputs = [v for v in outputs if v.dtype in _STORED] or outputs
        self._dtype = _STORED.get(outputs[0].dtype) if outputs else None
        counts = parameter_counts(settings) if settings is not None else (0, 0)
        self.calls.record(
            path, row, attributes, inputs, outputs, None, weights=counts[0], biases=counts[1]
        )
