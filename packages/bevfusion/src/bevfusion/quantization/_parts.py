"""Folding, quantization, calibration, rounding and training of a detector or of its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bevfusion.detectors import DETECTORS
from bevfusion.evaluation import FrameBatches
from bevfusion.model import Batch, Detector
from bevfusion.quantization._sensitivity import sensitivity_output
from bevfusion.quantization._stage_maps import whole_output
from bevfusion.training import Augmentation, Motion, PreparedFrames, make_batch, one_cycle, order_of
from bevquant_fusion import FusionResult, fuse_model, fuse_parts
from bevquant_qnn import (
    QatTrainer,
    QuantConfig,
    QuantizeResult,
    RangeSearch,
    RoundingResult,
    SkippedModule,
    distillation_loss,
    quantize_model,
    round_weights,
    search_ranges,
)
from bevquant_quantizers import CalibrationReport, calibrate
from bevquant_sparse import is_sparse_conv

_ADDED = ("quant_add", "quant_concat", "residual_quantizer", "sample_quantizer")


def fuse_detector(
    model: Detector, example: Batch, state: Mapping[str, Tensor] | None = None
) -> FusionResult:
    """A copy of the float model with every batch norm folded into its convolution.

    Each module with a forward of its own is folded by itself, on the inputs of the example.
    BEVFusion's head is folded without an example: differences as small as rounding change its
    choice of queries, so its outputs before and after folding cannot be compared one by one.

    Args:
        model: The float model; not changed.
        example: A batch that it can run on.
        state: State of the folded model, if only its modules are needed. Removed batch norms then
            follow from the structure, in a quarter of the time of capturing and comparing. If the
            state disagrees, the model is captured.
    """
    if state is not None:
        result = fuse_model(model)
        sizes = {name: tensor.shape for name, tensor in result.model.state_dict().items()}
        # A state that fits says which norms were folded: the model need not run.
        norms = {name for name in state if name.endswith(".running_var")}
        if norms <= sizes.keys() and all(
            name in state and state[name].shape == shape for name, shape in sizes.items()
        ):
            return result
    return fuse_parts(model, tuple(example), model.folded_apart, unchecked=model.chooses)


def quantize_detector(
    fused: Detector,
    example: Batch,
    parts: Iterable[str],
    *,
    method: str = "mse",
    exclude: Iterable[str] = (),
    first_layer: bool = True,
    reasons: Mapping[str, str] | None = None,
    **settings: Any,
) -> QuantizeResult:
    """A copy of the folded model with quantizers in some of its parts, not calibrated yet.

    Args:
        fused: Result of `fuse_detector`; not changed.
        example: A batch that the model can run on.
        parts: Parts that get quantizers: any of `bevfusion.model.PARTS` that the model has.
        method: "max" puts running-maximum calibrators on activations, others histograms.
        exclude: Paths or globs to leave float, in full or below the part, such as `conv_input.*`.
        first_layer: Quantize the first sparse convolution too, which NVIDIA deploys in fp16.
        reasons: Reasons why parts stay float, by name, and "first layer" for that layer: one line
            each in the result's `skipped`.
        **settings: weight_bits and other fields of `bevquant_qnn.QuantConfig`.

    Raises:
        InputError: A part that the model does not have.
    """
    given_reasons = reasons or {}
    quantized = tuple(parts)
    apart = fused.paths_outside(quantized)
    kept = {} if quantized == ("lidar",) else fused.kept_in_float
    first = [] if first_layer else first_sparse_conv(fused)
    config = QuantConfig(
        input_calibrator="max" if method == "max" else "histogram",
        exclude=(*expand_patterns(fused, exclude), *apart, *kept, *first),
        **settings,
    )
    result = quantize_model(fused, config, example_inputs=tuple(example))
    # One line for a part that stays float, not one for each of its layers.
    named = {f"excluded by {pattern!r}" for pattern in (*apart, *kept)}
    skipped = [
        SkippedModule(path, given_reasons.get(part, "not among the parts to quantize"))
        for part in fused.parts
        if part not in quantized
        for path in fused.part_paths[part]
    ]
    skipped += [SkippedModule(path, why) for path, why in kept.items() if path not in apart]
    why = given_reasons.get("first layer", "the first sparse convolution: fp16, as NVIDIA has it")
    skipped += [
        SkippedModule(item.path, why) if item.path in first else item
        for item in result.skipped
        if item.reason not in named
    ]
    return replace(result, skipped=tuple(skipped))


def calibrate_detector(model: Detector, batches: Iterable[Batch], **how: Any) -> CalibrationReport:
    """Find every quantizer's range from the batches, in place.

    Several ranks share the batches. Each gets the ranges of a single process, bit for bit.

    Args:
        model: The quantized model.
        batches: At least one.
        **how: method, resume and other arguments of `bevquant_quantizers.calibrate`.

    Raises:
        ValueError: As `bevquant_quantizers.calibrate`; for `FrameBatches` it names the frame.
    """
    try:
        return calibrate(model, batches, forward=_run, **how)
    except ValueError as error:
        read = list(getattr(batches, "names", {}).values())
        if not read or not hasattr(error, "__notes__"):  # notes say that a batch was running
            raise
        raise ValueError(f"{read[-1][0]}: {error}") from error


_SEARCH_FRAMES = 2


def search_detector(model: Detector, batches: FrameBatches) -> RangeSearch:
    """Search the ranges that make most of the output's noise, in place.

    `bevquant_qnn.search_ranges` on the first two frames, by the output of `sensitivity_output`.

    Args:
        model: Calibrated.
        batches: The calibration frames.

    Raises:
        ValueError: An output is not finite.
    """
    path = sensitivity_output(model)
    frames = batches.head(min(len(batches), _SEARCH_FRAMES))
    return search_ranges(model, frames, outputs=(path,) if path else (), forward=_run)


ROUNDING_FRAMES = 16
"""Most frames that rounding reads: it holds all of them, and runs each of them for each layer."""


def round_detector(model: Detector, batches: FrameBatches, **how: Any) -> RoundingResult:
    """Round the weights of a calibrated model and correct its biases, in place.

    `bevquant_qnn.round_weights` on the first 16 frames at most.

    Args:
        model: Calibrated, batch norms folded.
        batches: The calibration frames.
        **how: rounding and correct_bias of `round_weights`.

    Raises:
        ValueError: A layer's input is NaN or infinite.
    """
    frames = batches.head(min(len(batches), ROUNDING_FRAMES))
    return round_weights(model, frames, forward=_run, **how)


def _run(model: nn.Module, batch: Any) -> Any:
    return model(*batch)


def first_sparse_conv(model: nn.Module) -> list[str]:
    """Path of the first sparse convolution; none in a model without."""
    paths = (path for path, module in model.named_modules() if is_sparse_conv(module))
    return list(islice(paths, 1))


def expand_patterns(model: nn.Module, patterns: Iterable[str]) -> tuple[str, ...]:
    """Full paths or globs for patterns without the part's own path.

    `conv_input` becomes `encoders.lidar.backbone.conv_input`, `layer1.*` the layers of the camera's
    backbone. A pattern that matches as it stands is kept. One that matches nothing is kept too, and
    `quantize_model` refuses it.
    """
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    expanded: list[str] = []
    apart = getattr(model, "folded_apart", ())
    outer = {path.rpartition(".")[0] for path in apart} - {""}
    outer |= {path.rpartition(".")[0] for path in outer} - {""}
    # Those that a pattern may leave out.
    prefixes = (*apart, *sorted(outer, key=lambda path: (-path.count("."), path)))
    for pattern in patterns:
        candidates = [pattern, *(f"{prefix}.{pattern}" for prefix in prefixes)]
        owner, _, name = pattern.rpartition(".")
        if owner and name.startswith(_ADDED):  # not there yet: its owner is
            known = [c for c in candidates if _names(c.rpartition(".")[0], paths)]
        else:
            known = [c for c in candidates if _names(c, paths)]
        expanded += [pattern] if pattern in known else known or [pattern]
    return tuple(dict.fromkeys(expanded))


def _names(pattern: str, paths: list[str]) -> bool:
    return bool(pattern) and any(fnmatchcase(path, pattern) for path in paths)


class Distiller:
    """Compares the decoder's map and the heat map, whose cells correspond in both models.

    Downstream each model selects queries of its own, so boxes do not correspond one to one.

    Args:
        student: The trained model.
        teacher: The float model; put in eval mode.
        weight: Weight of the distance in the loss.
    """

    def __init__(self, student: Detector, teacher: Detector, weight: float) -> None:
        self._teacher, self._weight = teacher.eval(), weight
        self._maps: dict[str, Any] = {}
        self._handles = []
        for name, model in (("student", student), ("teacher", teacher)):
            neck = model.get_submodule(model.stages["decoder"])
            self._handles.append(neck.register_forward_hook(self._keeper(name)))

    def loss(self, batch: Batch, outputs: dict[str, Tensor]) -> Tensor:
        """Weight · mean of Σ(q − f)²/Σf² over both maps, for the student's last output.

        Args:
            batch: Its input.
            outputs: Its output, with gradient.
        """
        with torch.no_grad():
            wanted = self._teacher(*batch)
        pairs = [(self._maps[name], whole_output(found))
                 for name, found in (("student", outputs), ("teacher", wanted))]  # fmt: skip
        self._maps.clear()
        return self._weight * distillation_loss(*pairs)

    def stop(self) -> None:
        """Remove the hooks that record maps."""
        for handle in self._handles:
            handle.remove()

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._maps[name] = output

        return keep


SURVEYED = 16  # frames whose maxima ranges are followed from


class QatDetectorTrainer(QatTrainer):
    """`QatTrainer` of a detector, on randomly moved frames.

    Every random choice derives from the seed and the frame's number in the run. An interrupted run,
    or another distribution over processes, gives the same result.

    Args:
        model: The calibrated model on its training device; changed in place.
        frames: Frames to train on.
        steps: Steps of the whole run.
        batch: Frames in each step; each runs by itself.
        lr: Largest learning rate; see `one_cycle`.
        weight_decay: Weight decay of AdamW.
        clip: Largest norm of a step's gradient.
        seed: Seed of order, augmentation and dropout.
        augmentation: Random movements of frames.
        learn_ranges: Learn the ranges by gradient instead of following the largest values.
        frozen_after: Step from which ranges are constant.
        train_float: Train layers left in float too.
        teacher: Float model for distillation, or None.
        distill: Weight of the distance to it; see `Distiller`.

    Attributes:
        terms: Names of the losses.
    """

    model: Detector

    def __init__(
        self,
        model: Detector,
        frames: PreparedFrames,
        *,
        steps: int,
        batch: int,
        lr: float,
        weight_decay: float,
        clip: float,
        seed: int,
        augmentation: Augmentation,
        learn_ranges: bool = False,
        frozen_after: int = 0,
        train_float: bool = False,
        teacher: Detector | None = None,
        distill: float = 0.0,
    ) -> None:
        self._frames, self._seed, self._augmentation = frames, seed, augmentation
        self._device = next(model.parameters()).device
        self._distiller = None if teacher is None else Distiller(model, teacher, distill)
        objective = DETECTORS[model.kind].objective
        assert objective is not None  # a detector in other code has no kind there
        self._objective = objective
        self.terms = (*self._objective.terms, *(["distillation"] if self._distiller else []))
        super().__init__(
            model,
            self._losses_of,
            lambda step: one_cycle(step, steps, lr),
            batch=batch,
            clip=clip,
            weight_decay=weight_decay,
            learn=learn_ranges,
            frozen_after=frozen_after,
            train_float=train_float,
        )

    def survey(self) -> None:
        """Initialise the followed ranges from the first frames."""
        count = min(SURVEYED, len(self._frames))
        self.begin(
            self._batch_of(index, Motion())[0]
            for index in order_of(self._seed, 0, count, len(self._frames))
        )

    def finish(self) -> Detector:
        """The model for saving: ranges constant, on the CPU in eval mode."""
        if self._distiller is not None:
            self._distiller.stop()
        super().finish()
        return self.model

    def _batch_of(self, index: int, motion: Motion) -> tuple[Batch, Any]:
        batch, targets = make_batch([self._frames[index]], [motion], self.model)
        return batch.to(self._device), targets

    def _losses_of(self, sample: int) -> list[Tensor]:
        (index,) = order_of(self._seed, sample, 1, len(self._frames))
        generator = np.random.default_rng((self._seed, 2, sample))
        batch, targets = self._batch_of(index, self._augmentation.draw(generator))
        torch.manual_seed(int(generator.integers(2**63)))  # of dropout
        outputs = self.model(*batch)
        losses = list(self._objective.loss(outputs, targets, self.model.head.config))
        if self._distiller is not None:
            losses.append(self._distiller.loss(batch, outputs))
        return losses
