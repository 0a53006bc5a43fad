"""`bevfusion.model.camera` under the name that it had here."""

from bevfusion.model.camera import (
    Bottleneck,
    DepthLSSTransform,
    GeneralizedLSSFPN,
    PoolPlan,
    ResNet,
    bev_pool,
    lift_splat_pool,
    make_pool_plan,
)

__all__ = [
    "Bottleneck",
    "DepthLSSTransform",
    "GeneralizedLSSFPN",
    "PoolPlan",
    "ResNet",
    "bev_pool",
    "lift_splat_pool",
    "make_pool_plan",
]
