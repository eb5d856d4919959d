"""`convert` proves an agent's conversion before the target gets its name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands import convert
from ckpttool.conversion import receipt
from ckpttool.core import MappingError, sidecar
from ckpttool.core import Path as TreePath
from ckpttool.evaluation import agent_networks
from ckpttool.libraries import td3
from ckpttool.mapping import Plan
from ckpttool.mapping.rules import KEEP, TRANSPOSE
from ckpttool.networks import Network, numpy_backend
from ckpttool.verification import output_comparison
from tests.conftest import TF_SAMPLE, TORCH_SAMPLE, in_process
from tests.golden_texts import Golden
from tests.mutants import Leaves, changed
from tests.trees import leaf

NETWORKS = ["actor", "actor_target", "critic/q1", "critic/q2", "critic_target/q1", "critic_target/q2"]


def damaged(monkeypatch: pytest.MonkeyPatch, **renamed: str) -> None:
    """Make the torch layout exchange targets whose paths begin with one of two names."""
    plan = td3.TORCH.plan

    def wrong(*arguments: object) -> Plan:
        damaged_plan = plan(*arguments)  # type: ignore[arg-type]
        pairs = {**renamed, **{there: here for here, there in renamed.items()}}
        moves = []
        for move in damaged_plan.moves:
            key = str(move.target[1].value) if len(move.target) > 1 else ""
            head, dot, rest = key.partition(".")
            if move.target[0].value in ("critic", "critic_target") and head in pairs:
                target = (move.target[0], move.target[1]._replace(value=pairs[head] + dot + rest))
                move = replace(move, target=target)
            elif move.target[0].value in pairs:
                move = replace(
                    move,
                    target=(move.target[0]._replace(value=pairs[move.target[0].value]), *move.target[1:]),
                )
            moves.append(move)
        return replace(damaged_plan, moves=tuple(moves))

    monkeypatch.setattr(td3, "TORCH", replace(td3.TORCH, plan=wrong))


def square_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = td3.TORCH.plan

    def wrong(*arguments: object) -> Plan:
        result = plan(*arguments)  # type: ignore[arg-type]
        moves = (
            replace(m, rule=KEEP) if m.rule == TRANSPOSE and "l2.weight" in str(m.target[-1].value) else m
            for m in result.moves
        )
        return replace(result, moves=tuple(moves))

    monkeypatch.setattr(td3, "TORCH", replace(td3.TORCH, plan=wrong))


@pytest.mark.parametrize(
    ("damage", "wrong"),
    [
        (square_left_alone, NETWORKS),
        (lambda patch: damaged(patch, q1="q2"), NETWORKS[2:]),
        (lambda patch: damaged(patch, actor="actor_target"), NETWORKS[:2]),
    ],
    ids=["a square matrix not transposed", "q1 and q2 exchanged", "target for online network"],
)
def test_a_wrong_mapping_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: object, wrong: list[str]
) -> None:
    damage(monkeypatch)  # type: ignore[operator]
    done = convert.convert(str(TF_SAMPLE), str(tmp_path / "x.pt"))
    assert not done.written
    assert not done.within
    assert done.digest is None
    assert [n.name for n in done.parity if not n.within] == wrong
    assert list(tmp_path.iterdir()) == []
    # Whoever does not want to know gets what was asked for.
    assert convert.convert(str(TF_SAMPLE), str(tmp_path / "x.pt"), verify=False).written


def test_a_wrong_mapping_replaces_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "x.pt"
    convert.convert(str(TF_SAMPLE), str(target))
    before = target.read_bytes()
    damaged(monkeypatch, q1="q2")
    assert not convert.convert(str(TF_SAMPLE), str(target), force=True).written
    assert target.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_a_head_that_the_receipt_loses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = receipt.conversion_receipt
    monkeypatch.setattr(receipt, "conversion_receipt", lambda *args: replace(written(*args), head="clip"))
    done = convert.convert(str(TF_SAMPLE), str(tmp_path / "x.pt"))
    assert [n.name for n in done.parity if not n.within] == NETWORKS[:2]
    assert not done.written


def test_the_receipt_keeps_the_proof(tmp_path: Path, golden: Golden) -> None:
    ran = in_process("convert", TF_SAMPLE, tmp_path / "x.pt", "--json")
    assert ran.status == 0, ran.err
    document = ran.json()
    assert [n["name"] for n in document["parity"]] == NETWORKS
    assert all(
        n["within"] and n["max_abs"] == 0 and n["n"] == output_comparison.OBSERVATIONS
        for n in document["parity"]
    )
    kept = json.loads((tmp_path / "x.pt.ckpttool.json").read_text())["parity"]
    assert kept == [{"name": name, "max_abs": 0.0, "max_rel": 0.0, "within": True} for name in NETWORKS]
    shown = in_process("convert", tmp_path / "x.pt", tmp_path / "y.safetensors")
    golden("\n".join(line for line in shown.out.splitlines() if "networks" in line))


def test_each_side_is_run_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole: list[int] = []
    build = numpy_backend.build

    def counted(network: Network) -> object:
        if network.output == len(network.inputs) + len(network.nodes) - 1:
            whole.append(network.output)
        return build(network)

    monkeypatch.setattr(numpy_backend, "build", counted)
    done = convert.convert(str(TF_SAMPLE), str(tmp_path / "x.pt"))
    assert len(done.parity) == len(NETWORKS)
    assert len(whole) == 2 * len(NETWORKS)


def test_without_the_proof_no_receipt_claims_one(tmp_path: Path) -> None:
    ran = in_process("convert", TF_SAMPLE, tmp_path / "x.pt", "--json")
    ran = in_process("convert", tmp_path / "x.pt", tmp_path / "ckpt-1", "--to", "tf", "--no-verify", "--json")
    assert ran.json()["parity"] == []
    kept = sidecar.load_sidecar(str(tmp_path / "ckpt-1"))
    assert kept is not None
    assert kept.parity is None


@pytest.mark.parametrize("to", ["tf", "tf1", "safetensors", "npz", "torch"])
def test_every_form_of_the_agent_is_read_back_and_compared(tmp_path: Path, to: str) -> None:
    source = TF_SAMPLE if to == "torch" else TORCH_SAMPLE
    done = convert.convert(str(source), str(tmp_path / "agent-1"), to=to)
    assert [n.name for n in done.parity] == NETWORKS
    assert done.written


def test_what_the_source_could_not_run_is_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: Golden
) -> None:
    network = agent_networks.build_agent_network

    def partly(agent: object, other: object, title: str, assumed: list[str]) -> object:
        if title == "critic/q1":
            raise MappingError("the critic is odd")
        return network(agent, other, title, assumed)  # type: ignore[arg-type]

    monkeypatch.setattr(output_comparison, "build_agent_network", partly)
    done = convert.convert(str(TF_SAMPLE), str(tmp_path / "x.pt"))
    golden("\n".join(done.report.notes))
    assert [n.name for n in done.parity] == [name for name in NETWORKS if name != "critic/q1"]


def test_no_layout_for_what_was_written_is_a_note(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: Golden
) -> None:
    monkeypatch.setattr(output_comparison, "recognize_checkpoint", lambda *_: None)
    done = convert.convert(str(TORCH_SAMPLE), str(tmp_path / "ckpt-1"), to="tf")
    assert done.parity == ()
    golden("\n".join(done.report.notes))


def test_the_way_back_is_proven_too(tmp_path: Path) -> None:
    convert.convert(str(TORCH_SAMPLE), str(tmp_path / "ckpt-1"), to="tf")
    done = convert.convert(str(tmp_path / "ckpt-1"), str(tmp_path / "back.pt"))
    assert done.written
    assert [n.name for n in done.parity] == NETWORKS


def test_an_agent_of_nan_is_converted_like_any_other(tmp_path: Path) -> None:
    def diverged(leaves: Leaves, names: dict[str, TreePath]) -> None:
        path = names["actor/l2/weight"]
        leaves[path] = leaf(np.full((64, 64), np.nan, np.float32), "nan")

    source = changed(TORCH_SAMPLE, tmp_path / "source.pt", diverged)
    done = convert.convert(source, str(tmp_path / "ckpt-1"), to="tf")
    assert done.written
    assert [n.name for n in done.parity] == NETWORKS
