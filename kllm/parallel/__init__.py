"""Layouts and the communicators they run on."""
