"""Catch the calls of a running model: modules by hooks, functions by torch's own dispatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ._attributes import (
    count,
    function_attributes,
    module_attributes,
    output_dtype,
    parameter_counts,
    shape_of,
    tensors_in,
    weight_attributes,
    weighted_part,
)
from ._call import OperatorCall, Value
from ._naming import is_leaf, row_of_function, row_of_module
from ._table import SupportTable

DtypeOf = Callable[[str, nn.Module | None], str | None]


class _Draft:
    """A call under construction: who reads its result is known at the end."""

    def __init__(self, fields: dict[str, Any], index: object) -> None:
        self.fields = fields
        self.index = index  # the tensor of indices that max and its like return
        self.readers: list[str] = []


class Recorder(TorchFunctionMode):
    """Catches calls and follows values by their identity."""

    def __init__(self, model: nn.Module, table: SupportTable, dtype_of: DtypeOf | None) -> None:
        super().__init__()
        self.node = ""
        self._model = model
        self._table = table
        self._dtype_of = dtype_of
        self._drafts: list[_Draft] = []
        self._by_path: dict[str, dict[str, Any]] = {}
        self._taken: dict[str, int] = {}
        self._scopes: list[str] = []
        self._leaves = 0
        self._alive: list[Any] = []  # else a new tensor could get a dead one's identity
        self.dtypes: dict[int, str] = {}
        self.makers: dict[int, str] = {}
        self._index_readers: dict[int, list[str]] = {}
        self._handles: list[Any] = []
        self._wrapped: list[tuple[nn.Module, str]] = []

    @property
    def scope(self) -> str:
        """Path of the innermost module that is running."""
        return self._scopes[-1] if self._scopes else ""

    def know(self, value: Any, dtype: str, maker: str) -> None:
        """Remember a value's dtype and which call made it."""
        self._alive.append(value)
        self.dtypes[id(value)] = dtype
        self.makers[id(value)] = maker

    def attach(self) -> None:
        """Hook every module that counts as one call, and note where the others begin and end."""
        for path, module in self._model.named_modules():
            leaf = module is not self._model and is_leaf(module, self._table)
            leaf = leaf or (module is self._model and bool(row_of_module(module, self._table)))
            leaf = leaf or path.endswith(_BOUNDARY)
            if type(module).__name__ in _FUNCTIONALS:
                self._wrap_methods(path, module)
                continue
            before, after = self._hooks(path, leaf)
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ]

    def detach(self) -> None:
        """Take the hooks off again."""
        for handle in self._handles:
            handle.remove()
        for module, name in self._wrapped:
            delattr(module, name)

    def _hooks(self, path: str, leaf: bool) -> tuple[Callable[..., None], Callable[..., Any]]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._scopes.append(path)
            self._leaves += leaf

        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
            self._scopes.pop()
            self._leaves -= leaf
            if leaf and not self._leaves:
                if type(result) is Tensor and any(result is v for v in tensors_in(args)):
                    result = _alias(result)  # a float stub's: its input stays float to others
                self._record_module(path, module, (args, kwargs), result)
                return result
            return None

        return before, after

    def _wrap_methods(self, path: str, module: nn.Module) -> None:
        """Stand in front of a FloatFunctional's methods: no hook tells of their calls."""
        for name in dir(type(module)):
            base = name.removesuffix("_scalar").removesuffix("_relu")
            row = self._table.find(f"torch.{base}")
            if name.startswith("_") or hasattr(nn.Module, name) or row is None:
                continue

            def call(*args: Any, _name: str = name, _row: str = row.name, **kwargs: Any) -> Any:
                if self._leaves:  # a part of an operator
                    return getattr(type(module), _name)(module, *args, **kwargs)
                self._leaves += 1
                try:
                    result = getattr(type(module), _name)(module, *args, **kwargs)
                finally:
                    self._leaves -= 1
                inputs = list(tensors_in((args, kwargs)))
                base = _name.removesuffix("_scalar").removesuffix("_relu")
                attributes = function_attributes(
                    *(_row, base, args, kwargs, [shape_of(v) for v in inputs])
                )
                attributes["method"] = _name
                self.record(path, _row, attributes, inputs, result, module)
                return result

            setattr(module, name, call)
            self._wrapped.append((module, name))

    def _record_module(self, path: str, module: nn.Module, given: Any, result: Any) -> None:
        name = row_of_module(module, self._table) or f"torch.nn.{type(module).__name__}"
        if path.endswith(_BOUNDARY):
            name = "torch.quantization.QuantStub"
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

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._leaves:  # a part of an operator
            return result
        inputs = list(tensors_in((args, kwargs)))
        if not any(id(v) in self.dtypes for v in inputs):
            return result
        outputs = list(tensors_in(result))
        plain = getattr(func, "__name__", str(func)).removesuffix(".default")  # of an operator
        if plain == "__get__":
            plain = getattr(getattr(func, "__self__", None), "__name__", "")
            outputs = outputs if plain in ("T", "mT", "H", "mH") else []
        if not outputs or plain == "detach":
            self._pass_through((args, kwargs), result)
            return result
        name = row_of_function(func, plain, self._table, len(inputs))
        shapes = [shape_of(v) for v in inputs]
        attributes = function_attributes(name, plain, args, kwargs, shapes)
        if name in ("torch.add", "torch.mul"):
            attributes["method"] = ""
        path = self._function_path(plain.strip("_"))
        weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        parameters = {id(v): v for v in inputs if isinstance(v, nn.Parameter)}
        weights = count(weight) if id(weight) in parameters else 0
        biases = sum(count(v) for v in parameters.values()) - weights
        data = [v for v in inputs if id(v) not in parameters or "weight" not in _weight_names(name)]
        self.record(path, name, attributes, data, result, None, weights=weights, biases=biases)
        return result

    def _function_path(self, name: str) -> str:
        if self.node:
            return self.node
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
        """Write a call down: its place, settings, tensors and parameters."""
        outputs = list(tensors_in(result))
        if not outputs:
            return
        path = self._unique(path)
        dtypes = [self.dtypes.get(id(v), "constant") for v in inputs]
        asked = self._dtype_of(path, module) if self._dtype_of else None
        row = self._table.find(operator)
        dtype = asked or output_dtype(operator, row, module, dtypes, outputs[0])
        for value in inputs:
            self._index_readers.get(id(value), []).append(operator)
        index: object = None
        if row is not None and "index_is_output" in row.needs:
            index = outputs[-1] if len(outputs) > 1 or "arg" in operator else None
            self._index_readers[id(index)] = []
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
        self._drafts.append(_Draft(fields, index))
        self._by_path[path] = fields
        for value in outputs:
            self.know(value, "qint32" if value is index else dtype, path)

    def _unique(self, path: str) -> str:
        count = self._taken[path] = self._taken.get(path, -1) + 1
        return f"{path}_{count}" if count else path  # a module called twice, a second function

    def draft(self, path: str) -> dict[str, Any] | None:
        """The fields of a call on record, which may still change; None where there is none."""
        return self._by_path.get(path)

    def rename(self, old: str, new: str) -> str:
        """Give a call on record another path, as long as nothing has read its result."""
        new = self._unique(new)
        fields = self._by_path[new] = self._by_path.pop(old)
        fields["path"] = new
        return new

    def forget(self, path: str) -> None:
        """Take a call off the record that turned out to be part of another."""
        fields = self._by_path.pop(path, None)
        self._drafts = [draft for draft in self._drafts if draft.fields is not fields]

    def finish(self, outputs: Any) -> list[OperatorCall]:
        """The calls, with what only the end of the run tells."""
        readers: dict[str, list[dict[str, Any]]] = {}
        for draft in self._drafts:
            for maker in draft.fields["inputs"]:
                readers.setdefault(maker, []).append(draft.fields)
        leaving = {self.makers.get(id(v)) for v in tensors_in(outputs)}
        calls = []
        for draft in reversed(self._drafts):
            fields = draft.fields
            path = fields["path"]
            followers = readers.get(path, [])
            ends = path in leaving or bool(followers)
            fields["is_model_output"] = ends and all(
                f["is_model_output"] and f["operator"].rpartition(".")[2] in _LEAVING
                for f in followers
            )
            row = self._table.find(fields["operator"])
            if row is not None and "index_is_output" in row.needs:
                known = self._index_readers.get(id(draft.index), [])
                fields["attributes"]["index_is_output"] = all(
                    reader.rpartition(".")[2] in _LEAVING for reader in known
                )
            calls.append(OperatorCall(**fields))
        return calls[::-1]


_BOUNDARY = "_activation_post_process"  # end of the names of boundaries that prepare inserts
_FUNCTIONALS = ("FloatFunctional", "FXFloatFunctional", "QFunctional")

# What may stand between an operator and the end of the model without being one itself.
_LEAVING = ("DeQuantStub", "getitem", "__getitem__", "Identity", "Dropout", "Dropout2d")


def _alias(value: Tensor) -> Tensor:
    """The same tensor as another object, so that the two can be told apart."""
    with torch._C.DisableTorchFunction():
        return value.view_as(value)


def _weight_names(operator: str) -> str:
    return "weight" if operator.rpartition(".")[2].startswith(("conv", "linear", "layer_n")) else ""
