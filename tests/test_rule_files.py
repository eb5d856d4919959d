"""Rules of the user's own: what a file says happens, and what it cannot mean is refused with its line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckpttool.commands.convert import ConversionResult, convert
from ckpttool.commands.digest import digest
from ckpttool.conversion.write import save
from ckpttool.core import CkpttoolError, Leaf, MappingError, NotFoundError, UsageError
from ckpttool.formats import open_checkpoint
from ckpttool.mapping import RuleFile, apply_rules, load_rules
from tests.conftest import in_process as run
from tests.golden_texts import Golden
from tests.trees import torch_tree

ARRAYS = {
    "enc.0.w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "enc.1.w": np.arange(6, 12, dtype=np.float32).reshape(2, 3),
    "qkv": np.arange(12, dtype=np.float32).reshape(6, 2),
    "junk.a": np.zeros(3, np.float32),
    "junk.b.c": np.zeros(3, np.float32),
}
RULES = """
[[rule]]
from = "enc/{n}/w"
to = "layers.{n}.weight"
rule = "transpose"

[[rule]]
from = "qkv"
to = "q"
rule = "take 0:2 of 6 on axis 0"
[[rule]]
from = "qkv"
to = "k"
rule = ["take 2:4 of 6 on axis 0", "transpose"]
[[rule]]
from = "qkv"
to = "inner/v"
rule = "take 4:6 of 6 on axis 0"

[[drop]]
from = "junk/{all*}"

