"""The error for unusable input."""

from __future__ import annotations


class InputError(ValueError):
    """The input cannot be used; the message says why and what to do.

    A command line prints the message alone; `bevfusion-quant` then ends with exit code 2.
    """
