"""Anchors and detections, against plain loops."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from bevquant_hybrid.nn import (
    AnchorGenerator,
    DetectionPostProcess,
    DetectionPostProcessV1,
    RcnnPostProcess,
)
from bevquant_hybrid.qtensor import QTensor

Box = tuple[float, ...]
STEP = torch.tensor([0.02])


def moved(anchor: Box, delta: Box, absolute: bool = False) -> Box:
    x1, y1, x2, y2 = anchor
    w, h = x2 - x1, y2 - y1
    dx, dy = (delta[0], delta[1]) if absolute else (delta[0] * w, delta[1] * h)
    cx, cy = (x1 + x2) / 2 + dx, (y1 + y2) / 2 + dy
    w, h = (s * math.exp(min(d, math.log(62.5))) for s, d in ((w, delta[2]), (h, delta[3])))
    return cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2


def cut(box: Box, size: tuple[float, float]) -> Box:
    height, width = size
    limits = (width, height, width, height)
    return tuple(min(max(v, 0.0), m) for v, m in zip(box, limits, strict=True))


def overlap(a: Box, b: Box) -> float:
    def area(box: Box) -> float:
        return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])

    shared = area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))
    union = area(a) + area(b) - shared
    return shared / union if union > 0 else 0.0


def suppressed(rows: list, threshold: float, margin: float | None) -> list:
    """Rows (box, score, class), each compared with all that were kept before it.

    Margin None: whatever comes later loses, equal scores too.
    """
    kept: list = []
    for box, score, kind in sorted(rows, key=lambda row: -row[1]):
        loses = any(
            other == kind
            and (margin is None or above - score > margin)
            and overlap(first, box) > threshold
            for first, above, other in kept
        )
        if not loses:
            kept.append((box, score, kind))
    return kept


def assert_rows(found: tuple[Tensor, ...], rows: list) -> None:
    boxes, scores, classes = (t.numpy() for t in found)
    assert boxes.shape == (len(rows), 4)
    assert classes.dtype == np.int64
    assert np.allclose(boxes, np.reshape([row[0] for row in rows], (-1, 4)), rtol=0, atol=1e-4)
    assert np.allclose(scores, [row[1] for row in rows], rtol=0, atol=1e-6)
    assert classes.tolist() == [row[2] for row in rows]


@pytest.mark.parametrize("seed", range(6))
def test_suppression_is_that_of_all_pairs(seed: int) -> None:
    """Whole pixels and few scores: areas are exact, and equals are frequent; so is no area."""
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.choice([1, 40])):
        x, y = draw.randint(1, 9), draw.randint(0, 8)
        box = (x, y, x + draw.randint(-1, 6), y + draw.randint(0, 6))
        rows.append((tuple(map(float, box)), draw.randint(1, 6) / 8, draw.randint(0, 1)))
    rows.sort(key=lambda row: -row[1] * (row[2] == 0))  # as anchors are sorted first
    count = len(rows)
    boxes = torch.tensor([row[0] for row in rows])
    scores = torch.tensor([[row[1] * (row[2] == kind) for kind in (0, 1)] for row in rows])
    still = torch.zeros(count, 4)
    data = torch.cat([still, scores], 1).reshape(1, -1, 1, 1)
    with_background = torch.cat([still[:, :1], scores], 1)[..., None, None]
    wide = [row for row in rows if row[0][2] >= row[0][0]]  # the others have no size to keep
    for threshold in (0.0, 0.25, 0.5, 1.0):
        detect = DetectionPostProcess(0.1, iou_threshold=threshold)
        found = detect([boxes[None]], [scores[None]], [still[None]])
        assert_rows(tuple(part[0] for part in found), suppressed(rows, threshold, 0.0))
        for margin in (0.0, 0.25):
            settings = (2, 0.1, [0], False, None, threshold, count, count, None, margin)
            (made,) = DetectionPostProcessV1(*settings)([data], [boxes.reshape(1, -1, 1, 1)])
            assert_rows(made, suppressed(wide, threshold, margin))
        settings = ((20, 20), threshold, 0.1, 2, count, (0.0,) * 4, (1.0,) * 4)
        (table,) = RcnnPostProcess(*settings)(
            [boxes], with_background, still.repeat(1, 3)[..., None, None]
        )
        table = table[table[:, 4] > 0]
        parts = table[:, :4], table[:, 4], table[:, 5].long()
        assert_rows(parts, suppressed(rows, threshold, None))


def maps_of(rows: Tensor, height: int, width: int) -> Tensor:
    """``[N, H·W·A, k]`` as heads give it: ``[N, A·k, H, W]``, moved element by element."""
    batch, count, k = rows.shape
    anchors = count // (height * width)
    result = rows.new_zeros(batch, anchors * k, height, width)
    for i, j, a in np.ndindex(height, width, anchors):
        row = (i * width + j) * anchors + a
        result[:, a * k : (a + 1) * k, i, j] = rows[:, row]
    return result


def head(draw: random.Random, batch: int, classes: int, per_class: bool, yolo: bool, score: int):
    """Levels of anchors, scores and regressions in float64; scores are few, so many are equal."""
    levels = []
    for stride in (4, 8):
        height, width, anchors = draw.randint(1, 3), draw.randint(1, 3), 2
        count = height * width * anchors
        corner = torch.rand(batch, count, 2).double() * 20 - 2
        boxes = torch.cat([corner, corner + torch.rand(batch, count, 2).double() * 3 * stride], 2)
        scores = torch.randint(0, score, (batch, count, classes + yolo)).double() / score
        deltas = torch.randn(batch, count, 4 * classes if per_class else 4).double() * 0.5
        levels.append(((height, width), boxes, scores, deltas))
    return levels


def detected(image: int, levels, s: dict, sizes) -> list:
    """What the docstring of DetectionPostProcess says, step by step."""
    yolo = s.get("mode") == "yolo"
    joined = []
    for _, boxes, scores, deltas in levels:
        rows = list(zip(boxes[image].tolist(), scores[image].tolist(), deltas[image].tolist(),
                        strict=True))  # fmt: skip
        rows.sort(key=lambda row: -row[1][0])
        found = []
        for anchor, score, delta in rows[: s.get("pre_decode_top_n")]:
            kinds = score[1:] if yolo else score
            for kind, value in enumerate(kinds):
                own = delta[4 * kind : 4 * kind + 4] if len(delta) > 4 else delta
                own = [
                    a * b for a, b in zip(own, s.get("regression_scale") or [1] * 4, strict=True)
                ]
                box = moved(anchor, own, yolo)
                limit = score[0] if yolo else value
                if kind == s.get("background_class_idx") or limit < s.get("score_threshold", 0):
                    continue
                size = s.get("image_size") if sizes is None else sizes[image].tolist()
                box = cut(box, size) if size else box
                least = s.get("size_threshold")
                if least is None or min(box[2] - box[0], box[3] - box[1]) >= least:
                    found.append((box, score[0] * value if yolo else value, kind))
        found = sorted(found, key=lambda row: -row[1])[: s.get("post_decode_top_n")]
        joined.append(found)

    def reduced(rows: list) -> list:
        rows = sorted(rows, key=lambda row: -row[1])[: s.get("pre_nms_top_n")]
        if "iou_threshold" in s:
            rows = suppressed(rows, s["iou_threshold"], 0.0)
        return rows[: s.get("post_nms_top_n")]

    if not s.get("nms_on_each_level"):
        return reduced([row for rows in joined for row in rows])
    every = [row for rows in joined for row in reduced(rows)]
    return sorted(every, key=lambda row: -row[1])[: s.get("post_nms_top_n")]


CASES = {
    "nothing": {},
    "retinanet": {
        **{"score_threshold": 0.3, "pre_decode_top_n": 6, "iou_threshold": 0.4},
        **{"post_nms_top_n": 9, "regression_scale": (0.5, 0.25, 1.0, 2.0)},
    },
    "ssd": {"background_class_idx": 0, "iou_threshold": 0.1, "image_size": (15, 19)},
    "rpn": {
        **{"size_threshold": 2.5, "post_decode_top_n": 8, "iou_threshold": 0.5},
        **{"pre_nms_top_n": 7, "nms_on_each_level": True, "image_size": (16, 16)},
        "post_nms_top_n": 4,
    },
    "yolo": {"mode": "yolo", "score_threshold": 0.5, "iou_threshold": 0.3, "pre_nms_top_n": 12},
    "cut": {"pre_nms_top_n": 5, "image_size": (12, 12)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("per_class", [False, True])
def test_detections_are_those_of_the_steps(name: str, per_class: bool) -> None:
    settings = CASES[name]
    detect = DetectionPostProcess(**settings)
    for seed in range(3):
        draw = random.Random(f"{name}{seed}")
        torch.manual_seed(seed)
        yolo = settings.get("mode") == "yolo"
        levels = head(draw, 2, 3, per_class, yolo, 5)
        sizes = torch.tensor([[9, 30], [30, 9]]) if seed == 2 else None
        given = [[level[i] for level in levels] for i in (1, 2, 3)]
        pictures = [[maps_of(level[i], *level[0]) for level in levels] for i in (1, 2, 3)]
        for arguments in (given, pictures):
            found = detect(*arguments, sizes)
            for image in range(2):
                expected = detected(image, levels, settings, sizes)
                assert_rows(tuple(part[image] for part in found), expected)


def test_quantized_maps_are_dequantized() -> None:
    anchors = AnchorGenerator([8], [1, 2], [1])([torch.zeros(2, 1, 2, 2)])
    maps = [
        QTensor(torch.randint(-128, 128, (2, 2 * k, 2, 2)).to(torch.int8), STEP, "qint8")
        for k in (3, 4)
    ]
    detect = DetectionPostProcess(0.2, iou_threshold=0.5)
    found = detect(anchors, maps[:1], maps[1:])
    plain = detect(anchors, [maps[0].dequantize()], [maps[1].dequantize()])
    for a, b in zip(found, plain, strict=True):
        assert all(type(x) is Tensor and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_levels_that_do_not_belong_together_are_named() -> None:
    anchors = torch.zeros(1, 8, 2, 2)
    detect = DetectionPostProcess()
    with pytest.raises(ValueError, match=r"level 0: boxes \(1, 8, 2, 2\), scores \(1, 5, 2, 2\)"):
        detect([anchors], [torch.zeros(1, 5, 2, 2)], [anchors])
    with pytest.raises(ValueError, match=r"level 0:.*regressions \(1, 12, 2, 2\) do not belong"):
        detect([anchors], [torch.zeros(1, 4, 2, 2)], [torch.zeros(1, 12, 2, 2)])
    with pytest.raises(ValueError, match=r"level 0:.*expected \[N, A·4, H, W\]"):
        detect([anchors], [torch.zeros(1, 8, 2)], [anchors])
    with pytest.raises(ValueError, match="mode='ssd': expected 'normal' or 'yolo'"):
        DetectionPostProcess(mode="ssd")
    with pytest.raises(ValueError, match="pre_nms_top_n=0: expected 1 or more"):
        DetectionPostProcess(pre_nms_top_n=0)


@pytest.mark.parametrize("seed", range(6))
def test_one_box_for_each_anchor(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    classes, offsets, margin = 3, [0, 3], draw.choice([0.0, 0.25])
    levels = head(draw, 2, classes, per_class=False, yolo=False, score=5)
    padding = draw.choice([None, "pad_zero", "rollover"])
    least, clips = draw.choice([((0, 0), True), ((1.5, 2.5), [True, False])])
    detect = DetectionPostProcessV1(
        *(classes, 0.4, offsets, clips, (14, 18), 0.3, 12, 9, padding, margin),
        bbox_min_hw=least,
    )
    data = [maps_of(torch.cat([lv[3], lv[2]], 2), *lv[0]) for lv in levels]
    anchors = [maps_of(lv[1], *lv[0]) for lv in levels]
    sizes = torch.tensor([[9, 30], [30, 9]]) if seed % 2 else None
    found = detect(data, anchors, sizes)
    for image in range(2):
        rows = []
        for branch, (_, boxes, scores, deltas) in enumerate(levels):
            for anchor, score, delta in zip(
                boxes[image], scores[image], deltas[image], strict=True
            ):
                best = max(score.tolist())
                box = moved(anchor.tolist(), delta.tolist())
                if clips is True or clips[branch]:
                    box = cut(box, (14, 18) if sizes is None else sizes[image].tolist())
                tall, wide = box[3] - box[1], box[2] - box[0]
                if best >= 0.4 and tall >= least[0] and wide >= least[1]:
                    rows.append((box, best, score.tolist().index(best) + offsets[branch]))
        rows = sorted(rows, key=lambda row: -row[1])[:12]
        rows = suppressed(rows, 0.3, margin)[:9]
        if padding == "pad_zero" or (padding and not rows):
            rows += [((0.0,) * 4, 0.0, 0)] * (9 - len(rows))
        elif padding:
            rows = [rows[i % len(rows)] for i in range(9)]
        assert_rows(found[image], rows)


def test_a_margin_lets_close_scores_stand() -> None:
    """As documented: box 2 goes where box 1's score is higher by more than the margin."""
    boxes = torch.tensor([[0.0, 0, 10, 10]]).repeat(2, 1).reshape(1, 8, 1, 1)
    data = torch.tensor([[0.0, 0, 0, 0, 0.875], [0.0, 0, 0, 0, 0.75]]).reshape(1, 10, 1, 1)
    for margin, left in ((0.0, 1), (0.125, 2), (0.25, 2)):
        detect = DetectionPostProcessV1(1, 0.1, [0], False, None, 0.5, 9, 9, nms_margin=margin)
        [(_, scores, _)] = detect([data], [boxes])
        assert len(scores) == left
    equal = data.index_fill(1, torch.tensor([9]), 0.875)
    assert (
        len(DetectionPostProcessV1(1, 0.1, [0], False, None, 0.5, 9, 9)([equal], [boxes])[0][1])
        == 2
    )


