"""Which tokens run in the next step: policies on plain data, without torch."""
