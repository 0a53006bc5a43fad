"""The losses against plain loops, their gradients against differences, their limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from bev_data import InputError
from bevfusion.model.head import HeadConfig, TransFusionHead
from bevfusion.training import (
    Targets,
    assign,
    encode_boxes,
    focal_loss,
    gaussian_focal_loss,
    head_loss,
    heatmap_target,
    l1_loss,
    matching_cost,
)

CONFIG = HeadConfig(
    in_channels=4, hidden_channels=16, ffn_channels=16, branch_channels=8, num_heads=4,
    num_queries=12, map_size=(10, 8), voxel_size=(0.3, 0.4), origin=(-12.0, -12.8), dropout=0.0,
)  # fmt: skip


def objects(seed: int, count: int) -> Targets:
    generator = np.random.default_rng(seed)
    low, span = np.array([-11.0, -11.0, -2.0]), np.array([22.0, 22.0, 2.0])
    boxes = np.concatenate(
        [
            low + generator.random((count, 3)) * span,
            0.5 + 4 * generator.random((count, 3)),
            generator.uniform(-3, 3, (count, 1)),
        ],
        1,
    ).astype(np.float32)
    velocities = generator.normal(size=(count, 2)).astype(np.float32)
    if count:
        velocities[0] = np.nan
    return Targets(boxes, velocities, generator.integers(0, 10, count))


def outputs_of(frames: int, seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    head = TransFusionHead(CONFIG).double().eval()
    return head(torch.randn(frames, 4, 10, 8, dtype=torch.float64))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_gaussian_focal_loss_is_its_formula() -> None:
    generator = np.random.default_rng(0)
    logits, target = generator.normal(size=30) * 3, generator.random(30)
    target[::7] = 1.0
    wanted = 0.0
    for x, y in zip(logits, target, strict=True):
        p = sigmoid(x)
        wanted -= (1 - p) ** 2 * math.log(p) if y == 1 else p**2 * (1 - y) ** 4 * math.log(1 - p)
    got = gaussian_focal_loss(torch.from_numpy(logits), torch.from_numpy(target))
    assert float(got) == pytest.approx(wanted, rel=1e-12)


def test_focal_loss_is_its_formula() -> None:
    generator = np.random.default_rng(1)
    logits, target = generator.normal(size=30) * 3, generator.integers(0, 2, 30)
    wanted = 0.0
    for x, y in zip(logits, target, strict=True):
        p = sigmoid(x)
        wanted -= 0.25 * (1 - p) ** 2 * math.log(p) if y else 0.75 * p**2 * math.log(1 - p)
    got = focal_loss(torch.from_numpy(logits), torch.from_numpy(target))
    assert float(got) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("loss", [gaussian_focal_loss, focal_loss])
def test_gradients_are_those_of_the_losses(loss) -> None:
    target = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    logits = torch.tensor([-2.0, 1.5, 0.3, -0.7], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: loss(x, target), (logits,))


@pytest.mark.parametrize("loss", [gaussian_focal_loss, focal_loss])
def test_sure_logits_keep_finite_losses_and_gradients(loss) -> None:
    logits = torch.tensor([-500.0, 500.0, 500.0, -500.0], requires_grad=True)
    value = loss(logits, torch.tensor([1.0, 0.0, 1.0, 0.0]))
    value.backward()
    assert value.item() > 100
    assert bool(torch.isfinite(logits.grad).all())


def test_unknown_values_count_nothing() -> None:
    predicted = torch.ones(2, 3, requires_grad=True)
    target = torch.tensor([[0.0, math.nan, 4.0], [math.nan] * 3])
    loss = l1_loss(predicted, target, torch.tensor([1.0, 10.0, 100.0]))
    loss.backward()
    assert loss.item() == 1 + 300
    assert predicted.grad.tolist() == [[1.0, 0.0, -100.0], [0.0, 0.0, 0.0]]


def test_the_head_loss_is_the_sum_of_its_definition() -> None:
    outputs, targets = outputs_of(2), [objects(3, 5), objects(4, 2)]
    got = [term.detach() for term in head_loss(outputs, targets, CONFIG)]

    dense = outputs["dense_heatmap"].detach()
    wanted = torch.from_numpy(np.stack([heatmap_target(t, CONFIG) for t in targets])).double()
    heatmap = gaussian_focal_loss(dense, wanted) / (wanted == 1).sum()
    assert float(got[0]) == pytest.approx(float(heatmap), rel=1e-9)

    classes = boxes = 0.0
    for frame, target in enumerate(targets):
        row = {name: value[frame].detach().numpy() for name, value in outputs.items()}
        probability = 1 / (1 + np.exp(-row["heatmap"].T))
        decoded = boxes_in_query_order(outputs, frame)
        cost = matching_cost(
            probability, decoded, target.boxes.astype(float), target.classes, (24.0, 25.6)
        )
        queries, rows = assign(cost)
        assert sorted(rows) == list(range(len(target)))
        one_hot = np.zeros_like(probability)
        one_hot[queries, target.classes[rows]] = 1
        logits = torch.from_numpy(row["heatmap"].T.copy())
        classes += float(focal_loss(logits, torch.from_numpy(one_hot)))
        code = np.concatenate([row[k] for k in ("center", "height", "dim", "rot", "vel")]).T
        for query, line in zip(queries, rows, strict=True):
            wanted_code = encode_boxes(target, CONFIG)[line]
            for i in range(10):
                if np.isnan(wanted_code[i]):
                    continue
                weight = {0: 2.4 / 0.6, 1: 3.2 / 0.6, 8: 0.2, 9: 0.2}.get(i, 1.0)
                boxes += weight * abs(code[query, i] - wanted_code[i])
    assert float(got[1]) == pytest.approx(classes / 7, rel=1e-9)
    assert float(got[2]) == pytest.approx(0.25 * boxes / 7, rel=1e-5)


def boxes_in_query_order(outputs: dict[str, torch.Tensor], frame: int) -> np.ndarray:
    """What `decode` makes of each query by itself: scores rise with the query's number."""
    count = outputs["center"].shape[2]
    one = {name: value[frame : frame + 1].detach().clone() for name, value in outputs.items()}
    one["query_heatmap_score"] = torch.ones_like(one["query_heatmap_score"])
    order = torch.arange(count, 0, -1, dtype=torch.float64)
    one["heatmap"] = order.expand_as(one["heatmap"]) / count
    wide = (-1e6, -1e6, -1e6, 1e6, 1e6, 1e6)
    config = HeadConfig(
        **{**{k: getattr(CONFIG, k) for k in CONFIG.__dataclass_fields__},
           "post_center_range": wide}
    )  # fmt: skip
    from bevfusion.model.head import decode

    (found,) = decode(one, config)
    assert len(found.boxes) == count
    return found.boxes.astype(np.float64)


