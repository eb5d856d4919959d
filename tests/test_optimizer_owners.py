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

    for network in networks:
        network(torch.randn(4, network[0].in_features)).sum().backward()
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

    net = network(3, 5, 2)
    more = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(net.parameters(), **more)
    owners_ = owners(tmp_path / "a.pt", {"model": net.state_dict(), "optimizer": stepped(optimizer, net)})
    names = [f"model/{name.replace('.', '/')}" for name, _ in net.named_parameters()]
    for key, of in owners_.items():
        if not key.endswith("mu_product"):
            assert of == names[int(key.split(".")[2])], key
    assert {key.split(".")[2] for key in owners_} == {str(n) for n in range(6)}
    notes = ckpttool.open(str(tmp_path / "a.pt")).notes
    golden("\n".join(notes))
    shown = ckpttool.summary(str(tmp_path / "a.pt")).document()["tensors"]
    assert {row["of"] for row in shown if row["role"] == "slot"} >= set(names)


def test_names_decide_where_the_optimizer_has_them(tmp_path):
    import torch

    net, copy = network(3, 3, 3), network(3, 3, 3)
    backwards = list(net.named_parameters())[::-1]
    groups = [{"params": backwards[:2], "lr": 0.1}, {"params": backwards[2:]}]
    value = {"model": net.state_dict(), "optimizer": stepped(torch.optim.Adam(groups), net)}
    slot_owners = owners(tmp_path / "a.pt", value)
    expected = [f"model/{name.replace('.', '/')}" for name, _ in backwards]
    assert [slot_owners[name] for name in every(6)] == expected
    # Two networks with these names.
    slot_owners = owners(tmp_path / "b.pt", value | {"target": copy.state_dict()})
    assert set(slot_owners.values()) == {None}


def test_two_networks_that_fit_leave_it_open(tmp_path):
    import torch

    net, copy = network(3, 4, 2), network(3, 4, 2)
    value = {"actor": net.state_dict(), "optimizer": stepped(torch.optim.Adam(net.parameters()), net)}
    assert None not in owners(tmp_path / "a.pt", value).values()
    slot_owners = owners(tmp_path / "b.pt", value | {"critic": copy.state_dict()})
    assert set(slot_owners.values()) == {None}
    assert not ckpttool.open(str(tmp_path / "b.pt")).notes
    # Another width is no candidate.
    slot_owners = owners(tmp_path / "c.pt", value | {"critic": network(3, 5, 2).state_dict()})
    assert {of.split("/")[0] for of in slot_owners.values()} == {"actor"}


def test_another_order_or_count_or_several_groups_are_not_guessed(tmp_path):
    import torch

    net = network(3, 4, 2)
    every_one = list(net.parameters())
    optimizers = (
        torch.optim.Adam(every_one[::-1]),
        torch.optim.Adam(every_one[:-1]),
        torch.optim.Adam([{"params": every_one[:3]}, {"params": every_one[3:]}]),
    )
    for optimizer in optimizers:
        slot_owners = owners(tmp_path / "a.pt", {"m": net.state_dict(), "optimizer": stepped(optimizer, net)})
        assert set(slot_owners.values()) == {None}


def test_several_optimizers_find_their_own(tmp_path):
    import torch

    actor, critic = network(3, 4, 2), network(5, 4, 1)
    value = {
        "actor": actor.state_dict(),
        "critic": critic.state_dict(),
        "a": stepped(torch.optim.Adam(actor.parameters()), actor),
        "c": stepped(torch.optim.Adam(critic.parameters()), critic),
    }
    slot_owners = owners(tmp_path / "a.pt", value)
    assert slot_owners["a.state.0.exp_avg"] == "actor/0/weight"
    assert slot_owners["c.state.0.exp_avg"] == "critic/0/weight"


def test_an_optimizer_is_a_part_that_can_be_taken(tmp_path):
    import torch

    net = network(3, 4, 2)
    optimizer = torch.optim.Adam(net.parameters())
    owners(tmp_path / "a.pt", {"model": net.state_dict(), "optimizer": stepped(optimizer, net)})
    ran = conftest.in_process("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--part", "optimizer")
    assert ran.status == 0, ran.err
    contents = torch.load(tmp_path / "b.pt")
    assert torch.equal(contents["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])
    optimizer.load_state_dict(contents)
