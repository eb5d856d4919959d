"""`verify`: the same agent passes, every way of getting a conversion wrong does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands import verify
from ckpttool.commands.convert import convert
from ckpttool.commands.digest import digest
from ckpttool.conversion.write import save
from ckpttool.core import Leaf, UsageError, sidecar
from ckpttool.core import Path as TreePath
from ckpttool.mapping.rules import TRANSPOSE
from ckpttool.verification import output_comparison
from tests import mutants
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process, refused
from tests.golden_texts import Golden
from tests.mutants import Change, Leaves
from tests.trees import leaf


@pytest.fixture
def numpy_only(monkeypatch: pytest.MonkeyPatch, shared_workers: None) -> None:
    """Run both sides by numpy: what is tested here is the comparison, not the frameworks."""
    monkeypatch.setattr(verify, "available_backend", lambda _: "numpy")


def changed(tmp_path: Path, change: Change) -> str:
    """Write the torch sample after the change."""
    return mutants.changed(TORCH_SAMPLE, tmp_path / "changed.pt", change)


def swap(leaves: Leaves, one: TreePath, other: TreePath) -> None:
    leaves[one], leaves[other] = leaves[other], leaves[one]


def swap_all(leaves: Leaves, names: dict[str, TreePath], a: str, b: str) -> None:
    for name, path in names.items():
        if name.startswith(f"{a}/"):
            swap(leaves, path, names[f"{b}/{name[len(a) + 1 :]}"])


def transposed_square(leaves: Leaves, names: dict[str, TreePath]) -> None:
    path = names["actor/l2/weight"]
    leaves[path] = TRANSPOSE.leaf(leaves[path])


def noisy(leaves: Leaves, names: dict[str, TreePath]) -> None:
    path = names["critic/q1/l3/bias"]
    kernel = leaves[path]
    assert isinstance(kernel, Leaf)
    leaves[path] = replace(leaf(kernel.array() + np.float32(0.5), kernel.key))


def test_facts_of_one_side_serve_a_copy_without_a_sidecar(tmp_path: Path, numpy_only: None) -> None:
    agent, copy = str(tmp_path / "agent.pt"), str(tmp_path / "copy.safetensors")
    convert(TF_SAMPLE, agent, to="torch")
    convert(agent, copy)
    Path(sidecar.sidecar_path(copy)).unlink()
    result = verify.verify(agent, copy)
    assert result.within
    assert not sidecar.has_open_entries(result.ledger)
    lacking = {
        entry.what for entry in result.ledger if entry.use == "assumed" and entry.where.startswith("B")
    }
    assert {"activation", "action map"} <= lacking
    # Where neither side states them, equal outputs show nothing about the true ones.
    Path(sidecar.sidecar_path(agent)).unlink()
    result = verify.verify(agent, copy)
    assert result.within
    assert sidecar.has_open_entries(result.ledger)


MUTANTS: dict[str, tuple[Callable[..., None], set[str]]] = {
    "a square matrix transposed": (transposed_square, {"actor"}),
    "q1 and q2 swapped": (
        lambda leaves, names: swap_all(leaves, names, "critic/q1", "critic/q2"),
        {"critic/q1", "critic/q2"},
    ),
    "target for online network": (
        lambda leaves, names: swap_all(leaves, names, "actor", "actor_target"),
        {"actor", "actor_target"},
    ),
    "a target's weights in the online network": (
        lambda leaves, names: leaves.update(
            {
                names[n]: leaves[names[n.replace("critic/", "critic_target/")]]
                for n in names
                if n.startswith("critic/")
            }
        ),
        {"critic/q1", "critic/q2"},
    ),
    "a bias shifted": (noisy, {"critic/q1"}),
}


@pytest.mark.usefixtures("numpy_only")
class TestComparison:
    def test_a_copy_passes(self, tmp_path: Path) -> None:
        verification = verify.verify(str(TORCH_SAMPLE), changed(tmp_path, lambda *_: None))
        assert verification.within
        assert {n.name for n in verification.networks} == {
            "actor", "actor_target", "critic/q1", "critic/q2", "critic_target/q1", "critic_target/q2",
        }  # fmt: skip
        assert all(n.n == 1000 for n in verification.networks)
        assert all(n.max_abs == 0 for n in verification.networks)

    def test_a_conversion_passes(self, tmp_path: Path) -> None:
        convert(str(TF_SAMPLE), str(tmp_path / "x.pt"))
        assert verify.verify(str(TF_SAMPLE), str(tmp_path / "x.pt")).within

    @pytest.mark.parametrize("name", MUTANTS)
    def test_a_mutant_is_caught(self, tmp_path: Path, name: str) -> None:
        change, wrong = MUTANTS[name]
        verification = verify.verify(str(TORCH_SAMPLE), changed(tmp_path, change))
        assert not verification.within
        assert {n.name for n in verification.networks if not n.within} == wrong

    def test_two_agents_are_not_one(self) -> None:
        verification = verify.verify(str(TORCH_SAMPLE), str(TORCH_SAMPLE.with_name("ckpt-12500.pt")))
        assert not any(n.within for n in verification.networks)

    def test_the_tolerance_can_be_given(self) -> None:
        other = str(TORCH_SAMPLE.with_name("ckpt-12500.pt"))
        assert verify.verify(str(TORCH_SAMPLE), other, tolerance=1e9).within
        assert not verify.verify(str(TORCH_SAMPLE), other, tolerance=1e-9).within

    def test_other_widths_are_not_within(self, tmp_path: Path, golden: Golden) -> None:
        generator = np.random.default_rng(0)

        def narrow(leaves: Leaves, names: dict[str, TreePath]) -> None:
            for network in ("actor", "actor_target"):
                path = names[f"{network}/l1/weight"]
                leaves[path] = leaf(generator.standard_normal((64, 5)).astype(np.float32))
            for path in [p for n, p in names.items() if n.startswith("critic")]:
                leaves.pop(path)

        verification = verify.verify(str(TORCH_SAMPLE), changed(tmp_path, narrow))
        assert not verification.within
        assert verification.networks[0].n == 0
        golden("\n".join(note for note in verification.notes if note.startswith(("B lacks", "only A"))))

    def test_nothing_in_common(self, tmp_path: Path, golden: Golden) -> None:
        def only(prefix: str) -> Callable[..., None]:
            def keep(leaves: Leaves, names: dict[str, TreePath]) -> None:
                for name, path in names.items():
                    if not name.startswith((f"{prefix}/", "total_it")):
                        leaves.pop(path)

            return keep

        one, other = tmp_path / "a", tmp_path / "b"
        one.mkdir()
        other.mkdir()
        with pytest.raises(UsageError) as caught:
            verify.verify(changed(one, only("actor")), changed(other, only("critic")))
        golden(caught.value)

    def test_observations_are_always_the_same(self) -> None:
        from ckpttool.networks import Network

        network = Network((("obs", 3), ("action", 2)), (), 0)
        first, second = (
            output_comparison.make_observations(network),
            output_comparison.make_observations(network),
        )
        assert isinstance(first, dict)
        assert isinstance(second, dict)
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
        assert not first["obs"][0].any()
        assert np.abs(first["obs"]).max() > 20
        assert np.abs(first["action"]).max() == 1


STATISTICS = {"mean": [0.5, 0.0, -1.0], "var": [0.5, 0.5, 8.0], "epsilon": 1e-8, "clip": 10.0}


def with_facts(path: str, **facts: object) -> str:
    """Write a sidecar for the very weights that says this much more than the sample's."""
    known = sidecar.load_sidecar(str(TORCH_SAMPLE))
    assert known is not None
    document = replace(known, target_sha256=digest(path).sha256, **facts)  # type: ignore[arg-type]
    Path(sidecar.sidecar_path(path)).write_bytes(document.encode())
    return path


