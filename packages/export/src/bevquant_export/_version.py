"""The version, for modules inside the package."""

__version__ = "0.2.0"
