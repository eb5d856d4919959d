"""Sets of PyTorch files: which names make one, which files they are, and what cannot be written as one."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ckpttool.conversion.write import save
from ckpttool.core import Alias, FormatError, Tree, UnsupportedError
from ckpttool.formats import Probe, open_checkpoint, torch_zip
from tests.golden_texts import Golden
from tests.test_layouts import fujimoto_set
from tests.trees import keys, torch_tree


def put(folder: Path, *names: str) -> None:
    tree = torch_tree({"w": np.ones(3, np.float32)})
    for name in names:
        save(tree, str(folder / "written"), "torch")
        (folder / "written").replace(folder / name)


@pytest.mark.parametrize(
    ("names", "claimed"),
    [
        (("x_actor", "x_critic"), True),
        (("x_actor.pth", "x_critic_1.pth"), True),
        (("x_actor.pt", "x_crtic_2.pkl"), True),
        (("x_actor", "x_critic_target"), False),
        (("x_actor", "x_actor_optimizer"), False),
        (("x_critic", "x_critic_optimizer"), False),
        (("xactor", "xcritic"), False),
        (("x_actor.h5", "x_critic.h5"), False),
    ],
)
def test_an_actor_and_a_critic_make_a_set(tmp_path: Path, names: tuple[str, ...], claimed: bool) -> None:
    put(tmp_path, *names)
    assert (torch_zip.set_claims(Probe(str(tmp_path / "x"))) is not None) is claimed
    assert (torch_zip.set_claims(Probe(str(tmp_path))) == str(tmp_path / "x")) is claimed


def test_a_file_of_the_very_name_wins(tmp_path: Path) -> None:
    put(tmp_path, "x", "x_actor", "x_critic")
    assert open_checkpoint(str(tmp_path / "x")).format == "pytorch"


def test_the_name_without_a_suffix_is_tried_first(tmp_path: Path) -> None:
    put(tmp_path, "x_actor", "x_actor.pth", "x_critic.pth", "x_critic.pkl")
    files = [os.path.basename(file.path) for file in open_checkpoint(str(tmp_path / "x")).files]
    assert files == ["x_actor", "x_critic.pth"]


def test_what_a_member_is_refused_for_names_its_file(tmp_path: Path) -> None:
    put(tmp_path, "x_actor", "x_critic")
    whole = (tmp_path / "x_critic").read_bytes()
    (tmp_path / "x_critic").write_bytes(whole[:-30])
    with pytest.raises(FormatError) as error:
        open_checkpoint(str(tmp_path / "x"))
    assert error.value.file == str(tmp_path / "x_critic")


@pytest.mark.parametrize("strange", ["total_it", "other/w", "critic_3/l1.weight"])
def test_what_is_no_member_cannot_be_written(strange: str, golden: Golden) -> None:
    tree = torch_tree({**fujimoto_set(), strange: 3})  # type: ignore[dict-item]
    with pytest.raises(UnsupportedError) as error:
        torch_zip.set_pieces(tree)
    golden(error.value)
    assert strange.split("/")[0] in str(error.value)


def test_a_tensor_of_two_files_cannot_be_written(golden: Golden) -> None:
    tree = torch_tree(fujimoto_set())  # type: ignore[arg-type]
    shared = {keys("actor/l1.weight"): (Alias(keys("critic/l9.weight")),)}
    with pytest.raises(UnsupportedError) as caught:
        torch_zip.set_pieces(Tree(tree.leaves, shared))
    golden(caught.value)


def test_a_set_without_a_critic_cannot_be_written(golden: Golden) -> None:
    tree = torch_tree({"actor/w": np.ones(3, np.float32)})
    with pytest.raises(UnsupportedError) as caught:
        torch_zip.set_pieces(tree)
    golden(caught.value)
