"""Rules about the language of pages, messages, docstrings and comments (CONTRIBUTING.md, "Code").

A rule is a function from texts to the offenders that it finds. Every rule is run on the project and on a
wrong example below, which proves that it can fail. `python -m tests.test_language` prints the remaining
counts of the words that are discouraged but not yet banned.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Words and constructions that the project does not use for data, files and programs, each with the plain one.
BANNED = {
    r"told": "given, known, recorded",
    r"tells?|telling": "shows, states, determines",
    r"said|saying|says?": "states, records, contains",
    r"heard|hears?": "received",
    r"asked|asks": "requested, required",
    r"seen": "displayed, found",
    r"knows?": "recognizes, supports, contains",
    r"whom": "which",
    r"nobody|somebody|whoever": "no user, a user, anyone who",
    r"learnt|dearest|thereof|lest": "another word",
    r"habits?": "default, convention",
    r"none other|(?<!there )(?<!which )(?-i:is none)\b(?! of)": "has no, is not a",
    r"of (?:its|their|one's|your) own(?=\s*(?:[.,;:)\]|]|$))": "separate, custom, itself",
    r"the way back": "the reverse conversion",
    r"what (?:\w+ ){0,5}(?:is|are) (?:told|said|asked|heard)": "a noun",
    r"(?:is|are) well(?=[.,;:)]|$)": "healthy, valid",
    r"is there no(?:ne| more)?\b": "does not exist",
    r"cannot be told": "cannot be distinguished",
}
# One group for each: they are tried where a word starts, and nowhere else.
GROUPS = "|".join(f"({words})" for words in BANNED)
ANY = re.compile(rf"\b(?=\w)(?:{GROUPS})(?!\w)", re.IGNORECASE | re.MULTILINE)
BETTER = tuple(BANNED.values())

# Reported by `python -m tests.test_language`: rarer with every rewrite, and banned once they are near zero.
DISCOURAGED = (
    *(r"whatever", r"besides", r"beside", r"alone", r"whose", r"else", r"such an?", r"ours|theirs"),
    *(r"what is|what are", r"of which", r"nor", r"there is|there are", r"so that", r"as it is|as they are"),
)
# Banned as identifiers, with underscores around them too: they do not say what a value is. Uses follow from
# their definitions, so these are what the rule finds: variables, parameters, fields, functions and classes.
NAMES = (
    *(
        "told",
        "said",
        "says",
        "tells",
        "heard",
        "asked",
        "asks",
        "seen",
        "knows",
        "whom",
        "found",
        "given",
        "made",
    ),
    *("place", "held", "theirs", "ours", "paid", "each", "thing", "taken", "wanted", "begun", "took", "laid"),
)
# What a definition starts with, outside of strings and comments: a module without it need not be parsed.
DEFINED = re.compile(
    rf"(?<![^\W_])(?:{'|'.join(NAMES)})_*(?:\s*(?:[,:)]|=[^=]|\bin\b)|\s*\()"
    rf"|\b(?:def|class|as|lambda)\s+\**_*(?:{'|'.join(NAMES)})(?![^\W_])|\*(?:{'|'.join(NAMES)})\b"
)

# (file, name): why it is right there.
NAMES_ALLOWED: dict[tuple[str, str], str] = {
    ("ckpttool/commands/check.py", "wanted"): "public: a keyword of `ckpttool.check`",
    ("ckpttool/commands/plugin_rows.py", "seen"): "a key of the JSON of `plugins`",
    ("ckpttool/conversion/graph_code.py", "found"): "becomes an error's `found`",
    ("ckpttool/core/errors.py", "found"): "public: every error has `expected` and `found`",
    ("ckpttool/core/limits.py", "found"): "becomes an error's `found`",
    ("ckpttool/core/source.py", "found"): "becomes an error's `found`",
    ("ckpttool/encodings/archives.py", "found"): "becomes an error's `found`",
    ("ckpttool/encodings/pickle_reader.py", "found"): "becomes an error's `found`",
    ("ckpttool/evaluation/episode_videos.py", "paid"): "public: a field of what `ckpttool.video` returns",
    ("ckpttool/evaluation/episode_videos.py", "wanted"): "public: a field of what `ckpttool.video` returns",
    ("ckpttool/evaluation/simulators.py", "found"): "becomes an error's `found`",
    ("ckpttool/formats/torch_tensors.py", "found"): "becomes an error's `found`",
    ("ckpttool/graphs/graph.py", "place"): "public: a field of `ckpttool.graphs.OperatorNode`",
    ("ckpttool/libraries/recognize.py", "seen"): "public: a field of the tables of plug-ins",
    ("ckpttool/libraries/schema.py", "place"): "a key of sidecars",
    ("ckpttool/libraries/write.py", "place"): "public: a field of the tables of plug-ins",
    ("ckpttool/mapping/solver.py", "found"): "a key of JSON: `expected` and `found`",
}

# (file, words around the offender): reason.
ALLOWED: dict[tuple[str, str], str] = {}

# Files that are not yet rewritten; none may be added.
TO_REWRITE: frozenset[str] = frozenset()

HEADING_WORDS = 8
BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(`+)[^`]+\1")
QUESTION = re.compile(r"(?:What|Where|Which|Who|Whom|Whose)\b")
# Comments (the group) and strings of Python 3.11; tokenize takes twenty times as long.
TOKEN = re.compile(
    r"""(\#[^\n]*)|\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL,
)


