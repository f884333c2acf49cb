"""Embedding tables: lookup, exact row-wise optimisers, and three generations of sharding. Start with `collection`."""
