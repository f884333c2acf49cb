"""Kernels for jagged histories.

Every op is a folder: `reference.py` (the definition), `triton.py` and `gluon_sm90.py` (fast), `op.py` (the public
function), `cost.py` (FLOPs and bytes). `backend.py` says which implementation runs where.
"""
