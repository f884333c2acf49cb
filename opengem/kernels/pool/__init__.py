"""Pooling of a history by queries that average and queries that count."""
