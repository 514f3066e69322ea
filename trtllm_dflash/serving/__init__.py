"""Triton model repositories, the engine process and its supervision."""
