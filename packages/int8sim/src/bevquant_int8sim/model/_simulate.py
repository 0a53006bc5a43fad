"""From a calibrated model to one that runs in integers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from bevquant_graph import (
    Graph,
    arguments,
    as_example,
    called,
    capture,
    evaluation,
    flatten,
    refuse_unusable,
    reported_by,
    state_kept,
)
from bevquant_int8sim._quantize import check_arithmetic, dequantize
from bevquant_int8sim._rounding import check_rounding
from bevquant_int8sim.model._form import ACCUMULATORS, Integers
from bevquant_int8sim.model._integer_model import IntegerModel
from bevquant_int8sim.model._integer_steps import Add
from bevquant_int8sim.model._lower import lower
from bevquant_int8sim.model._program import rounded
from bevquant_int8sim.model._quantizers import SimulateError, check_calibrated
from bevquant_int8sim.model._read_graph import read_graph
from bevquant_int8sim.model._step import Step
from bevquant_int8sim.model._traced_source import Source
from bevquant_int8sim.model._verify import verify_model
from bevquant_int8sim.model._weighted_steps import Dense
from bevquant_quantizers import TensorQuantizer


@reported_by("simulate")
def simulate(
    model: nn.Module,
    example_inputs: Any,
    *,
    backend: str = "auto",
    graph: Graph | None = None,
    integer_sums: bool | Mapping[str, float] = False,
    rounding: str = "half_even",
    arithmetic: str = "float64",
    verify: bool = True,
) -> IntegerModel:
    r"""Lower a calibrated `bevquant_qnn` model to integer arithmetic.

    .. math:: y_q = \operatorname{clamp}\Bigl(\operatorname{round}\bigl(
              (\textstyle\sum x_q w_q + b_q)\, \tfrac{s_x s_w}{s_y}\bigr), q_\min, q_\max\Bigr),
              \quad w_q = \operatorname{round}(w/s_w), \; b_q = \operatorname{round}(b/(s_x s_w))

    rounded half to even (stored results: `rounding`), with s = amax/127 for eight bits, one per
    tensor for activations and one per output channel for weights.

    - The output scale s_y of a layer is the scale of its consumer, found in the data flow. Tensors
      stay in integers from layer to consumer. Where consumers need several scales, the int32
      accumulators are kept and requantized for each.
    - A ReLU is fused into the step in front of it; identities vanish; reshaping and concatenation
      keep the integers.
    - Operations without an integer form run in torch's float32 between dequantization and
      quantization. `IntegerModel.float_fallbacks` lists them with the reason.

    Args:
        model: Calibrated, in evaluation mode, frozen or not. It is not changed, and later changes
            to it do not affect the result.
        example_inputs: A tuple of positional inputs, a dict of named inputs, or one input. Their
            structure shows the tensors, sparse tensors and numbers; on their values the integer
            model is compared with `model`, so use inputs of a real call.
        backend: Kernels to run on, see `int8_sparse_conv`.
        graph: The model's graph, where it was captured already.
        integer_sums: How a sum reads a dense layer that has no quantizer after it. False: the
            layer's accumulators, rounded once, after the sum, as in TensorRT. True: eight bits with
            s = amax/127, amax the largest absolute value on `example_inputs`, with one more
            rounding, as in engines that add integers alone (ONNX Runtime, OpenVINO). A mapping
            gives amax by tensor, as `IntegerModel.sum_ranges` of another call.
        rounding: Rounding of stored integers, as in `requantize`: ``"half_even"``, ``"half_up"``
            (Horizon BPUs) or ``"half_away"`` (TensorRT plugins). Layers requantize through torch
            for the latter two, which is slower.
        arithmetic: Multiplication of accumulators and sums: ``"float64"``, or ``"fixed_point"``
            (a mantissa and a right shift). Quantization of floats, averages and interpolation are
            always in float64.
        verify: Run both models on `example_inputs`, each step from the same values, and refuse an
            integer model that differs by more than rounding explains (one step, plus the effect of
            a rounded bias and of float32 sums). False skips this.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `rounding` or `arithmetic` is unknown, `example_inputs` hold no tensor, the
            model is in training mode, activations have no usable range (all are named), a weight or
            its range is unusable, the forward cannot be captured, or a step of the integer model
            differs from the fake-quantized one (it is named).

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
    refuse_unusable(model, "simulate", finite=False)  # layers name the channel
    check_rounding(rounding, "simulate: rounding")
    check_arithmetic(arithmetic, "simulate: arithmetic")
    # A graph may be a part, with inputs of its own.
    if graph is None:
        example_inputs = as_example(model, example_inputs)
    else:
        example_inputs = graph.inputs_of(example_inputs)
    if not flatten(example_inputs)[0]:
        raise SimulateError(
            "example_inputs hold no tensor; give the arguments of one call of the model"
        )
    for path, module in model.named_modules():
        if module.training and (not path or _asks_for_training(module)):
            raise SimulateError(
                f"{path or 'the model'} ({type(module).__name__}) is in training mode; "
                "call model.eval() first, dropout and batch norm behave otherwise there"
            )
        collects = isinstance(module, TensorQuantizer) and module._if_calib
        if collects and not module._disabled:
            raise SimulateError(
                f"{path} collects statistics; load its range "
                "(load_calib_amax), then call disable_calib() and enable_quant() on every "
                "quantizer, or let bevquant_quantizers.calibrate do all of it"
            )
    with state_kept(model):
        if graph is None:
            graph = _captured(model, example_inputs)
        check_calibrated(model, graph.called)
        operations = read_graph(graph)
        program, held = lower(operations)
        program = rounded(program, rounding, arithmetic)
        integer = IntegerModel(program, Source(graph, held), backend=backend)
        if verify:
            verify_model(integer, example_inputs)
        if integer_sums is False:
            return integer
        given = None if integer_sums is True else integer_sums
        ranges = _sum_ranges(integer, example_inputs, given)
        program, held = lower(operations, {n: _eight_bits(amax) for n, amax in ranges.items()})
        program = rounded(program, rounding, arithmetic)
        program.operations.update(integer.program.operations)
        return IntegerModel(program, Source(graph, held), backend=backend, sum_ranges=ranges)


