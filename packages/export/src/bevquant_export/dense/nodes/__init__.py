"""An integer program as nodes of an ONNX file, one file for each kind of step."""
