"""The one error of the readers."""

from __future__ import annotations

from bev_data._errors import InputError


class PointsError(InputError):
    """A frame cannot be read or holds something that must not be used.

    The message names the file, what was found, what was expected and what to do. It is meant to
    be shown to the user as it is.

    Attributes:
        reason: The problem alone, where other layouts of the file are tried.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason
