"""The JSON Schemas: what commands print is in them, they are in the documentation, and both say the same."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

import ckpttool
from ckpttool.commands.schemas import schema_names
from ckpttool.conversion.alignment import By
from ckpttool.core import Role, UsageError, code_references, dtypes, errors
from ckpttool.core.sidecar import Scores
from ckpttool.listing.findings import Topic
from ckpttool.mapping.solver import CONFIDENCE
from tests import schemas
from tests.conftest import ROOT, TF_SAMPLE, TORCH_SAMPLE, Ran, in_process, refused
from tests.golden_texts import Golden
from tests.schemas import MismatchError, compiled, stored

# Documents that are no command's.
OTHERS = {"error", "result", "sidecar"}


def commands() -> set[str]:
    """Return the commands that print a document: `browse` refuses to."""
    from ckpttool.cli.app import COMMANDS
    from ckpttool.cli.parameters import AsJson

    # `browse` has the option, to refuse it.
    help_text = get_args(AsJson)[1].help
    options = {command.name: command.load().__annotations__.get("as_json") for command in COMMANDS}
    return {name for name, option in options.items() if option and get_args(option)[1].help == help_text}


def test_every_document_has_a_schema_and_every_schema_a_document() -> None:
    assert set(schema_names()) == commands() | OTHERS


@pytest.mark.parametrize("name", [*schema_names(), "common"])
def test_a_schema_is_one_by_the_rules_of_its_draft_and_carries_the_version(name: str) -> None:
    schema = stored(name)
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    assert schema["$id"] == f"urn:ckpttool:schema:1:{name}"
    # Compiling goes through every word of it: an unknown one is an error.
    if name != "common":
        assert compiled(name)


def test_a_schema_that_is_not_there(golden: Golden) -> None:
    with pytest.raises(UsageError) as error:
        ckpttool.schema("inspct")
    golden(error.value)
    with pytest.raises(UsageError):
        ckpttool.schema("../../pyproject")


def test_nothing_of_the_package_needs_the_library_that_checks() -> None:
    sources = (ROOT / "ckpttool").rglob("*.py")
    assert not [file for file in sources if re.search(r"import jsonschema|from jsonschema", file.read_text())]


# --- The check that all tests use, beside the library --------------------------------------------------

COMMANDS = {
    "inspect": ["inspect", TF_SAMPLE, "--glob", "critic/q1/l1/*"],
    "stats": ["stats", TORCH_SAMPLE, "--glob", "actor/l1/*"],
    "diff": ["diff", TORCH_SAMPLE, TORCH_SAMPLE.with_name("ckpt-2500.pt"), "--glob", "actor/l3/*"],
    "convert": ["convert", TF_SAMPLE, "x.npz", "--part", "policy/actor/l1", "--dry-run"],
    "formats": ["formats"],
    "error": ["inspect", "none.pt"],
}
SIDECAR = TF_SAMPLE.with_name(f"{TF_SAMPLE.name}.ckpttool.json")
GONE = object()
JUNK = (GONE, GONE, None, True, -1, 1.0, 0.5, "", "NaN", "float32", [], ["x"], {}, {"path": "x"})


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    documents = {name: in_process(*words, "--json").json() for name, words in COMMANDS.items()}
    return {**documents, "sidecar": json.loads(SIDECAR.read_text())}


@pytest.fixture(scope="module")
def libraries(real: dict[str, Any]) -> dict[str, Draft202012Validator]:
    return {name: Draft202012Validator(ckpttool.schema(name)) for name in real}


def is_valid(name: str, document: Any, *, strict: bool = False) -> bool:
    try:
        compiled(name, strict=strict)(document, "")
    except MismatchError:
        return False
    return True


def test_the_library_finds_real_documents_valid(
    real: dict[str, Any], libraries: dict[str, Draft202012Validator]
) -> None:
    for name, document in real.items():
        libraries[name].validate(document)
        assert is_valid(name, document, strict=True)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Go through all containers of a document and what is in them."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


@settings(max_examples=30)
@given(st.sampled_from(["sidecar", *COMMANDS]), st.integers(0, 1 << 20), st.integers(0, len(JUNK) - 1))
def test_the_check_and_the_library_agree_on_what_is_wrong(
    real: dict[str, Any], libraries: dict[str, Draft202012Validator], name: str, at: int, other: int
) -> None:
    document = copy.deepcopy(real[name])
    every = list(places(document))
    holder, key = every[at % len(every)]
    if JUNK[other] is GONE:
        del holder[key]
    else:
        holder[key] = JUNK[other]
    wrong = next(libraries[name].iter_errors(document), None)
    assert is_valid(name, document) == (wrong is None), (name, str(wrong)[:300])


def test_every_key_that_is_lost_or_new_is_noticed(real: dict[str, Any], golden: Golden) -> None:
    for name, document in real.items():
        for key in document:
            less = {other: value for other, value in document.items() if other != key}
            required = key in stored(name)["required"]
            assert is_valid(name, less, strict=True) != required, (name, key)
        # New keys are no change of the version, but somebody must describe them.
        assert is_valid(name, {**document, "new": 1})
        assert not is_valid(name, {**document, "new": 1}, strict=True)
    tensor = real["inspect"]["tensors"][0]
    tensor["new"] = tensor.pop("slot")
    with pytest.raises(MismatchError) as caught:
        schemas.require("inspect", real["inspect"])
    golden(str(caught.value))
    tensor["slot"] = tensor["new"]
    with pytest.raises(MismatchError) as caught:
        schemas.require("inspect", real["inspect"])
    golden(str(caught.value))
    del tensor["new"]


def test_what_a_command_prints_is_compared() -> None:
    printed = in_process("limits", "--json").out
    assert schemas.require_printed(["--limit", "members=5", "limits", "--json"], printed) is None
    for arguments in (["limits", "--json"], ["inspect", "limits", "--json"]):
        with pytest.raises(MismatchError):
            schemas.require_printed(arguments, printed.replace('"meaning"', '"sense"', 1))
    assert schemas.require_printed(["limits"], "limit  value") is None


# --- What else says the same ---------------------------------------------------------------------------


def shared(name: str) -> set[str]:
    return set(stored("common")["$defs"][name]["enum"])


def test_the_words_are_those_of_the_program() -> None:
    kinds = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)]
    assert shared("kind") == {item.kind for item in kinds}
    assert shared("role") == set(get_args(Role))
    assert set(stored("common")["$defs"]["finding"]["properties"]["topic"]["enum"]) == set(get_args(Topic))
    scores = stored("sidecar")["properties"]["choices"]["properties"]["scores"]
    assert set(scores["enum"]) == set(get_args(Scores))
    inspect = stored("inspect")["$defs"]
    assert set(inspect["verdict"]["enum"]) == set(code_references.VERDICTS)
    assert set(inspect["totals"]["properties"]["roles"]["properties"]) == shared("role")
    matched = stored("convert")["properties"]["matched"]["items"]["properties"]
    assert set(matched["by"]["enum"]) == set(CONFIDENCE)
    assert set(matched["confidence"]["enum"]) == set(CONFIDENCE.values())
    assert set(stored("diff")["properties"]["by"]["enum"]) == set(get_args(By))
    pattern = stored("common")["$defs"]["dtype"]["pattern"]
    assert all(re.search(pattern, item.name) for item in dtypes.TABLE)


def described(schema: Any) -> Iterator[str]:
    """Go through the keys that a schema describes, at any depth."""
    if isinstance(schema, dict):
        yield from schema.get("properties", ())
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from described(part)


def sections(page: str) -> dict[str, str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))


def in_tables(text: str) -> set[str]:
    """Return the keys that tables explain: those in their first columns."""
    cells = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


@pytest.mark.parametrize("name", sorted(set(schema_names()) - {"error", "result", "sidecar"}))
def test_the_documentation_names_the_same_keys(name: str) -> None:
    described_sections = sections("json.md")
    (section,) = (text for title, text in described_sections.items() if name in re.split(r", | and ", title))
    common = set(described(stored("common")))
    # A list of a command's name holds what the section's title says.
    own = set(described(stored(name))) - {name, "schema", "tool"}
    assert not {key for key in own - common if f"`{key}`" not in "".join(described_sections.values())}
    assert not in_tables(section) - own - common
    variants = [stored(name)["$defs"][name_] for name_ in ("evaluation", "several")] if name == "eval" else ()
    for variant in variants or [stored(name)]:
        top = set(variant["properties"]) & own
        assert not {key for key in top if f"`{key}`" not in section}


def test_the_documentation_of_the_sidecar_names_the_same_keys() -> None:
    page = (ROOT / "docs" / "sidecar.md").read_text(encoding="utf-8")
    assert in_tables(page) == set(stored("sidecar")["properties"])
    # What it says of a network is what `verify` says.
    keys = set(described(stored("sidecar"))) - {"n", "error_a", "error_b"}
    assert not {key for key in keys if f"`{key}`" not in page}


def test_shared_keys_are_explained() -> None:
    text = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    assert not {key for key in described(stored("common")) if f"`{key}`" not in text}


# --- The command -------------------------------------------------------------------------------------


def test_the_schemas_can_be_listed_and_printed(golden: Golden) -> None:
    listed = in_process("schema")
    assert listed.status == 0
    assert all(f"\n{name} " in listed.out for name in schema_names())
    assert max(map(len, listed.out.splitlines())) <= 80
    rows = in_process("schema", "--json").json()["schemas"]
    assert [row["name"] for row in rows] == list(schema_names())
    one: Ran = in_process("schema", "eval")
    assert json.loads(one.out) == ckpttool.schema("eval")
    (row,) = in_process("schema", "eval", "--json").json()["schemas"]
    assert row["content"] == ckpttool.schema("eval")
    golden(in_process("schema", "evl"))
    refused(in_process("schema", "evl"))
