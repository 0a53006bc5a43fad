"""Quantization loss of each group of layers: quantized alone, and alone left in float."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from bevquant_graph import Forward, checked_batches, is_sparse_tensor, leaves, on_batch
from bevquant_qnn._matmul import QuantMatmul
from bevquant_qnn._precision import (
    Precision,
    Setting,
    check_precisions,
    own_precision,
    own_setting,
    set_for_now,
    settings_at,
)
from bevquant_qnn._precision_groups import PrecisionGroup, precision_groups
from bevquant_qnn._ranks import Kept, deal_out
from bevquant_qnn._replay import Replay, Run, evaluation
from bevquant_qnn._scores import Metric, Reduce, Score, score_of
from bevquant_qnn._sensitivity_table import SensitivityRow, SensitivityTable
from bevquant_qnn._sparse_convolution import QuantSparseConvolution
from bevquant_qnn._sparse_tensor import features_of
from bevquant_quantizers import TensorQuantizer
from bevquant_sparse import Rulebook, build_rulebook

Settings = dict[TensorQuantizer, Setting]
GroupPrecisions = Sequence[Precision] | Callable[[PrecisionGroup], Sequence[Precision]] | None


def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    metric: str | Metric = "sqnr",
    *,
    outputs: Sequence[str] = (),
    precisions: GroupPrecisions = None,
    without: bool = True,
    forward: Forward | None = None,
    reduce: Reduce | None = None,
    distributed: bool | None = None,
    kept: Kept | None = None,
) -> SensitivityTable:
    """Measure the loss of each group of layers: alone quantized, and alone left in float.

    The first is the effect of a layer's rounding on the output; the second is the gain of leaving
    it in float while all others round. A run repeats only the parts that the group reaches. Layers
    upstream and parallel branches come from one recorded run per batch, with the bits of the plain
    loop. The activations of one batch are held in memory.

    Groups are layers that share quantizers (`precision_groups`). Modules must depend on their
    inputs alone, as in evaluation mode. Disabled quantizers are left out and stay disabled.

    Args:
        model: Calibrated, from `quantize_model`. It is not changed.
        batches: Arguments of `forward`, one by one.
        metric: ``"sqnr"``, 10·log₁₀(Σf²/Σ(f − q)²) over all outputs and batches, or ``"kl"``, minus
            the mean of Σ p_f·log(p_f/p_q) with p the softmax over axis 1; neither needs labels. Or
            a function ``metric(output, batch)``, larger is better.
        outputs: Paths of modules whose outputs count, such as the BEV encoder; a run ends there,
            and a metric function gets their tuple. Default: the model's own output.
        precisions: Precisions of each group alone: ``"int8"``, ``"int4"`` (weights of 4 bits,
            activations of 8), ``"w4a4"``, ``"int16"`` (activations of 16 bits, weights of 8),
            ``"fp8"`` (E4M3). Ranges for other bits than the quantizer's are searched in its
            calibrator's values. A function returns those of a group, such as ``"int8"`` alone for
            layers that an engine takes in no other format. None measures each group at its own
            bits.
        without: Measure each group alone left in float too.
        forward: Called as ``forward(model, batch)``; by default a tuple or list is spread over the
            arguments, a dict over the keywords, anything else is the only argument.
        reduce: Function from the results of a metric function, in order of batches, to the score
            (default: their mean). For mAP the metric returns boxes, and this computes the score.
        distributed: None uses torch.distributed where it is initialised: each process is given the
            same batches and runs its share; every process returns the same table, with the bits of
            a single process. False does not use it; True requires it.
        kept: Measurements of batches before an interruption; stores each batch's results as soon as
            they exist.

    Returns:
        The table, rows in model order.

    Raises:
        ValueError: No batches, no active quantizer, one without a range, an unknown metric,
            precision or module, or outputs that are not finite.
        RuntimeError: The model calls its modules in another order from run to run, or another
            process failed.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from bevquant_quantizers import calibrate
        >>> from bevquant_qnn import quantize_model
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        >>> images = torch.randn(2, 3, 8, 8)
        >>> net = quantize_model(net, example_inputs=images).model
        >>> report = calibrate(net, [images])
        >>> table = sensitivity(net, [images])
        >>> [row.name for row in table], table["0"].alone["int8"] > 20
        (['0', '2'], True)
    """
    trial = Trial(model, precisions, score_of(metric, reduce), tuple(outputs), without=without)
    return trial.table(batches, trial.measure, on_batch(forward), distributed, kept, "sensitivity")


class Trial:
    """Measurements of every group of layers, batch by batch.

    Each group at `precisions`, by default its own, and `without`: alone left in float. `outputs`
    are the paths of the modules whose outputs count; by default the model's own does.
    """

    def __init__(
        self,
        model: nn.Module,
        precisions: GroupPrecisions,
        score: Score,
        outputs: tuple[str, ...],
        *,
        without: bool,
    ) -> None:
        self.model, self.outputs = model, outputs
        self.groups = _active_groups(model)
        self._wanted = [_precisions_of(group, precisions) for group in self.groups]
        self._score, self._without = score, without
        active = [[q for q in group.quantizers if not q._disabled] for group in self.groups]
        quantizers = [q for held in active for q in held]
        self._active = active
        self.off = {q: own_setting(q, disabled=True) for q in quantizers}
        self.on = {q: own_setting(q, disabled=False) for q in quantizers}
        self.at: dict[tuple[int, str], Settings] = {
            (i, name): settings_at(model, self.groups[i], name, held)
            for i, held in enumerate(active)
            for name in self._wanted[i]
        }

    def measure(
        self, batch: Any, run: Run, only: Iterable[tuple[int, str]] | None = None
    ) -> dict[Any, Any]:
        """Score of this batch by variant; of the given variants, or of all."""
        found: dict[Any, Any] = {}
        with evaluation(self.model), set_for_now(self.off):
            replay = Replay(self.model, run, self.outputs)
            reference = replay.output
            found["float"] = self._score.of_batch(reference, reference, batch)
            for key in self.at if only is None else only:
                with set_for_now(self.at[key]):
                    output = replay(self.at[key])
                    found[key] = self._score.of_batch(output, reference, batch)
            if self._without:
                with set_for_now(self.on):
                    replay = Replay(self.model, run, self.outputs)
                    found["quantized"] = self._score.of_batch(replay.output, reference, batch)
                    for i, held in enumerate(self._active):
                        off = {q: self.off[q] for q in held}
                        with set_for_now(off):
                            result = self._score.of_batch(replay(off), reference, batch)
                        found[i, "float"] = result
        return found

    def table(
        self,
        batches: Iterable[Any],
        measure: Callable[[Any, Run], dict[Any, Any]],
        forward: Forward,
        distributed: bool | None,
        kept: Kept | None,
        step: str,
    ) -> SensitivityTable:
        """The table of the results of `measure`, with the variants in equal order."""
        operations: dict[nn.Module, int] = {}
        variants: list[Any] = ["float", *self.at]
        if self._without:
            variants += ["quantized", *((i, "float") for i in range(len(self._active)))]

        def runner(batch: Any) -> Run:
            return lambda model: forward(model, batch)

        def count(batch: Any) -> None:
            with evaluation(self.model):
                operations.update(count_operations(self.model, runner(batch)))

        def of_batch(batch: Any) -> list[Any]:
            found = measure(batch, runner(batch))
            return [found[key] for key in variants]

        measured = deal_out(
            checked_batches(batches), of_batch, distributed, first=count, step=step, kept=kept
        )
        if not measured:
            raise ValueError(f"{step}: there were no batches; give at least one")
        scores = {
            key: self._score.reduce(results)
            for key, results in zip(variants, zip(*measured, strict=True), strict=True)
        }
        rows = [
            SensitivityRow(
                group.modules,
                _operations_of(self.model, group, operations),
                {name: float(scores[i, name]) for name in self._wanted[i]},
                float(scores[i, "float"]) if self._without else None,
            )
            for i, group in enumerate(self.groups)
        ]
        whole = float(scores["quantized"]) if self._without else None
        best = float(scores["float"])
        return SensitivityTable(self._score.name, best, whole, tuple(rows), len(measured))


def _active_groups(model: nn.Module) -> list[PrecisionGroup]:
    """The groups whose quantizers are on, and have ranges; refuses a model without."""
    groups = [g for g in precision_groups(model) if not all(q._disabled for q in g.quantizers)]
    if not groups:
        raise ValueError(
            "sensitivity: the model has no active quantizer; quantize_model it, or enable() some"
        )
    bare = [
        group.name
        for group in groups
        if any(q.amax is None and not q._disabled for q in group.inputs)
    ]
    if bare:
        raise ValueError(
            f"sensitivity: the activations of {', '.join(bare)} have no range; calibrate the model "
            "first (bevquant_quantizers.calibrate)"
        )
    return groups


def _precisions_of(group: PrecisionGroup, precisions: GroupPrecisions) -> tuple[str, ...]:
    """Precisions to measure: the requested ones, or the group's own bits."""
    if callable(precisions):
        precisions = precisions(group)
    if precisions is None:
        return (own_precision(group.inputs, group.weights, f"sensitivity: {group.name}"),)
    check_precisions(precisions, "sensitivity")
    if not precisions or "float" in precisions:
        raise ValueError(
            "sensitivity: name precisions other than float, which they are compared with"
        )
    return tuple(dict.fromkeys(precisions))


