"""Files run on the CPU at hand, by onnxruntime, OpenVINO or ONNX's reference."""
