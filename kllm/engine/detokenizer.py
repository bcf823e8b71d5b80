"""Tokens to text as they come: no character cut in two, nothing past a stop string.

Works on bytes, because a token may end inside a character. What cannot be sent yet is held:
bytes of an unfinished character, and text that a stop string may begin with.
"""

import codecs
from collections.abc import Callable, Sequence


class TokenTable(dict[int, bytes]):
    """Bytes of each token, asked of the tokenizer once: asking costs more than all the rest."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._token_bytes(token_id)
        return found


class Detokenizer:
    """The text of one request.

    Args:
        token_bytes: the bytes that a token stands for; empty for special tokens.
        stop: texts that end the output; they are not part of it.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: tuple[str, ...] = ()) -> None:
        self._token_bytes = token_bytes
        self._stop = stop
        # Bytes that are no UTF-8 become U+FFFD once it is certain; an unfinished tail is held.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""  # decoded, and maybe the beginning of a stop string
        self._sent = 0  # characters
        self._ends: list[int] = []  # characters decoded after each token
        self.stopped = False
        self.kept_tokens = 0  # tokens that the text needs; fewer than given once stopped

    def push(self, token_ids: Sequence[int]) -> str:
        """New text that is certain; nothing more once a stop string was met."""
        out = []
        for token in token_ids:
            if self.stopped:
                break
            self._held += self._decoder.decode(self._token_bytes(token))
            self._ends.append(self._sent + len(self._held))
            self.kept_tokens += 1
            out.append(self._release())
        return "".join(out)

    def finish(self) -> str:
        """The text still held; the bytes of an unfinished character are dropped."""
        rest, self._held = self._held, ""
        self._sent += len(rest)
        return rest

    def _release(self) -> str:
        found = [(at + len(stop), at) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            # The one that is complete first, as if characters came one by one: the same text
            # however the tokens cut it.
            return self._end_at(min(found)[1])
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        self._sent += len(text)
        return text

    def _end_at(self, place: int) -> str:
        text, self._held = self._held[:place], ""
        self._sent += len(text)
        self.stopped = True
        # The tokens up to the one whose characters reach the end of the text.
        self.kept_tokens = sum(end < self._sent for end in self._ends) + (self._sent > 0)
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
