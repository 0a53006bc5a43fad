"""Float operations in ONNX's operators, by torch's exporter and forms of ours where it has none."""
