"""Slots of torch's optimizers find their parameters by name or by order; where two could fit, by neither."""

from __future__ import annotations

import itertools

import pytest

import ckpttool
from ckpttool.core import display
from tests import conftest

pytestmark = pytest.mark.torch


def network(*sizes: int):
    import torch

    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(sizes[-1]))


def stepped(optimizer, *networks):
    import torch

    for each in networks:
        each(torch.randn(4, each[0].in_features)).sum().backward()
    optimizer.step()
    return optimizer.state_dict()


def owners(path, value: dict) -> dict[str, str | None]:
    """Save and return by each slot's key the name of its parameter."""
    import torch

    torch.save(value, path)
    tree = ckpttool.open(str(path)).tree
    slots = {leaf.key: leaf.of for _, leaf in tree.tensors() if leaf.role == "slot"}
    return {name: None if of is None else display(of) for name, of in slots.items()}


def every(count: int, slot: str = "exp_avg", top: str = "optimizer.") -> list[str]:
    return [f"{top}state.{n}.{slot}" for n in range(count)]


@pytest.mark.parametrize(
    "kind", ["Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "SGD"]
)
def test_order_and_shapes_decide(tmp_path, kind, golden):
    import torch

    made = network(3, 5, 2)
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(made.parameters(), **more)
    found = owners(tmp_path / "a.pt", {"model": made.state_dict(), "optimizer": stepped(optimizer, made)})
    names = [f"model/{name.replace('.', '/')}" for name, _ in made.named_parameters()]
    for key, of in found.items():
        if not key.endswith("mu_product"):
            assert of == names[int(key.split(".")[2])], key
    assert {key.split(".")[2] for key in found} == {str(n) for n in range(6)}
    notes = ckpttool.open(str(tmp_path / "a.pt")).notes
    golden("\n".join(notes))
    shown = ckpttool.summary(str(tmp_path / "a.pt")).document()["tensors"]
    assert {row["of"] for row in shown if row["role"] == "slot"} >= set(names)


def test_names_decide_where_the_optimizer_has_them(tmp_path):
    import torch

    made, copy = network(3, 3, 3), network(3, 3, 3)
    backwards = list(made.named_parameters())[::-1]
    groups = [{"params": backwards[:2], "lr": 0.1}, {"params": backwards[2:]}]
    value = {"model": made.state_dict(), "optimizer": stepped(torch.optim.Adam(groups), made)}
    found = owners(tmp_path / "a.pt", value)
    wanted = [f"model/{name.replace('.', '/')}" for name, _ in backwards]
    assert [found[name] for name in every(6)] == wanted
    # Two networks with these names.
    found = owners(tmp_path / "b.pt", value | {"target": copy.state_dict()})
    assert set(found.values()) == {None}


def test_two_networks_that_fit_leave_it_open(tmp_path):
    import torch

    made, copy = network(3, 4, 2), network(3, 4, 2)
    value = {"actor": made.state_dict(), "optimizer": stepped(torch.optim.Adam(made.parameters()), made)}
    assert None not in owners(tmp_path / "a.pt", value).values()
    found = owners(tmp_path / "b.pt", value | {"critic": copy.state_dict()})
    assert set(found.values()) == {None}
    assert not ckpttool.open(str(tmp_path / "b.pt")).notes
    # Another width is no candidate.
    found = owners(tmp_path / "c.pt", value | {"critic": network(3, 5, 2).state_dict()})
    assert {of.split("/")[0] for of in found.values()} == {"actor"}


def test_another_order_or_count_or_several_groups_are_not_guessed(tmp_path):
    import torch

    made = network(3, 4, 2)
    every_one = list(made.parameters())
    optimizers = (
        torch.optim.Adam(every_one[::-1]),
        torch.optim.Adam(every_one[:-1]),
        torch.optim.Adam([{"params": every_one[:3]}, {"params": every_one[3:]}]),
    )
    for optimizer in optimizers:
        found = owners(tmp_path / "a.pt", {"m": made.state_dict(), "optimizer": stepped(optimizer, made)})
        assert set(found.values()) == {None}


def test_several_optimizers_find_their_own(tmp_path):
    import torch

    actor, critic = network(3, 4, 2), network(5, 4, 1)
    value = {
        "actor": actor.state_dict(),
        "critic": critic.state_dict(),
        "a": stepped(torch.optim.Adam(actor.parameters()), actor),
        "c": stepped(torch.optim.Adam(critic.parameters()), critic),
    }
    found = owners(tmp_path / "a.pt", value)
    assert found["a.state.0.exp_avg"] == "actor/0/weight"
    assert found["c.state.0.exp_avg"] == "critic/0/weight"


def test_an_optimizer_is_a_part_that_can_be_taken(tmp_path):
    import torch

    made = network(3, 4, 2)
    optimizer = torch.optim.Adam(made.parameters())
    owners(tmp_path / "a.pt", {"model": made.state_dict(), "optimizer": stepped(optimizer, made)})
    ran = conftest.in_process("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--part", "optimizer")
    assert ran.status == 0, ran.err
    found = torch.load(tmp_path / "b.pt")
    assert torch.equal(found["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    optimizer.load_state_dict(found)
