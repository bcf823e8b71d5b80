"""Published model sizes, one JSON config a file."""
