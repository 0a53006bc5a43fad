"""Find who reads which tensor by watching one real pass through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bevquant_qnn._concat import QuantConcat
from bevquant_qnn._example import arguments, evaluation, run
from bevquant_qnn._flow import Flow, Read
from bevquant_qnn._functional import FunctionalProducts
from bevquant_qnn._holders import activation_quantizers
from bevquant_qnn._kinds import is_batch_norm, is_quantized
from bevquant_qnn._sparse_tensor import features_of, is_sparse_tensor
from bevquant_quantizers import TensorQuantizer

__all__ = ["observe"]

# Copies that keep every value; views are told by their storage.
_COPIES = frozenset(
    {"clone", "_to_copy", "roll", "_unsafe_view", "_reshape_alias", "lift_fresh", "flip"}
)


class _Identities(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers tensors so that views, copies and in-place changes get the right number.

    Two tensors have one number if they cover the same elements of one storage at one version
    (in-place operations raise it), or if one is a value-keeping copy of the other. Every numbered
    tensor is kept alive, because memory that is freed would be reused under the same address.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._alive: list[Tensor] = []

    def number(self, tensor: Tensor) -> int:
        key = _memory_key(tensor)
        if key not in self._numbers:
            self._alive.append(tensor)
            self._numbers[key] = len(self._alive)
        return self._numbers[key]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (
            func.overloadpacket.__name__ in _COPIES
            and isinstance(result, Tensor)
            and isinstance(args[0], Tensor)
            and result.numel() == args[0].numel()
        ):
            self._same(args[0], result)
        return result

    def _same(self, source: Tensor, copy: Tensor) -> None:
        number = self.number(source)
        self._alive.append(copy)
        self._numbers[_memory_key(copy)] = number


def _memory_key(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return (id(tensor),)
    extent = tuple(sorted((st, s) for st, s in zip(tensor.stride(), tensor.shape, strict=True)))
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return (
        tensor.device,
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tensor.numel(),
        tensor.dtype,
        0 if tensor.is_inference() else tensor._version,
        () if whole else tuple(pair for pair in extent if pair[1] != 1),
    )


def observe(model: nn.Module, example_inputs: Any) -> Flow:
    """Run the model once in evaluation mode, without gradients and with its quantizers bypassed.

    Args:
        model: The model, its modules replaced already.
        example_inputs: A tuple of positional inputs, a dict of named ones, or one input.

    Returns:
        The reads of this pass. Training flags and quantizer states are as before.
    """
    flow = Flow()
    identities = _Identities()
    producer: dict[int, str] = {}
    with ExitStack() as stack:
        stack.enter_context(evaluation(model))
        products = FunctionalProducts(model)
        for hook in (*_hooks(model, flow, identities, producer), *products.hooks()):
            stack.callback(hook.remove)
        args, kwargs = arguments(example_inputs)
        for index, value in enumerate([*args, *kwargs.values()]):
            for tensor in _tensors(value):
                flow.names.setdefault(identities.number(tensor), f"model input {index}")
        with identities, products:
            run(model, args, kwargs)
    flow.products += products.found
    return flow


def _hooks(
    model: nn.Module, flow: Flow, identities: _Identities, producer: dict[int, str]
) -> Iterator[Any]:
    quantizers = {holder.quantizer for holder in activation_quantizers(model)}
    for path, module in model.named_modules():
        if module in quantizers:
            yield module.register_forward_pre_hook(_reader(flow, identities))
        elif isinstance(module, QuantConcat):
            yield module.register_forward_hook(_joiner(flow, identities))
        if is_batch_norm(module):
            yield module.register_forward_pre_hook(_norm_watch(path, flow, identities, producer))
        if not isinstance(module, TensorQuantizer):
            yield module.register_forward_hook(_namer(path, module, flow, identities, producer))


def _reader(flow: Flow, identities: _Identities) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...]) -> None:
        if isinstance(args[0], Tensor) and not isinstance(args[0], nn.Parameter):
            flow.reads.append(Read(module, identities.number(args[0])))

    return hook


def _joiner(flow: Flow, identities: _Identities) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        joined = identities.number(features_of(output))
        for tensor in _tensors(args):
            flow.joins.append((joined, identities.number(tensor)))

    return hook


def _norm_watch(
    path: str, flow: Flow, identities: _Identities, producer: dict[int, str]
) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        for tensor in _tensors(args):
            convolution = producer.get(identities.number(tensor))
            if convolution is not None and (path, convolution) not in flow.unfolded:
                flow.unfolded.append((path, convolution))

    return hook


def _namer(
    path: str, module: nn.Module, flow: Flow, identities: _Identities, producer: dict[int, str]
) -> Callable[..., None]:
    convolves = is_quantized(module) and "_weight_quantizer" in module._modules

    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for tensor in _tensors(output):
            number = identities.number(tensor)
            flow.names.setdefault(number, f"output of {path or 'the model'}")
            if convolves:
                producer.setdefault(number, path)

    return hook


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors in nested sequences and dicts, sparse ones by features."""
    if is_sparse_tensor(value):
        value = value.features
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
