"""One-to-one matching of queries and objects with the least total cost."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from bev_data import InputError

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

    The Hungarian method (Kuhn 1955) by shortest augmenting paths with potentials, O(n² m): each row
    in turn enters along the cheapest alternating path. Of equal paths the lower column is taken, so
    the result is deterministic.

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
    if 0 in matrix.shape:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    turned = matrix.shape[0] > matrix.shape[1]
    column_of = _cheapest(np.ascontiguousarray(matrix.T) if turned else matrix)
    rows: Ints = np.arange(len(column_of))
    if not turned:
        return rows, column_of
    order = np.argsort(column_of)
    return column_of[order], rows[order]


@numba.njit(cache=True)
def _cheapest(cost: Any) -> Any:
    """The column of each row; no more rows than columns."""
    rows, columns = cost.shape
    row_potential, column_potential = np.zeros(rows), np.zeros(columns)
    row_of = np.full(columns, -1)
    for entering in range(rows):
        shortest = np.full(columns, np.inf)
        before = np.full(columns, -1)  # the column that a path comes from
        done = np.zeros(columns, np.bool_)
        row, last = entering, -1
        while True:
            nearest, step = -1, np.inf
            for column in range(columns):
                if done[column]:
                    continue
                reduced = cost[row, column] - row_potential[row] - column_potential[column]
                if reduced < shortest[column]:
                    shortest[column], before[column] = reduced, last
                if shortest[column] < step:
                    nearest, step = column, shortest[column]
            row_potential[entering] += step
            for column in range(columns):
                if done[column]:
                    row_potential[row_of[column]] += step
                    column_potential[column] -= step
                else:
                    shortest[column] -= step
            done[nearest], last = True, nearest
            row = row_of[nearest]
            if row < 0:
                break
        while last >= 0:  # along the path, every column takes the row of the one before
            previous = before[last]
            row_of[last] = entering if previous < 0 else row_of[previous]
            last = previous
    column_of = np.empty(rows, np.int64)
    for column in range(columns):
        if row_of[column] >= 0:
            column_of[row_of[column]] = column
    return column_of
