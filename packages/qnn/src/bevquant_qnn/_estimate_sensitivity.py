"""Estimate of each layer's quantization loss from one backward pass, without a run per layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bevquant_graph import Forward, on_batch
from bevquant_qnn._layer_row import CHANNELS_LAST
from bevquant_qnn._precision import set_for_now
from bevquant_qnn._ranks import Kept
from bevquant_qnn._replay import Run, Watch, captured_outputs, evaluation
from bevquant_qnn._scores import floats_of, score_of
from bevquant_qnn._sensitivity import GroupPrecisions, Trial
from bevquant_qnn._sensitivity_table import SensitivityTable
from bevquant_qnn._snapshots import copied, float_tensors, mapped

_PARTS = 128  # of a batch: their noise is known to √(2/128), half a decibel
_FEWEST = 16  # parts that are an estimate; with fewer a layer lies near the outputs


def estimate_sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    outputs: Sequence[str] = (),
    precisions: GroupPrecisions = None,
    forward: Forward | None = None,
    probes: int = 1,
    distributed: bool | None = None,
    kept: Kept | None = None,
) -> SensitivityTable:
    """Estimate the result of `sensitivity`: the SQNR of each group alone quantized.

    Per batch, the model runs once in float and once backward, and each layer once more, quantized,
    on its float inputs. `sensitivity` runs the model once per layer.

    Rounding changes a layer's output by δ and the model's by about J·δ, with J the derivative. Its
    power is ‖J·δ‖² = E(v·J·δ)² over vectors v of independent ±1, and v·J·δ is the scalar product of
    δ with the gradient of v·output (Hutchinson 1990). One v is drawn; the products are summed and
    squared in about 128 parts of the map (tiles, rows of voxels, tokens), whose roundings are
    almost independent, so one pass has the precision of 128.

    Limits: effects beyond the derivative and correlations of distant places are not included. On
    trained networks the estimate is within a few dB of the measurement, where layers differ by 40
    dB (figures in the documentation). Measure a plan made from it with `refine_plan`. Groups that
    no gradient reaches (upstream of an `argmax` or `detach`) and groups with few places (an image
    classifier's last layers, image by image) are measured.

    Args:
        model: Calibrated, from `quantize_model`, with differentiable operations between its layers
            and the outputs. It is not changed, nor are its gradients.
        batches: Arguments of `forward`, one by one. All activations and roundings of one batch are
            held in memory.
        outputs: Paths of modules whose outputs count (default: the model's own).
        precisions: Precisions of each group alone; see `sensitivity`.
        forward: Called as ``forward(model, batch)``; see `sensitivity`.
        probes: Number of vectors v per batch, each one backward pass. Use more where few places are
            summed: an image classifier, image by image.
        distributed: As for `sensitivity`; every process returns the same table.
        kept: As for `sensitivity`.

    Returns:
        A table with `estimated` set, without scores of groups left in float; its `quantized_score`
        is measured.

    Raises:
        ValueError: No batches or probes, no active quantizer, one without a range, an unknown
            precision or module, or outputs that are not finite.

    Example:
        >>> from bevquant_quantizers import calibrate
        >>> from bevquant_qnn import quantize_model
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        >>> images = torch.randn(2, 3, 8, 8)
        >>> net = quantize_model(net, example_inputs=images).model
        >>> report = calibrate(net, [images])
        >>> table = estimate_sensitivity(net, [images])
        >>> [row.name for row in table], table["0"].alone["int8"] > 20, table.estimated
        (['0', '2'], True, True)
    """
    if probes < 1:
        raise ValueError(f"estimate_sensitivity: probes={probes}, at least one is drawn")
    trial = Trial(model, precisions, score_of("sqnr", None), tuple(outputs), without=False)

    def estimate(batch: Any, run: Run) -> dict[Any, tuple[float, float]]:
        with evaluation(model), set_for_now(trial.off):
            found = _Backward(trial).noises(run, probes)
        unreached = [key for key in trial.at if key not in found]
        return found | trial.measure(batch, run, unreached) if unreached else found

    step = "estimated sensitivity"
    table = trial.table(batches, estimate, on_batch(forward), distributed, kept, step)
    return replace(table, estimated=True)


class _Backward:
    """One run of a model in float, each layer's rounding beside it, and runs backward."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        model = trial.model
        self._layers = {
            model.get_submodule(path): i
            for i, group in enumerate(trial.groups)
            for path in group.modules
        }
        self._targets = {model.get_submodule(path): path for path in trial.outputs}
        self._captured: dict[str, Any] = {}
        self._within: set[int] = set()
        self._waiting: Counter[int] = Counter()  # outputs of a group that no gradient reached
        # The gradients' source: parameters may need none, and are given none.
        self._zero = torch.zeros((), requires_grad=True)
        self._products: dict[tuple[int, str], dict[int, Tensor]] = {}
        self._known: dict[int, _Known] = {}

    def noises(self, run: Run, probes: int) -> dict[Any, tuple[float, float]]:
        """Power of the outputs and of the estimated noise in it, of what gradients reach."""
        model = self._trial.model
        with Watch(model).seeing(self._call), torch.enable_grad():
            result = run(model)
        if self._trial.outputs:
            result = captured_outputs(self._captured, self._trial.outputs)
        outputs = floats_of(result)
        signal = math.fsum(float(o.detach().double().square().sum()) for o in outputs)
        reached = [o for o in outputs if o.requires_grad]
        random = torch.Generator().manual_seed(0)
        noise: dict[Any, float] = {}
        for last in range(probes - 1, -1, -1) if reached else ():
            self._products = {}
            signs = [_signs(o, random) for o in reached]
            torch.autograd.grad(reached, self._zero, signs, retain_graph=last > 0)
            for key, products in self._products.items():
                if self._waiting[key[0]] or probes * sum(map(len, products.values())) < _FEWEST:
                    continue
                squares = (float(p.double().square().sum()) for p in products.values())
                noise[key] = noise.get(key, 0.0) + math.fsum(squares) / probes
        known = {key: (signal, n) for key, n in noise.items() if math.isfinite(n)}
        return {"float": (signal, 0.0), **known}

    def _call(
        self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        i = self._layers.get(module)
        if i is None or i in self._within:  # a quantizer that a layer of its group calls
            output = forward(*args, **kwargs)
        else:
            self._within.add(i)
            with torch.no_grad():
                rounded = self._rounded(i, forward, args, kwargs)
            output = self._marked(i, module, forward(*args, **kwargs), rounded)
            self._within.discard(i)
        if module in self._targets:
            self._captured[self._targets[module]] = copied(output)
        return output

    def _rounded(
        self, i: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, tuple[list[Tensor], list[Tensor] | None]]:
        """Output of a layer at each precision; and in float, if its float inputs differ."""
        outputs = {}
        for (group, name), settings in self._trial.at.items():
            if group != i:
                continue
            replaced: list[Tensor] = []

            def given(tensor: Tensor, name: str = name, seen: list[Tensor] = replaced) -> Tensor:
                known = self._known.get(id(tensor))
                if known is None or known.group != i or known.version != tensor._version:
                    return tensor.detach()
                seen.append(tensor)
                return known.rounded[name]

            inner, options = mapped((args, kwargs), given)
            with set_for_now(settings):
                made = float_tensors(forward(*inner, **options))
            # A concatenation and the layer that reads it share one quantizer, and values are
            # rounded only once: such a layer gets the rounded inputs in both cases.
            outputs[name] = made, float_tensors(forward(*inner, **options)) if replaced else None
        return outputs

    def _marked(
        self,
        i: int,
        module: nn.Module,
        output: Any,
        rounded: dict[str, tuple[list[Tensor], list[Tensor] | None]],
    ) -> Any:
        """The output, whose gradient is multiplied with the layer's roundings when it comes."""
        at = iter(range(len(float_tensors(output))))

        def mark(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            k, missing = next(at), [True]
            self._waiting[i] += 1
            roundings = {
                name: made[k] - (tensor.detach() if base is None else base[k])
                for name, (made, base) in rounded.items()
            }

            def multiply(gradient: Tensor) -> None:
                if missing:
                    self._waiting[i] -= missing.pop()
                for name, rounding in roundings.items():
                    parts = _parts(gradient * rounding, module)
                    products = self._products.setdefault((i, name), {})
                    products[len(parts)] = products.get(len(parts), 0) + parts

            # A new tensor: what a ReLU does to it in place has the hook behind it.
            marked = tensor + self._zero
            if not marked.requires_grad:  # within no_grad: a checkpoint, a frozen part
                return tensor
            marked.register_hook(multiply)
            # Such layers share a quantizer, see `_rounded`.
            if len(self._trial.groups[i].modules) > 1:
                made = {name: made[k] for name, (made, _) in rounded.items()}
                self._known[id(marked)] = _Known(marked, marked._version, i, made)
            return marked

        return mapped(output, mark)


class _Known(NamedTuple):
    """An output of a layer, and its rounded values."""

    tensor: Tensor  # held, so that its number stays its own
    version: int
    group: int
    rounded: dict[str, Tensor]


def _signs(tensor: Tensor, random: torch.Generator) -> Tensor:
    bits = torch.randint(0, 2, tensor.shape, generator=random, dtype=torch.int8)
    return (2 * bits - 1).to(tensor)


def _parts(products: Tensor, module: nn.Module) -> Tensor:
    """Sums over channels and over about `_PARTS` neighbourhoods."""
    axes = products.dim() - 2
    # [batch, tokens, channels], as of a linear layer.
    tokens = axes == 1 and not isinstance(module, _ConvNd)
    if axes < 1 or tokens or isinstance(module, CHANNELS_LAST):
        rows = products.sum(-1).flatten()
        size = max(1, math.ceil(len(rows) / _PARTS))
        return F.pad(rows, (0, -len(rows) % size)).view(-1, size).sum(1)
    cells = products.sum(1, keepdim=True)
    across = max(1, round((_PARTS / max(1, len(cells))) ** (1 / axes)))
    if axes == 1:
        cells = cells[..., None]
    tile = [max(1, math.ceil(size / across)) for size in cells.shape[2:]]
    # Average pooling without the division: sums over tiles, the last ones smaller.
    pool: Any = F.avg_pool3d if axes == 3 else F.avg_pool2d
    sums: Tensor = pool(cells, tile, ceil_mode=True, divisor_override=1)
    return sums.flatten()
