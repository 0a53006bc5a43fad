"""A module's computation by its class and, for a convolution's padding with zeros, its settings."""

from __future__ import annotations

from typing import Any

from torch import nn

from bevquant_sparse import is_sparse_conv, library_name

from ._guards import only_guards

# Whose classes are known layers: what is written there is what the class is known to compute.
_LIBRARIES = (
    "torch.nn.modules.",
    "torch.ao.",
    "spconv.",
    "mmcv.ops.",
    "mmdet3d.ops.",
    "torchsparse.",
    "MinkowskiEngine.",
    "pytorch_quantization.",
    "bevquant_sparse.",
    "bevquant_quantizers.",
    "bevquant_qnn.",
    "bevquant_hybrid.",
)
# What a subclass may define without computing anything else: how it is made, shown, stored, moved.
_HARMLESS = frozenset(
    """__init__ __new__ __init_subclass__ __doc__ __module__ __qualname__ __annotations__ __dict__
    __weakref__ __slots__ __constants__ __parameters__ __orig_bases__ __classcell__ __firstlineno__
    __static_attributes__ __annotate__ __annotate_func__ __annotations_cache__ __abstractmethods__
    _abc_impl __repr__ extra_repr _get_name __dir__ __getstate__ __setstate__ __deepcopy__
    __reduce__ __reduce_ex__ __hash__ __eq__ _version state_dict load_state_dict
    _save_to_state_dict _load_from_state_dict get_extra_state set_extra_state reset_parameters
    _reset_parameters reset_running_stats train eval requires_grad_ from_float to_float
    dump_patches call_super_init""".split()
)


def layer_class(module: object, *classes: type[Any]) -> type[Any] | None:
    """The known class whose function a module computes.

    A module *is* a layer of class C where its class is C, or a subclass that adds nothing to C's
    computation. Not a layer of C are subclasses with their own `forward`, `_conv_forward` or
    another method of C (timm's `BatchNormAct2d`: batch norm and activation), a property in place of
    a parameter (a parametrized weight), or a method replaced on the instance. A `forward` that only
    handles empty inputs (mmcv's wrappers; its source is read) does not count as its own. Nor do an
    `__init__`, an `extra_repr`, state loading, or methods of other names. Classes of torch, of
    sparse libraries and of this project are known. A class with ``float_class = C`` in its own
    body, as the quantized layers have, computes C's function, apart from quantization. Hooks are
    ignored.

    Args:
        module: Any object.
        classes: Candidate classes, in order. Without any, the result is the known class itself: the
            first library class among the module's bases.

    Returns:
        The first of `classes` that the module is; without classes, its known class. None where it
        is none of them or has its own code.

    Example:
        >>> class Named(nn.ReLU):
        ...     def extra_repr(self): return "mine"
        >>> class Doubled(nn.ReLU):
        ...     def forward(self, x): return 2 * super().forward(x)
        >>> layer_class(Named(), nn.ReLU6, nn.ReLU).__name__, layer_class(Doubled(), nn.ReLU)
        ('ReLU', None)
        >>> layer_class(Named()).__name__, layer_class(Doubled())
        ('ReLU', None)
    """
    if not classes:
        known = _known_class(type(module))
        return None if known is None or own_code(module, known) else known
    for cls in classes:
        if isinstance(module, cls) and own_code(module, cls) is None:
            return cls
    return None


