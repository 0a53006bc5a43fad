"""Stand-in until the float32 CPU kernel lands: the torch functions."""

from bevquant_sparse._conv_torch import forward, grad_features, grad_weight  # noqa: F401
