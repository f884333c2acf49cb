"""RMS and layer normalisation with optional fused residual sum and MX quantisation. Start with `op.py`."""
