"""Options in panels: what a dataclass of options makes of a command."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from ckpttool.cli.app import COMMANDS, CommandEntry
from ckpttool.cli.app import app as program
from ckpttool.cli.panels import given_options, takes_panels
from ckpttool.conversion.options import ConversionOptions
from ckpttool.core import UsageError
from ckpttool.verification.options import VerificationOptions
from docs.faces import ENTRY
from tests.conftest import ROOT, in_process


@dataclass(frozen=True)
class SpeedOptions:
    """How fast.

    Speed:
        steps (N): Step count.
            Longer runs take more steps.
        engine (NAME, --engine -e, steam|diesel):
            What drives.
        sync (--sync/--no-sync): Wait for the disk.
    """

    steps: int = 10
    engine: str = "steam"
    sync: bool = True


@dataclass(frozen=True)
class NameOptions:
    """Which names.

    Names:
        strip (--strip): Strip prefixes.
    """

    strip: bool = False
    match: Annotated[list[str], typer.Option(metavar="A=B", help="Pair two names.")] = field(
        default_factory=list
    )

    def __post_init__(self) -> None:
        if self.strip and self.match:
            raise UsageError("--strip and --match exclude each other")


Call = tuple[str, SpeedOptions, NameOptions, bool]


@pytest.fixture
def calls() -> list[Call]:
    return []


@pytest.fixture
def app(calls: list[Call]) -> typer.Typer:
    def train(
        path: Annotated[str, typer.Argument(metavar="PATH")],
        speed: SpeedOptions,
        names: NameOptions,
        quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print less.")] = False,
    ) -> int:
        """Train a model."""
        calls.append((path, speed, names, quiet))
        return 0

    typer_app = typer.Typer()
    typer_app.command()(takes_panels(train))
    return typer_app


@pytest.fixture
def run(app: typer.Typer) -> Callable[..., Any]:
    def invoke(*words: str) -> Any:
        return CliRunner().invoke(app, words, env={"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"})

    return invoke


@pytest.mark.parametrize(
    "panels",
    [
        (SpeedOptions(), NameOptions()),
        (SpeedOptions(steps=3, engine="diesel", sync=False), NameOptions(match=["a=b", "c=-d"])),
        (SpeedOptions(), NameOptions(strip=True)),
    ],
    ids=["defaults", "values", "flag"],
)
def test_the_options_of_a_panel_give_it_again(
    panels: tuple[SpeedOptions, NameOptions], run: Callable[..., Any], calls: list[Call]
) -> None:
    words = [word for panel in panels for word in given_options(panel)]
    assert bool(words) == (panels != (SpeedOptions(), NameOptions()))
    run("a.pt", *words)
    assert calls == [("a.pt", *panels, False)]


def test_without_options_a_panel_has_its_defaults(run: Callable[..., Any], calls: list[Call]) -> None:
    run("a.pt")
    assert calls == [("a.pt", SpeedOptions(), NameOptions(), False)]


def test_options_reach_the_field_of_their_name(run: Callable[..., Any], calls: list[Call]) -> None:
    run("a.pt", "--steps", "3", "-e", "diesel", "--no-sync", "--match", "a=b", "--match", "c=d", "-q")
    assert calls == [("a.pt", SpeedOptions(3, "diesel", False), NameOptions(False, ["a=b", "c=d"]), True)]


def test_a_list_is_not_shared_by_calls(run: Callable[..., Any], calls: list[Call]) -> None:
    run("a.pt")
    calls[0][2].match.append("a=b")
    run("a.pt")
    assert calls[1][2].match == []


def test_help_shows_each_panel_under_its_title(run: Callable[..., Any]) -> None:
    text = run("--help").output
    assert "Train a model." in text
    speed, names = text.index(" Speed "), text.index(" Names ")
    assert text.index(" Options ") < speed < text.index("--steps") < names < text.index("--match")
    assert "Step count." in text
    assert "[default: 10]" in text


def test_help_ends_where_the_explanation_for_the_reference_begins(run: Callable[..., Any]) -> None:
    assert "Longer" not in run("--help").output


@pytest.mark.parametrize("record", [ConversionOptions, VerificationOptions])
def test_the_reference_shows_the_whole_explanation_of_options(record: type) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8").replace("\\", "")
    text = "\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in record.__mro__[:-1])
    meanings = {name: meaning.split() for name, _, meaning in ENTRY.findall(text)}
    assert {item.name for item in fields(record)} == {*meanings}
    assert sum(" ".join(words).count(". ") for words in meanings.values()) > 5
    assert not [name for name, words in meanings.items() if " ".join(words).rstrip(".") not in page]


@pytest.mark.parametrize("words", [("--steps", "0"), ("--steps", "many"), ("--sync=1",), ("--unknown",)])
def test_a_wrong_option_is_a_usage_error(
    run: Callable[..., Any], calls: list[Call], words: tuple[str, ...]
) -> None:
    assert run("a.pt", *words).exit_code == 2
    assert not calls


def test_options_that_exclude_each_other(run: Callable[..., Any], calls: list[Call]) -> None:
    assert isinstance(run("a.pt", "--strip", "--match", "a=b").exception, UsageError)
    assert not calls


def test_words_are_completed(app: typer.Typer) -> None:
    done = CliRunner().invoke(
        app,
        env={"_TRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "train a.pt -e d", "COMP_CWORD": "3"},
        prog_name="train",
    )
    assert done.output.split() == ["diesel"]


def test_two_panels_with_one_option_are_refused() -> None:
    def command(first: SpeedOptions, second: SpeedOptions) -> int:
        return 0

    with pytest.raises(ValueError, match="duplicate"):
        takes_panels(command)


# --- The options of the program's own commands -----------------------------------------------------------

_MANY_OPTIONS = 10
_HELP_WIDTH = 60
_COMMANDS = [pytest.param(command, id=command.name) for command in COMMANDS]


def options(command: CommandEntry) -> list[Any]:
    return [param for param in command.parser().params if param.param_type_name == "option"]


@pytest.mark.parametrize("command", _COMMANDS)
def test_a_command_with_many_options_shows_them_in_panels(command: CommandEntry) -> None:
    titles = [option.rich_help_panel for option in options(command)]
    if len(titles) > _MANY_OPTIONS:
        # What every command has stays under "Options": --json, --quiet, and one or two more.
        assert sum(title is None for title in titles) <= 4, titles
        assert len(set(titles)) > 2


@pytest.mark.parametrize("command", _COMMANDS)
def test_help_of_an_option_is_a_short_phrase(command: CommandEntry) -> None:
    assert len(command.summary) <= _HELP_WIDTH
    for param in command.parser().params:
        assert param.help, param.name
        assert len(param.help) <= _HELP_WIDTH, param.help


def test_help_of_the_options_of_the_program_is_a_short_phrase() -> None:
    group = typer.main.get_command(program)
    params = group.get_params(typer.Context(group))
    assert {param.name for param in params} >= {"version", "limit", "show_completion"}
    assert not [param.name for param in params if not param.help or len(param.help) > _HELP_WIDTH]


def test_options_without_docstrings_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -OO` leaves them out: options that silently did nothing would be worse."""
    monkeypatch.setattr(SpeedOptions, "__doc__", None)

    def command(speed: SpeedOptions) -> int:
        return 0

    with pytest.raises(UsageError):
        takes_panels(command)


