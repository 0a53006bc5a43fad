"""Names of the documents that this package has, at the paths where they import them."""

from __future__ import annotations

import importlib

import pytest

NAMES = {
    "": """March set_march get_march march dtype qtensor quantization nn utils functional mapper
        __version__ qconfig qat_mode bgr2centered_gray bgr2centered_yuv bgr2gray bgr2rgb bgr2yuv
        centered_yuv2bgr centered_yuv2rgb rgb2bgr rgb2centered_gray rgb2centered_yuv rgb2gray
        rgb2yuv""",
    "march": "March set_march get_march",
    "dtype": "qint8 qint16 qint32 qinfo QuantDType",
    "qtensor": "QTensor",
    "qat_mode": "QATMode set_qat_mode get_qat_mode",
    "functional": """argmax filter rgb2centered_yuv bgr2centered_yuv centered_yuv2rgb
        centered_yuv2bgr""",
    "nn.functional": "filter bgr_to_yuv444 point_pillars_preprocess",
    "nn.detection_post_process": "DetectionPostProcess",
    "nn.detection_post_process_v1": "DetectionPostProcessV1",
    "nn.bgr_to_yuv444": "bgr_to_yuv444 BgrToYuv444",
    "nn": """Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Div Erf Exp Floor HardLog Pow Reciprocal
        Selu Sin Sinh Sqrt Tan Interpolate LayerNorm MultiScaleRoIAlign PointPillarsScatter
        BgrToYuv444 Correlation AnchorGenerator DetectionPostProcess DetectionPostProcessV1
        RcnnPostProcess functional intrinsic qat quantized""",
    "nn.quantized": "FloatFunctional",
    "nn.quantized.quantize": "Quantize DeQuantize",
    "nn.quantized.functional_modules": "QFunctional FloatFunctional",
    "nn.qat": """Conv2d ConvReLU2d ConvAddReLU2d ConvTranspose2d Linear BatchNorm2d AvgPool2d
        SegmentLUT QuantStub DeQuantStub FloatFunctional LayerNorm Softmax MultiheadAttention
        LSTMCell Div GLU ReLU ReLU6 Interpolate Upsample UpsamplingBilinear2d
        UpsamplingNearest2d""",
    "nn.qat.relu": "ReLU",
    "nn.qat.batchnorm": "BatchNorm2d",
    "nn.qat.avg_pool2d": "AvgPool2d",
    "nn.qat.interpolate": "Interpolate",
    "nn.qat.upsampling": "Upsample UpsamplingBilinear2d",
    "nn.qat.segment_lut": "SegmentLUT",
    "nn.qat.conv2d": "Conv2d ConvReLU2d ConvReLU62d ConvAdd2d ConvAddReLU2d ConvAddReLU62d",
    "nn.qat.stubs": "QuantStub",
    "nn.qat.functional_modules": "FloatFunctional",
    "quantization": """March QuantStub QTensor FakeQuantize CalibFakeQuantize FakeQuantState
        set_fake_quantize fuse_known_modules fuse_modules fuse_fx prepare_qat prepare_calibration
        prepare_qat_fx prepare_calibration_fx convert convert_fx load_observer_params
        get_default_qat_qconfig get_default_qat_out_qconfig get_default_calib_qconfig
        get_default_qconfig check_model compile_model export_hbir
        FixedScaleObserver MovingAverageMinMaxObserver
        MovingAveragePerChannelMinMaxObserver PACTFakeQuantize
        default_qat_8bit_fake_quant_qconfig default_calib_8bit_fake_quant_qconfig
        default_weight_8bit_fake_quant default_8bit_fake_quant""",
    "quantization.quantize": "prepare_qat convert",
    "quantization.quantize_fx": "fuse_fx prepare_qat_fx prepare_calibration_fx convert_fx",
    "quantization.fuse_modules": "fuse_known_modules fuse_modules",
    "quantization.fake_quantize": "FakeQuantize FakeQuantState set_fake_quantize",
    "quantization.observer": """FixedScaleObserver MinMaxObserver ClipObserver
        MovingAverageMinMaxObserver MovingAveragePerTensorMinMaxObserver""",
    "quantization.observer_v2": """PercentileObserver MSEObserver KLObserver MixObserver
        MinMaxObserver""",
    "quantization.qconfig": """default_qat_8bit_fake_quant_qconfig
        default_qat_out_8bit_fake_quant_qconfig default_calib_8bit_fake_quant_qconfig
        default_calib_out_8bit_fake_quant_qconfig
        default_qat_8bit_weight_32bit_out_fake_quant_qconfig
        default_calib_8bit_weight_32bit_out_fake_quant_qconfig
        default_qat_8bit_weight_16bit_act_fake_quant_qconfig
        default_calib_8bit_weight_16bit_act_fake_quant_qconfig
        default_qat_8bit_lsq_quant_qconfig""",
    "utils.onnx_helper": "export_to_onnx export_quantized_onnx",
    "utils.fx_helper": "wrap",
    "fx.fx_helper": "wrap",
    "jit": "save load to_device",
}


@pytest.mark.parametrize("path", NAMES)
def test_names_are_where_the_documents_import_them(path: str) -> None:
    module = importlib.import_module(f"bevquant_hybrid.{path}".rstrip("."))
    for name in NAMES[path].split():
        assert hasattr(module, name), name


@pytest.mark.parametrize("path", ["nn", "nn.qat", "nn.quantized"])
def test_classes_are_found_where_pickle_looks_for_them(path: str) -> None:
    package = importlib.import_module(f"bevquant_hybrid.{path}")
    classes = [c for n in package.__all__ if isinstance(c := getattr(package, n), type)]
    assert len(classes) > 20
    for cls in classes:
        assert getattr(importlib.import_module(cls.__module__), cls.__qualname__) is cls


def test_submodules_are_attributes_of_the_package() -> None:
    import bevquant_hybrid as horizon

    assert callable(horizon.quantization.fuse_modules)
    assert horizon.nn.qat.Conv2d is horizon.nn.qat.conv2d.Conv2d
