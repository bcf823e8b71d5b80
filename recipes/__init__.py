"""Recipes: a tuned deployment as a small TOML file."""