def own_code(module: object, cls: type[Any] | None = None) -> str | None:
    """Part of a module that changes a known class's computation.

    Args:
        module: Any object.
        cls: The class, one of the module's bases (default: the one that `layer_class` finds).

    Returns:
        The module's own part, for a message, as ``"zoo.BNAct has a forward of its own"``; None
        without one, and without a known class.

    Example:
        >>> bn = nn.BatchNorm2d(3)
        >>> bn.forward = lambda x: x
        >>> own_code(bn)
        'BatchNorm2d.forward was replaced on the instance'
    """
    cls = _known_class(type(module)) if cls is None else cls
    if cls is None:
        return None
    known = {name for base in cls.__mro__ for name in vars(base)} - _HARMLESS
    name = type(module).__name__
    own = getattr(module, "__dict__", {})
    # `Module.compile` keeps its result there, which computes the same. What cannot be called is a
    # note of the model's (a parser's `module.type = "Upsample"`) and replaces no code.
    for method in sorted(known & set(own) - {"_compiled_call_impl"}):
        if callable(getattr(cls, method)) and callable(own[method]):
            return f"{name}.{method} was replaced on the instance"
    values = _value_names(module, cls)
    settled: set[type] = set()
    for base in _written(type(module)).__mro__:
        if base is cls:
            return None
        if base in settled:
            continue
        if is_library_class(base) and issubclass(base, cls):
            settled.update(base.__mro__)  # what it takes from them is part of what it is known for
            continue
        guards = {"forward"} if only_guards(base) else set()
        for method in sorted(set(vars(base)) - _HARMLESS - guards):
            if method in known or (method in values and hasattr(vars(base)[method], "__get__")):
                return f"{base.__module__}.{base.__qualname__} has a {method} of its own"
    return None


def _value_names(module: object, cls: type[Any]) -> set[str]:
    """Parameters, buffers and settings of a class, which a property may stand in the place of."""
    names = {name for base in cls.__mro__ for name in vars(base).get("__annotations__", ())}
    names |= {name for base in cls.__mro__ for name in vars(base).get("__constants__", ())}
    if isinstance(module, nn.Module):
        names |= {*module._parameters, *module._buffers, *module._modules}
    return names


def _known_class(cls: type) -> type | None:
    bases = _written(cls).__mro__
    return next((base for base in bases if base is not object and is_library_class(base)), None)


def _written(cls: type) -> type:
    """The author's class behind one that `use_bevquant_kernels` made of it."""
    written: type = vars(cls).get("stock_class", cls)
    return written


def is_library_class(cls: type) -> bool:
    """Whether a library wrote the class, so that its name determines its computation.

    Libraries are torch, libraries of sparse convolutions (spconv, also as a copy) and this project,
    and classes registered by `bevquant_sparse.register_layout`. Classes derived from these are not.

    Example:
        >>> class Mine(nn.ReLU): ...
        >>> is_library_class(nn.ReLU), is_library_class(Mine)
        (True, False)
    """
    if library_name(cls).startswith(_LIBRARIES) or "float_class" in vars(cls):
        return True
    # A class registered with its weight layout is vouched for; what is derived from it is not.
    return _is_sparse_class(cls) and not any(map(_is_sparse_class, cls.__mro__[1:]))


def _is_sparse_class(cls: type) -> bool:
    return issubclass(cls, nn.Module) and is_sparse_conv(object.__new__(cls))


def zero_padding(conv: Any) -> tuple[tuple[int, int], ...]:
    """Zeros in front of and after each axis, as in torch's forward of Conv1d, 2d and 3d.

    `padding`, `dilation` and `kernel_size` are read when it runs, so they may be set after
    construction (as backbones of segmentation models set their dilation). torch's stored value for
    other padding modes is outdated then.

    Args:
        conv: The layer; its padding is a number per axis, ``"same"`` or ``"valid"``.

    Example:
        >>> from torch import nn
        >>> conv = nn.Conv2d(1, 1, 3, padding=1)
        >>> conv.padding, conv.dilation = (2, 2), (2, 2)
        >>> zero_padding(conv)
        ((2, 2), (2, 2))
        >>> zero_padding(nn.Conv1d(1, 1, 4, padding="same"))
        ((1, 2),)
    """
    if conv.padding == "valid":
        return ((0, 0),) * len(conv.kernel_size)
    if conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((size, size) for size in conv.padding)
