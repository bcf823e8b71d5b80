"""Results: one JSON document a run, with statistics, comparison and reports."""
