"""Descriptors that quantized modules use when the caller gives none: upstream's defaults.

8 bit, symmetric, a per-tensor range for the input and one range per output channel for the
weight, both collected by a `MaxCalibrator` until a `QuantConfig` says otherwise.
"""

from __future__ import annotations

from bevquant_quantizers import QuantDescriptor

__all__ = ["Axis", "check_fake_quant", "default_input_descriptor", "default_weight_descriptor"]

Axis = int | tuple[int, ...] | None


def default_input_descriptor() -> QuantDescriptor:
    """Per tensor, 8 bit, `MaxCalibrator`."""
    return QuantDescriptor(num_bits=8)


def default_weight_descriptor(axis: Axis) -> QuantDescriptor:
    """Per channel along `axis`, 8 bit, `MaxCalibrator`."""
    return QuantDescriptor(num_bits=8, axis=axis)


def check_fake_quant(descriptor: QuantDescriptor, owner: str, argument: str) -> QuantDescriptor:
    """Refuse a descriptor of integer output: the modules compute in float."""
    if not isinstance(descriptor, QuantDescriptor):
        msg = f"{owner}: {argument} must be a QuantDescriptor, got {type(descriptor).__name__}."
        raise TypeError(msg)
    if not descriptor.fake_quant:
        msg = (
            f"{owner}: {argument} has fake_quant=False, but the module computes in float on "
            "fake-quantized values. Use QuantDescriptor(fake_quant=True)."
        )
        raise ValueError(msg)
    return descriptor
