"""Every family's logits against the reference; `pytest -s` on this file prints the table."""

from collections.abc import Iterator

import pytest

from tests.models import deepseek_v4_logits, glm_moe_dsa_logits, llama_logits
from tests.models.logit_cases import LogitCase, LogitRow, measure

CASES: list[LogitCase] = [
    *llama_logits.CASES,
    *deepseek_v4_logits.CASES,
    *glm_moe_dsa_logits.CASES,
]

Table = dict[LogitCase, LogitRow]


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Collects what the cases measured and prints it at the end."""
    rows: Table = {}
    yield rows
    print("\n\nlargest logit difference to the reference, float32")
    print(f"{'family':<12} {'case':<58} {'difference':>10} {'allowed':>8} {'logit std':>9}")
    for case, row in rows.items():
        print(
            f"{case.family:<12} {case.name:<58} {row.difference:>10.1e} "
            f"{case.tolerance:>8.0e} {row.scale:>9.2f}"
        )


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.family}: {c.name}")
def test_logits_agree_with_reference(case: LogitCase, table: Table) -> None:
    table[case] = row = measure(case)
    assert row.scale > 0.3, "logits this small would hide errors"
    assert row.difference <= case.tolerance
