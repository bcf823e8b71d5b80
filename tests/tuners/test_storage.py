"""Storages by URL: what is said about them holds no password."""

import pytest

from kllm.errors import DataError
from kllm.tuners.storage import open_storage, without_password


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:secret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("--storage=mysql+pymysql://me:a@b/c@host/db", "--storage=mysql+pymysql://me:***@host/db"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("sqlite:///study.db", "sqlite:///study.db"),
        ("journal:a/b.journal", "journal:a/b.journal"),
    ],
)
def test_the_password_of_a_url_is_masked(text: str, shown: str) -> None:
    assert without_password(text) == shown


def test_an_error_does_not_show_the_password() -> None:
    with pytest.raises(DataError) as caught:
        open_storage("nonsense://me:secret@host/db")
    assert "secret" not in str(caught.value)