[[add]]
to = "steps"
value = 7
dtype = "int64"
"""


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = str(tmp_path / "model.pt")
    save(torch_tree(ARRAYS), path)
    return path


def rules(tmp_path: Path, text: str) -> str:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return str(path)


def go(source: str, target: Path, text: str, **options: object) -> ConversionResult:
    return convert(source, str(target), rules=rules(target.parent, text), sync=False, **options)  # type: ignore[arg-type]


def arrays(path: Path) -> dict[str, np.ndarray]:
    return {leaf.key: leaf.array() for _, leaf in open_checkpoint(str(path)).tree.tensors()}


def test_what_the_file_says_happens(source: str, tmp_path: Path, golden: Golden) -> None:
    done = go(source, tmp_path / "out.pt", RULES)
    assert done.written
    assert done.report.complete
    read_back = arrays(tmp_path / "out.pt")
    assert list(read_back) == ["layers.0.weight", "layers.1.weight", "q", "k", "inner.v", "steps"]
    np.testing.assert_array_equal(read_back["layers.1.weight"], ARRAYS["enc.1.w"].T)
    np.testing.assert_array_equal(read_back["k"], ARRAYS["qkv"][2:4].T)
    np.testing.assert_array_equal(read_back["inner.v"], ARRAYS["qkv"][4:])
    assert (read_back["steps"].dtype, read_back["steps"].item()) == (np.int64, 7)
    golden("\n".join(done.report.notes))


def test_it_is_undone_bit_for_bit(source: str, tmp_path: Path) -> None:
    go(source, tmp_path / "a-1", RULES, to="tf")
    convert(str(tmp_path / "a-1"), str(tmp_path / "back.pt"), sync=False)
    assert digest(str(tmp_path / "back.pt")).sha256 == digest(source).sha256


def test_parts_become_one(source: str, tmp_path: Path) -> None:
    text = """
    [[rule]]
    from = "enc/0/w"
    to = "all"
    rule = "into 0:2 of 4 on axis 0"
    [[rule]]
    from = "enc/1/w"
    to = "all"
    rule = "into 2:4 of 4 on axis 0"
    [[drop]]
    from = "qkv"
    [[drop]]
    from = "junk{x*}"
    """
    assert go(source, tmp_path / "out.pt", text).written
    whole = np.concatenate([ARRAYS["enc.0.w"], ARRAYS["enc.1.w"]])
    np.testing.assert_array_equal(arrays(tmp_path / "out.pt")["all"], whole)


def test_what_no_rule_names_is_unmapped_unless_said(source: str, tmp_path: Path) -> None:
    text = '[[rule]]\nfrom = "qkv"\nto = "x"\n'
    done = go(source, tmp_path / "out.pt", text)
    assert not done.written
    assert set(done.report.unused) == {"enc/0/w", "enc/1/w", "junk/a", "junk/b/c"}
    done = go(source, tmp_path / "out.pt", 'rest = "keep"\n' + text)
    assert done.report.complete
    assert set(arrays(tmp_path / "out.pt")) == {"x", *ARRAYS} - {"qkv"}


def test_the_rest_may_go_by_kinds(tmp_path: Path) -> None:
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    save(
        torch_tree({"l.weight": weight, "l.bias": np.zeros(2, np.float32), "odd": weight}),
        str(tmp_path / "m.pt"),
    )
    done = go(
        str(tmp_path / "m.pt"), tmp_path / "a-1", 'rest = "kinds"\n[[rule]]\nfrom="odd"\nto="odd"\n', to="tf"
    )
    assert done.report.complete
    arrays = {leaf.name: leaf.array() for _, leaf in open_checkpoint(str(tmp_path / "a-1")).tree.tensors()}
    np.testing.assert_array_equal(arrays["l/kernel"], weight.T)
    np.testing.assert_array_equal(arrays["odd"], weight)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("[[rule]\n", 1, id="not-toml"),
        pytest.param('x = 1\n[[rule]]\nfrom = "a"\nto = "b"\n', 1, id="unknown-key"),
        pytest.param('\n\n[[rules]]\nfrom = "a"\n', 3, id="unknown-key-2"),
        pytest.param('[rule]\nfrom = "a"\n', 1, id="not-a-list"),
        pytest.param('[[rule]]\nfrom = "qkv"\n', 1, id="needs-to"),
        pytest.param('[[rule]]\nto = "qkv"\n', 1, id="needs-from"),
        pytest.param('[[rule]]\nfrom = "qkv"\nto = 5\n', 3, id="type"),
        pytest.param('[[rule]]\nfrom = "qkv"\nto = "b"\nrul = "transpose"\n', 4, id="unknown-key-of-a-rule"),
        pytest.param('[[rule]]\nfrom = "qkv"\nto = "b"\nrule = "transpsoe"\n', 4, id="unknown-rule"),
        pytest.param('[[rule]]\nfrom = "qkv"\nto = "b"\nrule = ["transpose", 5]\n', 4, id="unknown-rule-2"),
        pytest.param('[[rule]]\nfrom = "a{n}"\nto = "b{m}"\n', 3, id="unknown-hole"),
        pytest.param('[[rule]]\nfrom = "a{n"\nto = "b"\n', 2, id="hole"),
        pytest.param('[[rule]]\nfrom = ""\nto = "b"\n', 2, id="hole-2"),
        pytest.param(
            '[[rule]]\nfrom = "qkv"\nto = "b"\n[[add]]\nto = "c"\nvalue = 1\ndtype = "int7"\n',
            7,
            id="dtype",
        ),
        pytest.param('[[add]]\nto = "c"\nvalue = 1\ndtype = "int8"\nshape = [-1]\n', 5, id="shape"),
        pytest.param(
            '[[add]]\nto = "c"\nvalue = 1\ndtype = "int8"\nshape = [100000, 100000]\n', 5, id="too-large"
        ),
        pytest.param('[[add]]\nto = "c"\nvalue = 300\ndtype = "int8"\n', 3, id="out-of-range"),
        pytest.param('rest = "some"\n', 1, id="rest"),
        pytest.param(
            '[[rule]]\nfrom = "qkv"\nto = "b"\n\n[[rule]]\nfrom = "nothing"\nto = "c"\n',
            5,
            id="no-such-entry",
        ),
        pytest.param('[[drop]]\nfrom = "nothing"\n', 1, id="no-such-entry-2"),
        pytest.param('[[rule]]\nfrom = "qkv"\nto = "b"\nrule = "permute 2,1,0"\n', 1, id="axes"),
        pytest.param(
            '[[rule]]\nfrom = "qkv"\nto = "b"\nrule = "take 0:2 of 5 on axis 0"\n', 1, id="does-not-fit"
        ),
    ],
)
def test_what_a_file_cannot_mean_is_refused_with_its_line(
    text: str, line: int, golden: Golden, source: str, tmp_path: Path
) -> None:
    with pytest.raises(CkpttoolError) as caught:
        go(source, tmp_path / "out.pt", text)
    assert caught.value.file == str(tmp_path / "rules.toml")
    assert f"line {line}" in caught.value.message
    if text != "[[rule]\n":  # the end of that message is tomllib's
        golden(caught.value)
    assert not (tmp_path / "out.pt").exists()


def test_two_sources_for_one_target_are_refused(source: str, tmp_path: Path, golden: Golden) -> None:
    with pytest.raises(MappingError) as caught:
        go(source, tmp_path / "out.pt", 'rest = "keep"\n[[rule]]\nfrom = "enc/{n}/w"\nto = "same"\n')
    golden(caught.value)


def test_a_file_that_is_not_there(source: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        convert(source, str(tmp_path / "x.pt"), rules=str(tmp_path / "none.toml"))
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError) as caught:
        load_rules(str(tmp_path / "b.toml"))
    assert caught.value.file == str(tmp_path / "b.toml")


def test_rules_are_no_agent_of_a_library(source: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rules"):
        go(source, tmp_path / "x", RULES, to="cleanrl")


def test_native_keys_are_names_too(source: str) -> None:
    tree = open_checkpoint(source).tree
    application = apply_rules(load_text('[[rule]]\nfrom = "enc.{n}.w"\nto = "{n}"\n'), tree)
    assert [name for _, name, _ in application.ways] == ["0", "1"]
    assert all(isinstance(tree[path], Leaf) for path, _, _ in application.ways)


def load_text(text: str) -> RuleFile:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        return load_rules(rules(Path(folder), text))


def test_the_command_shows_the_table_of_a_dry_run(source: str, tmp_path: Path) -> None:
    ran = run("convert", source, tmp_path / "o.pt", "--map", rules(tmp_path, RULES), "--dry-run")
    assert ran.status == 0, ran.err
    assert "enc/0/w" in ran.out
    assert "transpose" in ran.out
    assert not (tmp_path / "o.pt").exists()
    ran = run("convert", source, tmp_path / "o.pt", "--map", rules(tmp_path, "[[rule]]\nform = 1\n"))
    assert ran.status == 2
    assert "line 2" in ran.err
    assert "from" in ran.err
