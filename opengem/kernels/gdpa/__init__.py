"""Generalised dot-product attention, `act(q kᵀ · scale) v`, over jagged sequences. Start at `op.py`."""

from opengem.kernels.gdpa.op import gdpa, gdpa_schedule

__all__ = ["gdpa", "gdpa_schedule"]
