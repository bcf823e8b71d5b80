"""Number formats of weights and KV: FP8, FP4 and their scales."""
