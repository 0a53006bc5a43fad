"""Three forms of a dense model for a BPU, and the accuracy of each operator in them.

`quantize_dense` converts a model, or its BPU part, from float to integers. `calibrating_form` and
`finished_forms` are its two halves, for parts of a larger model. `Forms` holds the three forms, the
same graph node by node, with plan and estimate. `compare_forms` compares them; `FormsComparison`
supports several units in one model and keeps one value at a time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn

from bevquant_graph import Followed, checked_batches, on_batch
from bevquant_hybrid.partition import Plan
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import (
    FakeQuantState,
    convert_fx,
    fuse_fx,
    get_default_calib_qconfig,
    get_default_qat_qconfig,
    observer,
    prepare_calibration_fx,
    prepare_qat_fx,
    set_fake_quantize,
)
from bevquant_hybrid.undisturbed import positional
from bevquant_hybrid_tools.by_layer import (
    NodeLabel,
    estimate_by_layer,
    node_labels,
    plan_by_layer,
)
from bevquant_hybrid_tools.performance import ChipFigures, LayerEstimate, load_chip_figures
from bevquant_qnn import Leader, PairSums, lead

__all__ = [
    "OBSERVERS",
    "BpuEstimate",
    "BpuLayer",
    "Forms",
    "FormsComparison",
    "Note",
    "calibrating_form",
    "compare_forms",
    "finished_forms",
    "quantize_dense",
    "run_noting",
]

OBSERVERS = {
    "percentile": observer.CalibObserver,
    "max": observer.MinMaxObserver,
    "mse": observer.MSEObserver,
    "entropy": observer.KLObserver,
}
"""What finds the ranges of activations, by the name of the method; percentile is 99.99 %."""
_HALF_RANGE = 127.5  # steps from 0 to the end of int8's range, as scales are made

Note = Callable[[str, Tensor], None]
"""Takes a value and its name."""


@dataclass(frozen=True)
class BpuEstimate:
    """A roofline estimate from public figures, not a measurement."""

    figures: ChipFigures  # figures of the chip with their sources
    cores: int  # how many of the chip's cores share the work
    # One for each call on the BPU, named as in the model; boundaries left out
    layers: tuple[LayerEstimate, ...]
    violations: tuple[str, ...]  # violations of the march's limits, one line each

    @property
    def seconds(self) -> float:
        """Sum over the layers."""
        return sum(layer.seconds for layer in self.layers)


@dataclass(frozen=True, eq=False)
class Forms:
    """Three forms of one model, the same graph node by node, and the conversion's warnings."""

    float_graph: fx.GraphModule  # fused
    fake_graph: fx.GraphModule  # fake-quantized, for evaluation
    integer_graph: fx.GraphModule  # in integers
    warnings: tuple[str, ...] = ()  # of the conversion
    prefix: str = ""  # prefix of its modules' paths in the whole model
    on_cpu: tuple[str, ...] = ()  # paths of modules within it that run on the CPU

    @cached_property
    def labels(self) -> dict[str, NodeLabel]:
        """The names of its nodes in the model."""
        return node_labels(self.fake_graph, self.prefix)

    def plan(
        self, march: str, shapes: Sequence[tuple[int, ...]], why_cpu: str = "it was put there"
    ) -> Plan:
        """The placement of its nodes, with reasons; see `plan_by_layer`.

        Args:
            march: The BPU.
            shapes: Of its inputs.
            why_cpu: The reported reason of `on_cpu`.
        """
        on_cpu = dict.fromkeys(self.on_cpu, why_cpu)
        return plan_by_layer(self.fake_graph, march, shapes, prefix=self.prefix, on_cpu=on_cpu)

    def estimate(self, march: str, shapes: Sequence[tuple[int, ...]]) -> BpuEstimate:
        """Its estimated cost on one BPU core; see `estimate_by_layer`."""
        found = estimate_by_layer(self.integer_graph, self.labels, march, shapes)
        return BpuEstimate(load_chip_figures(march), 1, *found)


def calibrating_form(fused: nn.Module, method: str, on_cpu: Iterable[str] = ()) -> Any:
    """The calibration form, which counts activations of float values.

    Args:
        fused: From `fuse_fx`.
        method: One of `OBSERVERS`.
        on_cpu: Paths of modules to run on the CPU.

    Raises:
        ValueError: Another method.
    """
    if method not in OBSERVERS:
        raise ValueError(
            f"{method}: no observer of a BPU finds ranges so; choose one of {', '.join(OBSERVERS)}"
        )
    qconfig = get_default_calib_qconfig(calib_qkwargs={"observer": OBSERVERS[method]})
    return prepare_calibration_fx(fused, {"": qconfig}, **_hybrid(on_cpu)).eval()


