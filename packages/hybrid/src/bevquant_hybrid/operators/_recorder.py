"""Recorder of a running model's calls: modules by hooks, functions by torch's dispatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn import quantized as torch_quantized

from bevquant_graph import Followed, FunctionCalls
from bevquant_hybrid.nn._functions import FLOAT_OPERATIONS, Arithmetic

from ._attributes import (
    count,
    function_attributes,
    is_leaf,
    module_attributes,
    output_dtype,
    parameter_counts,
    row_of_function,
    row_of_module,
    shape_of,
    tensors_in,
    weight_attributes,
    weighted_part,
)
from ._expressions import OperatorCall, Value
from ._table import find_row, is_identity

DtypeOf = Callable[[str, nn.Module | None], str | None]


@dataclass(frozen=True)
class Seen:
    """A called operator."""

    path: str  # path of its module; "" for a function
    module: nn.Module | None  # the module; None for a function
    method: str | None  # method of a FloatFunctional; None for others
    function: Any  # the function; None for a module
    args: tuple[Any, ...]  # positional arguments
    kwargs: dict[str, Any]  # keyword arguments


class Watch(FunctionCalls):
    """Reports the operators of a running model, each before and after its call.

    Modules are observed by hooks, methods of FloatFunctionals by wrappers, functions by torch's
    dispatch. Calls inside an operator are not reported.
    """

    def __init__(self) -> None:
        super().__init__(self._function)
        self._running: list[Seen] = []
        self._handles: list[Any] = []
        self._wrapped: list[tuple[nn.Module, str]] = []
        self._alive: list[Any] = []  # else a new tensor could get a dead one's identity
        self.makers: dict[int, Any] = {}  # what made a value, by the value's identity

    def follow(self, value: Any, maker: Any) -> None:
        """Remember what made a value; functions are reported that read one."""
        self._alive.append(value)
        self.makers[id(value)] = maker

    def before(self, seen: Seen) -> None:
        """An operator is about to run."""

    def after(self, seen: Seen, result: Any) -> Any:
        """An operator has run; returns the result that the model goes on with."""
        raise NotImplementedError

    def attach(self, path: str, module: nn.Module) -> None:
        """Watch a module as one operator."""
        if not isinstance(module, torch_quantized.FloatFunctional | Arithmetic):
            self.hook(
                module,
                lambda called, args, kwargs: self._enter(path, called, None, args, kwargs),
                lambda called, args, kwargs, result: self._leave(result),
            )
            return
        for name in FLOAT_OPERATIONS:  # no hook tells of their calls
            if hasattr(type(module), name):
                setattr(module, name, self._method(path, module, name))
                self._wrapped.append((module, name))

    def hook(self, module: nn.Module, before: Any, after: Any) -> None:
        """Call functions before and after a module's forward, until `detach`."""
        self._handles += [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        for module, name in self._wrapped:
            delattr(module, name)

    def _method(self, path: str, module: nn.Module, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._enter(path, module, name, args, kwargs)
            return self._leave(getattr(type(module), name)(module, *args, **kwargs))

        return call

    def _enter(self, path: str, module: Any, method: str | None, args: Any, kwargs: Any) -> None:
        self._running.append(Seen(path, module, method, None, args, kwargs))
        if len(self._running) == 1:
            self.before(self._running[0])

    def _leave(self, result: Any) -> Any:
        if len(self._running) == 1:  # still running: what `after` calls is not shown
            result = self.after(self._running[0], result)
        self._running.pop()
        return result

    def _function(self, func: Any, args: Any, kwargs: Any) -> Any:
        # What an operator calls inside is part of it.
        if self._running or not any(id(v) in self.makers for v in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        seen = Seen("", None, None, func, args, kwargs)
        self.before(seen)
        return self.after(seen, func(*args, **kwargs))


class Recorder(Watch):
    """Records calls and follows values by their identity."""

    def __init__(self, model: nn.Module, dtype_of: DtypeOf | None) -> None:
        super().__init__()
        self.graph: Followed | None = None  # the graph that runs; None where a forward does
        self._model = model
        self._dtype_of = dtype_of
        # Fields of calls, with the readers of the indices that max and its like return
        self._drafts: list[tuple[dict[str, Any], list[str] | None]] = []
        self.drafts: dict[str, dict[str, Any]] = {}  # the same fields, which may change, by path
        self._taken: dict[str, int] = {}
        self._scopes: list[str] = []
        self.dtypes: dict[int, str] = {}
        self._index_readers: dict[int, list[str]] = {}

    @property
    def scope(self) -> str:
        """Path of the innermost module that is running."""
        return self._scopes[-1] if self._scopes else ""

    def know(self, value: Any, dtype: str, maker: str) -> None:
        """Remember a value's dtype and which call made it."""
        self.follow(value, maker)
        self.dtypes[id(value)] = dtype

    def attach_all(self) -> None:
        """Watch every module that counts as one call, and record the begin and end of others."""
        for path, module in self._model.named_modules():
            leaf = is_leaf if module is not self._model else row_of_module
            if type(module).__name__ in _FUNCTIONALS:
                self.attach(path, module)
                continue
            self.hook(module, self._scope_of(path), self._leave_scope)
            if leaf(module) or path.endswith(_BOUNDARY):
                self.attach(path, module)

    def _scope_of(self, path: str) -> Callable[..., None]:
        return lambda *_: self._scopes.append(path)

    def _leave_scope(self, *_: Any) -> None:
        self._scopes.pop()

    def after(self, seen: Seen, result: Any) -> Any:
        """Record a call."""
        if seen.module is None:
            self._record_function(seen, result)
        elif seen.method is not None:
            name = row_of_module(seen.module, seen.method)
            inputs = list(tensors_in((seen.args, seen.kwargs)))
            plain, shapes = name.rpartition(".")[2], [shape_of(v) for v in inputs]
            attributes = function_attributes(name, plain, seen.args, seen.kwargs, shapes)
            attributes["method"] = seen.method
            self.record(seen.path, name, attributes, inputs, result, seen.module)
        else:
            if type(result) is Tensor and any(result is v for v in tensors_in(seen.args)):
                result = _alias(result)  # a float stub's: its input stays float to others
            self._record_module(seen.path, seen.module, (seen.args, seen.kwargs), result)
        return result

    def _record_module(self, path: str, module: nn.Module, given: Any, result: Any) -> None:
        name = row_of_module(module) or f"torch.nn.{type(module).__name__}"
        if path.endswith(_BOUNDARY):
            name = "torch.quantization.QuantStub"
        # What a fake quantizer gives is the value of the module that holds it.
        if path.rpartition(".")[2] == "activation_post_process":
            self._pass_through(given, result)
            return
        inputs = [v for v in tensors_in(given) if id(v) in self.dtypes]
        part = weighted_part(name, module)
        weights, biases = parameter_counts(part)
        attributes = module_attributes(name, module, [shape_of(v) for v in inputs])
        attributes |= weight_attributes(module, part, self.dtypes[id(inputs[0])] if inputs else "")
        self.record(
            *(path, name, attributes, inputs, result, module), weights=weights, biases=biases
        )

    def _pass_through(self, given: Any, result: Any) -> None:
        sources = [v for v in tensors_in(given) if id(v) in self.dtypes]
        for value in tensors_in(result):
            if sources and id(value) not in self.dtypes:
                source = id(sources[0])
                self.know(value, self.dtypes[source], self.makers[source])

    def _record_function(self, seen: Seen, result: Any) -> None:
        func, args, kwargs = seen.function, seen.args, seen.kwargs
        inputs, outputs = list(tensors_in((args, kwargs))), list(tensors_in(result))
        plain = getattr(func, "__name__", str(func)).removesuffix(".default")  # of an operator
        if plain == "__get__":  # of an attribute: transposes compute, others tell facts
            plain = getattr(getattr(func, "__self__", None), "__name__", "")
            outputs = outputs if plain in ("T", "mT", "H", "mH") else []
        if not outputs or plain == "detach":
            self._pass_through((args, kwargs), result)
            return
        name = row_of_function(func, plain, len(inputs))
        shapes = [shape_of(v) for v in inputs]
        attributes = function_attributes(name, plain, args, kwargs, shapes)
        if name in ("torch.add", "torch.mul"):
            attributes["method"] = ""
        path = self._function_path(plain.strip("_"))
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        parameters = {id(v): v for v in inputs if isinstance(v, nn.Parameter)}
        weights = count(weight) if id(weight) in parameters else 0
        biases = sum(count(v) for v in parameters.values()) - weights
        # The parameters of a layer's function are no inputs.
        weighted = name.rpartition(".")[2].startswith(("conv", "linear", "layer_n"))
        data = [v for v in inputs if not weighted or id(v) not in parameters]
        self.record(path, name, attributes, data, result, None, weights=weights, biases=biases)

    def _function_path(self, name: str) -> str:
        if self.graph is not None:
            return self.graph.node
        prefix = f"{self.scope}." if self.scope else ""
        return prefix + name

    def record(
        self,
        path: str,
        operator: str,
        attributes: dict[str, Value],
        inputs: list[Any],
        result: Any,
        module: nn.Module | None,
        *,
        weights: int = 0,
        biases: int = 0,
    ) -> None:
        """Record a call: its place, settings, tensors and parameters."""
        outputs = list(tensors_in(result))
        if not outputs:
            return
        path = self._unique(path)
        dtypes = [self.dtypes.get(id(v), "constant") for v in inputs]
        asked = self._dtype_of(path, module) if self._dtype_of else None
        row = find_row(operator)
        dtype = asked or output_dtype(operator, row, module, dtypes, outputs[0])
        for value in inputs:
            self._index_readers.get(id(value), []).append(operator)
        index, readers = None, None
        if row is not None and "index_is_output" in row.needs:
            index = outputs[-1] if len(outputs) > 1 or "arg" in operator else None
            readers = self._index_readers[id(index)] = []
        fields = {
            "path": path,
            "operator": operator,
            "attributes": attributes,
            "input_shapes": tuple(shape_of(v) for v in inputs),
            "input_dtypes": tuple(dtypes),
            "output_shape": shape_of(outputs[0]),
            "output_dtype": dtype,
            "weight_count": weights,
            "bias_count": biases,
            "inputs": tuple(self.makers.get(id(v), "") for v in inputs),
        }
        self._drafts.append((fields, readers))
        self.drafts[path] = fields
        for value in outputs:
            self.know(value, "qint32" if value is index else dtype, path)

    def _unique(self, path: str) -> str:
        count = self._taken[path] = self._taken.get(path, -1) + 1
        return f"{path}_{count}" if count else path  # a module called twice, a second function

    def rename(self, old: str, new: str) -> str:
        """Change a recorded call's path, as long as its result has no consumer."""
        new = self._unique(new)
        fields = self.drafts[new] = self.drafts.pop(old)
        fields["path"] = new
        return new

    def forget(self, path: str) -> None:
        """Remove a recorded call that is part of another."""
        fields = self.drafts.pop(path, None)
        self._drafts = [draft for draft in self._drafts if draft[0] is not fields]

    def finish(self, outputs: Any) -> list[OperatorCall]:
        """The calls, completed with consumers and outputs."""
        readers: dict[str, list[dict[str, Any]]] = {}
        for fields, _ in self._drafts:
            for maker in fields["inputs"]:
                readers.setdefault(maker, []).append(fields)
        leaving = {self.makers.get(id(v)) for v in tensors_in(outputs)}
        calls = []
        # Readers come later: whether they lead to an output is known before it is asked of their
        # sources.
        for fields, of_indices in reversed(self._drafts):
            path = fields["path"]
            followers = readers.get(path, [])
            ends = path in leaving or bool(followers)
            fields["is_model_output"] = ends and all(
                f["is_model_output"] and _leads_out(f["operator"]) for f in followers
            )
            if of_indices is not None:
                fields["attributes"]["index_is_output"] = all(
                    _leads_out(reader) for reader in of_indices
                )
            calls.append(OperatorCall(**fields))
        return calls[::-1]


_BOUNDARY = "_activation_post_process"  # end of the names of boundaries that prepare inserts
_FUNCTIONALS = ("FloatFunctional", "FXFloatFunctional", "QFunctional")


def _leads_out(operator: str) -> bool:
    """Whether it may stand between an operator and the model's end without being one itself."""
    return operator.endswith((".DeQuantStub", ".getitem")) or is_identity(operator)


def _alias(value: Tensor) -> Tensor:
    """The same tensor as another object, so that the two can be told apart."""
    with torch._C.DisableTorchFunction():
        return value.view_as(value)
