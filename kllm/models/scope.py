"""Writing manifests: a prefix of names in the checkpoint and of targets in the network."""

from dataclasses import dataclass, replace
from typing import Self

from kllm.models.base import BlockScale, CheckpointTensor


@dataclass(frozen=True, slots=True)
class Scope:
    """A prefix of names in the checkpoint and of targets in the network."""

    source: str
    target: str
    mtp: bool = False

    def inner(self, source: str, target: str) -> Self:
        """The scope of a part: both prefixes made longer."""
        return replace(self, source=self.source + source, target=self.target + target)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        target: str,
        dtype: str = "BF16",
        *,
        scale: BlockScale | None = None,
        row: int = 0,
        expert: int | None = None,
        split: str | None = None,
    ) -> CheckpointTensor:
        """A tensor of this part; see `CheckpointTensor`."""
        return CheckpointTensor(
            name=self.source + name,
            shape=shape,
            dtype=dtype,
            target=self.target + target,
            scale=scale,
            row=row,
            expert=expert,
            split=split,
            mtp=self.mtp,
        )