def finished_forms(
    fused: Any,
    calibrated: Any,
    on_cpu: Iterable[str] = (),
    state: Mapping[str, Tensor] | None = None,
    prefix: str = "",
) -> Forms:
    """Fake-quantized, for evaluation, and in integers.

    Args:
        fused: From `fuse_fx`.
        calibrated: From `calibrating_form`, after its batches.
        on_cpu: As that had it.
        state: State of the fake-quantized form, instead of the calibrated one.
        prefix: Prefix of its modules' paths in the model.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qconfig = get_default_qat_qconfig()
        fake = prepare_qat_fx(calibrated, {"": qconfig}, **_hybrid(on_cpu)).eval()
        if state is not None:
            caught.clear()  # of ranges that were still missing
            fake.load_state_dict(state)
        set_fake_quantize(fake, FakeQuantState.VALIDATION)
        integers = convert_fx(fake)
    messages = dict.fromkeys(str(item.message) for item in caught)
    return Forms(fused.eval(), fake, integers, tuple(messages), prefix, tuple(on_cpu))


def _hybrid(on_cpu: Iterable[str]) -> dict[str, Any]:
    return {"hybrid": True, "hybrid_dict": {"module_name": list(on_cpu)}}


def quantize_dense(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    method: str = "percentile",
    on_cpu: Iterable[str] = (),
    prefix: str = "",
) -> Forms:
    """A float model in all its forms: fused, calibrated on the batches, converted.

    Scales are amax/127.5, one for each activation and one for each output channel of a weight.

    Args:
        model: Between QuantStub and DeQuantStub; the march is set.
        batches: A loader's batches (`bevquant_quantizers.calibrate`), or tuples of arguments.
        method: Calibration method, one of `OBSERVERS`.
        on_cpu: Paths of modules to run on the CPU in float.
        prefix: Prefix of its modules' paths in the whole model.

    Raises:
        ValueError: Another method.

    Example:
        >>> from bevquant_hybrid.march import March, set_march
        >>> from bevquant_hybrid.quantization import DeQuantStub, QuantStub
        >>> set_march(March.BAYES)
        >>> layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)
        >>> net = nn.Sequential(QuantStub(), *layers, DeQuantStub())
        >>> images = [torch.rand(1, 3, 16, 16) for _ in range(2)]
        >>> forms = quantize_dense(net, images, method="max")
        >>> [(row.layer, row.operator) for row in compare_forms(forms, images)]
        [('1', 'Conv2d + ReLU'), ('3', 'Conv2d')]
        >>> forms.plan("bayes", [(1, 3, 16, 16)]).transfer_bytes  # 3·16² in, 4·14² out
        1552
    """
    names = tuple(on_cpu)
    fused = fuse_fx(model.eval())
    counting = calibrating_form(fused, method, names)
    run = on_batch(keeps_state=False)
    with torch.no_grad():
        for batch in checked_batches(batches):
            run(counting, batch)
    return finished_forms(fused, counting, names, prefix=prefix)


def run_noting(graph: Any, note: Callable[[fx.Node, Any], None], *inputs: Any) -> Any:
    """Run a graph and report the result of each call."""

    def see(node: fx.Node, given: Any, result: Any) -> None:
        if node.op in ("call_module", "call_method", "call_function"):
            note(node, result)

    return Followed(graph, see).run(*inputs)


@dataclass(frozen=True)
class BpuLayer:
    """One operator on the BPU, over all frames."""

    layer: str  # its path in the model
    operator: str
    channels: int  # of the result
    cells: float  # of the result, in a frame
    # Of the fake-quantized result against float; None where equal or all zero
    fake_sqnr_db: float | None
    fake_cosine: float | None  # of the two as vectors
    integer_sqnr_db: float | None  # the same of the integers
    integer_cosine: float | None  # the same of the integers
    # Largest difference of integers and fake-quantized result, in steps of it, each model on
    # its own activations
    max_steps: int
    mean_steps: float  # mean of its size
    differ: float  # share of values that differ
    saturated: float | None  # share of the float model's input values beyond the input's range
    input_amax: float | None  # end of that range, the widest input's


@dataclass(eq=False)
class _Probe:
    """Sums over one node's results."""

    label: NodeLabel
    sources: tuple[str, ...]
    fake: PairSums = field(default_factory=PairSums)
    integer: PairSums = field(default_factory=PairSums)
    shape: tuple[int, ...] = ()
    frames: int = 0
    max_steps: int = 0
    sum_steps: int = 0
    differ: int = 0
    numel: int = 0
    beyond: int = 0
    amax: float | None = None

    def judge(self, wanted: Tensor, fake: QTensor, got: QTensor) -> None:
        """One frame's results."""
        self.fake.add(wanted, fake.dequantize())
        self.integer.add(wanted, got.dequantize())
        apart = (got.int_repr().int() - fake.int_repr().int()).abs_()
        self.max_steps = max(self.max_steps, int(apart.max()))
        self.sum_steps += int(apart.sum())
        self.differ += int(torch.count_nonzero(apart))
        self.shape, self.frames = tuple(wanted.shape), self.frames + 1
        # How much of the float result the scale that its readers see cannot express.
        self.amax = float(fake.scale) * _HALF_RANGE
        self.numel += wanted.numel()
        low, high = wanted.aminmax()
        if max(-float(low), float(high)) > self.amax:
            self.beyond += int(torch.count_nonzero(wanted.abs() > self.amax))

    def row(self, sources: Sequence[_Probe]) -> BpuLayer:
        """The observed row, with the inputs that could not be expressed."""
        read = sum(source.numel for source in sources)
        ranges = [source.amax for source in sources if source.amax is not None]
        return BpuLayer(
            self.label.path,
            self.label.operator,
            self.shape[1],
            self.numel / self.shape[1] / self.frames,
            self.fake.sqnr_db,
            self.fake.cosine,
            self.integer.sqnr_db,
            self.integer.cosine,
            self.max_steps,
            self.sum_steps / self.numel,
            self.differ / self.numel,
            sum(source.beyond for source in sources) / read if read else None,
            max(ranges, default=None),
        )


