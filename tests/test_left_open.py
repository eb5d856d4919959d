"""What no file of an agent contains has one weight for all libraries, by the evidence that there is."""

from __future__ import annotations

import pickle
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpttool.commands.convert import convert
from ckpttool.core import display, plugins, sidecar
from ckpttool.core.sidecar import NO_ACTIVATIONS, STATISTICS_UNKNOWN
from ckpttool.evaluation.agent_facts import AgentFacts
from ckpttool.evaluation.restore import restore_agent
from ckpttool.formats import open_checkpoint
from ckpttool.libraries import recognize_tree, td3
from ckpttool.libraries.schema import LEFT_OPEN
from ckpttool.mapping.rules import canonical_tree
from tests import sb3_files as sb3
from tests.conftest import TORCH_SAMPLE, Ran, in_process
from tests.pickles import importable, instance

pytest.importorskip("gymnasium")

PENDULUM = "Pendulum-v1"
MEAN, VAR = np.array([0.5, -0.5, 1.0]), np.array([0.25, 1.0, 4.0])
STATISTICS = "observation statistics"


def test_every_library_takes_what_it_leaves_open_from_the_table() -> None:
    for layout in plugins.installed("layouts"):
        lacks = layout.load().TABLE.facts.lacks
        assert not lacks or lacks in LEFT_OPEN.values(), layout.name


# Layouts whose default activation is no guess: a constant in the library's code, or a setting in its files.
_CERTAIN = {
    *("fujimoto", "fasttd3", "cleanrl", "elegantrl", "tf2rl"),
    *("stable_baselines2", "stable_baselines3", "agilerl"),
}


def test_a_default_activation_is_certain_or_decides() -> None:
    for layout in plugins.installed("layouts"):
        lacks = layout.load().TABLE.facts.lacks
        assert (NO_ACTIVATIONS in lacks) != (layout.name in _CERTAIN), layout.name


def cleanrl(path: Path) -> str:
    """Write a PPO agent of CleanRL for Pendulum."""
    torch.manual_seed(0)
    module = nn.Module()
    module.critic = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    module.actor_mean = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    module.actor_logstd = nn.Parameter(torch.zeros(1, 1))
    torch.save(module.state_dict(), path)
    return str(path)


def stable_baselines3(path: Path) -> str:
    """Write a PPO agent of Stable-Baselines3 for Pendulum."""
    data = sb3.settings(sb3.ON_POLICY, policy_kwargs={"net_arch": [5, 4]}, action_space=sb3.box([-2], [2]))
    return sb3.put(path, sb3.members({"policy": sb3.ppo(1).state_dict()}, data))


def tianshou(path: Path) -> str:
    """Write a SAC agent of Tianshou for Pendulum."""
    torch.manual_seed(0)
    rows = {
        "actor.preprocess.model.model.0": (8, 3),
        "actor.mu.model.0": (1, 8),
        "actor.sigma.model.0": (1, 8),
    }
    rows |= {f"critic{n}.preprocess.model.model.0": (8, 4) for n in (1, 2)}
    rows |= {f"critic{n}.last.model.0": (1, 8) for n in (1, 2)}
    state = {f"{name}.weight": torch.randn(shape) for name, shape in rows.items()}
    state |= {f"{name}.bias": torch.zeros(shape[0]) for name, shape in rows.items()}
    torch.save(state, path)
    return str(path)


def d3rlpy(path: Path) -> str:
    """Write a model file of d3rlpy for Pendulum, without its params.json."""
    torch.manual_seed(0)

    def network(number: str, inputs: int) -> dict[str, torch.Tensor]:
        return {
            f"{number}{name}.{weight}": torch.randn(shape)
            for name, rows in (("_encoder._layers.0", (8, inputs)), ("_fc", (1, 8)))
            for weight, shape in (("weight", rows), ("bias", rows[:1]))
        }

    torch.save({"policy": network("", 3), "q_funcs": network("0.", 4)}, path)
    return str(path)