def _asks_for_training(module: nn.Module) -> bool:
    """Whether training mode may change what a module computes."""
    if next(chain(module.children(), module.parameters(), module.buffers()), None) is not None:
        return True
    # No children and no numbers, as layers of einops, which a deep copy makes anew in training
    # mode: it depends on the mode only if code of its class reads `training`.
    classes = [c for c in type(module).__mro__ if c not in nn.Module.__mro__]
    functions = (value for c in classes for value in vars(c).values() if inspect.isfunction(value))
    return any("training" in function.__code__.co_names for function in functions)


def _captured(model: nn.Module, example_inputs: Any) -> Graph:
    try:
        return capture(model, example_inputs)
    except Exception:  # any error of a model without ranges
        check_calibrated(model, _reached(model, example_inputs))
        raise


def _reached(model: nn.Module, example_inputs: Any) -> set[str]:
    """Quantizers that a call reaches; those of an auxiliary head may have no range."""
    reached: set[str] = set()
    quantizers = {m: p for p, m in model.named_modules() if isinstance(m, TensorQuantizer)}
    hooks = [
        m.register_forward_pre_hook(lambda module, _: reached.add(quantizers[module]))
        for m in quantizers
    ]
    try:
        with evaluation(model), torch.no_grad():
            called(model, *arguments(example_inputs))
    except Exception:  # the caller has the error of the capture
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return reached


def _eight_bits(amax: float) -> Integers:
    return Integers(amax / 127, 8, -128, 127)


def _sum_ranges(
    integer: IntegerModel, example_inputs: Any, given: Mapping[str, float] | None
) -> dict[str, float]:
    """Largest absolute value of every dense layer's result that a sum reads as accumulators.

    A result that is 0 throughout has no range, and is left to its accumulators.
    """
    values = integer.program.values
    dense = {step.outputs[0] for step in integer.steps if isinstance(step, Dense)}
    read = {
        ref.name: values[ref.name].source
        for step in integer.steps
        if isinstance(step, Add)
        for ref in step.args
        if ref.name in dense and values[ref.name].form == ACCUMULATORS
    }
    if given is not None:
        wrong = sorted(set(given) - set(read.values()))
        if wrong:
            raise SimulateError(
                f"integer_sums has a range of {wrong[0]!r}, which no sum of this model "
                "reads as accumulators; give ranges of the same model, or True"
            )
        for name, amax in given.items():
            if not 0 < amax < math.inf:
                raise SimulateError(
                    f"integer_sums: the range of {name!r} is {amax}; expected a number above 0"
                )
        return dict(given)
    found: dict[str, float] = {}

    def see(step: Step, inputs: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        if not isinstance(step, Add):
            return
        for ref, value, scale in zip(step.args, inputs, step.scales, strict=True):
            if ref.name in read and value.numel():
                most = dequantize(value, scale, axis=step.axis, dtype=torch.float64).abs().max()
                source = read[ref.name]
                found[source] = max(float(most), found.get(source, 0.0))

    integer.run(example_inputs, record=False, observe=see)
    return {name: amax for name, amax in found.items() if amax}