class Text(NamedTuple):
    """One text that people read: a paragraph of a page, a string, a docstring or a comment."""

    file: str
    line: int
    text: str


Rule = Callable[[Iterable[Text]], set[str]]


# Texts of the project.


def without_blocks(markdown: str) -> str:
    """Blank fenced blocks, keeping line numbers."""
    return BLOCK.sub(lambda block: "\n" * block[0].count("\n"), markdown)


def without_code(markdown: str) -> str:
    """Blank fenced blocks, `code`, comments and the targets of links."""
    return re.sub(r"<!--.*?-->|\]\([^)]*\)", "", CODE.sub("`x`", without_blocks(markdown)))


def page_texts(file: str, markdown: str) -> Iterator[Text]:
    for number, line in enumerate(without_code(markdown).splitlines(), start=1):
        if line.strip():
            yield Text(file, number, line)


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield a module's strings with their lines."""
    constants = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant))
    yield from ((node.lineno, node.value) for node in constants if isinstance(node.value, str))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield a module's comments with their lines."""
    line, end = 1, 0
    for token in TOKEN.finditer(source):
        if token[1]:
            line += source.count("\n", end, token.start())
            end = token.start()
            yield line, token[1]


def may_offend(source: str) -> bool:
    """Return whether a banned word may be in a string or comment: parsing all modules takes seconds.

    Strings that Python joins are joined here too.
    """
    read, end = [], 0
    for token in TOKEN.finditer(source):
        apart = source[end : token.start()].strip(" \\\n\trfbuRFBU")
        read += ["\n;\n" * bool(apart), token[0].strip("\"'")]
        end = token.end()
    return ANY.search(re.sub(r"\\[abfnrtv0]|\\\n", " ", "".join(read))) is not None


def code_texts(file: str, source: str) -> Iterator[Text]:
    """Yield strings with a space (words alone are keys), docstrings and comments."""
    for line, text in strings(source):
        if " " in text.strip():
            yield Text(file, line, CODE.sub("`x`", text))
    for line, text in comments(source):
        yield Text(file, line, CODE.sub("`x`", text))


def docstrings(file: str, source: str) -> Iterator[Text]:
    """Yield a module's docstring, which stands before all other strings and statements."""
    first = next((token for token in TOKEN.finditer(source) if not token[1]), None)
    if first is not None and not source[: first.start()].rpartition("\n")[2]:
        yield Text(file, 1, ast.get_docstring(ast.parse(source[: first.end()])) or "")


def headings(file: str, markdown: str) -> Iterator[Text]:
    for number, line in enumerate(without_blocks(markdown).splitlines(), start=1):
        if match := re.match(r"#+ +(.+)", line):
            yield Text(file, number, match[1])


@cache
def pages() -> dict[str, str]:
    """Return the pages by name: the documentation and the files beside it, without the changelog."""
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in sorted(paths)
        if path.name != "CHANGELOG.md"
    }


def suites() -> dict[str, str]:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@cache
def modules() -> dict[str, str]:
    """Return the sources by name: the package, the examples and the programs of the documentation."""
    folders = [ROOT / "ckpttool", ROOT / "docs", ROOT / "examples"]
    paths = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def all_of(files: dict[str, str], split: Callable[[str, str], Iterable[Text]]) -> list[Text]:
    return [text for file, content in files.items() for text in split(file, content)]


# The rules.


