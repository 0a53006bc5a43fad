"""Building a quantized module out of a float one without copying parameters, and undoing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

from torch import Tensor, nn

from bevquant_graph import own_code

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_OWN_DICTS = ("_parameters", "_buffers", "_modules")


def take_over(quantized: ModuleT, source: nn.Module) -> ModuleT:
    """Move the state of `source` into the empty instance `quantized`."""
    # The same objects: an optimizer made before still trains the parameters, and `remove()` of a
    # hook's handle still works.
    quantized.__dict__.update(source.__dict__)
    # Copies: what is added to the quantized module must not appear in the float one.
    for name in _OWN_DICTS:
        quantized.__dict__[name] = source.__dict__[name].copy()
    return quantized


def no_source(quantized: Any, module: object) -> TypeError:
    """The error of a class's `from_float` that was given another layer than its `float_class`."""
    wanted: type[nn.Module] = quantized.float_class
    own = own_code(module) if isinstance(module, wanted) else None
    return TypeError(
        f"{quantized.__name__}.from_float expects {wanted.__name__}, got {own or repr(module)}."
    )


def attach_quantizer(module: nn.Module, name: str, quantizer: nn.Module) -> None:
    """Add `quantizer` as a child, on the module's device and in its training mode."""
    quantizer.train(module.training)
    tensor = next(_tensors(module), None)
    if tensor is not None:
        quantizer.to(tensor.device)
    module.add_module(name, quantizer)


@contextmanager
def unchanged_on_error(model: nn.Module) -> Iterator[None]:
    """Give every module of `model` back its class, attributes and children if the block raises."""
    # Values of tensors are not kept: nothing in such a block writes to them.
    held = [(m, type(m), dict(vars(m)), _contents(m)) for m in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, attributes, contents in held:
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
            # Children, hooks and plain containers stay the same objects, with what they held.
            for container, content in contents:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(
                    content
                )
        raise


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    return [(v, v.copy()) for v in vars(module).values() if isinstance(v, dict | list | set)]


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())
