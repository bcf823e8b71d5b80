"""What all tests share: no terminal's size, and pyproject's settings without every plugin."""

import os

import pytest

for name in ("COLUMNS", "LINES"):  # pytest-xdist gives its workers a size
    os.environ.pop(name, None)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Where pytest-timeout is not installed, its setting is known and means nothing."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "Seconds; needs pytest-timeout.")


def pytest_configure(config: pytest.Config) -> None:
    """The same of its marker."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): needs pytest-timeout")
