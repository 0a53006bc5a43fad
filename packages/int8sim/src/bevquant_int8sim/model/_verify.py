"""The integer model held against the fake-quantized one before anybody gets it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from bevquant_graph import flatten
from bevquant_int8sim.model._forced import ForcedRun, place
from bevquant_int8sim.model._form import ACCUMULATORS, Integers
from bevquant_int8sim.model._integer_model import IntegerModel
from bevquant_int8sim.model._layer_sums import float_gaps, largest_steps
from bevquant_int8sim.model._program import Ref, Step
from bevquant_int8sim.model._reference import tensor_of

__all__ = ["verify"]

# float32 sums of up to 10⁴ products: 4·√n·2⁻²⁴ of the sum of their magnitudes.
_SUM = 2.0**-14
_FLOAT = 2.0**-12  # of the largest value, where both compute one thing in float32
_ENERGY = 1e-4  # 40 dB: a difference below what any quantizer makes
_CHANNELS = {"sparse_conv": -1, "conv_transpose": 1}
_LAYERS = ("sparse_conv", "conv", "conv_transpose", "linear")


@torch.no_grad()
def verify(integer: IntegerModel, example_inputs: Any) -> None:
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


class _Verification(ForcedRun):
    def __init__(self, integer: IntegerModel) -> None:
        super().__init__(integer)
        self._slack: dict[str, float] = {}

    def judge(self, node: fx.Node, made: dict[str, Tensor], *runs: Any) -> None:
        """Hold each value that stands for a node against the forced run."""
        forced = tensor_of(runs[-1])
        for value in self.values.get(node, ()):
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