def test_functions_of_the_command_line_are_small() -> None:
    for file in (ROOT / "ckpttool" / "cli").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 80, (file.name, node.name)
                args = node.args
                assert len([*args.posonlyargs, *args.args, *args.kwonlyargs]) <= 8, (file.name, node.name)


def test_only_the_command_that_is_chosen_is_imported() -> None:
    program = (
        "import sys\nfrom ckpttool.cli import main\nsys.argv = ['ckpttool', *sys.argv[1:]]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*(name for name in sys.modules if name.startswith('ckpttool.')), file=sys.stderr)"
    )

    def imported(*words: str) -> set[str]:
        done = subprocess.run(
            [sys.executable, "-c", program, *words], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return set(done.stderr.split())

    own = {f"ckpttool.cli{ending}" for ending in ("", ".app", ".console", ".panels", ".progress", ".styles")}
    for words in (("--version",), ("--help",)):
        modules = imported(*words)
        assert {name for name in modules if not name.startswith(("ckpttool.core", "ckpttool.version"))} == own
    modules = {name for name in imported("eval", "--help") if name.startswith("ckpttool.cli")}
    chosen = ("columns", "evaluate", "parameters", "tables")
    assert modules == own | {f"ckpttool.cli.{name}" for name in chosen}


def test_plain_help_has_the_same_titles() -> None:
    ran = in_process("eval", "--help", env={"TERM": "dumb", "COLUMNS": "80"})
    text = ran.out
    (command,) = (command for command in COMMANDS if command.name == "eval")
    parser = command.parser()
    with typer._click.core.Context(parser, info_name="eval") as context:
        formatter = context.make_formatter()
        parser.format_options(context, formatter)
    plain = formatter.getvalue()
    for title in ("Arguments", "Options", "Environment", "Agent", "Training runs", "Output"):
        assert f"{title}:\n" in plain
        assert f" {title} " in text