class FormsComparison:
    """Compares the float, fake-quantized and integer model, operator by operator.

    Args:
        forms: By unit; a unit's values are reported as "unit/node".
        also: Names of further values of all three models, to their consumers: float,
            fake-quantized, integer.
    """

    def __init__(
        self,
        forms: Mapping[str, Forms],
        also: Mapping[str, Callable[[Tensor, Tensor, Tensor], None]] | None = None,
    ) -> None:
        self._also = dict(also or {})
        self._probes: dict[str, _Probe] = {}
        self._order: dict[str, _Probe] = {}
        for unit, form in forms.items():
            graphs = (form.float_graph, form.fake_graph, form.integer_graph)
            known = set.intersection(*({node.name for node in g.graph.nodes} for g in graphs))
            for node in form.fake_graph.graph.nodes:
                label = form.labels.get(node.name)
                if label is not None and node.name in known:
                    sources = tuple(f"{unit}/{source.name}" for source in node.all_input_nodes)
                    self._probes[f"{unit}/{node.name}"] = _Probe(label, sources)

    def run(self, models: Sequence[Callable[[Note], Any]]) -> tuple[Any, Any, Any]:
        """Run the three models on one batch in lockstep and return their outputs.

        Only compared values are exchanged, so no model's values accumulate.

        Args:
            models: Float, fake-quantized and integer; each gets a callback for its values.
        """
        leaders: list[Leader[Any]] = []

        def watched(note: Note) -> Note:
            def tell(name: str, value: Tensor) -> None:
                if name in self._probes or name in self._also:
                    note(name, value)

            return tell

        def leading(place: int) -> Callable[[], Any]:
            return lambda: models[place](watched(leaders[place].hand_out))

        def judge(name: str, got: Tensor) -> None:
            wanted, fake = (leader.take(name) for leader in leaders)
            if name in self._also:
                self._also[name](wanted, fake, got)
            elif isinstance(fake, QTensor) and isinstance(got, QTensor):
                probe = self._order.setdefault(name, self._probes[name])
                probe.judge(wanted, fake, got)

        with torch.no_grad(), lead(leading(0)) as real, lead(leading(1)) as fake:
            leaders += [real, fake]
            got = models[2](watched(judge))
            return real.result(), fake.result(), got

    def layers(self) -> tuple[BpuLayer, ...]:
        """Operators with integer results, in the order of execution."""
        return tuple(
            probe.row([self._order[name] for name in probe.sources if name in self._order])
            for probe in self._order.values()
            if not probe.label.operator.endswith("Stub")  # which quantizes what comes in
        )


def compare_forms(forms: Forms, batches: Iterable[Any]) -> tuple[BpuLayer, ...]:
    """Run the three forms of one model side by side; a row for each operator on the BPU.

    Args:
        forms: Of the model.
        batches: A loader's batches (`bevquant_quantizers.calibrate`), or tuples of arguments.
    """
    comparison = FormsComparison({"": forms})

    def noting(graph: fx.GraphModule, inputs: tuple[Any, ...]) -> Callable[[Note], Any]:
        def run(note: Note) -> Any:
            def tell(node: fx.Node, value: Any) -> None:
                if isinstance(value, Tensor):
                    note(f"/{node.name}", value)

            return run_noting(graph, tell, *inputs)

        return run

    for batch in checked_batches(batches):
        inputs = positional(forms.float_graph, batch)
        graphs = (forms.float_graph, forms.fake_graph, forms.integer_graph)
        comparison.run([noting(graph, inputs) for graph in graphs])
    return comparison.layers()
