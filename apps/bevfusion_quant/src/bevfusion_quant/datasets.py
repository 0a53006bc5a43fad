"""`bev_data.datasets` under the name that it had here, kinds of other packages among them."""

from bev_data import datasets
from bev_data.datasets import *  # noqa: F403
from bevfusion_quant.options import DatasetKind

__all__ = [*datasets.__all__, "DatasetKind"]
