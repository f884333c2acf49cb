"""Block attention: softmax attention inside blocks of 64 tokens, with an optional fused rotary embedding."""
