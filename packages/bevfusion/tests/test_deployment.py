"""The detector cut into files: in a row they are the model, and each reads what the others make."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bevfusion.deployment import (
    FilePart,
    SplitModel,
    autoware_files,
    bpu_files,
    bpu_pieces,
    bpu_units,
    compose_plan,
    cpu_weights,
    evaluate_split,
    nvidia_files,
    split_stage_table,
    stage_shapes,
    unit_inputs,
    walk,
    watching,
)
from bevfusion.detectors import DETECTORS, build_detector, example_of
from bevfusion.model import CONFIGS, PARTS, Batch, build_model, example_batch, random_weights

TINY = CONFIGS["tiny"]


@torch.no_grad()
def test_files_in_a_row_are_the_model() -> None:
    model = build_model(TINY, ("lidar", "decoder")).eval()
    x, y, z = (n // 2 for n in TINY.lidar.sparse_shape)
    steps = torch.arange(40, dtype=torch.int32)
    coords = torch.stack([steps * 0, x + steps, y + steps % 7, z + steps % 2], 1)
    batch = Batch(torch.randn(40, TINY.lidar.in_channels), coords.contiguous(), 1)
    wanted = random_weights(model, *batch, seed=0)
    ran: list[str] = []

    def execute(file: FilePart, args: tuple[Any, ...]) -> Sequence[Tensor]:
        ran.append(file.name)
        return [file.module(model)(*args)]

    files = nvidia_files(model.parts)
    with watching(model) as known:
        model(*batch)
    inputs, tensors = walk(files, execute, batch, model, known=known)
    assert list(inputs) == ["lidar.backbone.xyz", "decoder"]
    assert ran == []  # what the model's own run made is not made again
    assert torch.equal(tensors["middle"], wanted)


def test_every_set_is_closed() -> None:
    """A file reads frames, the pooled map, or what one before it makes."""
    given = {"features", "coords", "images", "depth", "flat_images", "flat_depth", "pooled"}
    lidar = build_model(TINY, ("lidar", "decoder", "head"))
    sets = [nvidia_files(PARTS), autoware_files(lidar)]
    sets += [bpu_files(PARTS, on) for on in ((), ("fuser",), ("camera", "fuser", "decoder"))]
    for files in sets:
        known = set(given)
        for file in files:
            assert known.issuperset(file.inputs.values()), file.name
            known.update(file.outputs.values())
        assert "score" in known


class Notes:
    """A composer that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[str, ...], str]] = []

    def source(self, name: str, shape: object = None) -> str:
        self.told.append((name, (), "source"))
        return name

    def on_cpu(self, name: str, *inputs: str, reason: str, **about: object) -> str:
        self.told.append((name, inputs, reason))
        return name

    def unit(self, plan: str, *inputs: str) -> tuple[str, ...]:
        self.told.append((plan, inputs, "unit"))
        return (plan,)


@pytest.mark.parametrize(
    ("kind", "parts", "flow", "files"),
    [
        ("centerpoint", ("decoder", "head"), ["LiDAR encoder", "unit"], ["rpn_centerhead"]),
        (
            "centerpoint-pillars",
            ("head",),
            ["pillar encoder", "scatter", "decoder backbone", "decoder neck", "unit"],
            ["rpn", "centerhead"],
        ),
        ("centerpoint", ("decoder",), ["LiDAR encoder", "unit", "head"], ["rpn", "centerhead"]),
    ],
)
def test_centerpoint_is_split_behind_its_encoder(
    kind: str, parts: tuple[str, ...], flow: list[str], files: list[str]
) -> None:
    model, notes = build_detector(DETECTORS[kind].configs["tiny"]), Notes()
    reasons = {"decoder": "left out", "head": "left out"}
    last = compose_plan(model, parts, {"bev": "unit"}, notes, shapes={}, reasons=reasons)
    assert last == (flow[-1],)
    assert [(name, *inputs) for name, inputs, _ in notes.told] == [
        ("voxels",), *zip(flow, ["voxels", *flow], strict=False)
    ]  # fmt: skip
    forms = {"bev": SimpleNamespace(float_graph=0, fake_graph=0, integer_graph=0, prefix="")}
    pieces = bpu_pieces(model, parts, forms)
    assert [piece.file.name for piece in pieces[1:]] == files
    on_bpu = {"rpn_centerhead": parts, "rpn": ("decoder",), "centerhead": ("head",)}
    for piece in pieces[1:]:
        assert (piece.kind == "bpu") == (on_bpu[piece.file.name] == parts)
    (unit,) = bpu_units(model, parts).values()
    held = {name for name in model.state_dict() if name in unit.state_dict()}
    assert held == model.state_dict().keys() - cpu_weights(model, parts).keys()
    with torch.no_grad():
        x = model.encode_lidar(*example_of(DETECTORS[kind].configs["tiny"])[:3])
        x = x if "decoder" in parts else model.decoder["neck"](model.decoder["backbone"](x))
        made = unit(x)
    assert len(made) == (len(model.head.output_names) if "head" in parts else 1)


