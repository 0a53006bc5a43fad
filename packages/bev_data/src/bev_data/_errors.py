"""The error of whatever is handed in and cannot be used."""

from __future__ import annotations


class InputError(ValueError):
    """Something handed in cannot be used; the message says what is wrong and what to do.

    A command line prints the message alone; `bevfusion-quant` then ends with exit code 2.
    """
