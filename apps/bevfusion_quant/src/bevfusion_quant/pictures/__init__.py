"""Pictures of a run: the bird's-eye view, and the error by layer."""

from bevfusion_quant.pictures._bev import bev_picture
from bevfusion_quant.pictures._layers import layer_picture

__all__ = ["bev_picture", "layer_picture"]