def test_a_split_detector_is_planned_and_written_in_the_order_of_its_flow() -> None:
    model, notes = build_model(TINY), Notes()
    parts, plans = ("camera", "fuser"), {"camera": "images' unit", "bev": "maps' unit"}
    reasons = {"decoder": "nobody asked for it"}
    last = compose_plan(model, parts, plans, notes, shapes={}, reasons=reasons)
    assert last == ("head",)
    flow = {name: inputs for name, inputs, _ in notes.told}
    assert flow["images' unit"] == ("images",)
    assert flow["view transform"] == ("images' unit", "depth")
    assert flow["maps' unit"] == ("view transform", "LiDAR encoder")
    assert flow["decoder neck"] == ("decoder backbone",)
    assert ("decoder backbone", ("maps' unit",), "nobody asked for it") in notes.told
    assert [unit_inputs(unit, parts) for unit in plans] == [("images",), ("camera", "lidar")]
    graphs = [nn.Identity() for _ in range(3)]
    form = SimpleNamespace(
        float_graph=graphs[0], fake_graph=graphs[1], integer_graph=graphs[2], prefix="in."
    )
    pieces = {piece.file.name: piece for piece in bpu_pieces(model, parts, {"bev": form})}
    assert (pieces["fuser"].kind, pieces["fuser"].prefix) == ("bpu", "in.")
    assert pieces["fuser"].lower is not None
    assert pieces["fuser"].lower(graphs[1], ()) is graphs[2]
    assert pieces["lidar.backbone.xyz"].kind == "sparse"
    assert pieces["decoder"].kind == "float"


class InTurn:
    """Runs three models one after the other, and hands over what they note."""

    def __init__(self, stages: Mapping[str, Any]) -> None:
        self.stages = stages

    def run(self, models: Sequence[Any]) -> tuple[Any, ...]:
        told: list[dict[str, Tensor]] = []
        outputs = []
        for model in models:
            told.append({})
            outputs.append(model(told[-1].__setitem__))
        for name in told[0]:
            self.stages[name](*(values[name] for values in told))
        return tuple(outputs)

    def layers(self) -> tuple[()]:
        return ()


class Batches(list):
    """Batches as `FrameBatches` has them, where nobody asks for boxes."""

    sizes = TINY


@torch.no_grad()
def test_three_forms_of_a_split_detector_are_judged_stage_by_stage() -> None:
    model = build_model(TINY, ("lidar", "decoder")).eval()
    batch = example_batch(TINY)._replace(images=None, depth=None, cells=None)
    random_weights(model, *batch, seed=0)
    other = copy.deepcopy(model)
    next(other.decoder["neck"].parameters()).mul_(1.01)
    real, fake, integer = (SplitModel(m, {}, (), run=lambda: None) for m in (model, other, model))
    found = evaluate_split([real, fake, integer], InTurn, Batches([batch]))  # type: ignore[arg-type]
    assert [stage.stage for stage in found.stages] == ["lidar", "decoder"]
    lidar, decoder = found.stages
    assert lidar.fake_sqnr_db is None  # equal
    wanted, got = model(*batch), other(*batch)
    noise = (wanted - got).double().square().sum() / wanted.double().square().sum()
    assert decoder.fake_sqnr_db == pytest.approx(-10 * float(noise.log10()))
    assert decoder.integer_sqnr_db is None
    assert found.evaluation.layers[-1].sqnr_db == pytest.approx(decoder.fake_sqnr_db)
    assert split_stage_table(found.stages).text().splitlines()[3].startswith("Decoder")
    shapes = stage_shapes(real, batch)
    assert list(shapes) == ["voxels", "lidar", "decoder"]
    assert shapes["decoder"] == tuple(wanted.shape)