def test_quantized_maps_are_brought_to_sixteenths() -> None:
    """9 saturates at 127/16, 0.28125 lies between two steps and goes up."""
    values = torch.tensor([0.0, 0.5, 0.28125, -0.28125, 9.0, 0.1]).reshape(1, 6, 1, 1)
    anchor = torch.tensor([0.0, 0, 16, 16]).reshape(1, 4, 1, 1)
    detect = DetectionPostProcessV1(2, 0.0, [0], False, None, 0.5, 9, 9)
    step = torch.tensor([1 / 32])
    for data in (values, (values * 32).round().to(torch.int16)):
        [(box, score, kind)] = detect([QTensor(data, step, "qint16")], [anchor])
        assert (score.item(), kind.item()) == (127 / 16, 0)
        expected = moved((0.0, 0, 16, 16), (0.0, 0.5, 5 / 16, -4 / 16))
        assert box[0].tolist() == pytest.approx(expected, abs=1e-4)
    [(_, score, _)] = detect([values], [anchor])
    assert score.item() == 9.0


def test_settings_of_the_first_version_that_do_not_fit_are_named() -> None:
    good = (2, 0.1, [0], True, None, 0.5, 9, 9)
    data, anchors = torch.zeros(1, 6, 1, 1), torch.zeros(1, 4, 1, 1)
    with pytest.raises(ValueError, match="use_clippings needs the size of the image"):
        DetectionPostProcessV1(*good)([data], [anchors])
    assert len(DetectionPostProcessV1(*good)([data], [anchors], (8, 8))) == 1
    with pytest.raises(ValueError, match=r"data \[\(1, 5, 1, 1\)\] and anchors.*\[N, 6·A, H, W\]"):
        DetectionPostProcessV1(*good)([data[:, :5]], [anchors], (8, 8))
    with pytest.raises(ValueError, match="nms_padding_mode='zero'"):
        DetectionPostProcessV1(*good, "zero")
    with pytest.raises(ValueError, match=r"class_offsets=\[0\] and use_clippings=\[True, False\]"):
        DetectionPostProcessV1(2, 0.1, [0], [True, False], None, 0.5, 9, 9)
    with pytest.raises(ValueError, match="post_nms_top_k=0: expected 1 or more"):
        DetectionPostProcessV1(2, 0.1, [0], True, None, 0.5, 9, 0)


