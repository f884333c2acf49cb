"""Rotary position embedding on jagged rows: positions restart at every sample. Start with `op.py`."""
