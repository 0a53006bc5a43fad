"""The version, importable by the modules of the package."""

__version__ = "0.2.0"