@pytest.mark.parametrize("seed", range(5))
def test_regions_become_detections(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    classes, counts = draw.randint(1, 3), [draw.randint(0, 25), draw.randint(0, 25)]
    mean, std = (0.05, -0.1, 0.0, 0.2), (0.1, 0.2, 0.5, 0.4)
    total = sum(counts)
    corners = torch.rand(total, 2) * 20 - 3
    boxes = torch.cat([corners, corners + torch.rand(total, 2) * 12], 1)
    scores = torch.randint(0, 6, (total, classes + 1)) / 6
    deltas = torch.randn(total, 4 * (classes + 1))
    sizes = torch.tensor([[9, 30], [30, 9]], dtype=torch.int32) if seed % 2 else None
    detect = RcnnPostProcess((16, 20), 0.3, 0.4, classes, 8, mean, std)
    given = list(boxes.split(counts))
    result = detect(given, scores[..., None, None], deltas[..., None, None], sizes)
    assert result.shape == (2, 8, 6)
    assert result.dtype == torch.float32
    start = 0
    for image, count in enumerate(counts):
        rows = []
        for k in range(start, start + count):
            best = max(scores[k].tolist())
            kind = scores[k].tolist().index(best)
            own = deltas[k].tolist()[4 * kind : 4 * kind + 4]
            own = [d * s + m for d, m, s in zip(own, mean, std, strict=True)]
            if kind and best >= 0.4:
                size = (16, 20) if sizes is None else sizes[image].tolist()
                rows.append((cut(moved(boxes[k].tolist(), own), size), best, kind - 1))
        start += count
        expected = [(*box, score, kind) for box, score, kind in suppressed(rows, 0.3, None)[:8]]
        expected += [(-1.0,) * 6] * (8 - len(expected))
        assert np.allclose(result[image].numpy(), expected, rtol=0, atol=1e-4)


def test_of_equal_regions_the_first_stays() -> None:
    boxes = torch.tensor([[0.0, 0, 8, 8], [0.0, 0, 8, 7], [9.0, 9, 12, 12]])
    scores = torch.tensor([[0.2, 0.8]]).repeat(3, 1)
    result = RcnnPostProcess((16, 16), post_nms_top_k=3)([boxes], scores, torch.zeros(3, 8))
    assert result[0, :, :4].tolist() == [boxes[0].tolist(), boxes[2].tolist(), [-1.0] * 4]


def test_quantized_regions_are_dequantized() -> None:
    quantized = QTensor(
        torch.tensor([[4, 4, 40, 24]], dtype=torch.int16), torch.tensor([0.25]), "qint16"
    )
    scores, deltas = torch.tensor([[0.1, 0.9]]), torch.zeros(1, 8)
    row = RcnnPostProcess(post_nms_top_k=1)([quantized], scores, deltas)[0, 0]
    assert row.tolist() == pytest.approx([1, 1, 10, 6, 0.9, 0])


def test_regions_that_do_not_fit_are_named() -> None:
    detect = RcnnPostProcess(num_classes=2)
    with pytest.raises(
        ValueError, match=r"scores \(3, 2\) and deltas .*expected \[n, 4\].*\[Σn, 3"
    ):
        detect([torch.zeros(3, 4)], torch.zeros(3, 2), torch.zeros(3, 12))
    with pytest.raises(ValueError, match="num_classes=0: expected 1 or more"):
        RcnnPostProcess(num_classes=0)
    with pytest.raises(ValueError, match=r"delta_std=\[1\.0\]: expected four numbers"):
        RcnnPostProcess(delta_std=[1.0])


def test_anchors_stand_around_their_cells() -> None:
    strides, scales, ratios, bases = [4, 10], [1.0, 2.5], [0.5, 1.0, 3.0], [6.0, 9.0]
    maps = [torch.zeros(2, 7, 3, 2), torch.zeros(2, 7, 1, 4)]
    for legacy in (False, True):
        found = AnchorGenerator(strides, scales, ratios, bases, legacy_bbox=legacy)(maps)
        for level, anchors in enumerate(found):
            assert anchors.shape == (2, 24, *maps[level].shape[2:])
            for i, j in np.ndindex(*maps[level].shape[2:]):
                a = 0
                for ratio in ratios:
                    for scale in scales:
                        side = scale * bases[level]
                        w, h = side / math.sqrt(ratio) - legacy, side * math.sqrt(ratio) - legacy
                        x, y = j * strides[level], i * strides[level]
                        expected = [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
                        own = anchors[1, 4 * a : 4 * a + 4, i, j].tolist()
                        assert own == pytest.approx(expected, abs=1e-4)
                        a += 1


def test_rounded_anchors_are_those_of_torchvision() -> None:
    """128·√2 is 181.02 and 128/√2 is 90.51 pixels: half of either, rounded."""
    [anchors] = AnchorGenerator([16], [8], [0.5, 1, 2], round_anchor=True)(
        [torch.zeros(1, 1, 1, 1)]
    )
    assert anchors.reshape(3, 4).tolist() == [
        [-91, -45, 91, 45],
        [-64, -64, 64, 64],
        [-45, -91, 45, 91],
    ]


def test_anchors_of_given_sides() -> None:
    """Called as public configurations do, on quantized maps too."""
    made = AnchorGenerator(feat_strides=[4], anchor_wh_groups=[[[16, 8], [5, 3]]], legacy_bbox=True)
    quantized = QTensor(torch.zeros(1, 2, 1, 2), torch.tensor([0.1]), "qint8")
    [anchors] = made.forward([quantized])
    assert anchors.dtype == torch.float32
    assert anchors[0, :, 0, 1].tolist() == [-3.5, -3.5, 11.5, 3.5, 2.0, -1.0, 6.0, 1.0]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"feat_strides": [4]}, "give scales and ratios, or anchor_wh_groups, and not both"),
        ({"feat_strides": [4], "scales": [1]}, "give scales and ratios"),
        ({"feat_strides": [4, 8], "anchor_wh_groups": [[[1, 2]]]}, "2 feat_strides.* 1 groups"),
        ({"feat_strides": [4], "scales": [1], "ratios": [0]}, r"ratios=\[0\]: expected numbers"),
        ({"feat_strides": [], "scales": [1], "ratios": [1]}, "0 feat_strides"),
    ],
)
def test_anchors_that_do_not_fit_are_named(given: dict, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        AnchorGenerator(**given)


def test_maps_that_no_anchors_belong_to_are_named() -> None:
    made = AnchorGenerator([4, 8], [1], [1])
    with pytest.raises(
        ValueError, match=r"expected 2 feature maps .*got shapes \[\(1, 2, 3, 3\)\]"
    ):
        made([torch.zeros(1, 2, 3, 3)])
