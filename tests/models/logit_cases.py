"""One case of the table of largest logit differences to the reference implementation.

Each family has a module with a list `CASES`; `test_logits_table.py` runs and prints them all.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.tolerances import LOGITS


@dataclass(frozen=True, slots=True)
class LogitCase:
    """A comparison in float32: `run` returns (ours, reference), both [n, V]."""

    family: str  # a key of tests.tolerances.LOGITS
    name: str
    run: Callable[[], tuple[Tensor, Tensor]]

    @property
    def tolerance(self) -> float:
        """Largest absolute difference allowed."""
        return LOGITS[self.family]


@dataclass(frozen=True, slots=True)
class LogitRow:
    """What a case measured."""

    difference: float  # largest absolute
    scale: float  # standard deviation of the reference


def measure(case: LogitCase) -> LogitRow:
    """Run a case."""
    ours, reference = case.run()
    assert ours.shape == reference.shape
    difference = (ours.double() - reference.double()).abs().max().item()
    return LogitRow(difference, reference.std().item())


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter and buffer-like table a value that matters.

    Matrices N(0, 1 / inputs), vectors N(1, 0.1) if they are norm weights and N(0, 0.5) if not:
    the zeros and ones of a default initialisation would hide whole terms of the formulas.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
            elif "norm" in name and name.endswith("weight"):
                parameter.normal_(1, 0.1, generator=generator)
            else:
                parameter.normal_(0, 0.5, generator=generator)


def seeded_ids(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()
