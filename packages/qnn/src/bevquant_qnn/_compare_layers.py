"""Float against fake-quantized, layer by layer, on the same batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bevquant_graph import checked_batches, on_batch, state_kept
from bevquant_qnn._layer_row import CHANNELS_LAST, LayerProbe, LayerRow, LayerSums, layer_probes
from bevquant_qnn._lockstep import Leader, lead
from bevquant_qnn._snapshots import UnknownValue, tensors
from bevquant_qnn.matched import Choices

Judge = Callable[[Tensor, Tensor], None]
_BESIDE = "integers."  # stands before what the comparison beside this one gave in a record


class Beside(Protocol):
    """A comparison that shares the walk: `bevquant_int8sim.LayerComparison`."""

    @property
    def layers(self) -> Set[str]:
        """Paths of the layers whose results it can be given."""

    def measure(self, batch: Any, returned: Any) -> dict[str, np.ndarray[Any, Any]]:
        """The record of a batch."""

    def add(self, record: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Add it."""


def first_tensor(output: Any) -> Tensor:
    """The tensor that stands for an output: the first one in it; of a sparse one features."""
    try:
        found = next(tensors(output), None)
    except UnknownValue:
        found = None
    if found is None:
        raise ValueError(
            f"compare_layers: a {type(output).__name__} goes in or out of a layer, and no "
            "tensor is found in it: say with `output` which one stands for it"
        )
    return found


def compare_layers(
    float_model: nn.Module,
    quantized_model: nn.Module,
    batches: Iterable[Any],
    *,
    output: Callable[[Any], Tensor] = first_tensor,
) -> list[LayerRow]:
    """Compare the float and the fake-quantized model, layer by layer.

    The two models run in step, the float model one layer ahead, so only one of its activations is
    kept.

    Args:
        float_model: The folded float model, in evaluation mode.
        quantized_model: The calibrated model made from it. Layers correspond by path. Layers that
            the float model does not have (QuantAdd) are compared at the end of their block.
        batches: At least one; each a tuple of positional inputs, a dict of named inputs, or one
            input. Every batch is run through both models.
        output: Selects the tensor to compare from the result of a layer or of the model.

    Returns:
        One row per quantized layer in order of execution, then one for the model's output, over all
        batches (sums of squares, not means of decibels), for `layer_table`.

    Raises:
        ValueError: No batches, or the two models share a quantized layer.
        LookupError: The float model does not call a layer that the quantized one calls.

    Example:
        >>> from bevquant_quantizers import calibrate
        >>> from bevquant_qnn import quantize_model
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
        >>> image = torch.randn(1, 3, 8, 8)
        >>> quantized = quantize_model(net, example_inputs=image).model
        >>> report = calibrate(quantized, [image])
        >>> rows = compare_layers(net, quantized, [image])
        >>> [(row.layer, row.channels, row.rows) for row in rows]
        [('0', 8, 36.0), ('2', 4, 36.0), ('output', 4, 36.0)]
    """
    comparison = LayerComparison(float_model, quantized_model, output=output)
    with comparison.watching():
        for batch in checked_batches(batches):
            comparison.add(comparison.run(batch)[0])
    return comparison.rows()


class LayerComparison:
    """`compare_layers` batch by batch: each batch gives a record, and records are added.

    Sums are taken per batch and added in the order of `add`, so the bits of the result do
    not depend on the process that ran a batch.

    Args:
        float_model: The folded float model.
        quantized_model: The calibrated model made from it.
        output: As in `compare_layers`.
        watch: Paths of further modules, each with a function that is called with the module's
            output in both models.
        beside: `bevquant_int8sim.LayerComparison` of both models with the integer model. It runs
            beside them and reads the results of their layers.
        match_choices: Let the float model take the quantized model's choices, such as a top-k, so
            that later layers are compared on the same objects. Where choices differ, the float
            model runs once more, for its own output.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> comparison = LayerComparison(net, net)
        >>> with comparison.watching():
        ...     record, wanted, got = comparison.run(torch.ones(1, 2))
        >>> comparison.add(record)
        >>> comparison.rows()[-1].rows
        1.0
    """

    def __init__(
        self,
        float_model: nn.Module,
        quantized_model: nn.Module,
        *,
        output: Callable[[Any], Tensor] = first_tensor,
        watch: Mapping[str, Judge] = MappingProxyType({}),
        beside: Beside | None = None,
        match_choices: bool = True,
    ) -> None:
        self._match_choices = match_choices
        self._models, self._output, self._beside = (float_model, quantized_model), output, beside
        shared: Set[str] = frozenset() if beside is None else beside.layers
        self._hooks = _Hooks(float_model, quantized_model, output, watch, shared)
        self._whole = LayerProbe("output", "", None, output)
        self._rows: dict[LayerProbe, None] = {}  # in the order of execution

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hook the models for the length of the block, in which they run without gradients."""
        with ExitStack() as stack, torch.no_grad():
            self._hooks.attach(stack)
            yield

    def run(
        self, batch: Any, *, alone: bool = False
    ) -> tuple[dict[str, np.ndarray[Any, Any]], Any, Any]:
        """Run both models on a batch; return a record of arrays, and the two outputs.

        Args:
            batch: Inputs.
            alone: Leave out the comparison with the integer model.
        """
        float_model, quantized_model = self._models
        beside = None if alone else self._beside
        hooks = self._hooks
        hooks.start()
        # The lock is this thread's; the runs are those of threads of their own.
        call = on_batch(keeps_state=False)
        ahead = Choices()
        hooks.choices = choices = Choices(ahead)
        quantized, in_float = (
            partial(_choosing, taken, call, model, batch)
            if self._match_choices
            else partial(call, model, batch)
            for taken, model in ((ahead, quantized_model), (choices, float_model))
        )
        record: dict[str, np.ndarray[Any, Any]] = {}
        # The float model runs in a thread of its own, one value ahead (`_lockstep`).
        with state_kept(*self._models), lead(in_float) as leader:
            hooks.leaders = [leader]
            if beside is None:
                got = quantized()
            else:
                with lead(quantized) as follower:
                    hooks.leaders.append(follower)
                    found = beside.measure(batch, hooks.returned())
                    record = {_BESIDE + name: values for name, values in found.items()}
                    got = follower.result()
            wanted = leader.result()
        self._whole.batch = LayerSums()
        self._whole.judge(self._output(wanted), self._output(got), choices.matched)
        if choices.differ:  # the result of the float model itself
            hooks.leaders = []
            with state_kept(*self._models):
                wanted = call(float_model, batch)
        reached = [*(hooks.probes[place] for place in hooks.order), self._whole]
        record |= {
            "layers.order": np.array(hooks.order, np.int64),
            "layers.sums": np.array([probe.batch.as_sums() for probe in reached], np.float64),
        }
        return record, wanted, got

    def add(self, record: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """Add a batch's record. Batches are added in their order."""
        reached = [self._hooks.probes[int(place)] for place in record["layers.order"]]
        self._rows |= dict.fromkeys(reached)
        for probe, sums in zip([*reached, self._whole], record["layers.sums"], strict=True):
            probe.total.add_sums(sums)
        names = [name for name in record if name.startswith(_BESIDE)]
        if self._beside is not None and names:
            self._beside.add({name.removeprefix(_BESIDE): record[name] for name in names})

    def rows(self) -> list[LayerRow]:
        """Rows over the added batches; the last one is the model's output.

        Raises:
            ValueError: No batch was added.
        """
        if not self._whole.total.batches:
            raise ValueError("there are no batches to compare on: give at least one")
        return [probe.row() for probe in (*self._rows, self._whole)]


