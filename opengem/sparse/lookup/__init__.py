"""Table-batched lookup, and the update fused with the reduction of gradients. Start with `op`."""
