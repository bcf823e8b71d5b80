"""Building blocks of the model families, aware of parallel layouts."""
