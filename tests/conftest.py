"""A terminal's size is no part of what tests see; pytest-xdist gives its workers one."""

import os

for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
