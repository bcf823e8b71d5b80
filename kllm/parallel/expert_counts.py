"""Routing counts in a result file: the bench that measures them writes, the ranks read. No torch.

They are a series of the result, so that model, scale and machine stand beside them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kllm.errors import ConfigError, DataError

ROUTING = "routing"  # the series: layer, expert, tokens
Count = Annotated[int, msgspec.Meta(ge=0)]
Rows = tuple[tuple[Count, Count, Count], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRouting:
    """How often a model's experts were chosen.

    They suit every layout: the ranks derive its placement from them.
    """

    source: Path
    model: str
    scale: str
    counts: Mapping[int, Sequence[int]]  # [E] tokens, by layer

    @classmethod
    def read(cls, path: Path) -> "MeasuredRouting":
        """The counts of a result.

        Raises:
            DataError: the file cannot be read, or has none.
        """
        from kllm.results.store import load  # with pandas, which an engine seldom needs

        result = load(path)
        series = result.find_series(ROUTING)
        if series is None:
            raise DataError(
                f"{path} holds no routing counts; make some with "
                f"`kllm bench expert-balance --model {result.model}`"
            )
        layers: defaultdict[int, list[int]] = defaultdict(list)
        try:
            for layer, expert, tokens in msgspec.convert(series.rows, Rows):
                if expert != len(layers[layer]):
                    raise ValueError(f"layer {layer} continues with expert {expert}")
                layers[layer].append(tokens)
        except ValueError as error:  # also what `convert` raises
            raise DataError(f"{path}: series '{ROUTING}' cannot be used: {error}") from None
        return cls(source=path, model=result.model, scale=result.scale, counts=dict(layers))

    def check(self, model: str, scale: str) -> None:
        """Check that the counts are those of a model.

        Raises:
            ConfigError: they are not.
        """
        if (self.model, self.scale) != (model, scale):
            raise ConfigError(
                f"the routing in {self.source} is that of {self.model} ({self.scale}) and this is "
                f"{model} ({scale}); measure it with `kllm bench expert-balance`"
            )


def routing_rows(counts: Mapping[int, Sequence[int]]) -> Iterator[dict[str, Any]]:
    """The rows of the series, given [E] tokens of each layer."""
    for layer, tokens in counts.items():
        for expert, count in enumerate(tokens):
            yield {"layer": layer, "expert": expert, "tokens": count}
