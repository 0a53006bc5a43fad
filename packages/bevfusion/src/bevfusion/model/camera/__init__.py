"""The camera branch: ResNet or Swin transformer, FPN, and the view transform with BEV pooling."""

from bevfusion.model.camera._backbone import Bottleneck, GeneralizedLSSFPN, ResNet
from bevfusion.model.camera._bev_pool import bev_pool, lift_splat_pool, make_pool_plan
from bevfusion.model.camera._depth_lss import DepthLSSTransform, splat
from bevfusion.model.camera._pool_torch import PoolPlan
from bevfusion.model.camera._swin import SwinTransformer

__all__ = [
    "Bottleneck",
    "DepthLSSTransform",
    "GeneralizedLSSFPN",
    "PoolPlan",
    "ResNet",
    "SwinTransformer",
    "bev_pool",
    "lift_splat_pool",
    "make_pool_plan",
    "splat",
]