def _choosing(choices: Choices, call: Callable[..., Any], model: nn.Module, batch: Any) -> Any:
    with choices:
        return call(model, batch)


class _Hooks:
    """Hooks on both models: the float one hands its values out, the quantized one judges.

    What the layers of `shared` return, both hand out.
    """

    leaders: list[Leader[Any]]
    choices: Choices

    def __init__(
        self,
        float_model: nn.Module,
        quantized_model: nn.Module,
        output: Callable[[Any], Tensor],
        watch: Mapping[str, Judge],
        shared: Set[str],
    ) -> None:
        self.models = float_model, quantized_model
        self.probes = layer_probes(float_model, quantized_model, output)
        self.paths = {probe.layer for probe in self.probes} | watch.keys()
        theirs = set(quantized_model.modules())
        for path in self.paths:
            if (module := float_model.get_submodule(path)) in theirs:
                # Its hook would wait for itself.
                raise ValueError(
                    f"compare_layers: {path!r} ({type(module).__name__}) is one object in both "
                    "models, as quantize_model(model, inplace=True) leaves them; quantize without "
                    "inplace=True and compare its result with the model"
                )
        self.order: list[int] = []
        self._output, self._watch, self._shared = output, watch, shared
        self._calls: Counter[tuple[int, str]] = Counter()

    def start(self) -> None:
        """Forget the batch before."""
        self.order = []
        self._calls.clear()
        for probe in self.probes:
            probe.batch = LayerSums()

    def attach(self, stack: ExitStack) -> None:
        float_model, quantized_model = self.models
        for path in self.paths:
            reference = float_model.get_submodule(path)
            stack.callback(reference.register_forward_hook(self._hand_out(path)).remove)
            judged = quantized_model.get_submodule(path)
            stack.callback(judged.register_forward_hook(self._judge(path)).remove)
        for probe in self.probes:
            if probe.reader is not None:
                stack.callback(probe.reader.register_forward_pre_hook(probe.count).remove)
        for side, model in enumerate(self.models):
            known = dict(model.named_modules())
            for path in self._shared & known.keys():
                stack.callback(known[path].register_forward_hook(self._share(side, path)).remove)

    def returned(self) -> tuple[Callable[[str, int], Tensor | None], ...]:
        """For each model: outputs of its layers in this batch, by path and number of the call.

        The quantized model runs first; the float one then compares with its outputs.
        """
        follower = self.leaders[1]

        def taken(side: int, path: str, number: int) -> Tensor | None:
            follower.reach((path, number))
            run = self.leaders[side]
            return run.take((path, number)) if run.reach((path, number)) else None

        return partial(taken, 0), partial(taken, 1)

    def _share(self, side: int, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if len(self.leaders) < 2 or output is None:
                return  # no comparison beside asks for it
            number = self._calls[side, path]
            self._calls[side, path] += 1
            self.leaders[side].hand_out((path, number), self._output(output))

        return hook

    def _hand_out(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if output is not None and self.leaders:
                self.leaders[0].hand_out(path, self._output(output))

        return hook

    def _judge(self, path: str) -> Callable[..., None]:
        probes = [(i, probe) for i, probe in enumerate(self.probes) if probe.layer == path]

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if output is None:  # a module that changes its arguments; its layers are compared
                return
            wanted, got = self.leaders[0].take(path), self._output(output)
            for place, probe in probes:
                if place not in self.order:
                    self.order.append(place)
                last = isinstance(module, CHANNELS_LAST)
                probe.judge(wanted, got, self.choices.matched, channels_last=last)
            if path in self._watch:
                self._watch[path](wanted, got)

        return hook
