"""Conversion of QAT models to integer programs for exporters."""
