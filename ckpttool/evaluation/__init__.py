"""Evaluation: environments, rollout, statistics, video."""

from typing import TYPE_CHECKING

from ckpttool import package_face

if TYPE_CHECKING:
    from ckpttool.evaluation.fast_engines import TaskRules as TaskRules
    from ckpttool.evaluation.gymnasium_engine import (
        Agreement as Agreement,
        EnvSpec as EnvSpec,
        GymVector as GymVector,
        VectorEnv as VectorEnv,
        measure_deviation as measure_deviation,
    )
    from ckpttool.evaluation.rollout import (
        ActionSampler as ActionSampler,
        ExplorationNoise as ExplorationNoise,
        NormalSampler as NormalSampler,
        Rollout as Rollout,
        RolloutSpec as RolloutSpec,
        rollouts as rollouts,
    )
    from ckpttool.evaluation.simulators import DeviceVector as DeviceVector, is_factory as is_factory
    from ckpttool.evaluation.statistics import (
        Estimate as Estimate,
        Judgement as Judgement,
        ReturnStatistics as ReturnStatistics,
        difference_of_means as difference_of_means,
        estimate_over_runs as estimate_over_runs,
        find_reference_scores as find_reference_scores,
        judge_return as judge_return,
        paired_interval as paired_interval,
        probability_of_improvement as probability_of_improvement,
        summarize as summarize,
    )
    from ckpttool.evaluation.video import (
        Camera as Camera,
        Caption as Caption,
        CutError as CutError,
        write_video as write_video,
    )
    from ckpttool.evaluation.wrappers import WrapperSpec as WrapperSpec

package_face()