@pytest.mark.usefixtures("numpy_only")
class TestWhatASidecarTells:
    """The policy is compared from the raw observation to the environment's action."""

    @pytest.fixture
    def normalised(self, tmp_path: Path) -> str:
        (tmp_path / "a").mkdir()
        return with_facts(changed(tmp_path / "a", lambda *_: None), obs_norm=STATISTICS)

    def test_the_same_passes(self, normalised: str, tmp_path: Path) -> None:
        assert verify.verify(
            normalised, with_facts(changed(tmp_path, lambda *_: None), obs_norm=STATISTICS)
        ).within

    def test_clip_for_tanh(self, normalised: str, tmp_path: Path) -> None:
        other = with_facts(changed(tmp_path, lambda *_: None), obs_norm=STATISTICS, head="clip")
        assert {n.name for n in verify.verify(normalised, other).networks if not n.within} == {
            "actor",
            "actor_target",
        }

    def test_a_guess_in_the_sidecar_is_what_it_is_played_by(self, normalised: str, tmp_path: Path) -> None:
        guess = {"head": "assumed: the habit of layout x"}
        other = with_facts(
            changed(tmp_path, lambda *_: None), obs_norm=STATISTICS, head="clip", provenance=guess
        )
        assert not verify.verify(normalised, other).within

    @pytest.mark.parametrize("written", [True, False])
    def test_an_omitted_normaliser(
        self, normalised: str, tmp_path: Path, written: bool, golden: Golden
    ) -> None:
        other = changed(tmp_path, lambda *_: None)
        verification = verify.verify(normalised, with_facts(other) if written else other)
        assert not any(n.within for n in verification.networks)
        golden("\n".join(note for note in verification.notes if note.startswith(("B lacks", "only A"))))

    def test_other_statistics(self, normalised: str, tmp_path: Path) -> None:
        other = with_facts(changed(tmp_path, lambda *_: None), obs_norm={**STATISTICS, "clip": 5.0})
        assert not verify.verify(normalised, other).within

    def test_another_activation(self, normalised: str, tmp_path: Path) -> None:
        other = with_facts(
            changed(tmp_path, lambda *_: None), obs_norm=STATISTICS, activations=["relu", "elu"]
        )
        assert not verify.verify(normalised, other).within


