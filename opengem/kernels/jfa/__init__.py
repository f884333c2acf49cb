"""Jagged Flash Attention: exact softmax attention over sequences of different lengths, without padding."""
