"""AdamW over a list of tensors in one launch."""
