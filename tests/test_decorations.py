"""What wrappers put into names: torch's own wrappers are the referees; what is removed can come back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ckpttool
from ckpttool.commands.inspect import summary
from ckpttool.core import Inline, Leaf, Tree, UsageError, display, key
from ckpttool.core import Path as Keys
from ckpttool.mapping import unwrap_names, wrap_name, wrappers
from tests import conftest
from tests.golden_texts import Golden

# torch.compile imports what torch itself says is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
WRAPPERS = tuple(wrappers.WRAPPERS)


def network():
    import torch

    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def partly():
    """Return a network of which one layer is wrapped, twice."""
    import torch

    module = network()
    module[2] = torch.compile(torch.nn.DataParallel(module[2]))
    return module


def wrapped():
    """Return wrapped networks by what their names carry."""
    import torch
    from torch.nn import DataParallel
    from torch.optim.swa_utils import AveragedModel

    return {
        "module.": DataParallel(network()),
        "_orig_mod.": torch.compile(network()),
        "module._orig_mod.": DataParallel(torch.compile(network())),
        "module._orig_mod.module.": AveragedModel(torch.compile(DataParallel(network()))),
        "_orig_mod.module.": torch.compile(AveragedModel(network())),
    }


def saved(path: Path, value: object) -> Tree:
    import torch

    torch.save(value, path)
    return ckpttool.open(str(path)).tree


def versions(tree: Tree, where: Keys) -> list[tuple[str, object]]:
    state = tree.containers[where].state
    assert isinstance(state, dict)
    return list(state["_metadata"].items())


def named(*names: str) -> Tree:
    return Tree({(key(name),): Leaf("uint8", (1,), Inline(b"x"), name) for name in names})


@pytest.mark.torch
@pytest.mark.parametrize(
    "prefix",
    ["module.", "_orig_mod.", "module._orig_mod.", "module._orig_mod.module.", "_orig_mod.module."],
)
def test_what_torchs_wrappers_add_goes_and_comes_back(tmp_path, prefix):
    import torch

    module = wrapped()[prefix]
    bare = network().state_dict()
    tree = saved(tmp_path / "a.pt", {"model": module.state_dict(), "epoch": 2})
    stripped = wrappers.strip_prefixes(tree)
    assert stripped is not None
    names = [str(path[-1].value) for path, _ in stripped.tree.tensors()]
    assert next(iter(module.state_dict().keys() - {"n_averaged"})).startswith(prefix[: prefix.index(".")])
    assert [name for name in names if name != "n_averaged"] == list(bare)
    assert versions(stripped.tree, (key("model"),)) == list(bare._metadata.items())
    assert [stripped.tree[new] for new in stripped.moves] == [tree[old] for old in stripped.moves.values()]

    source, middle, back = (str(tmp_path / name) for name in ("a.pt", "b.pt", "c.pt"))
    done = ckpttool.convert(source, middle, strip=True)
    assert any(line.rule == "strip" for line in done.report.mapped)
    if "n_averaged" not in names:
        network().load_state_dict(torch.load(middle)["model"])
    ckpttool.convert(middle, back, restore=True)
    assert ckpttool.digest(back).sha256 == ckpttool.digest(source).sha256
    again = ckpttool.open(back).tree
    assert list(again) == list(tree)
    assert versions(again, (key("model"),)) == versions(tree, (key("model"),))
    module.load_state_dict(torch.load(back)["model"])


@pytest.mark.torch
def test_a_wrapped_layer_is_a_subtree_of_its_own(tmp_path, golden: Golden):
    tree = saved(tmp_path / "a.pt", partly().state_dict())
    stripped = wrappers.strip_prefixes(tree)
    assert stripped is not None
    assert [str(path[0].value) for path in stripped.tree] == list(network().state_dict())
    assert list(wrappers.restore_prefixes(stripped.tree, stripped.decorations)[0]) == list(tree)
    (note,) = summary(str(tmp_path / "a.pt")).notes
    golden(note)


def test_one_name_without_the_prefix_keeps_it_for_all():
    assert wrappers.strip_prefixes(named("module.a.w", "b.w")) is None
    assert wrappers.strip_prefixes(named("a.w", "a.b")) is None
    assert wrappers.strip_prefixes(named("module", "w")) is None


def test_names_that_would_collide_are_left_alone():
    # Both would be n_averaged.
    stripped = wrappers.strip_prefixes(named("n_averaged", "module.n_averaged", "module.a.w"))
    assert stripped is None


def test_two_networks_of_one_file_are_judged_apart():
    leaf = Leaf("uint8", (1,), Inline(b"x"), "")
    tree = Tree(
        {
            (key("actor"), key("module.l.w")): leaf,
            (key("critic"), key("l.w")): leaf,
            (key("critic"), key("m.w")): leaf,
        }
    )
    stripped = wrappers.strip_to_plain_names(tree)
    assert stripped is not None
    assert [display(path) for path in stripped[0]] == ["actor/l/w", "critic/l/w", "critic/m/w"]
    assert stripped[1][key("actor"), key("l.w")] == (key("actor"), key("module.l.w"))
    assert wrappers.strip_to_plain_names(stripped[0]) is None


@pytest.mark.torch
def test_lightnings_module_is_known_by_its_checkpoint(tmp_path, golden: Golden):
    import torch

    state = {f"model.{name}": tensor for name, tensor in network().state_dict().items()}
    optimizer = torch.optim.Adam(network().parameters())
    whole = {"epoch": 1, "pytorch-lightning_version": "2.5.0", "state_dict": state}
    whole["optimizer_states"] = [optimizer.state_dict()]
    stripped = wrappers.strip_prefixes(saved(tmp_path / "a.ckpt", whole))
    assert stripped is not None
    assert [d.wrapped[0].segments for d in stripped.decorations] == [("model",)]
    notes = summary(str(tmp_path / "a.ckpt")).notes
    golden("\n".join(notes))
    # Without Lightning's mark, `model` is a name like others.
    assert wrappers.strip_prefixes(saved(tmp_path / "b.pt", {"state_dict": state, "epoch": 1})) is None


@pytest.mark.torch
def test_lightnings_module_is_stripped_as_a_part_too(tmp_path):
    state = {f"model.{name}": tensor for name, tensor in network().state_dict().items()}
    saved(tmp_path / "a.ckpt", {"pytorch-lightning_version": "2.5.0", "state_dict": state, "epoch": 1})
    ckpttool.convert(str(tmp_path / "a.ckpt"), str(tmp_path / "b.pt"), part="state_dict", strip=True)
    tree = ckpttool.open(str(tmp_path / "b.pt")).tree
    assert {leaf.key for _, leaf in tree.tensors()} == set(network().state_dict())


@pytest.mark.torch
def test_an_average_is_named_and_never_taken(tmp_path, golden: Golden):
    saved(tmp_path / "a.pt", {"model": network().state_dict(), "ema": network().state_dict(), "epoch": 1})
    golden("\n".join(summary(str(tmp_path / "a.pt")).notes))


@pytest.mark.torch
def test_a_part_is_stripped_too(tmp_path):
    import torch

    value = {"state_dict": torch.nn.DataParallel(network()).state_dict(), "epoch": 1}
    saved(tmp_path / "a.pt", value)
    ran = conftest.in_process(
        "convert", tmp_path / "a.pt", tmp_path / "b.pt", "--part", "state_dict", "--strip"
    )
    assert ran.status == 0, ran.err
    network().load_state_dict(torch.load(tmp_path / "b.pt"))
    record = json.loads((tmp_path / "b.pt.ckpttool.json").read_text())
    assert record["stripped"][0]["wrapped"] == [{"at": "", "segments": "module", "averaged": None}]
    assert record["rules"][0]["source"] == "state_dict/module/0/weight"
    ran = conftest.in_process("convert", tmp_path / "b.pt", tmp_path / "c.pt", "--restore")
    assert ran.status == 0, ran.err
    assert torch.load(tmp_path / "c.pt").keys() == value["state_dict"].keys()


@pytest.mark.torch
def test_what_cannot_be_restored_is_refused(tmp_path, golden: Golden):
    saved(tmp_path / "a.pt", {"m": {"module.w": network()[0].weight.detach()}})
    source, target = str(tmp_path / "a.pt"), str(tmp_path / "b.pt")
    with pytest.raises(UsageError) as caught:
        ckpttool.convert(source, target, restore=True)
    golden(caught.value)
    with pytest.raises(UsageError) as caught:
        ckpttool.convert(source, target, restore=True, strip=True)
    golden(caught.value)
    ckpttool.convert(source, target, strip=True)
    with pytest.raises(UsageError) as caught:
        ckpttool.convert(target, str(tmp_path / "c.pt"), restore=True, part="m")
    golden(caught.value)
    file = tmp_path / "b.pt.ckpttool.json"
    record = json.loads(file.read_text())
    for broken in ([{"where": 3}], [{}], [{**record["stripped"][0], "where": [{"index": 1, "key": "x"}]}]):
        file.write_text(json.dumps({**record, "stripped": broken}))
        with pytest.raises(UsageError) as caught:
            ckpttool.convert(target, str(tmp_path / "c.pt"), restore=True)
        golden(caught.value)
    elsewhere = {**record["stripped"][0], "where": [{"key": "nowhere"}]}
    file.write_text(json.dumps({**record, "stripped": [elsewhere]}))
    with pytest.raises(UsageError) as caught:
        ckpttool.convert(target, str(tmp_path / "c.pt"), restore=True)
    golden(caught.value)


names = st.lists(st.sampled_from(("a", "b", "0", "n_averaged", *WRAPPERS)), min_size=1, max_size=5)


@given(st.lists(names.map(".".join), min_size=1, max_size=8, unique=True))
def test_plain_names_lead_back_to_the_old_ones(result):
    unwrapped = unwrap_names(result, WRAPPERS)
    if unwrapped is None:
        return
    assert set(unwrapped.names) == set(result)
    assert len(set(unwrapped.names.values())) == len(result)
    for old, new in unwrapped.names.items():
        assert wrap_name(new, unwrapped.wrapped) == old


@given(st.lists(st.sampled_from(WRAPPERS), max_size=4), st.lists(names.map(".".join), min_size=2, max_size=6))
def test_any_nesting_around_all_is_removed(prefix, inner):
    inner = sorted({f"net.{name}" for name in inner} | {"other.w"})
    bare, nested = (
        unwrap_names(inner, WRAPPERS),
        unwrap_names([".".join((*prefix, name)) for name in inner], WRAPPERS),
    )
    expected = list(bare.names.values()) if bare else inner
    assert (list(nested.names.values()) if nested else inner) == expected