@pytest.mark.usefixtures("numpy_only")
def test_a_network_that_got_lost_is_not_the_same(tmp_path: Path) -> None:
    def without_critic(leaves: Leaves, names: dict[str, TreePath]) -> None:
        for name, path in names.items():
            if name.startswith("critic/"):
                leaves.pop(path)

    lost = changed(tmp_path, without_critic)
    verification = verify.verify(str(TORCH_SAMPLE), lost)
    assert not verification.within
    assert {n.name for n in verification.networks if not n.within} == {"critic/q1", "critic/q2"}
    assert verify.verify(lost, str(TORCH_SAMPLE)).within  # what B has besides says nothing against it


@pytest.mark.torch
@pytest.mark.tensorflow
def test_each_framework_runs_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import importlib.util

    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    convert(str(TF_SAMPLE), str(tmp_path / "x.pt"))
    ran = in_process("verify", TF_SAMPLE, tmp_path / "x.pt", "--json")
    assert ran.status == 0, ran.err
    document = ran.json()
    assert document["backends"] == ["tensorflow", "torch"]
    assert all(n["within"] and n["max_rel"] < 1e-5 and n["error_b"] > 0 for n in document["networks"])
    assert document["assumed"] == []


@pytest.mark.torch
def test_the_command_exits_with_one_above_the_tolerance(shared_workers: None, golden: Golden) -> None:
    pytest.importorskip("torch")
    words = ("verify", TORCH_SAMPLE, TORCH_SAMPLE.with_name("ckpt-2500.pt"))
    ran, quiet = in_process(*words), in_process(*words, "--quiet")
    assert ran.status == quiet.status == 1
    golden(ran.out.splitlines()[-1])
    assert ran.out.startswith(quiet.out)


def test_a_missing_interpreter_is_one_sentence() -> None:
    refused(in_process("verify", TORCH_SAMPLE, TORCH_SAMPLE, "--python", "/nowhere/python"))


def test_no_agent_no_verification(tmp_path: Path, golden: Golden) -> None:
    from tests.trees import torch_tree

    save(torch_tree({"x": np.zeros(3, np.float32)}), str(tmp_path / "x.pt"))
    golden(refused(in_process("verify", tmp_path / "x.pt", TORCH_SAMPLE)))
