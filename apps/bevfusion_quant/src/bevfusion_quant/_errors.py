"""Exceptions that end a command: the input is at fault, or what came out is not right."""

from __future__ import annotations

from bev_data import InputError as InputError


class VerificationError(Exception):
    """What was written is not what it should be; the files stay, to be looked into.

    The command line prints what the run has to say, then the message, and ends with exit code 1.

    Args:
        message: Which file and layer, and how far off.
        output: What the run printed.
    """

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output