def test_no_objects_leave_a_finite_loss_that_empties_the_map() -> None:
    outputs = {
        name: value.detach().requires_grad_(value.is_floating_point())
        for name, value in outputs_of(1).items()
    }
    loss = head_loss(outputs, [objects(0, 0)], CONFIG)
    loss.total.backward()
    assert loss.boxes.item() == 0
    assert bool((outputs["dense_heatmap"].grad > 0).all())


def test_a_perfect_head_has_almost_no_loss() -> None:
    target = objects(7, 4)
    code = torch.from_numpy(encode_boxes(target, CONFIG).astype(np.float64).T).nan_to_num()
    heatmap = torch.full((10, 12), -30.0, dtype=torch.float64)
    heatmap[torch.from_numpy(target.classes), torch.arange(4)] = 30.0
    padded = torch.cat([code, torch.zeros(10, 8, dtype=torch.float64)], 1)[None]
    split = torch.split(padded, [2, 1, 3, 2, 2], 1)
    outputs = dict(zip(("center", "height", "dim", "rot", "vel"), split, strict=True))
    peaks = torch.from_numpy(heatmap_target(target, CONFIG))[None].double()
    outputs |= {"heatmap": heatmap[None], "dense_heatmap": (peaks == 1) * 60.0 - 30.0}
    loss = head_loss(outputs, [target], CONFIG)
    assert float(loss.boxes) < 1e-9
    assert float(loss.total) < 1e-6


def test_outputs_that_hold_nan_are_refused() -> None:
    outputs = {name: value.detach().clone() for name, value in outputs_of(1).items()}
    outputs["dim"][0, 0, 0] = math.nan
    with pytest.raises(InputError, match="NaN or infinity"):
        head_loss(outputs, [objects(0, 3)], CONFIG)


def test_another_number_of_frames_is_refused() -> None:
    with pytest.raises(InputError, match="2 frames, targets of 1"):
        head_loss(outputs_of(2), [objects(0, 1)], CONFIG)
