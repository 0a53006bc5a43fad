"""Holding an integer model against the calibrated model that it was made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bevquant_graph import arguments, flatten, own_inputs
from bevquant_int8sim._scales import sums_of_sizes
from bevquant_int8sim.model._float8 import Float8Layer, blocks_round, float8_round, float8_steps
from bevquant_int8sim.model._forced import ForcedRun, place
from bevquant_int8sim.model._form import ACCUMULATORS, Integers
from bevquant_int8sim.model._integer_model import IntegerModel
from bevquant_int8sim.model._integer_steps import Matmul, Sample
from bevquant_int8sim.model._layer_sums import alike, largest_steps
from bevquant_int8sim.model._quantizers import SimulateError
from bevquant_int8sim.model._reference import tensor_of
from bevquant_int8sim.model._step import Ref, Step
from bevquant_int8sim.model._weighted_steps import Weighted

# float32 sums of up to 10⁴ products: 4·√n·2⁻²⁴ of the sum of their magnitudes.
_SUM = 2.0**-14
_FLOAT = 2.0**-12  # of the largest value, where both compute one thing in float32


@torch.no_grad()
def verify_model(integer: IntegerModel, example_inputs: Any) -> None:
    r"""Refuse an integer model that does something else than the model it was made from.

    The model's graph, which gives the model's own bits, runs once on the integer model's
    intermediate results (teacher forcing), where every step starts from the values that the
    integer step read. There rounding alone explains

    .. math:: |q - \operatorname{round}(y/s)| \le 1 + (b + e)/s

    steps: one for a value on the border of two integers, b for the bias, which is rounded to half
    a unit of the accumulator (for samples: `sampling_error`), and e for the fake-quantized model's
    own float32 sums, 2⁻¹⁴·Σ|w|·max|x|. FP8 tensors may differ by one step of FP8, results of FP8
    layers by e and 2⁻¹² of their largest value. What else is held in floats may differ by b + e and
    2⁻¹² of its largest value, or by noise 40 dB below it. As every step is judged on the same
    inputs, neither the depth of a model nor its data move these bounds.

    What each step multiplies on the way is kept as `Program.operations`.
    """
    try:
        verification = _Verification(integer)
        returned, forced = verification.follow(example_inputs)
        integer.program.operations.update(verification.operations)
    except SimulateError:
        raise
    except Exception as error:
        remedy = _float_remedy(integer)
        # Of float32 models, layers name themselves.
        if not (remedy or isinstance(error, RuntimeError)):
            raise
        raise SimulateError(
            f"the integer model does not run on the example inputs: {error}{remedy}"
        ) from error
    check_results(integer, example_inputs, returned, forced)


def _float_remedy(integer: IntegerModel) -> str:
    """What to do with a model in another type than the integer model's floats; "" of others."""
    model = None if integer.source is None else integer.source.graph.model
    for path, value in () if model is None else model.named_parameters():
        if value.is_floating_point() and value.dtype != torch.float32:
            return (
                f". Its floats are float32, and the parameter {path} is {value.dtype}; call "
                "model.float() before it is quantized and calibrated"
            )
    return ""


def check_results(integer: IntegerModel, batch: Any, returned: Any, forced: Sequence[Any]) -> None:
    """Refuse a result that differs from that of the single steps.

    `batch` has the inputs of `ForcedRun.follow`; if a call takes other steps, one is made.
    """
    floats = [found for value in forced if (found := tensor_of(value)) is not None]
    results = flatten(returned)[0]
    made = [found for value in results if (found := tensor_of(value)) is not None]
    for index, (want, got) in enumerate(zip(floats, made, strict=False)):
        if not alike(want, got, _FLOAT):
            raise SimulateError(
                f"result {index} of the integer model differs from the result of its "
                "steps on the same values; verify=False turns this check off"
            )
    if integer.calls_other_steps:  # than those that were followed
        args, kwargs = integer.program.members.required(
            arguments(own_inputs(integer.inputs_of(batch)))
        )
        called = flatten(integer(*args, **kwargs))[0]
        for index, (want, got) in enumerate(zip(results, called, strict=True)):
            one, other = tensor_of(want), tensor_of(got)
            if one is not None and other is not None and not alike(one, other, _FLOAT):
                raise SimulateError(
                    f"result {index} of a call, which joins steps and sorts voxels, "
                    "differs from that of single steps; verify=False turns this check off"
                )


