"""KV declarations, block pool and the tensors behind them."""
