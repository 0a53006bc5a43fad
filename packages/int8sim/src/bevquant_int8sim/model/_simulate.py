"""From a calibrated model to one that runs in integers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from bevquant_graph import CaptureError, Graph, arguments, capture, flatten, refuse_unusable
from bevquant_int8sim._quantize import dequantize
from bevquant_int8sim._requantize import check_arithmetic
from bevquant_int8sim._rounding import check_rounding
from bevquant_int8sim.model._forced import ForcedRun, place
from bevquant_int8sim.model._form import ACCUMULATORS, Integers
from bevquant_int8sim.model._integer_model import IntegerModel
from bevquant_int8sim.model._layer_sums import float_gaps, largest_steps
from bevquant_int8sim.model._lower import lower
from bevquant_int8sim.model._program import Ref, Step, rounded
from bevquant_int8sim.model._quantizers import check_calibrated
from bevquant_int8sim.model._read_graph import read_graph
from bevquant_int8sim.model._reference import tensor_of
from bevquant_int8sim.model._signature import copied
from bevquant_int8sim.model._traced_source import Source

__all__ = ["simulate"]


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

    rounded half to even (what is stored, as `rounding` says), with s = amax/127 for eight bits, one
    per tensor for activations and one per output channel for weights. The output scale s_y of a
    layer is that of whoever reads its output, found in the data flow: a tensor stays in integers
    from a layer to its readers, and where these want several forms the int32 accumulators are kept
    and requantized for each. A ReLU is part of the step before it, identities vanish, reshaping and
    concatenation move the integers as they are. What has no integer form runs in torch's float32
    between dequantization and quantization and is listed in
    `IntegerModel.float_fallbacks` with the reason.

    Args:
        model: In evaluation mode, calibrated; frozen or not. It is not changed, and later changes
            of it do not change the result.
        example_inputs: A tuple of positional inputs, a dict of named ones, or one input. Their
            structure says which are tensors, sparse tensors, numbers; on their values the integer
            model is held against `model`, so give what a real call gets.
        backend: Kernels to run on, see `int8_sparse_conv`.
        graph: The model's graph, where it was captured already.
        integer_sums: What a sum reads of a dense layer that has no quantizer behind it. False: the
            layer's accumulators, as TensorRT adds them, rounded once, behind the sum. True: eight
            bits with s = amax/127, amax the largest absolute value on `example_inputs`, as engines
            add them that take integers alone (ONNX Runtime, OpenVINO); one more rounding. A
            mapping gives amax by tensor, as `IntegerModel.sum_ranges` of another call has it.
        rounding: Of everything that is stored as integers, as of `requantize`: ``"half_even"``,
            ``"half_up"`` (Horizon BPUs) or ``"half_away"`` (TensorRT plugins). But for the first,
            layers requantize through torch, which is slower.
        arithmetic: Of what multiplies accumulators and sums: ``"float64"``, or ``"fixed_point"``,
            a mantissa and a right shift. What floats are quantized with, averages and
            interpolation stay in float64.
        verify: Run both on `example_inputs`, step by step from the same values, and refuse an
            integer model that differs by more than rounding explains (a step, and what a rounded
            bias and float32 sums come to). False hands it out unseen.

    Raises:
        TypeError: `model` is no module.
        ValueError: `rounding` or `arithmetic` is unknown, `example_inputs` hold no tensor, the
            model is in training mode, an activation has no usable range (every one is named), a
            weight or its range is unusable, or the forward cannot be followed; or a step of the
            integer model departs from the fake-quantized one, which is named.

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
    if not flatten(arguments(example_inputs))[0]:
        raise ValueError(
            "simulate: example_inputs hold no tensor; give what one call of the model takes"
        )
    for path, module in model.named_modules():
        if module.training and (not path or _asks_for_training(module)):
            raise ValueError(
                f"simulate: {path or 'the model'} ({type(module).__name__}) is in training mode; "
                "call model.eval() first, dropout and batch norm behave otherwise there"
            )
    if graph is None:
        graph = _captured(model, example_inputs)
    check_calibrated(model, graph)
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
    """Whether training mode may change what a module computes.

    It cannot where a module holds no other and no numbers, and no code of its class reads
    `training`: a layer of einops, which a deep copy makes anew in training mode.
    """
    if next(chain(module.children(), module.parameters(), module.buffers()), None) is not None:
        return True
    classes = [c for c in type(module).__mro__ if c not in nn.Module.__mro__]
    functions = (value for c in classes for value in vars(c).values() if inspect.isfunction(value))
    return any("training" in function.__code__.co_names for function in functions)


def _captured(model: nn.Module, example_inputs: Any) -> Graph:
    try:
        return capture(model, example_inputs)
    except Exception as error:  # whatever a model that has no ranges raises
        check_calibrated(model)
        if not isinstance(error, CaptureError):
            raise
        message = str(error).replace("capture:", "simulate:", 1)
        raise ValueError(message) from error


def _eight_bits(amax: float) -> Integers:
    return Integers(amax / 127, 8, -128, 127)


def _sum_ranges(
    integer: IntegerModel, example_inputs: Any, given: Mapping[str, float] | None
) -> dict[str, float]:
    """Largest absolute value of every dense layer's result that a sum reads as accumulators.

    A result that is 0 throughout has no range, and is left to its accumulators.
    """
    values = integer.program.values
    dense = {s.outputs[0] for s in integer.steps if s.op in ("conv", "conv_transpose", "linear")}
    read = {
        ref.name: values[ref.name].source
        for step in integer.steps
        if step.op == "add"
        for ref in step.args
        if ref.name in dense and values[ref.name].form == ACCUMULATORS
    }
    if given is not None:
        wrong = sorted(set(given) - set(read.values()))
        if wrong:
            raise ValueError(
                f"simulate: integer_sums has a range of {wrong[0]!r}, which no sum of this model "
                "reads as accumulators; give ranges of the same model, or True"
            )
        for name, amax in given.items():
            if not 0 < amax < math.inf:
                raise ValueError(
                    f"simulate: integer_sums: the range of {name!r} is {amax}; expected a number "
                    "above 0"
                )
        return dict(given)
    found: dict[str, float] = {}

    def see(step: Step, inputs: tuple[Any, ...], made: tuple[Any, ...]) -> None:
        for index, (ref, value) in enumerate(zip(step.args, inputs, strict=False)):
            if step.op == "add" and ref.name in read and value.numel():
                scale = step.tensors[f"scale{index}"]
                axis = step.attributes["axis"]
                most = dequantize(value, scale, axis=axis, dtype=torch.float64).abs().max()
                source = read[ref.name]
                found[source] = max(float(most), found.get(source, 0.0))

    integer.run(example_inputs, record=False, observe=see)
    return {name: amax for name, amax in found.items() if amax}


# float32 sums of up to 10⁴ products: 4·√n·2⁻²⁴ of the sum of their magnitudes.
_SUM = 2.0**-14
_FLOAT = 2.0**-12  # of the largest value, where both compute one thing in float32
_ENERGY = 1e-4  # 40 dB: a difference below what any quantizer makes
_CHANNELS = {"sparse_conv": -1, "conv_transpose": 1}
_LAYERS = ("sparse_conv", "conv", "conv_transpose", "linear")


@torch.no_grad()
def verify_model(integer: IntegerModel, example_inputs: Any) -> None:
    r"""Refuse an integer model that does something else than the model it was made from.

    The model's graph, which gives the model's own bits, runs once on the integer model's
    intermediate results (teacher forcing), where every step starts from the values that the
    integer step read. There rounding alone explains

    .. math:: |q - \operatorname{round}(y/s)| \le 1 + (b + e)/s

    steps: one for a value on the border of two integers, b for the bias, which is rounded to half
    a unit of the accumulator, and e for the fake-quantized model's own float32 sums,
    2⁻¹⁴·Σ|w|·max|x|. What is held in floats may differ by b + e and 2⁻¹² of its largest value, or
    by noise 40 dB below it. As every step is judged on the same inputs, neither the depth of a
    model nor its data move these bounds.

    What each step multiplies on the way is kept as `Program.operations`.

    Raises:
        ValueError: The first step beyond its bound is named.
    """
    try:
        verification = _Verification(integer)
        returned, forced = verification.follow(example_inputs)
        integer.program.operations.update(verification.operations)
    except RuntimeError as error:
        raise ValueError(
            f"simulate: the integer model does not run on the example inputs: {error}"
        ) from error
    floats = [found for value in forced if (found := tensor_of(value)) is not None]
    made = [found for value in flatten(returned)[0] if (found := tensor_of(value)) is not None]
    pairs = zip(floats, made, strict=False)
    for index, (want, got) in enumerate(pairs):
        if not _alike(want, got, 0.0):
            raise ValueError(
                f"simulate: result {index} of the integer model is not what its steps make of the "
                "same values; verify=False turns this check off"
            )
    if integer.calls_other_steps:  # than those that were followed
        args, kwargs = arguments(copied(example_inputs))
        called = flatten(integer(*args, **kwargs))[0]
        for index, (want, got) in enumerate(zip(flatten(returned)[0], called, strict=True)):
            one, other = tensor_of(want), tensor_of(got)
            if one is not None and other is not None and not _alike(one, other, 0.0):
                raise ValueError(
                    f"simulate: result {index} of a call, which joins steps and sorts voxels, is "
                    "not what these make one by one; verify=False turns this check off"
                )


class _Verification(ForcedRun):
    def __init__(self, integer: IntegerModel) -> None:
        super().__init__(integer)
        self._slack: dict[str, float] = {}

    def judge(self, values: list[str], made: dict[str, Tensor], *runs: Any) -> None:
        """Hold each of the values that stand for a node against the forced run."""
        forced = tensor_of(runs[-1])
        for value in values:
            if forced is None or value not in made:
                continue
            step, got = self.makers[value], made[value]
            form, slack = self.model.program.values[value].form, self._of(value)
            if got.shape != forced.shape:
                raise _departure(step, f"has shape {tuple(got.shape)}, not {tuple(forced.shape)}")
            if not isinstance(form, Integers):
                if not _alike(forced, self.as_float(value, got), slack):
                    apart = (forced.double() - self.as_float(value, got).double()).abs().max()
                    raise _departure(step, f"differs by up to {float(apart):.3g}")
                continue
            steps = largest_steps(forced, got, form)
            explained = 1 + slack / form.scale
            # NaN is no number of steps, and never explained.
            if not steps <= explained:
                raise _departure(
                    step, f"differs by {steps:.0f} steps where rounding explains {explained:.2g}"
                )

    def _of(self, value: str) -> float:
        """What rounding of the bias and float32 sums explain of a value, in its own unit."""
        if value not in self._slack:
            step = self.makers[value]
            if step.op in _LAYERS:
                self._slack[value] = self._of_layer(step)
            else:
                refs = [arg.name for arg in step.args if isinstance(arg, Ref)]
                values = self.model.program.values
                self._slack[value] = sum(
                    self._of(name)
                    for name in refs
                    if name in self.makers and values[name].form == ACCUMULATORS
                )
        return self._slack[value]

    def _of_layer(self, step: Step) -> float:
        values, tensors = self.model.program.values, step.tensors
        form, read = values[step.outputs[0]].form, values[step.args[0].name].form
        unit = tensors["scale"] if "scale" in tensors else tensors["multiplier"]
        largest = float(unit.max()) * (form.scale if isinstance(form, Integers) else 1.0)
        weight = tensors["weight"].double().abs().movedim(_CHANNELS.get(step.op, 0), 0)
        products = float(weight.flatten(1).sum(1).max()) if weight.numel() else 0.0
        top = read.high if isinstance(read, Integers) else 0
        return largest * (("bias" in tensors) / 2 + _SUM * products * top)


def _departure(step: Step, what: str) -> ValueError:
    return ValueError(
        f"simulate: {place(step)} ({step.op}) {what} from the fake-quantized model, given the same "
        "inputs: something in the forward has no integer form and was not found out, such as a "
        "write to a part of a tensor. Write it as a new tensor or keep this part in float (exclude "
        "it in QuantConfig); verify=False turns this check off"
    )


def _alike(want: Tensor, got: Tensor, slack: float) -> bool:
    if want.shape != got.shape:
        return False
    most, energy, top, power = float_gaps(want, got)
    return most <= slack + _FLOAT * top or energy <= _ENERGY * power
