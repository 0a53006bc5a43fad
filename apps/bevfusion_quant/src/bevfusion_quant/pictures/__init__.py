"""Pictures of a run: bird's-eye views, quantizer histograms, error by layer."""

from bevfusion_quant.pictures._bev import bev_pictures
from bevfusion_quant.pictures._histograms import histogram_pictures
from bevfusion_quant.pictures._layers import layer_picture

__all__ = ["bev_pictures", "histogram_pictures", "layer_picture"]