def banned_words(texts: Iterable[Text]) -> set[str]:
    """Find banned words; an entry of ALLOWED excuses one file's use in these words."""
    offenders = set()
    for file, line, text in texts:
        for match in ANY.finditer(text):
            around = " ".join(text[max(0, match.start() - 40) : match.end() + 40].split())
            if not any(file == where and words in around for where, words in ALLOWED):
                better = BETTER[(match.lastindex or 0) - 1]
                offenders.add(f"{file}:{line}: {match[0]!r} in {around!r}; use {better}")
    return offenders


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines, with their lines; attributes where `self` gets them."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
                yield node.lineno, node.attr
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                yield node.lineno, name
            case ast.alias(asname=str(name)):
                yield node.lineno, name


def banned_identifiers(files: dict[str, str]) -> set[str]:
    """Find banned identifiers; an entry of NAMES_ALLOWED excuses one name in one file."""
    return {
        f"{file}:{line}: {name}"
        for file, source in files.items()
        if DEFINED.search(TOKEN.sub("''", source))
        for line, name in defined_names(ast.parse(source))
        if name.strip("_") in NAMES and (file, name) not in NAMES_ALLOWED
    }


def long_headings(texts: Iterable[Text]) -> set[str]:
    return {f"{file}:{line}: {text}" for file, line, text in texts if len(text.split()) > HEADING_WORDS}


def questions(texts: Iterable[Text]) -> set[str]:
    return {f"{file}:{line}: {text.splitlines()[0]}" for file, line, text in texts if QUESTION.match(text)}


def rewritten(files: dict[str, str]) -> dict[str, str]:
    return {file: text for file, text in files.items() if file not in TO_REWRITE}


def suspected(files: dict[str, str]) -> dict[str, str]:
    return {file: text for file, text in rewritten(files).items() if may_offend(text)}


# Each rule with the texts of the project that it applies to, and wrong texts.
CASES: list[tuple[Rule, Callable[[], list[Text]], tuple[str, ...]]] = [
    (
        banned_words,
        lambda: [*all_of(rewritten(pages()), page_texts), *all_of(suspected(modules()), code_texts)],
        (
            "The user is told the size.",
            "nothing tells which fills which",
            "the file said so",
            "The header says nothing.",
            "a fault that nobody has heard of",
            "the option that was asked for",
            "all entries that were seen",
            "the format knows these bytes",
            "the one to whom it belongs",
            "the format is none",
            "has a folder of its own.",
            "The way back is recorded.",
            "what was written is told",
            "The numbers are well.",
            "is there no more",
            "the habit of layout X",
        ),
    ),
    (
        long_headings,
        lambda: all_of(rewritten(pages()), headings),
        ("one two three four five six seven eight nine",),
    ),
    (
        questions,
        lambda: [*all_of(rewritten(pages()), headings), *all_of(rewritten(modules()), docstrings)],
        ("What never happens", "Where files lie", "Which format it is", "Who reads what\n\nMore."),
    ),
]
NAMED = [rule.__name__ for rule, _, _ in CASES]


@pytest.mark.parametrize(("rule", "texts", "wrong"), CASES, ids=NAMED)
def test_the_project_follows_the_rule(
    rule: Rule, texts: Callable[[], list[Text]], wrong: tuple[str, ...]
) -> None:
    assert sorted(rule(texts())) == []


@pytest.mark.parametrize(("rule", "texts", "wrong"), CASES, ids=NAMED)
def test_the_rule_finds_its_wrong_examples(
    rule: Rule, texts: Callable[[], list[Text]], wrong: tuple[str, ...]
) -> None:
    for text in wrong:
        assert rule([Text("wrong.py", 1, text)]), text


@pytest.mark.parametrize(
    "text",
    [
        "None if there is none",
        "a file of its own format",
        "each in its own process",
        "folding, saying `told` or `asked`".replace("saying", "with"),
        "an unknown word; all known words",
        "well known",
        "untold tasks, masked values, basked",
    ],
)
def test_plain_texts_pass(text: str) -> None:
    assert not banned_words(code_texts("right.py", f"# {text}\n"))


def test_texts_are_found_where_people_read_them() -> None:
    source = (
        '"""Told."""\n# told 1\nTOLD = "told 2"\nF = f"a told {TOLD} told 3"\nKEY = {"told": 1}  # `told`\n'
    )
    lines = [text.line for text in code_texts("x.py", source) if "told" in text.text]
    assert sorted(lines) == [2, 3, 4, 4]
    page = "# Told\n`told`\n```text\ntold\n```\nIt told [us](told.md)\n"
    assert [text.line for text in page_texts("x.md", page) if "told" in text.text] == [6]
    assert [text.text for text in headings("x.md", page)] == ["Told"]


