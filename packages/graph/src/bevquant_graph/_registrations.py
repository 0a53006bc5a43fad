"""torch's registrations for a program's decompositions, replayed from a record.

Before a second trace of a program, torch registers about 12,000 kernels in 525 operators, each with
a new function, and removes them afterwards. On a small program this takes twice the time of the
rest. The kernels depend on the decompositions alone, so those of the last traces are kept. If an
operator's registrations differ from the record, torch registers its kernels again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

_MOST = 4  # tables of decompositions: that of none, and that of torch.onnx
# Decompositions to what their operators held before and hold meanwhile.
_known: dict[Any, tuple[list[Any], list[Any]]] = {}
_usual: dict[Any, Any] = {}  # an operator's own decomposition, which torch wraps anew each time


@contextmanager
def registered_once() -> Iterator[None]:
    """Decompose a program faster inside the block, with the same result.

    No operator may be registered inside.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_graph import quiet
        >>> with quiet(), registered_once():
        ...     program = torch.export.export(nn.Linear(4, 2), (torch.ones(3, 4),))
        ...     [node.name for node in program.run_decompositions().graph.nodes]
        ['p_weight', 'p_bias', 'input', 'permute', 'addmm', 'output']
    """
    from torch._export import utils
    from torch.export import decomp_utils, exported_program

    shorter: list[tuple[Any, str, Callable[[Any], Any]]] = [
        # torch asks its registry for each namespace anew, and no operator is added meanwhile.
        (utils, "_materialize_cpp_cia_ops", cache),
        (utils, "_collect_all_valid_cia_ops_for_namespace", cache),
        (utils, "_check_valid_to_preserve", lambda check: partial(_is_valid, check)),
        (decomp_utils, "_get_decomp_for_cia", lambda make: partial(_decomposition, make)),
        (
            exported_program,
            "_override_composite_implicit_decomp",
            lambda override: partial(_overridden, override),
        ),
    ]
    with ExitStack() as stack:
        for module, name, made in shorter:
            if hasattr(module, name):  # they are torch's own affair
                stack.enter_context(mock.patch.object(module, name, made(getattr(module, name))))
        yield


@cache
def _is_valid(check: Callable[[Any], bool], op: Any) -> bool:
    """Whether an operator's schema lets it be kept as it is."""
    return check(op)


def _decomposition(make: Callable[[Any], Any], op: Any) -> Any:
    made = make(op)
    return _usual.setdefault(op, made) if isinstance(made, partial) else made


@contextmanager
def _overridden(
    override: Callable[[Any], AbstractContextManager[None]], decompositions: dict[Any, Any]
) -> Iterator[None]:
    from torch._subclasses.fake_impls import _deregister_op_impl, op_implementations_dict

    fakes: dict[Any, Any] = op_implementations_dict
    key = tuple(decompositions.items())
    before = [(dict(op.py_kernels), fakes.get(op)) for op in decompositions]
    held = _known.get(key)
    if held is None or held[0] != before:
        with override(decompositions):
            during = [(dict(op.py_kernels), fakes.get(op)) for op in decompositions]
            while len(_known) >= _MOST:
                del _known[next(iter(_known))]
            _known[key] = before, during
            yield
        return
    try:
        for op, (kernels, fake) in zip(decompositions, held[1], strict=True):
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
            if fake is not None:
                fakes[op] = fake
        yield
    finally:
        for op, (kernels, _) in zip(decompositions, before, strict=True):
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
            _deregister_op_impl(op)
