"""Exceptions that end a command: wrong input, or a wrong result."""

from __future__ import annotations

from bev_data import InputError as InputError


class VerificationError(Exception):
    """A written file does not compute the model. The files stay for inspection.

    The command line prints the run's output, then the message, and returns exit code 1.

    Args:
        message: File, layer and difference.
        output: Text that the run printed.
    """

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output