def own_program(
    path: Path,
    layers: Sequence[str] = ("fc1", "fc2", "fc3"),
    widths: Sequence[int] = (8, 8),
    alone: bool = False,
) -> str:
    """Write a dict of state_dicts of a program's own classes for Pendulum; `alone`, only its actor's."""
    torch.manual_seed(0)

    def network(sizes: Sequence[int]) -> dict[str, torch.Tensor]:
        shapes = zip(layers, sizes, sizes[1:], strict=False)
        rows = [(name, torch.randn(outputs, inputs)) for name, inputs, outputs in shapes]
        return {f"{name}.{n}": v for name, w in rows for n, v in (("weight", w), ("bias", w.mean(1)))}

    actor, critic = network((3, *widths, 1)), network((4, *widths, 1))
    agent = {"actor": actor, "actor_target": network((3, *widths, 1)), "critic": critic, "total_it": 9}
    torch.save(actor if alone else agent, path)
    return str(path)


AGENTS: dict[str, Callable[[Path], str]] = {
    "agent.cleanrl_model": cleanrl,
    "agent.zip": stable_baselines3,
    "policy.pth": tianshou,
}


def write_statistics(path: Path, size: int = 3) -> None:
    """Write statistics of observations, as VecNormalize or as two arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pkl":
        sb3.statistics(path)
    else:
        np.savez(path, mean=np.resize(MEAN, size), var=np.resize(VAR, size))


def play(path: str, *words: str) -> Ran:
    # Only statistics are in question: the activation of Tianshou's networks is an argument.
    stated = ("--activation", "relu") if path.endswith("policy.pth") else ()
    return in_process("eval", path, "--env", PENDULUM, "--episodes", "1", "--json", *stated, *words)


def test_an_activation_that_is_an_argument_decides_in_every_library(tmp_path: Path) -> None:
    decided = {name for name, lacks in LEFT_OPEN.items() if any(lack.what == "activation" for lack in lacks)}
    assert {"skrl", "rsl_rl", "rl_games", "keras_rl", "tianshou", "tianshou sac", "tianshou q"} <= decided
    assert decided.isdisjoint(("fujimoto", "fasttd3", "cleanrl ppo", "stable_baselines"))
    for name, write, unknown in (
        ("policy.pth", tianshou, ["activation"]),
        ("agent.cleanrl_model", cleanrl, []),
        ("model_1.pt", d3rlpy, ["action map", "activation"]),
        ("agent.pt", own_program, ["activation", "action map"]),
    ):
        path = write(tmp_path / name)
        ran = in_process("eval", path, "--env", PENDULUM, "--episodes", "1", "--json")
        decides = [row["what"] for row in ran.json()["ledger"] if row["decides"]]
        assert (ran.status, decides) == (len(unknown[:1]), unknown)
        # A conversion needs no activation.
        assert in_process("convert", path, str(tmp_path / f"{name}.npz"), "--json").status == 0


FACTS = ("--activation", "relu", "--head", "tanh")


@pytest.mark.parametrize("alone", [False, True], ids=["agent", "lone network"])
class TestConnections:
    """The order of layers and sums of their outputs weigh the same in an agent and in a lone network."""

    @pytest.mark.parametrize(
        ("layers", "widths", "known"),
        [
            (("fc1", "fc2", "fc3", "fc4"), (8, 8, 8), True),  # by numbers
            (("inp", "mid", "top", "out"), (8, 7, 6), True),  # by sizes
            (("inp", "mid", "out"), (8, 8), True),
            (("inp", "mid", "top", "out"), (8, 8, 8), False),
            (("fc1", "fc2", "hidden", "out"), (8, 8, 8), False),
        ],
    )
    def test_only_numbers_and_sizes_order_layers(
        self, layers: Sequence[str], widths: Sequence[int], known: bool, alone: bool, tmp_path: Path
    ) -> None:
        path = own_program(tmp_path / "agent.pt", layers, widths, alone)
        ran = in_process("eval", path, "--env", PENDULUM, "--episodes", "1", *FACTS)
        assert ran.status == (0 if known else 2)
        # The same names are written: they need no order. A library's numbers do.
        assert in_process("convert", path, str(tmp_path / "same.safetensors")).status == 0
        if not alone:
            words = ("--to", "tianshou", "--bounds", "-2", "2", "--head", "tanh_clip_affine")
            assert in_process("convert", path, str(tmp_path / "other.pth"), *words).status == (
                0 if known else 2
            )

    @pytest.mark.parametrize(
        ("layers", "widths", "named"),
        [
            (("fc1", "fc2", "fc3", "fc4"), (8, 8, 8), ["fc2", "fc3"]),
            (("fc1", "fc2", "fc3", "fc4"), (8, 4, 8), ["fc2", "fc3"]),
            (("fc1", "fc2", "fc3", "fc4"), (8, 7, 6), []),
            # Parts of a Sequential have nothing but its other parts between them.
            (("net.0", "net.2", "net.4", "net.6"), (8, 8, 8), []),
            (("net.0", "net.2", "net.4", "mu"), (8, 8, 8), []),
            (("inp", "net.0", "net.2", "mu"), (8, 8, 8), ["net/0", "net/2"]),
        ],
    )
    def test_a_sum_that_sizes_allow_is_assumed_away_in_the_first_lines(
        self, layers: Sequence[str], widths: Sequence[int], named: Sequence[str], alone: bool, tmp_path: Path
    ) -> None:
        path = own_program(tmp_path / "agent.pt", layers, widths, alone)
        ran = in_process("eval", path, "--env", PENDULUM, "--episodes", "1", *FACTS)
        ledger = in_process("eval", path, "--env", PENDULUM, "--episodes", "1", *FACTS, "--json").json()[
            "ledger"
        ]
        values = [row["value"] for row in ledger if row["value"].startswith(sidecar.NO_RESIDUALS)]
        assert values == ([f"{sidecar.NO_RESIDUALS} in {', '.join(named)}"] if named else [])
        assert (ran.status, any(value in ran.out.splitlines()[1] for value in values)) == (0, bool(named))

    def test_a_target_assumes_as_its_source(self, alone: bool, tmp_path: Path) -> None:
        target = str(tmp_path / "target.safetensors")
        convert(own_program(tmp_path / "agent.pt", alone=alone), target, facts=AgentFacts("relu", "tanh"))
        values = [entry.value for entry in restore_agent(target).ledger if entry.use == "assumed"]
        assert f"{sidecar.NO_RESIDUALS} in fc2" in values


def test_layers_that_a_library_orders_get_names_that_do(tmp_path: Path) -> None:
    ambiguous = own_program(tmp_path / "agent.pt", ("inp", "mid", "top", "out"), (8, 8, 8))
    library = recognize_tree(open_checkpoint(ambiguous).tree, "agent.pt")
    assert library is not None
    library = replace(library, unplaced={})
    agent = canonical_tree(open_checkpoint(ambiguous).tree, library.moves)
    for plan in (td3.plan_torch, td3.plan_tf):
        names = [display(move.target) for move in plan(library, agent, {}).moves]
        first = [name for name in names if "actor/l1" in name]
        assert first


def test_a_program_that_states_its_chain_leaves_nothing_open() -> None:
    assert not [
        entry
        for entry in restore_agent(str(TORCH_SAMPLE)).ledger
        if entry.open or entry.value.startswith(sidecar.NO_RESIDUALS)
    ]


def test_buffers_of_an_action_map_state_it(tmp_path: Path) -> None:
    path = own_program(tmp_path / "agent.pt")
    agent = torch.load(path)
    agent["actor"]["action_scale"], agent["actor"]["action_bias"] = torch.tensor([2.0]), torch.tensor([0.0])
    torch.save(agent, path)
    assert [entry.what for entry in restore_agent(path).ledger if entry.open] == ["activation"]


def entries(ran: Ran) -> list[dict[str, Any]]:
    return [row for row in ran.json()["ledger"] if row["what"] == STATISTICS and row["use"] != "used"]


@pytest.mark.parametrize("name", AGENTS)
def test_without_evidence_one_line_names_it_and_nothing_decides(name: str, tmp_path: Path) -> None:
    ran = play(AGENTS[name](tmp_path / name))
    assert (ran.status, entries(ran)) == (0, [STATISTICS_UNKNOWN.document()])


PLACES = ["best/normalizer.npz", "obs_norm.npz", "stats/obs_rms.npz", "final/vecnormalize.pkl"]


@pytest.mark.parametrize("location", PLACES)
@pytest.mark.parametrize("name", AGENTS)
def test_statistics_in_the_run_decide_and_the_hint_applies_them(
    name: str, location: str, tmp_path: Path
) -> None:
    (tmp_path / "best").mkdir()
    path = AGENTS[name](tmp_path / "best" / name)
    write_statistics(tmp_path / location)
    ran = play(path)
    (entry,) = entries(ran)
    assert (ran.status, entry["use"], entry["decides"]) == (1, "not used", True)
    repeated = play(path, *shlex.split(entry["hint"]))
    assert (repeated.status, entries(repeated)) == (0, [])
    assert repeated.json()["returns"] != ran.json()["returns"]


@pytest.mark.parametrize("location", ["other/normalizer.npz", "ppo_run/obs_norm.npz", "../normalizer.npz"])
def test_other_runs_are_no_evidence(location: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "sac_run"
    run.mkdir(parents=True)
    path = stable_baselines3(run / "agent.zip")
    write_statistics(tmp_path / "runs" / location)
    assert play(path).status == 0


def test_statistics_of_another_size_do_not_decide(tmp_path: Path) -> None:
    path = cleanrl(tmp_path / "agent.cleanrl_model")
    write_statistics(tmp_path / "normalizer.npz", 5)
    assert play(path).status == 0


def test_a_setting_that_needs_statistics_does_not_hide_the_file(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    path = stable_baselines3(tmp_path / "best" / "agent.zip")
    (tmp_path / "best" / "config.yml").write_text("policy: MlpPolicy\nnormalize: true\n")
    write_statistics(tmp_path / "final" / "vecnormalize.pkl")
    ran = play(path)
    assert ran.status == 1
    hints = [entry["hint"] for entry in entries(ran) if entry["use"] == "not used"]
    assert hints == [f"--obs-norm {tmp_path / 'final' / 'vecnormalize.pkl'}"]


@pytest.mark.parametrize("library", [True, False])
def test_statistics_alone_are_assumed_to_be_limited_as_the_library_does(
    library: bool, tmp_path: Path
) -> None:
    path = stable_baselines3(tmp_path / "agent.zip")
    file = tmp_path / "obs_rms.pkl"
    rms: Any = {"mean": MEAN, "var": VAR / 1e4}
    with importable(sb3.MEAN_STD):
        file.write_bytes(pickle.dumps(instance(sb3.MEAN_STD, **rms, count=9.0) if library else rms, 4))
    agent = restore_agent(path)
    assert agent.known.obs_norm is not None
    assert agent.known.obs_norm["clip"] == (10.0 if library else None)
    assert any("obs_rms.pkl" in sentence for sentence in sidecar.assumption_sentences(agent.ledger))
    given_agent = restore_agent(path, facts=AgentFacts(obs_norm=str(file)))
    assert given_agent.known.obs_norm == agent.known.obs_norm


class TestSidecar:
    """A sidecar answers what its provenance answers."""

    def test_an_assumed_default_of_a_library_that_leaves_it_open_is_no_answer(self, tmp_path: Path) -> None:
        source = tmp_path / "agent.pt"
        layers = {"net.0.weight": torch.randn(8, 3), "net.0.bias": torch.zeros(8)}
        policy = {**layers, "policy_layer.weight": torch.randn(1, 8), "policy_layer.bias": torch.zeros(1)}
        torch.save({"policy": policy, "target_policy": policy}, source)
        assert NO_ACTIVATIONS in restore_agent(str(source)).ledger
        target = tmp_path / "converted.safetensors"
        convert(str(source), str(target))
        assert NO_ACTIVATIONS in restore_agent(str(target)).ledger
        inputs = tmp_path / "given.safetensors"
        convert(str(source), str(inputs), facts=AgentFacts(activations="relu", head="tanh"))
        assert not [
            entry for entry in restore_agent(str(inputs)).ledger if entry.what == "activation" and entry.open
        ]

    def test_the_question_about_observations_stays(self, tmp_path: Path) -> None:
        target = tmp_path / "converted.pt"
        convert(cleanrl(tmp_path / "agent.cleanrl_model"), str(target))
        assert STATISTICS_UNKNOWN in restore_agent(str(target)).ledger
