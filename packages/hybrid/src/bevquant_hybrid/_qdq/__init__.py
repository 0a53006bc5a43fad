"""Models that train quantized, read as programs in integers."""
