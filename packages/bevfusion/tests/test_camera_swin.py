"""Swin transformer: mmdet's numbers, its own formula, and INT8 of a detector that has it."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bev_data import InputError
from bevfusion.model import (
    CONFIGS,
    BEVFusionConfig,
    build_model,
    example_batch,
    random_weights,
)
from bevfusion.model.camera import SwinTransformer

DEPTHS = (2, 2, 2, 1)


def settle(net: nn.Module) -> None:
    """Weights that leave no bias zero and no norm at its start."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            deviation = 0.5 if parameter.ndim == 1 else 1.5 / parameter[0].numel() ** 0.5
            parameter.copy_(draw * deviation + (parameter.ndim == 1))


def mmdets_swin(**settings: Any) -> nn.Module:
    pytest.importorskip("mmdet", reason="needs mmdet 3.3.0 with mmcv-lite and mmengine")
    if "mmcv._ext" not in sys.modules:  # compiled operators, which a Swin transformer never calls
        absent = types.ModuleType("mmcv._ext")
        absent.__getattr__ = lambda name: None  # type: ignore[method-assign]
        sys.modules["mmcv._ext"] = absent
    from mmdet.models.backbones.swin import SwinTransformer as Theirs

    net: nn.Module = Theirs(out_indices=(1, 2, 3), **settings)
    return net


@pytest.mark.filterwarnings("ignore")  # of mmdet's imports, on a newer torch
@pytest.mark.parametrize(
    ("size", "depths", "width", "heads"),
    [
        ((256, 704), (2, 2, 6, 2), 96, (3, 6, 12, 24)),
        ((64, 176), DEPTHS, 32, (1, 2, 4, 8)),  # an odd number of columns is merged
        ((224, 224), DEPTHS, 32, (1, 2, 4, 8)),  # whole windows
    ],
)
def test_numbers_are_those_of_mmdet(
    size: tuple[int, int],
    depths: tuple[int, int, int, int],
    width: int,
    heads: tuple[int, int, int, int],
) -> None:
    theirs = mmdets_swin(embed_dims=width, depths=depths, num_heads=heads)
    theirs.eval()
    settle(theirs)
    ours = SwinTransformer(size, depths, width).eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = theirs(images)
        for got, other in zip(ours(images), wanted, strict=True):
            assert other.std() > 0.1
            torch.testing.assert_close(got, other, rtol=1e-5, atol=1e-5)
