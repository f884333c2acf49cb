"""Kernels for jagged histories. Every op: `reference.py` (definition), fast versions, `op.py` (public function), `cost.py`."""
