"""Text from tokens: no character cut in two, the same text however tokens and calls cut it."""

import codecs
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from kllm.engine.detokenizer import Detokenizer, TokenTable

TEXT = "naïve 日本語 👩‍👩‍👧 e\u0301 \U0001f600 end"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """`data` in tokens that begin at these places."""
    marks = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[a:b] for a, b in pairwise(marks)]


def read(tokens: list[bytes], stop: tuple[str, ...] = (), calls: int = 1) -> tuple[str, int]:
    """(text, tokens kept) when `calls` tokens are pushed at a time."""
    reader = Detokenizer(tokens.__getitem__, stop)
    text = ""
    for start in range(0, len(tokens), calls):
        text += reader.push(range(start, min(start + calls, len(tokens))))
    return text + ("" if reader.stopped else reader.finish()), reader.kept_tokens


def until_stop(text: str, stop: tuple[str, ...]) -> str:
    """The slow way: characters one by one, until the text ends with a stop string."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@settings(max_examples=200, deadline=None)
@given(places=st.lists(st.integers(0, 1000), max_size=40), calls=st.integers(1, 5))
def test_text_does_not_depend_on_where_tokens_and_calls_cut_it(
    places: list[int], calls: int
) -> None:
    tokens = cut(TEXT.encode(), places)
    assert read(tokens, calls=calls) == (TEXT, len(tokens))


def test_pieces_never_hold_a_part_of_a_character() -> None:
    data = TEXT.encode()
    reader = Detokenizer(lambda place: data[place : place + 1])
    pieces = [reader.push([place]) for place in range(len(data))]
    assert [piece for piece in pieces if piece] == list(TEXT)


@settings(max_examples=200, deadline=None)
@given(end=st.integers(0, len(TEXT.encode())), places=st.lists(st.integers(0, 99), max_size=9))
def test_an_unfinished_character_at_the_end_is_dropped(end: int, places: list[int]) -> None:
    data = TEXT.encode()[:end]
    text, _ = read(cut(data, places))
    assert text == data.decode(errors="ignore")


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=12), places=st.lists(st.integers(0, 99), max_size=9))
def test_bytes_that_are_no_text_give_the_same_replacements_for_every_cut(
    data: bytes, places: list[int]
) -> None:
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(data)
    assert read(cut(data, places))[0] == whole


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("abcé", max_size=12),
    stop=st.lists(st.text("abcé", min_size=1, max_size=4), max_size=3).map(tuple),
    places=st.lists(st.integers(0, 99), max_size=9),
    calls=st.integers(1, 4),
)
def test_stop_strings_end_the_text_across_any_cut(
    text: str, stop: tuple[str, ...], places: list[int], calls: int
) -> None:
    tokens = cut(text.encode(), places)
    got, kept = read(tokens, stop, calls)
    assert got == until_stop(text, stop)
    if got != text:
        needed = next(n for n in range(len(tokens) + 1) if _covers(tokens[:n], got))
        assert kept == needed, "no token more than the text needs"


def _covers(tokens: list[bytes], text: str) -> bool:
    return len(b"".join(tokens).decode(errors="ignore")) >= len(text)


def test_nothing_is_sent_that_a_stop_string_may_take_back() -> None:
    tokens = [b"say ST", b"O", b"P no", b"w STOP", b" more"]
    reader = Detokenizer(tokens.__getitem__, ("STOP now", "w S"))
    assert [reader.push([i]) for i in range(4)] == ["say ", "", "", ""]
    assert reader.stopped
    assert reader.push([4]) == ""


def test_what_was_held_is_sent_when_no_stop_string_came() -> None:
    assert read([b"ab", b"cd"], ("cde",)) == ("abcd", 2)


def test_special_tokens_have_no_text() -> None:
    assert read([b"a", b"", b"b"]) == ("ab", 3)


def test_the_tokenizer_is_asked_once_for_each_token() -> None:
    asked: list[int] = []

    def token_bytes(token_id: int) -> bytes:
        asked.append(token_id)
        return bytes([token_id])

    table = TokenTable(token_bytes)
    reader = Detokenizer(table.__getitem__)
    assert reader.push(b"abba") == "abba"
    assert asked == list(b"ab")
