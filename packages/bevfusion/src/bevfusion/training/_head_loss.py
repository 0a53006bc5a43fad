"""The loss of a TransFusion head for a batch of labelled frames.

Queries and objects are matched one to one, with the least cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from bev_data import InputError
from bevfusion.model.head._config import BRANCHES
from bevfusion.training._samples import Targets, decode_boxes, encode_boxes, heatmap_target

if TYPE_CHECKING:
    from bevfusion.model.head import HeadConfig

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

CLASS_WEIGHT, CENTRE_WEIGHT, OVERLAP_WEIGHT = 0.15, 0.25, 0.25
_EPS = 1e-12


def matching_cost(
    probabilities: Floats,
    predicted: Floats,
    boxes: Floats,
    classes: Ints,
    extent: tuple[float, float],
) -> Floats:
    """Cost of each pair of query and object.

    0.15 · focal(p) + 0.25 · (|Δx| / X + |Δy| / Y) − 0.25 · IoU, with mit-bevfusion's weights for
    TransFusion (Bai et al. 2022, section 3.4; the assigner HungarianAssigner3D): focal(p) =
    −α (1 − p)^γ ln p + (1 − α) p^γ ln(1 − p) of the object's class, α = 0.25, γ = 2 (Lin et al.
    2017); distances of centres relative to the map's extent X × Y; the overlap of the rotated boxes
    seen from above. mit-bevfusion takes the overlap of their volumes.

    Args:
        probabilities: float64 [queries, classes], after the sigmoid.
        predicted: float64 [queries, 7], boxes as in `points.Labels`.
        boxes: float64 [objects, 7].
        classes: int64 [objects].
        extent: Size of the map along x and y [m].

    Returns:
        float64 [queries, objects].
    """
    from bevfusion.model.head import rotated_iou

    p = probabilities[:, classes]
    focal = -0.25 * (1 - p) ** 2 * np.log(p + _EPS) + 0.75 * p**2 * np.log(1 - p + _EPS)
    apart = np.abs(predicted[:, None, :2] - boxes[None, :, :2]) / extent
    cost: Floats = CLASS_WEIGHT * focal + CENTRE_WEIGHT * apart.sum(2)
    return cost - OVERLAP_WEIGHT * rotated_iou(predicted, boxes)


def assign(cost: npt.ArrayLike) -> tuple[Ints, Ints]:
    """The one-to-one matching of least total cost; it has as many pairs as the shorter side.

    SciPy's `linear_sum_assignment` (the Hungarian method, Kuhn 1955, by shortest augmenting paths).

    Args:
        cost: float [rows, columns], finite.

    Returns:
        Rows and columns of the pairs, int64 [pairs] each, rows ascending.

    Raises:
        InputError: Not a matrix, or NaN or infinity in it.

    Example:
        >>> [side.tolist() for side in assign([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0]])]
        [[0, 1], [1, 0]]
    """
    matrix = np.ascontiguousarray(cost, np.float64)
    if matrix.ndim != 2:
        raise InputError(f"assign: the cost must be a matrix, not {list(matrix.shape)}")
    if not np.isfinite(matrix).all():
        raise InputError("assign: the cost holds NaN or infinity; look for NaN in the predictions")
    from scipy.optimize import linear_sum_assignment  # imports for a third of a second

    rows, columns = linear_sum_assignment(matrix)
    return rows, columns


_ALPHA = 0.25


def gaussian_focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Penalty-reduced focal loss of a heatmap, summed.

    −(1 − p)² ln p where the target y is 1, −p² (1 − y)⁴ ln(1 − p) elsewhere, p = σ(logit).
    CornerNet (Law and Deng 2018, equation 1), CenterNet (Zhou et al. 2019, equation 1). The
    logarithms are taken of the logits, so that p = 0 and p = 1 lose nothing; mit-bevfusion bounds p
    to [10⁻⁴, 1 − 10⁻⁴] instead.

    Args:
        logits: float, any shape.
        target: Same shape, from 0 to 1.

    Example:
        >>> import torch
        >>> loss = gaussian_focal_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.5]))
        >>> round(float(loss), 4)  # 0.25 ln 2 + 0.25 · 0.0625 ln 2
        0.1841
    """
    p = logits.sigmoid()
    positive = -((1 - p) ** 2) * F.logsigmoid(logits)
    negative = -(p**2) * (1 - target) ** 4 * F.logsigmoid(-logits)
    return torch.where(target == 1, positive, negative).sum()


def focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Focal loss of independent classes, summed.

    −α (1 − p)² ln p where the target is 1, −(1 − α) p² ln(1 − p) where it is 0, p = σ(logit) and
    α = 0.25. RetinaNet (Lin et al. 2017, equation 5 with γ = 2).

    Args:
        logits: float, any shape.
        target: Same shape, 0 or 1.

    Example:
        >>> import torch
        >>> loss = focal_loss(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 0.0]))
        >>> round(float(loss), 4)  # 0.25 · 0.25 ln 2 + 0.75 · 0.25 ln 2
        0.1733
    """
    p = logits.sigmoid()
    positive = -_ALPHA * (1 - p) ** 2 * F.logsigmoid(logits)
    negative = -(1 - _ALPHA) * p**2 * F.logsigmoid(-logits)
    return torch.where(target == 1, positive, negative).sum()


def l1_loss(predicted: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Σ weight · |predicted − target| over the known targets.

    Args:
        predicted: float [objects, values].
        target: Same shape; NaN, where unknown, counts 0.
        weights: float [values].

    Example:
        >>> import torch
        >>> nan = float("nan")
        >>> l1_loss(torch.zeros(1, 2), torch.tensor([[3.0, nan]]), torch.tensor([2.0, 1.0])).item()
        6.0
    """
    known = ~target.isnan()
    distance = (predicted - target.nan_to_num()).abs() * known
    return (distance * weights).sum()


BOX_WEIGHT, VELOCITY_WEIGHT = 0.25, 0.2
CELL = 0.6  # m, of mit-bevfusion's map: what its weight of a centre's error in cells stands for


class HeadLoss(NamedTuple):
    """The terms of the loss, each a tensor with a single number.

    Attributes:
        heatmap: Gaussian focal loss per object.
        classes: Focal loss of the queries' classes per object.
        boxes: 0.25 · the L1 distance of the codes per object.
    """

    heatmap: Tensor
    classes: Tensor
    boxes: Tensor

    @property
    def total(self) -> Tensor:
        """The minimised loss: the sum of the three."""
        return self.heatmap + self.classes + self.boxes


