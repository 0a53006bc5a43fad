"""From a traced graph to operations: aliases resolved, sparse tensors taken apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from bevquant_int8sim.model._form import ACCUMULATORS, FLOAT, Form, Integers
from bevquant_int8sim.model._grid_operations import grid_call, max_pool, module_call, resize
from bevquant_int8sim.model._method import Method
from bevquant_int8sim.model._operation import Operation, Operations
from bevquant_int8sim.model._program import Ref, SparseRef, names_in, replaced
from bevquant_int8sim.model._quantized_layer import float_sparse_step, quantized_layer
from bevquant_int8sim.model._quantizers import integers_of, is_active, unsupported
from bevquant_int8sim.model._signature import is_sparse_tensor, leaf_names, leaves, named
from bevquant_int8sim.model._sites import dense
from bevquant_int8sim.model._trace import SCOPE, Traced
from bevquant_int8sim.model._vocabulary import (
    ADDITIONS,
    JOINS,
    KEEPS_INPUT,
    METADATA,
    MOVES,
    RELUS,
    SITES_METADATA,
    is_identity,
    is_inplace,
    is_move,
    is_relu,
)
from bevquant_quantizers import TensorQuantizer
from bevquant_sparse import to_dense

__all__ = ["read_graph"]


def read_graph(traced: Traced) -> Operations:
    """The operations of `traced`.

    Raises:
        ValueError: A sparse tensor goes where no integer form and no float one is known.
    """
    return _Reader(traced).run()


class _Reader:
    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.operations: list[Operation] = []
        self.sparse_inputs: dict[str, str] = {}
        self.natural: dict[str, Form] = {}
        self._made: dict[str, Operation] = {}
        self._hosts: set[str] = set()
        self._refs: dict[fx.Node, Any] = {}

    def run(self) -> Operations:
        args, kwargs = self.traced.arguments
        numbers = self.traced.numbers
        examples = leaves([list(args), dict(kwargs)], numbers=numbers)
        called = leaf_names(self.traced.model, (args, kwargs), numbers=numbers)
        inputs: list[str] = []
        result: Any = None
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                inputs.append(node.name)
                self._refs[node] = self._input(node, next(examples), next(called))
            elif node.op == "output":
                result = self._resolved(node.args[0])
            else:
                self._refs[node] = self._visit(node)
        names = iter(inputs)
        signature = (
            tuple(named(list(args), names, numbers=numbers)),
            named(dict(kwargs), names, numbers=numbers),
        )
        return Operations(
            operations=tuple(self.operations),
            signature=signature,
            sparse_inputs=self.sparse_inputs,
            result=result,
            hosts=frozenset(self._hosts),
        )

    def _resolved(self, value: Any) -> Any:
        return fx.node.map_arg(value, lambda node: self._refs[node])

    def _input(self, node: fx.Node, example: Any, path: str) -> Any:
        name = node.name
        if is_sparse_tensor(example):
            self.sparse_inputs[name] = f"{name}.sites"
            self._hosts.add(f"{name}.sites")
            self._tensor(node, "input", path=path)
            return SparseRef(name, f"{name}.sites")
        if not isinstance(example, torch.Tensor):
            self._hosts.add(name)
            return Ref(name)
        return self._tensor(node, "input", path=path)

    def _visit(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._attribute(node)
        args, kwargs = self._resolved(node.args), self._resolved(node.kwargs)
        if node.op == "call_module":
            return self._module(node, args, kwargs)
        name = getattr(node.target, "__name__", str(node.target))
        result = self._call(node, name, args, kwargs)
        if is_inplace(name, kwargs) and args and isinstance(args[0], Ref):
            self._rename(args[0], result)
        return result

    def _rename(self, old: Ref, new: Any) -> None:
        """Every name of a tensor that was written to now means what was written."""
        if not isinstance(new, Ref) or old.name in self._hosts:
            return
        for node, value in self._refs.items():
            self._refs[node] = replaced(value, lambda ref: _renamed(ref, old.name, new.name))

    def _attribute(self, node: fx.Node) -> Any:
        value: Any = self.traced.model
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return value
        return self._tensor(node, "constant", args=(), tensor=value.detach(), path=str(node.target))

    # Modules

    def _module(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        path = str(node.target)
        module = self.traced.model.get_submodule(path)
        first: Any = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(module, TensorQuantizer):
            return self._quantizer(node, module, path, first)
        if is_identity(module):
            return first
        if is_relu(module):
            features = Ref(first.features) if isinstance(first, SparseRef) else first
            made = self._relu(node, path, features, 6.0 if isinstance(module, nn.ReLU6) else None)
            if getattr(module, "inplace", False):
                self._rename(features, made)
            return _with_features(first, made)
        if "_input_quantizer" in module._modules and "_weight_quantizer" in module._modules:
            single = len(args) == 1 and not kwargs
            return self._quantized(node, module, path, first, args, kwargs, single=single)
        if isinstance(first, SparseRef):
            return self._sparse_module(node, module, path, first)
        call = module_call(module)
        if call is not None and len(args) == 1 and not kwargs:
            made = self._grid(node, path, first, call)
            if made is not None:
                return made
        if is_move(module):
            return self._tensor(
                node, "move", args=args, kwargs=kwargs, path=path, module=module,
                what=type(module).__name__, natural=self.natural[first.name], moved=(first.name,),
            )  # fmt: skip
        reason = self.traced.untraced.get(path) or f"{type(module).__name__} has no integer form"
        if any(isinstance(m, TensorQuantizer) for m in module.modules()):
            reason += "; the quantized layers in it run in float on fake-quantized values"
        return self._float(node, path, type(module).__name__, args, kwargs, reason, module=module)

    def _quantizer(self, node: fx.Node, module: TensorQuantizer, path: str, x: Any) -> Any:
        if not is_active(module):
            return x
        reason = unsupported(module)
        if reason:
            return self._float(node, path, "TensorQuantizer", (x,), {}, reason, module=module)
        integers = integers_of(module, path)
        if self.natural[x.name] == integers:
            return x
        return self._tensor(node, "quantizer", args=(x,), natural=integers, path=path)

    def _quantized(
        self, node: fx.Node, module: nn.Module, path: str, x: Any, args: Any, kwargs: Any,
        *, single: bool,
    ) -> Any:  # fmt: skip
        features = x.features if isinstance(x, SparseRef) else x.name
        layer = quantized_layer(module, path) if single else "it is called with further arguments"
        sites = f"{node.name}.sites" if isinstance(x, SparseRef) else ""
        if isinstance(layer, str):
            if isinstance(x, SparseRef):
                return self._sparse_module(node, module, path, x, reason=layer)
            name = type(module).__name__
            return self._float(node, path, name, args, kwargs, layer, module=module)
        args = (Ref(features), Ref(x.sites)) if isinstance(x, SparseRef) else (x,)
        made = self._tensor(
            node, "layer", args=args, path=path, what=type(module).__name__, layer=layer,
            natural=ACCUMULATORS, sites=sites,
        )  # fmt: skip
        if not sites:
            return made
        self._hosts.add(sites)
        return SparseRef(made.name, sites)

    def _sparse_module(
        self, node: fx.Node, module: nn.Module, path: str, x: SparseRef, reason: str = ""
    ) -> Any:
        """A sparse layer in float, where there is a way to run it without its library."""
        name = type(module).__name__
        if name == "ToDense":
            return self._dense(node, x, path)
        step = float_sparse_step(module)
        if step is None:
            raise ValueError(
                f"simulate: {path} ({name}) reads a sparse tensor and has neither an integer nor a "
                "float form here; simulate the model up to it, or replace it by a convolution"
            )
        sites = f"{node.name}.sites"
        made = self._float(
            node, path, name, (Ref(x.features), Ref(x.sites)), {},
            reason or "it is not quantized", module=step, sites=sites,
        )  # fmt: skip
        return SparseRef(made.name, sites)

    # Functions and methods

    def _call(self, node: fx.Node, name: str, args: Any, kwargs: Any) -> Any:
        path: str = node.meta[SCOPE]
        first: Any = args[0] if args else None
        target = node.target
        if name in ("_assert", "check_not"):
            return None
        if target is getattr:
            return self._read(node, first, str(args[1]))
        if target is setattr:
            return self._write(node, args)
        if name == "SparseConvTensor" and isinstance(target, type):
            return self._sparse_tensor(node, args, kwargs)
        if name == "replace_feature":
            return _with_features(first, args[1])
        if name in KEEPS_INPUT and self._is_tensor(first):
            if name == "float" and self.natural[first.name] == FLOAT:
                return self._float(node, path, name, args, kwargs, "", self._function(node))
            return first
        if isinstance(first, SparseRef):
            return self._of_sparse(node, name, first, path)
        if name in METADATA or not self._tensors((args, kwargs)):
            return self._host(node, name, args, kwargs)
        if name in RELUS and isinstance(first, Ref):
            return self._relu(node, path, first, RELUS[name])
        if name in ADDITIONS and not kwargs and len(args) == 2:
            made = self._addition(node, path, args)
            if made is not None:
                return made
        call = grid_call(name, args, kwargs)
        if call is not None and isinstance(first, Ref):
            made = self._grid(node, path, first, call)
            if made is not None:
                return made
        function = dense if target is to_dense else self._function(node)
        settings: Any = dict(args=args, kwargs=kwargs, path=path, what=name, function=function)
        if name in JOINS and isinstance(first, list | tuple):
            moved = tuple(ref.name for ref in first if isinstance(ref, Ref))
            forms = {self.natural[m] for m in moved}
            natural = forms.pop() if len(forms) == 1 else FLOAT
            natural = FLOAT if natural == ACCUMULATORS else natural
            if len(moved) == len(first):
                return self._tensor(node, "move", moved=moved, natural=natural, **settings)
        if _moves(name, target, args, kwargs) and isinstance(first, Ref):
            natural = self.natural[first.name]
            natural = FLOAT if natural == ACCUMULATORS else natural
            return self._tensor(node, "move", moved=(first.name,), natural=natural, **settings)
        return self._float(node, path, name, args, kwargs, f"{name} has no integer form", function)

    def _read(self, node: fx.Node, base: Any, attribute: str) -> Any:
        if isinstance(base, SparseRef):
            if attribute == "features":
                return Ref(base.features)
            if attribute in SITES_METADATA:
                return self._host(node, "getattr", (Ref(base.sites), attribute), {})
            raise ValueError(
                f"simulate: {node.meta[SCOPE] or 'the model'} reads .{attribute} of a sparse "
                "tensor, which an integer model does not keep"
            )
        if attribute == "features" and isinstance(base, Ref):
            return base
        if self._is_tensor(base) and attribute not in METADATA:
            return self._float(
                node, node.meta[SCOPE], attribute, (base, attribute), {},
                f"{attribute} has no integer form", getattr,
            )  # fmt: skip
        return self._host(node, "getattr", (base, attribute), {})

    def _write(self, node: fx.Node, args: Any) -> Any:
        base, attribute, value = args
        if not isinstance(base, SparseRef) or attribute != "features":
            if attribute in ("indice_dict", "grid", "benchmark"):
                return None
            raise ValueError(
                f"simulate: {node.meta[SCOPE] or 'the model'} writes .{attribute} of a tensor, "
                "which cannot be followed in integers"
            )
        new = SparseRef(value.name, base.sites)
        for other, ref in self._refs.items():
            if ref is base:
                self._refs[other] = new
        return None

    def _sparse_tensor(self, node: fx.Node, args: Any, kwargs: Any) -> SparseRef:
        names = ("features", "indices", "spatial_shape", "batch_size")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        sites = f"{node.name}.sites"
        self.operations.append(
            Operation(
                "sites",
                node.meta[SCOPE],
                sites,
                args=tuple(given[name] for name in names[1:]),
            )
        )
        self._hosts.add(sites)
        return SparseRef(given["features"].name, sites)

    def _of_sparse(self, node: fx.Node, name: str, x: SparseRef, path: str) -> Any:
        if name == "dense":
            return self._dense(node, x, path)
        raise ValueError(
            f"simulate: {path or 'the model'} calls {name} on a sparse tensor, which has no "
            "integer form; call it on the features"
        )

    def _dense(self, node: fx.Node, x: SparseRef, path: str) -> Any:
        hosts = []
        for attribute in ("indices", "spatial_shape", "batch_size"):
            name = f"{node.name}.{attribute}"
            self._hosts.add(name)
            self.operations.append(
                Operation(
                    "host", path, name, (Ref(x.sites), attribute), what="getattr", function=getattr
                )
            )
            hosts.append(Ref(name))
        natural = self.natural[x.features]
        return self._tensor(
            node, "move", args=(Ref(x.features), *hosts), path=path, what="to_dense",
            function=dense, moved=(x.features,),
            natural=FLOAT if natural == ACCUMULATORS else natural,
        )  # fmt: skip

    def _addition(self, node: fx.Node, path: str, args: Any) -> Any:
        """A sum in integers, if every operand is made of integers."""
        if not all(isinstance(a, Ref) and a.name not in self._hosts for a in args):
            return None
        forms = [self.natural[a.name] for a in args]
        if FLOAT in forms or not all(
            form != ACCUMULATORS or self._is_plain_layer(a.name)
            for a, form in zip(args, forms, strict=True)
        ):
            return None
        return self._tensor(node, "add", args=args, path=path, what="add", natural=ACCUMULATORS)

    # Making operations

    def _relu(self, node: fx.Node, path: str, x: Ref, ceiling: float | None) -> Ref:
        return self._tensor(
            node, "relu", args=(x,), path=path, what="relu", natural=self.natural[x.name],
            ceiling=ceiling,
        )  # fmt: skip

    def _grid(self, node: fx.Node, path: str, x: Ref, call: tuple[str, dict[str, Any]]) -> Any:
        """Pooling or resizing; ``None`` where the operand has no integers to do it on."""
        what, settings = call
        natural = self.natural[x.name]
        if what == "avg_pool":
            if not isinstance(natural, Integers):
                return None
            return self._tensor(
                node, "average", args=(x,), kwargs=settings, path=path, what=what,
                natural=ACCUMULATORS,
            )  # fmt: skip
        return self._tensor(
            node, "move", args=(x,), kwargs=settings, path=path, what=what, moved=(x.name,),
            function=max_pool if what == "max_pool" else resize,
            natural=FLOAT if natural == ACCUMULATORS else natural,
            linear=settings.get("mode") == "bilinear",
        )  # fmt: skip

    def _host(self, node: fx.Node, name: str, args: Any, kwargs: Any) -> Ref:
        self._hosts.add(node.name)
        self.operations.append(
            Operation("host", node.meta[SCOPE], node.name, args, kwargs, self._function(node), name)
        )
        return Ref(node.name)

    def _float(
        self,
        node: fx.Node,
        path: str,
        what: str,
        args: Any,
        kwargs: Any,
        reason: str,
        function: Callable[..., Any] | None = None,
        module: nn.Module | None = None,
        sites: str = "",
    ) -> Ref:
        self._hosts.update([sites] if sites else [])
        return self._tensor(
            node, "float", args=args, kwargs=kwargs, path=path, what=what, reason=reason,
            function=function, module=module, sites=sites,
        )  # fmt: skip

    def _tensor(self, node: fx.Node, kind: str, *, path: str = "", **settings: Any) -> Ref:
        name = node.name
        operation = Operation(kind=kind, path=path, output=name, **settings)
        self.operations.append(operation)
        self.natural[name] = operation.natural
        self._made[name] = operation
        return Ref(name)

    def _function(self, node: fx.Node) -> Callable[..., Any]:
        target: Any = node.target
        made: Callable[..., Any] = Method(target) if node.op == "call_method" else target
        return made

    def _is_plain_layer(self, name: str) -> bool:
        layer = self._made[name].layer
        return layer is not None and not layer.relu

    def _is_tensor(self, value: Any) -> bool:
        if isinstance(value, SparseRef):
            return True
        return isinstance(value, Ref) and value.name not in self._hosts

    def _tensors(self, values: Any) -> list[str]:
        return [name for name in names_in(values) if name not in self._hosts]


def _with_features(x: Any, features: Any) -> Any:
    return SparseRef(features.name, x.sites) if isinstance(x, SparseRef) else features


def _renamed(ref: Any, old: str, new: str) -> Any:
    if isinstance(ref, SparseRef):
        return SparseRef(new, ref.sites) if ref.features == old else ref
    return Ref(new) if ref.name == old else ref


def _moves(name: str, target: Any, args: Any, kwargs: Any) -> bool:
    if name == "pad":  # with zeros, the integer of the value 0
        given = dict(zip(("mode", "value"), args[2:], strict=False)) | kwargs
        return given.get("mode", "constant") == "constant" and not given.get("value")
    return name in MOVES or target is to_dense
