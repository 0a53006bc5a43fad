"""The version, where modules below the package can read it."""

__version__ = "0.2.0"
