"""Inputs of each layer, in the quantized model and in the float one, layer after layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from bevquant_graph import Forward, check_kind, layer_class
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_qnn._weighted import QuantWeighted
from bevquant_quantizers import TensorQuantizer


class _Reached(BaseException):
    """The layer was called; nothing after it is needed."""


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every training flag is put back."""
    check_kind(model, nn.Module, "a torch module")
    training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for module, flag in training:
            module.training = flag


def layers_called(model: nn.Module, forward: Forward, batch: Any) -> tuple[list[str], list[str]]:
    """Return paths of layers whose weight is quantized, in the order of their calls.

    Returns:
        Those called once, and those called never or several times, which have no one input.
    """
    paths = {
        module: path
        for path, module in model.named_modules()
        if layer_class(module, QuantWeighted, QuantSparseConvolution) and _is_on(module)
    }
    called: list[str] = []
    with ExitStack() as stack:
        for module in paths:
            hook = module.register_forward_pre_hook(lambda m, _: called.append(paths[m]))
            stack.callback(hook.remove)
        forward(model, batch)
    once = [path for path in called if called.count(path) == 1]
    return once, [path for path in paths.values() if path not in once]


def input_of(module: nn.Module, model: nn.Module, forward: Forward, batch: Any) -> Any:
    """Run the model up to `module` and return the input that reaches it."""
    found: list[Any] = []

    def stop(_: nn.Module, args: Sequence[Any]) -> None:
        found.append(args[0])
        raise _Reached

    hook = module.register_forward_pre_hook(stop)
    try:
        forward(model, batch)
    except _Reached:
        pass
    finally:
        hook.remove()
    return found[0] if found else None


def _is_on(module: Any) -> bool:
    quantizer = module.weight_quantizer
    return (
        isinstance(quantizer, TensorQuantizer) and not quantizer._disabled and quantizer._if_quant
    )
