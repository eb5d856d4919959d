"""Other people's actors and critics, converted and run by both frameworks, optimizers included."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ckpttool.commands import verify
from ckpttool.commands.convert import convert
from tests.golden_texts import Golden

TWINS = ["critic/q1", "critic/q2"]
TARGETS = ["actor_target", "critic_target/q1", "critic_target/q2"]
KERAS_RL = "tf/keras_h5/yosider_kerasrl/ddpg_Pendulum-v0_weights"
# Where it lies, what it becomes, what is compared, whether it can be trained on.
PAIRS: dict[str, tuple[str, str, list[str], bool]] = {
    "keras-rl's DDPG actor": (f"{KERAS_RL}_actor.h5f", "x.pt", ["actor"], False),
    "TD3 of Stable-Baselines 2": (
        "tf/sb2/zoo/td3_LunarLanderContinuous-v2.pkl",
        "x.pt",
        ["actor", *TWINS, *TARGETS],
        True,
    ),
    "DDPG of Stable-Baselines 2": (
        "tf/sb2/zoo/ddpg_Pendulum-v0.pkl",
        "x.pt",
        ["actor", "actor_target", "critic/q1", "critic_target/q1"],
        True,
    ),
    "TD3 of the authors' code": (
        "torch/fujimoto/bmcnns/models/TD3_HalfCheetah-v3_0",
        "x-1.index",
        ["actor", *TWINS],
        True,
    ),
}


@pytest.mark.corpus
@pytest.mark.torch
@pytest.mark.tensorflow
@pytest.mark.parametrize("name", PAIRS)
def test_a_pair_is_one_agent(corpus: Path, shared_workers: None, tmp_path: Path, name: str) -> None:
    for framework in ("torch", "tensorflow"):
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"{framework} is not installed")
    source, target, networks, trains = PAIRS[name]
    done = convert(str(corpus / source), str(tmp_path / target), allow_missing=True)
    assert done.written
    assert {n.name for n in done.parity} == set(networks)
    assert all(n.within and n.max_abs == 0 for n in done.parity)
    verification = verify.verify(str(corpus / source), done.target, steps=3 if trains else None)
    assert sorted(verification.backends) == ["tensorflow", "torch"]
    assert {n.name for n in verification.networks} == set(networks)
    assert verification.within, verification.document()
    if trains:
        assert verification.training is not None
        exact = [moved.relative for moved in verification.training.moved if moved.dtype == "float64"]
        assert max(exact) < 1e-10


@pytest.mark.corpus
def test_a_critic_that_nobody_can_run_is_written_and_said(
    corpus: Path, tmp_path: Path, golden: Golden
) -> None:
    """keras-rl's critic alone does not tell whether its observation or its action comes first."""
    done = convert(str(corpus / f"{KERAS_RL}_critic.h5f"), str(tmp_path / "x.pt"), allow_missing=True)
    assert done.written
    assert not done.parity
    golden("\n".join(note for note in done.report.notes if note.startswith("critic/q1")))
