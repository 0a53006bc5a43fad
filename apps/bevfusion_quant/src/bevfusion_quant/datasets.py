"""Alias of `bev_data.datasets`, with the kinds that other packages register."""

from bev_data import datasets
from bev_data.datasets import *  # noqa: F403
from bevfusion_quant.options import DatasetKind

__all__ = [*datasets.__all__, "DatasetKind"]
