"""DFlash and DFlash 2 speculative decoding on TensorRT engines."""

__version__ = "0.1.0"
