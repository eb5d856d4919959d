"""The same weights stored otherwise: equal returns per seed and batch shape, equal means by any backend."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands.convert import convert
from ckpttool.commands.evaluate import evaluate
from ckpttool.evaluation.agent_facts import NO_FACTS, AgentFacts
from ckpttool.evaluation.protocol import Evaluation, Protocol
from tests import schemas, warm
from tests.conftest import TF_SAMPLE
from tests.restored import agree

pytestmark = pytest.mark.environment

CHEETAH = "torch/fujimoto/bmcnns/models/TD3_HalfCheetah-v3_1"
WALKER = "torch/fujimoto/nikhil/BipedalWalker-v2/ONE/TD3_BipedalWalker-v2_0_solved"
LANDER = "tf/sb2/zoo/td3_LunarLanderContinuous-v2.pkl"
KERAS_RL = "tf/keras_h5/yosider_kerasrl/ddpg_Pendulum-v0_weights_actor.h5f"
PENDULUM = "tf/sb2/zoo/td3_Pendulum-v0.pkl"


def paired(one: Evaluation, other: Evaluation) -> None:
    """Assert that every seed gave both the same return, to the last bit."""
    assert one.rollout.num_envs == other.rollout.num_envs
    np.testing.assert_array_equal(one.rollout.seeds, other.rollout.seeds)
    np.testing.assert_array_equal(one.rollout.returns, other.rollout.returns, strict=True)
    assert one.statistics == other.statistics


@pytest.mark.parametrize("num_envs", [1, 3, 8])
def test_a_tensorflow_checkpoint_and_its_torch_file_are_paired(tmp_path: Path, num_envs: int) -> None:
    pytest.importorskip("gymnasium")
    target = convert(str(TF_SAMPLE), str(tmp_path / "agent.pt"), sync=False).target
    how = Protocol(episodes=8, num_envs=num_envs)
    paired(evaluate(str(TF_SAMPLE), protocol=how), evaluate(target, protocol=how))


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("source", "target", "to", "env", "needs", "episodes"),
    [
        (CHEETAH, "ckpt-1", "tf", "HalfCheetah-v5", "mujoco", 6),
        (CHEETAH, "agent.cleanrl_model", "cleanrl", "HalfCheetah-v5", "mujoco", 6),
        (WALKER, "ckpt-1", "tf", "BipedalWalker-v3", "Box2D", 2),
        (LANDER, "agent.pt", "torch", "LunarLanderContinuous-v3", "Box2D", 6),
        (KERAS_RL, "agent.pt", "torch", "Pendulum-v1", "gymnasium", 20),
        (PENDULUM, "agent.pt", "torch", "Pendulum-v1", "gymnasium", 20),
    ],
    ids=[
        "td3 to tf",
        "td3 to cleanrl",
        "legacy td3 to tf",
        "sb2 to torch",
        "keras-rl to torch",
        "sb2 pkl to torch",
    ],
)
def test_a_conversion_is_paired_with_its_source(
    corpus: Path, tmp_path: Path, source: str, target: str, to: str, env: str, needs: str, episodes: int
) -> None:
    pytest.importorskip(needs)
    path = str(corpus / source)
    facts = AgentFacts(action_low=-1, action_high=1) if to == "cleanrl" else NO_FACTS
    done = convert(path, str(tmp_path / target), to=to, allow_missing=True, sync=False, facts=facts)
    assert done.written
    how = Protocol(episodes=episodes, num_envs=min(episodes, 4))
    paired(evaluate(path, env, how), evaluate(done.target, env, how))


@pytest.mark.corpus
@pytest.mark.torch
@pytest.mark.tensorflow
def test_each_framework_scores_what_the_other_does(corpus: Path, tmp_path: Path) -> None:
    """A cheetah is chaotic: rounding decides each return, and must not move the mean."""
    for framework in ("mujoco", "torch", "tensorflow"):
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    path = str(corpus / CHEETAH)
    target = convert(path, str(tmp_path / "ckpt-1"), to="tf", allow_missing=True, sync=False).target
    source = evaluate(path, "HalfCheetah-v5", Protocol(episodes=8, backend="torch"))
    args = ("--env", "HalfCheetah-v5", "--episodes", "8", "--backend", "tensorflow", "--json")
    # As the command line would, but TensorFlow has been imported there.
    program = f"import sys; from ckpttool.cli import main; sys.argv[1:] = {['eval', target, *args]!r}; main()"
    status, printed = warm.run("tensorflow", program, tmp_path)
    assert status == 0, printed
    schemas.require_printed(("eval", target, *args), document := printed[printed.index("{") :])
    converted = json.loads(document)
    assert converted["protocol"]["backend"] == "tensorflow"
    assert converted["returns"] != source.rollout.returns.tolist()
    assert agree(source.statistics, converted["mean"], converted["std"], len(converted["returns"]))
