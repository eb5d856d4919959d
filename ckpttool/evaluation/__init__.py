"""Evaluation: environments, rollout, statistics, video."""

from typing import TYPE_CHECKING

from ckpttool.core import package_face

# Public names, imported from their modules on first use.

if TYPE_CHECKING:
    from ckpttool.evaluation.fast_engines import TaskRules
    from ckpttool.evaluation.gymnasium_engine import (
        Agreement,
        EnvSpec,
        GymVector,
        VectorEnv,
        measure_deviation,
    )
    from ckpttool.evaluation.rollout import (
        ActionSampler,
        ExplorationNoise,
        NormalSampler,
        Rollout,
        RolloutSpec,
        rollouts,
    )
    from ckpttool.evaluation.simulators import DeviceVector, is_factory
    from ckpttool.evaluation.statistics import (
        Estimate,
        Judgement,
        ReturnStatistics,
        difference_of_means,
        estimate_over_runs,
        find_reference_scores,
        judge_return,
        paired_interval,
        probability_of_improvement,
        summarize,
    )
    from ckpttool.evaluation.video import Camera, Caption, CutError, write_video
    from ckpttool.evaluation.wrappers import WrapperSpec

__all__ = [
    "ActionSampler",
    "Agreement",
    "Camera",
    "Caption",
    "CutError",
    "DeviceVector",
    "EnvSpec",
    "Estimate",
    "ExplorationNoise",
    "GymVector",
    "Judgement",
    "NormalSampler",
    "ReturnStatistics",
    "Rollout",
    "RolloutSpec",
    "TaskRules",
    "VectorEnv",
    "WrapperSpec",
    "difference_of_means",
    "estimate_over_runs",
    "find_reference_scores",
    "is_factory",
    "judge_return",
    "measure_deviation",
    "paired_interval",
    "probability_of_improvement",
    "rollouts",
    "summarize",
    "write_video",
]

_HOMES = {
    "Agreement": "gymnasium_engine",
    "Camera": "video",
    "Caption": "video",
    "CutError": "video",
    "DeviceVector": "simulators",
    "EnvSpec": "gymnasium_engine",
    "Estimate": "statistics",
    "ExplorationNoise": "rollout",
    "GymVector": "gymnasium_engine",
    "Judgement": "statistics",
    "NormalSampler": "rollout",
    "ReturnStatistics": "statistics",
    "Rollout": "rollout",
    "RolloutSpec": "rollout",
    "ActionSampler": "rollout",
    "TaskRules": "fast_engines",
    "VectorEnv": "gymnasium_engine",
    "WrapperSpec": "wrappers",
    "difference_of_means": "statistics",
    "estimate_over_runs": "statistics",
    "find_reference_scores": "statistics",
    "is_factory": "simulators",
    "judge_return": "statistics",
    "measure_deviation": "gymnasium_engine",
    "paired_interval": "statistics",
    "probability_of_improvement": "statistics",
    "rollouts": "rollout",
    "summarize": "statistics",
    "write_video": "video",
}

__getattr__, __dir__ = package_face(__name__, _HOMES)
