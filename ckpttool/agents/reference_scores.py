"""Reference returns that turn a return into a normalised score: 0 for a random policy, 100 for an expert.

The numbers are D4RL's (d4rl/infos.py, REF_MIN_SCORE and REF_MAX_SCORE, one pair for every dataset of an
environment; Fu et al. 2020, https://arxiv.org/abs/2004.07219). They were measured in Gym's `-v2` environments
(d4rl/gym_mujoco/gym_envs.py); later versions of the same body pay a little differently, which is said beside
every score. There is no table of ours: an environment that D4RL has no pair for has no normalised score.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SOURCE = "D4RL, d4rl/infos.py"


@dataclass(frozen=True, slots=True)
class Reference:
    """The returns of a random and of an expert policy, in the environment that they were measured in."""

    env: str
    random: float
    expert: float

    def normalized(self, value: float) -> float:
        """Return 100 * (value - random) / (expert - random)."""
        return 100.0 * (value - self.random) / (self.expert - self.random)


_TABLE = {
    "HalfCheetah": Reference("HalfCheetah-v2", -280.178953, 12135.0),
    "Hopper": Reference("Hopper-v2", -20.272305, 3234.3),
    "Walker2d": Reference("Walker2d-v2", 1.629008, 4592.3),
    "Ant": Reference("Ant-v2", -325.6, 3879.7),
}


def reference(env: str) -> Reference | None:
    """Return the pair for any version of an environment, such as `Hopper-v5`; None if there is none."""
    named = re.fullmatch(r"([A-Za-z0-9]+)-v\d+", env)
    return _TABLE.get(named[1]) if named else None
