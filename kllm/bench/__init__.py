"""Benches: each measures the engine and returns results; none of them prints."""
