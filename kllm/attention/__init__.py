"""Attention backends: each takes flat tokens and paged KV and returns flat outputs."""
