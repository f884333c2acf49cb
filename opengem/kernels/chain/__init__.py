"""The norms and sums between two parts of a layer, in one pass."""