@pytest.mark.parametrize(
    "source",
    [
        "x = 1  # it told\n",
        '"""It told."""\n',
        "x = 'it told'\n",
        'x = f"it {y} told so"\n',
        'x = "he was to" \\\n    "ld so"\n',
        'x = ("it " r"to"\n    "ld")\n',
        'x = "so it\\ntold"\n',
        "x = 'a \\' quote', \"told it\"\n",
        "x = \"#\"; y = '''so it was\ntold'''\n",
    ],
)
def test_no_offender_is_overlooked_without_parsing(source: str) -> None:
    assert any(banned_words([text]) for text in code_texts("x.py", source))
    assert may_offend(source)


def test_identifiers_say_what_they_are() -> None:
    assert sorted(banned_identifiers({**modules(), **suites()})) == []


@pytest.mark.parametrize(
    "source",
    [
        "found = 1\n",
        "_made: int = 1\n",
        "a, (held, b) = c\n",
        "[each for each in a]\n",
        "for place in a: pass\n",
        "def given(): pass\n",
        "def f(*, theirs=None): pass\n",
        "lambda ours: 1\n",
        "class _Record:\n    paid: int\n",
        "def f(self):\n    self._taken = 1\n",
        "if (wanted := 1): pass\n",
        "with a as thing: pass\n",
        "import a as told\n",
        "try: pass\nexcept OSError as said: pass\n",
        "match a:\n    case [*asked]: pass\n    case b as seen: pass\n",
    ],
)
def test_banned_identifiers_are_found_where_they_are_defined(source: str) -> None:
    assert banned_identifiers({"x.py": source})
    name = next(name for _, name in defined_names(ast.parse(source)) if name.strip("_") in NAMES)
    assert not banned_identifiers(
        {"x.py": re.sub(rf"\b{name}\b", "tensor", source).replace("asked", "rest").replace("seen", "b")}
    )


def test_uses_of_a_name_are_not_its_definition() -> None:
    assert not banned_identifiers(
        {"x.py": "f(found=1); error.found; a = 'found = 1'  # found = 1\nfrom h import given\n"}
    )


def test_names_need_no_parsing() -> None:
    assert not may_offend('told = heard["#"]  # a list\nsaid("a text")\n')


def test_comments_are_those_of_tokenize() -> None:
    for name in ("test_language.py", "test_gate.py", "conftest.py"):
        source = (ROOT / "tests" / name).read_text(encoding="utf-8")
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        expected = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
        assert list(comments(source)) == expected


def test_allowed_words_pass_in_their_file_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALLOWED, ("a.md", 'the title "Told by'), "a quotation")
    text = 'the title "Told by an idiot"'
    assert not banned_words([Text("a.md", 1, text)])
    assert banned_words([Text("b.md", 1, text)])
    assert banned_words([Text("a.md", 1, "told")])


def test_the_lists_have_no_stale_entries() -> None:
    assert all(ALLOWED.values())
    everything = {**pages(), **modules()}
    assert all(NAMES_ALLOWED.values())
    defined = {
        file: {name for _, name in defined_names(ast.parse({**modules(), **suites()}[file]))}
        for file, _ in NAMES_ALLOWED
    }
    assert not [(file, name) for file, name in NAMES_ALLOWED if name not in defined[file]]
    assert not [(file, words) for file, words in ALLOWED if words not in " ".join(everything[file].split())]


def counts() -> Iterator[tuple[str, int, int]]:
    """Yield each discouraged word with its occurrences in pages and in the texts of the code."""
    read, code = all_of(pages(), page_texts), all_of(modules(), code_texts)
    for words in (*BANNED, *DISCOURAGED):
        pattern = re.compile(rf"\b(?:{words})\b", re.IGNORECASE)
        yield words, *(sum(len(pattern.findall(text.text)) for text in texts) for texts in (read, code))


def main() -> None:
    """Print the counts: words in pages and code, identifiers, pages that break a rule."""
    for words, read, code in counts():
        sys.stdout.write(f"{words[:50]:52}{read:6}{code:6}\n")
    offending = Counter(
        line.partition(":")[0]
        for file, text in pages().items()
        for rule, split in ((banned_words, page_texts), (long_headings, headings), (questions, headings))
        for line in rule(split(file, text))
    )
    for file, number in sorted(offending.items()):
        sys.stdout.write(f"page {file:47}{number:12}\n")
    clean = sorted(file for file in TO_REWRITE if file.endswith(".md") and file not in offending)
    sys.stdout.write(f"no longer TO_REWRITE: {' '.join(clean)}\n")


if __name__ == "__main__":
    main()
