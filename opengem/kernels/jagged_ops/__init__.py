"""Copies and products between jagged and dense tensors. Start with `op.py`."""
