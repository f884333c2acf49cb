"""Microscaling (MX) quantisation: 8-bit floats with a shared power-of-two scale per block. Start with `tensor.py`."""
