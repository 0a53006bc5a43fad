"""spconv-style sparse tensors as arguments and results of exported and compiled models."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from bevquant_sparse._dense import to_dense

# What a tensor is made of; the rest (rulebooks, timers, scratch) is not part of its value.
_FIELDS = ("features", "indices")
_SPCONV2 = (
    "voxel_num", "benchmark", "benchmark_record", "thrust_allocator", "_timer", "force_algo",
    "int8_scale",
)  # fmt: skip
_lock = Lock()
_traced: dict[type[Any], type[Any]] = {}


def register_sparse_tensor(cls: type) -> None:
    """Make an spconv-style tensor class a pytree node: its features and indices are the leaves.

    Then ``torch.export`` and ``torch.compile`` take and return such tensors. The grid and the
    batch size are part of the structure: a graph is for one of each. Rulebooks
    (``indice_dict``) do not go along; they are built anew where they are needed, and an inverse
    convolution needs its strided one in the same graph. ``use_bevquant_kernels`` registers the
    classes that go with the model's modules. A class that is registered already stays as it is.

    Args:
        cls: Made by ``cls(features, indices, spatial_shape, batch_size)``, with attributes of
            these names: spconv 1's and 2's ``SparseConvTensor``.

    Raises:
        TypeError: ``cls`` is no class.

    Example:
        >>> class Tensor:
        ...     def __init__(self, features, indices, spatial_shape, batch_size):
        ...         self.features, self.indices = features, indices
        ...         self.spatial_shape, self.batch_size = spatial_shape, batch_size
        >>> register_sparse_tensor(Tensor)
        >>> from torch.utils import _pytree as pytree
        >>> pytree.tree_map(str, Tensor(1, 2, [4, 4], 1)).features
        '1'
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_sparse_tensor: expected a class, got {cls!r}; pass type(x)")
    with _lock:
        if cls in pytree.SUPPORTED_NODES:
            return
        _register(cls, cls)
        body = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "names": tuple(dir(cls)),
        }
        bases = (_TracedCopies if hasattr(cls, "replace_feature") else _Traced, cls)
        meta: Any = type(cls)
        _traced[cls] = meta(cls.__name__, bases, body)
        # Whoever runs an exported graph gets the class that the model itself gives.
        _register(_traced[cls], cls)


class _OpenInt(type):
    """What `int` is to whoever makes integers of sizes: an open one stays as it is."""

    def __call__(cls, *given: Any) -> Any:
        return given[0] if given and isinstance(given[0], torch.SymInt) else int(*given)

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)


class _Int(metaclass=_OpenInt):
    pass


@contextmanager
def open_shapes() -> Iterator[None]:
    """Let spconv's sparse tensors keep the sizes of their grid open while a model is exported.

    spconv's constructor takes ``int(size)`` of each, which fixes a size that the forward has
    computed (the largest coordinate of a scan, as Pointcept's SpUNet does) to that of the example;
    and it decides by a batch size, which mmdet3d's BEVFusion gives it as a tensor. Its `sparse_add`
    adds torch's sparse tensors or tables on CUDA, which no graph holds: the sum by ``unique`` and
    ``index_add`` gives the same voxels, in the same order as the former. Without spconv among the
    imported modules, nothing changes.

    Example:
        >>> with open_shapes():
        ...     pass
    """
    core = sys.modules.get("spconv.pytorch.core")
    if core is None:
        yield
        return
    begin = core.SparseConvTensor.__init__
    names = list(inspect.signature(begin).parameters)

    def counted(*args: Any, **named: Any) -> None:
        given = dict(zip(names, args, strict=False)) | named
        if isinstance(given.get("batch_size"), Tensor):
            given["batch_size"] = given["batch_size"].item()
        begin(given.pop(names[0]), **given)

    from bevquant_sparse._standin._functional import sparse_add

    with ExitStack() as stack:
        stack.enter_context(patch.object(core, "int", _Int, create=True))
        stack.enter_context(patch.object(core.SparseConvTensor, "__init__", counted))
        for name in ("sparse_add", "sparse_add_hash_based"):
            # The code, because models import the function by its name. Its globals are those of
            # spconv's module, which has ``torch`` and ``SparseConvTensor`` too.
            if added := getattr(sys.modules.get("spconv.pytorch.functional"), name, None):
                stack.callback(setattr, added, "__code__", added.__code__)
                added.__code__ = sparse_add.__code__
        yield


def register_tensor_of(module_class: type) -> None:
    """Register the tensor class that goes with an spconv-style module's class."""
    for base in module_class.__mro__:
        home = sys.modules.get(base.__module__)
        for scope in (home, getattr(home, "spconv", None)):
            found = getattr(scope, "SparseConvTensor", None)
            if isinstance(found, type):
                register_sparse_tensor(found)
                return


def _register(cls: type, made: type) -> None:
    """``cls`` as a node that is put together again as ``made``."""

    def flatten(x: Any) -> tuple[list[Any], tuple[tuple[int, ...], int]]:
        return [x.features, x.indices], (tuple(int(n) for n in x.spatial_shape), int(x.batch_size))

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(x)
        keys = (pytree.GetAttrKey(name) for name in _FIELDS)
        return list(zip(keys, leaves, strict=True)), context

    def unflatten(leaves: Any, context: Any) -> Any:
        features, indices = leaves
        shape, batch_size = context
        if isinstance(features, Tensor) and isinstance(indices, Tensor):
            return made(features, indices, list(shape), batch_size)
        # Trees of specs and names have the structure of a tensor without its constructor's rules.
        x: Any = object.__new__(made)
        x.__dict__.update(
            features=features, _features=features, indices=indices, spatial_shape=list(shape),
            batch_size=batch_size, indice_dict={},
        )  # fmt: skip
        return x

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=json.dumps,
        from_dumpable_context=lambda text: (tuple((read := json.loads(text))[0]), read[1]),
        flatten_with_keys_fn=flatten_with_keys,
    )


class _Traced:
    """What a convolution hands on while it is traced: ``dense()`` is this package's operator."""

    names: ClassVar[tuple[str, ...]]

    def __dir__(self) -> list[str]:
        # Public forwards ask `"replace_feature" in x.__dir__()`; a tracer has no answer of its own.
        return [*self.names, *self.__dict__]

    def dense(self: Any, channels_first: bool = True) -> Tensor:
        out = to_dense(self.features, self.indices, self.spatial_shape, self.batch_size)
        return out if channels_first else out.movedim(1, -1)


class _TracedCopies(_Traced):
    """The same for spconv 2, whose tensors are replaced, not written to."""

    def replace_feature(self: Any, feature: Tensor) -> Any:
        return traced(self, feature, self.indices, self.spatial_shape, self.indice_dict)

    def shadow_copy(self: Any) -> Any:
        return self.replace_feature(self.features)


def traced(
    x: Any, features: Tensor, indices: Tensor, shape: list[int], indice_dict: dict[Any, Any]
) -> Any:
    """A tensor like ``x`` whose ``dense()`` is an operator: what a graph is made with."""
    known = type(x) in _traced or isinstance(x, _Traced)
    if not known and not torch.compiler.is_dynamo_compiling():
        register_sparse_tensor(type(x))
    cls = _traced.get(type(x), type(x))
    out = cls(features, indices, shape, x.batch_size)
    # Plain attributes; what the constructor derived from its arguments stays.
    for name in ("grid", *_SPCONV2):
        if hasattr(x, name):
            setattr(out, name, getattr(x, name))
    out.indice_dict = indice_dict
    return out
