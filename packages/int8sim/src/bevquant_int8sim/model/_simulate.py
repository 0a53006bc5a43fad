"""From a calibrated model to one that runs in integers."""

from __future__ import annotations

from typing import Any

from torch import nn

from bevquant_graph import CaptureError, Graph, capture
from bevquant_int8sim.model._integer_model import IntegerModel
from bevquant_int8sim.model._lower import lower
from bevquant_int8sim.model._quantizers import check_calibrated
from bevquant_int8sim.model._read_graph import read_graph
from bevquant_int8sim.model._signature import arguments, leaves
from bevquant_int8sim.model._traced_source import Source
from bevquant_int8sim.model._verify import verify as verify_model

__all__ = ["simulate"]


def simulate(
    model: nn.Module,
    example_inputs: Any,
    *,
    backend: str = "auto",
    graph: Graph | None = None,
    verify: bool = True,
) -> IntegerModel:
    r"""Lower a calibrated `bevquant_qnn` model to integer arithmetic.

    .. math:: y_q = \operatorname{clamp}\Bigl(\operatorname{round}\bigl(
              (\textstyle\sum x_q w_q + b_q)\, \tfrac{s_x s_w}{s_y}\bigr), q_\min, q_\max\Bigr),
              \quad w_q = \operatorname{round}(w/s_w), \; b_q = \operatorname{round}(b/(s_x s_w))

    all rounded half to even, with s = amax/127 for eight bits, one per tensor for activations and
    one per output channel for weights. The output scale s_y of a layer is that of whoever reads
    its output, found in the data flow: a tensor stays in integers from a layer to its readers, and
    where these want several forms the int32 accumulators are kept and requantized for each. A
    ReLU is part of the step before it, identities vanish, reshaping and concatenation move the
    integers as they are. What has no integer form runs in torch's float32 between dequantization
    and quantization and is listed in `IntegerModel.islands` with the reason.

    Args:
        model: In evaluation mode, calibrated; frozen or not. It is not changed, and later changes
            of it do not change the result.
        example_inputs: A tuple of positional inputs, a dict of named ones, or one input. Their
            structure says which are tensors, sparse tensors, numbers; on their values the integer
            model is held against `model`, so give what a real call gets.
        backend: Kernels to run on, see `int8_sparse_conv`.
        graph: The model's graph, where it was captured already.
        verify: Run both on `example_inputs`, step by step from the same values, and refuse an
            integer model that differs by more than rounding explains (a step, and what a rounded
            bias and float32 sums come to). False hands it out unseen.

    Raises:
        TypeError: `model` is no module.
        ValueError: `example_inputs` hold no tensor, the model is in training mode, an activation
            has no usable range (every one is named), a weight or its range is unusable, or the
            forward cannot be followed; or a step of the integer model departs from the
            fake-quantized one, which is named.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_qnn import quantize_model
        >>> from bevquant_quantizers import calibrate
        >>> x = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
        >>> quantized = quantize_model(net, example_inputs=x).model
        >>> _ = calibrate(quantized, [x])
        >>> simulate(quantized, x)(x).shape
        torch.Size([1, 4, 2, 2])
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"simulate: expected a torch module, got {type(model).__name__}")
    if next(leaves(list(arguments(example_inputs)), numbers=False), None) is None:
        raise ValueError(
            "simulate: example_inputs hold no tensor; give what one call of the model takes"
        )
    if any(module.training for module in model.modules()):
        raise ValueError(
            "simulate: the model is in training mode; call model.eval() first, dropout and batch "
            "norm behave otherwise there"
        )
    check_calibrated(model)
    if graph is None:
        graph = _captured(model, example_inputs)
    program, held = lower(read_graph(graph))
    integer = IntegerModel(program, Source(graph, held), backend=backend)
    if verify:
        verify_model(integer, example_inputs)
    return integer


def _captured(model: nn.Module, example_inputs: Any) -> Graph:
    for path, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(
                f"simulate: {path or 'the model'} has forward hooks, which may change what it "
                "computes; remove the hooks first"
            )
    try:
        return capture(model, example_inputs)
    except CaptureError as error:
        message = str(error).replace("capture:", "simulate:", 1)
        raise ValueError(message) from error