def head_loss(
    outputs: Mapping[str, Tensor], targets: Sequence[Targets], config: HeadConfig
) -> HeadLoss:
    """TransFusion's loss as mit-bevfusion trains it.

    L = L_heatmap / N + L_class / M + 0.25 · L_box / M, with N the heatmap's cells that are 1 and M
    the matched queries of the batch, each at least 1. L_heatmap is the Gaussian focal loss of
    `dense_heatmap`; then the queries are matched one to one with the objects (`matching_cost`,
    `assign`), L_class is the focal loss of every query's classes (all 0 where unmatched), and L_box
    the L1 distance of the matched queries' codes, velocities weighing 0.2. A centre's error counts
    per 0.6 m, mit-bevfusion's cell, at every cell size. Sources: Bai et al. 2022 (TransFusion),
    section 3.4; mit-bevfusion's configs/nuscenes/det/transfusion.

    Args:
        outputs: From `TransFusionHead`, with gradient.
        targets: One for each frame of the batch.
        config: Of the head.

    Raises:
        InputError: Another number of frames, or outputs that hold NaN or infinity.

    Example:
        >>> import numpy as np
        >>> import torch
        >>> from bevfusion.model.head import HeadConfig, TransFusionHead
        >>> from bevfusion.training import Targets, head_loss
        >>> config = HeadConfig(in_channels=4, hidden_channels=16, num_queries=9, map_size=(9, 9))
        >>> outputs = TransFusionHead(config)(torch.zeros(1, 4, 9, 9))
        >>> box = np.array([[-52, -52, 0, 4, 2, 1.5, 0]], np.float32)
        >>> car = Targets(box, np.zeros((1, 2), np.float32), np.array([0]))
        >>> loss = head_loss(outputs, [car], config)
        >>> loss.total.backward()
        >>> bool(loss.boxes > 0)
        True
    """
    dense = outputs["dense_heatmap"]
    if len(dense) != len(targets):
        raise InputError(f"head_loss: outputs of {len(dense)} frames, targets of {len(targets)}")
    wanted = torch.from_numpy(np.stack([heatmap_target(t, config) for t in targets])).to(dense)
    peaks = max(1, int((wanted == 1).sum()))
    heatmap = gaussian_focal_loss(dense, wanted) / peaks

    code = torch.cat([outputs[name] for name in BRANCHES], 1).transpose(1, 2)
    logits = outputs["heatmap"].transpose(1, 2)
    frames, queries, rows = _match(code, logits, targets, config)
    classes = torch.zeros_like(logits)
    labels = np.concatenate([t.classes[r] for t, r in zip(targets, rows, strict=True)])
    classes[frames, queries, torch.from_numpy(labels).to(frames)] = 1
    matched = max(1, len(frames))
    codes = [encode_boxes(t, config)[r] for t, r in zip(targets, rows, strict=True)]
    boxes = l1_loss(
        code[frames, queries],
        torch.from_numpy(np.concatenate(codes)).to(code),
        code_weights(config.cell_size).to(code),
    )
    return HeadLoss(heatmap, focal_loss(logits, classes) / matched, BOX_WEIGHT * boxes / matched)


def _match(
    code: Tensor, logits: Tensor, targets: Sequence[Targets], config: HeadConfig
) -> tuple[Tensor, Tensor, list[np.ndarray]]:
    """Frame and query of every pair, int64 [pairs] each, and per frame the rows of its targets."""
    codes = code.detach().double().cpu().numpy()
    probabilities = logits.detach().double().sigmoid().cpu().numpy()
    if not (np.isfinite(codes).all() and np.isfinite(probabilities).all()):
        raise InputError(
            "head_loss: the head's outputs hold NaN or infinity; look at the inputs and the "
            "learning rate"
        )
    extent = tuple(n * cell for n, cell in zip(config.map_size, config.cell_size, strict=True))
    frames, queries, rows = [], [], []
    for frame, target in enumerate(targets):
        cost = matching_cost(
            probabilities[frame],
            decode_boxes(codes[frame], config),
            target.boxes.astype(np.float64),
            target.classes,
            (extent[0], extent[1]),
        )
        picked, found = assign(cost)
        frames.append(np.full(len(picked), frame))
        queries.append(picked)
        rows.append(found)
    index = [torch.from_numpy(np.concatenate(side)).to(code.device) for side in (frames, queries)]
    return index[0], index[1], rows


def code_weights(cell_size: tuple[float, float]) -> Tensor:
    """Weights of a code's values: centre (2), height, dim (3), rot (2) and vel (2).

    Args:
        cell_size: Of the map along x and y [m]; a centre's error counts per 0.6 m.

    Example:
        >>> code_weights((1.2, 0.6)).tolist()[:3]
        [2.0, 1.0, 1.0]
    """
    x, y = cell_size
    weights = [x / CELL, y / CELL, *[1.0] * 6, VELOCITY_WEIGHT, VELOCITY_WEIGHT]
    return torch.tensor(weights)


class Objective(NamedTuple):
    """Training objective of a detector.

    Attributes:
        loss: Maps a head's outputs, the frames' targets and the head's configuration to a named
            tuple of terms with their `total`.
        terms: Names of the terms.
    """

    loss: Callable[[Mapping[str, Tensor], Sequence[Targets], Any], Any]
    terms: tuple[str, ...]


TRANSFUSION_OBJECTIVE = Objective(head_loss, ("heatmap", "class", "box"))
"""BEVFusion's."""
