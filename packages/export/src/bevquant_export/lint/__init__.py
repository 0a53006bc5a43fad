"""What a target refuses, misreads or runs slowly in an ONNX file, found without running it."""

from bevquant_export.lint._calibration import note_calibration
from bevquant_export.lint._lint import RULES, lint_onnx
from bevquant_export.lint._rule import TARGETS, Finding, Rule

__all__ = ["RULES", "TARGETS", "Finding", "Rule", "lint_onnx", "note_calibration"]
