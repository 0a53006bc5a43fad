"""Settings of whole models, under their older path."""

from __future__ import annotations

from bevquant_hybrid.quantization.qconfig_setter import (
    ModuleNameQconfigSetter,
    QconfigSetterBase,
    calibration_8bit_weight_16bit_act_qconfig_setter,
    default_calibration_qconfig_setter,
    default_qat_fixed_act_qconfig_setter,
    default_qat_fixed_qconfig_setter,
    default_qat_qconfig_setter,
    qat_8bit_weight_16bit_act_qconfig_setter,
    qat_8bit_weight_16bit_fixed_act_qconfig_setter,
)

__all__ = [
    "ModuleNameQconfigSetter",
    "QconfigSetterBase",
    "calibration_8bit_weight_16bit_act_qconfig_setter",
    "default_calibration_qconfig_setter",
    "default_qat_fixed_act_qconfig_setter",
    "default_qat_fixed_qconfig_setter",
    "default_qat_qconfig_setter",
    "qat_8bit_weight_16bit_act_qconfig_setter",
    "qat_8bit_weight_16bit_fixed_act_qconfig_setter",
]
