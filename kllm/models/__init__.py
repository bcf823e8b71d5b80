"""Model families, their presets, and reading or making their weights."""
