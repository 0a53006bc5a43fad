"""The weights that a run begins with."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import torch

from bevfusion.model import CONFIGS, build_model, read_state_dict
from bevfusion_quant._errors import InputError

if TYPE_CHECKING:
    from bevfusion.model import BEVFusion
    from bevfusion_quant.train._config import TrainConfig

__all__ = ["first_model"]

LOG = logging.getLogger(__name__)
RARE = 0.1  # what the heatmap says before it has learned anything


def first_model(config: TrainConfig) -> BEVFusion:
    """A model with the seed's weights, or with those of `config.start` where they fit.

    Every layer has its own default initialisation; the heatmap's bias is −ln((1 − p) / p) with p =
    0.1, so that the many empty cells do not rule the first steps (Lin et al. 2017, section 4.1).
    The global random generators are left as they were.

    Raises:
        InputError: No entry of `config.start` fits the model.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_model(CONFIGS[config.config], config.parts)
    with torch.no_grad():
        bias = math.log(RARE / (1 - RARE))
        model.head.heatmap_head[1].bias.fill_(bias)
        model.head.prediction_heads[0].heatmap[1].bias.fill_(bias)
    if config.start is not None:
        own = model.state_dict()
        given = read_state_dict(config.start)
        fits = {n: t for n, t in given.items() if n in own and t.shape == own[n].shape}
        if not fits:
            raise InputError(
                f"{config.start}: no entry fits the model of config {config.config!r}, branch "
                f"{config.branch!r}; start from weights that `train` wrote with this --config"
            )
        model.load_state_dict(fits, strict=False)
        LOG.info("%d of %d entries from %s", len(fits), len(own), config.start)
    return model
