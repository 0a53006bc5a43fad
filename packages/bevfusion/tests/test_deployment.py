"""The detector cut into files: in a row they are the model, and each reads what the others make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bevfusion.deployment import FilePart, autoware_files, bpu_files, nvidia_files, walk, watching
from bevfusion.model import CONFIGS, PARTS, Batch, build_model, random_weights

TINY = CONFIGS["tiny"]


@torch.no_grad()
def test_files_in_a_row_are_the_model() -> None:
    pytest.importorskip("spconv", reason="spconv is not installed")
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
    assert ran == ["decoder"]  # what the model's own run made is not made again
    assert torch.equal(tensors["middle"], wanted)


def test_every_set_is_closed() -> None:
    """A file reads frames, the pooled map, or what one before it makes."""
    given = {"features", "coords", "images", "depth", "flat_images", "flat_depth", "pooled"}
    sets = [nvidia_files(PARTS), autoware_files(("lidar", "decoder", "head"))]
    sets += [bpu_files(PARTS, on) for on in ((), ("fuser",), ("camera", "fuser", "decoder"))]
    for files in sets:
        known = set(given)
        for file in files:
            assert known.issuperset(file.inputs.values()), file.name
            known.update(file.outputs.values())
        assert "score" in known
