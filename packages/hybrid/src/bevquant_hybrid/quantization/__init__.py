"""Quantization under its documented names."""

from __future__ import annotations

from bevquant_hybrid._documented import names_from
from bevquant_hybrid._quant_stub import DeQuantStub, QuantStub
from bevquant_hybrid.dtype import qint4, qint8, qint16, qint32
from bevquant_hybrid.march import March
from bevquant_hybrid.qtensor import QTensor
from bevquant_hybrid.quantization import fake_quantize, observer, observer_v2, qconfig, quantize_fx
from bevquant_hybrid.quantization._compile import check_model, compile_model, export_hbir
from bevquant_hybrid.quantization.fake_quantize import (
    CalibFakeQuantize,
    FakeQuantize,
    FakeQuantState,
    LSQFakeQuantize,
    PACTFakeQuantize,
    set_fake_quantize,
)
from bevquant_hybrid.quantization.fuse_modules import fuse_known_modules, fuse_modules
from bevquant_hybrid.quantization.observer import (
    CalibObserver,
    ClipObserver,
    ClipStdObserver,
    FixedScaleObserver,
    KLObserver,
    MinMaxObserver,
    MixObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    MovingAveragePerTensorMinMaxObserver,
    MSEObserver,
    NoopObserver,
    PercentileObserver,
    PerChannelMinMaxObserver,
)
from bevquant_hybrid.quantization.prepare import PrepareMethod, prepare
from bevquant_hybrid.quantization.qconfig import (
    default_8bit_fake_quant,
    default_calib_8bit_fake_quant_qconfig,
    default_calib_8bit_weight_16bit_act_fake_quant_qconfig,
    default_calib_8bit_weight_32bit_out_fake_quant_qconfig,
    default_calib_out_8bit_fake_quant_qconfig,
    default_qat_8bit_fake_quant_qconfig,
    default_qat_8bit_lsq_quant_qconfig,
    default_qat_8bit_weight_16bit_act_fake_quant_qconfig,
    default_qat_8bit_weight_32bit_out_fake_quant_qconfig,
    default_qat_out_8bit_fake_quant_qconfig,
    default_weight_8bit_fake_quant,
    get_default_calib_qconfig,
    get_default_qat_out_qconfig,
    get_default_qat_qconfig,
    get_default_qconfig,
    get_qconfig,
)

from .qconfig_setter import ModuleNameQconfigSetter, QconfigSetter
from .quantize import convert, load_observer_params, prepare_calibration, prepare_qat
from .quantize_fx import convert_fx, fuse_fx, prepare_calibration_fx, prepare_qat_fx

__getattr__ = names_from("quantization", "perf_model", "visualize_model", "visualize_partition")

__all__ = [
    "CalibFakeQuantize",
    "CalibObserver",
    "ClipObserver",
    "ClipStdObserver",
    "DeQuantStub",
    "FakeQuantState",
    "FakeQuantize",
    "FixedScaleObserver",
    "KLObserver",
    "LSQFakeQuantize",
    "MSEObserver",
    "March",
    "MinMaxObserver",
    "MixObserver",
    "ModuleNameQconfigSetter",
    "MovingAverageMinMaxObserver",
    "MovingAveragePerChannelMinMaxObserver",
    "MovingAveragePerTensorMinMaxObserver",
    "NoopObserver",
    "PACTFakeQuantize",
    "PerChannelMinMaxObserver",
    "PercentileObserver",
    "PrepareMethod",
    "QTensor",
    "QconfigSetter",
    "QuantStub",
    "check_model",
    "compile_model",
    "convert",
    "convert_fx",
    "default_8bit_fake_quant",
    "default_calib_8bit_fake_quant_qconfig",
    "default_calib_8bit_weight_16bit_act_fake_quant_qconfig",
    "default_calib_8bit_weight_32bit_out_fake_quant_qconfig",
    "default_calib_out_8bit_fake_quant_qconfig",
    "default_qat_8bit_fake_quant_qconfig",
    "default_qat_8bit_lsq_quant_qconfig",
    "default_qat_8bit_weight_16bit_act_fake_quant_qconfig",
    "default_qat_8bit_weight_32bit_out_fake_quant_qconfig",
    "default_qat_out_8bit_fake_quant_qconfig",
    "default_weight_8bit_fake_quant",
    "export_hbir",
    "fake_quantize",
    "fuse_fx",
    "fuse_known_modules",
    "fuse_modules",
    "get_default_calib_qconfig",
    "get_default_qat_out_qconfig",
    "get_default_qat_qconfig",
    "get_default_qconfig",
    "get_qconfig",
    "load_observer_params",
    "observer",
    "observer_v2",
    "perf_model",
    "prepare",
    "prepare_calibration",
    "prepare_calibration_fx",
    "prepare_qat",
    "prepare_qat_fx",
    "qconfig",
    "qint4",
    "qint8",
    "qint16",
    "qint32",
    "quantize_fx",
    "set_fake_quantize",
    "visualize_model",
    "visualize_partition",
]