def _operations_of(
    model: nn.Module, group: PrecisionGroup, operations: dict[nn.Module, int]
) -> int:
    modules = dict.fromkeys(model.get_submodule(path) for path in group.modules)
    return sum(operations.get(module, 0) for module in modules)


def count_operations(model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[nn.Module, int]:
    """Multiply-accumulates by layer; for layers without products, the elements that they read.

    A convolution does outputs · in/groups · kernel, a linear layer outputs · in, a sparse
    convolution in · out for every pair of its rulebook. Pools, additions, concatenations and
    residual inputs count one for every element that they read.
    """
    counts: dict[nn.Module, int] = {}

    def add(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        counts[module] = counts.get(module, 0) + _operations(module, inputs, output)

    with ExitStack() as stack:
        for module in model.modules():
            # The quantizer of a residual input counts what it reads.
            own = [c for c in module._modules.values() if isinstance(c, TensorQuantizer)]
            if own or isinstance(module, TensorQuantizer):
                stack.callback(module.register_forward_hook(add).remove)
        run(model)
    return counts


def _operations(module: Any, inputs: tuple[Any, ...], output: Any) -> int:
    if isinstance(module, QuantSparseConvolution):
        channels: Any = module.in_channels, module.out_channels
        return int(math.prod(channels)) * _pairs(module, inputs[0], output)
    if isinstance(module, nn.Linear):
        return int(output.numel() * module.in_features)
    if isinstance(module, QuantMatmul):
        return int(output.numel()) * module.depth(*inputs)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        # Every input meets every weight of its group.
        return int(inputs[0].numel() * math.prod(module.weight.shape[1:]))
    if isinstance(module, nn.modules.conv._ConvNd):
        return int(output.numel() * math.prod(module.weight.shape[1:]))
    read = [v for v in leaves(inputs) if isinstance(v, Tensor) or is_sparse_tensor(v)]
    return sum(features_of(value).numel() for value in read)


def _pairs(module: Any, x: Any, output: Any) -> int:
    """Pairs of (input, output) voxels that meet."""
    kept = output.indice_dict.get(getattr(module, "indice_key", None))
    if isinstance(kept, Rulebook):
        return kept.num_pairs
    sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
    # One pair for each voxel, without a rulebook.
    if all(size == 1 for size in module.kernel_size):
        return len(output.features)
    subm, transposed = bool(module.subm), bool(getattr(module, "transposed", False))
    shape = [int(size) for size in x.spatial_shape]
    return build_rulebook(
        x.indices, shape, *sizes, subm=subm, transposed=transposed, batch_size=int(x.batch_size)
    ).num_pairs
