"""SwiGLU on the output of one fused projection; the backward recomputes. Start with `op.py`."""