class _Verification(ForcedRun):
    def __init__(self, integer: IntegerModel) -> None:
        super().__init__(integer)
        self._bounds = StepBounds(self)

    def judge(self, values: list[str], made: dict[str, Tensor], *runs: Any) -> None:
        """Hold each of the values that stand for a node against the forced run."""
        forced = tensor_of(runs[-1])
        if forced is not None:
            for value in values:
                if value in made:
                    self._bounds.hold(value, made[value], forced)


class StepBounds:
    """How far rounding alone takes each value of an integer model from its forced run."""

    def __init__(self, run: ForcedRun) -> None:
        self._run, self._values = run, run.model.program.values
        self._slack: dict[str, float] = {}

    def hold(self, value: str, got: Tensor, forced: Tensor) -> None:
        """Refuse what rounding does not explain, by the formula of `verify_model`."""
        step, form, slack = self._run.makers[value], self._values[value].form, self._of(value)
        if got.shape != forced.shape:
            raise _departure(step, f"has shape {tuple(got.shape)}, not {tuple(forced.shape)}")
        if step.target is float8_round:
            codes = float8_steps(forced, got, *step.args[1:])
            if codes > 1:
                raise _departure(step, f"differs by {codes} steps of {step.args[2]}, not by one")
            return
        if step.target is blocks_round:
            if not torch.equal(forced.nan_to_num(), got.nan_to_num()):
                raise _departure(step, f"has other values of {step.args[2]}")
            return
        if not isinstance(form, Integers):
            floats = self._run.as_float(value, got)
            sums = isinstance(step.target, Float8Layer)
            if not alike(forced, floats, _FLOAT, slack, noise=not sums):
                apart = (forced.double() - floats.double()).abs().max()
                raise _departure(step, f"differs by up to {float(apart):.3g}")
            return
        steps = largest_steps(forced, got, form)
        explained = 1 + slack / form.scale
        # NaN is no number of steps, and never explained.
        if not steps <= explained:
            raise _departure(
                step, f"differs by {steps:.0f} steps where rounding explains {explained:.2g}"
            )

    def _of(self, value: str) -> float:
        """Bound of a value from the rounding of the bias and float32 sums, in its own unit."""
        step = self._run.makers[value]
        if isinstance(step, Sample):  # of this batch's positions
            return self._run.sampling[value] * step.scale
        if isinstance(step, Matmul):
            return _SUM * self._run.sampling[value] * step.scale
        if value not in self._slack:
            if isinstance(step, Weighted):
                self._slack[value] = self._of_layer(step)
            elif isinstance(step.target, Float8Layer):
                self._slack[value] = step.target.slack()
            else:
                refs = [arg.name for arg in step.args if isinstance(arg, Ref)]
                self._slack[value] = sum(
                    self._of(name)
                    for name in refs
                    if name in self._run.makers and self._values[name].form == ACCUMULATORS
                )
        return self._slack[value]

    def _of_layer(self, step: Weighted) -> float:
        read = self._values[step.args[0].name].form
        sums = sums_of_sizes(step.weight, step.out_axis)
        products = int(sums.max()) if step.weight.numel() else 0
        top = max(read.high, -read.low) if isinstance(read, Integers) else 0
        rounded = (step.bias is not None) / 2
        return float(step.unit.max()) * (rounded + _SUM * products * top)


def _departure(step: Step, what: str) -> ValueError:
    return SimulateError(
        f"{place(step)} ({step.op}) {what} from the fake-quantized model, given the same "
        "inputs: probably the forward has an operation without an integer form that was not "
        "recognised, such as a write to a part of a tensor. Write it as a new tensor or keep this "
        "part in float (exclude it in QuantConfig); verify=False turns this check off"
    )
