"""Sequential tests: stop measuring once the evidence is enough."""

import math
from typing import Literal

from kllm.errors import ConfigError

Decision = Literal["undecided", "meets", "misses"]


class AttainmentTest:
    """Wald's sequential probability ratio test of "attainment >= target" (Wald 1945).

    Each request either met its SLO or did not. The test weighs attainment = target against
    attainment = target - indifference and decides as early as the errors allow; between the two
    either answer is acceptable. With target 1.0 one miss decides.

    Args:
        target: share of requests that must meet the SLO, in (0, 1].
        indifference: width of the region where either answer will do.
        false_miss: chance of "misses" although attainment is at the target.
        false_meet: chance of "meets" although attainment is at target - indifference.

    Raises:
        ConfigError: a share outside its range.
    """

    def __init__(
        self,
        target: float,
        *,
        indifference: float = 0.05,
        false_miss: float = 0.01,
        false_meet: float = 0.05,
    ) -> None:
        if not 0 < indifference < target <= 1:
            raise ConfigError(
                f"SLO attainment needs 0 < indifference < target <= 1, got indifference "
                f"{indifference:g} and target {target:g}"
            )
        if not (0 < false_miss < 0.5 and 0 < false_meet < 0.5):
            raise ConfigError("error chances of a sequential test must lie between 0 and 0.5")
        low = target - indifference
        self._met = math.log(low / target)
        self._missed = math.log((1 - low) / (1 - target)) if target < 1 else math.inf
        self._upper = math.log((1 - false_meet) / false_miss)
        self._lower = math.log(false_meet / (1 - false_miss))
        self._evidence = 0.0  # log likelihood ratio, missing over meeting
        self.requests = 0
        self.decision: Decision = "undecided"

    def update(self, met: bool) -> Decision:
        """Add one request; a decision once taken stays."""
        self.requests += 1
        if self.decision == "undecided":
            self._evidence += self._met if met else self._missed
            if self._evidence >= self._upper:
                self.decision = "misses"
            elif self._evidence <= self._lower:
                self.decision = "meets"
        return self.decision
