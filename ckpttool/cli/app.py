"""The commands: each parses its options, calls one operation, prints its record and returns its status."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from ckpttool import limits
from ckpttool.cli import (
    browsing,
    checking,
    completing,
    describing,
    evaluating,
    measuring,
    next_steps,
    output,
    reporting,
)
from ckpttool.cli.options import (
    AsJson,
    Glob,
    InputShape,
    LayoutOption,
    LikeArgs,
    LikePython,
    PathArgument,
    Quiet,
    like_of,
)
from ckpttool.cli.progress import fetching, progress
from ckpttool.errors import CkpttoolError, UsageError
from ckpttool.version import __version__

# However it was started: usage lines, and the variable that a shell's completion sets, are named after it.
_NAME = "ckpttool"


class _Ended(SystemExit):
    """A signal asks the program to end: an exception, so that temporary files are removed on the way out."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)
        self.how = "interrupted" if signum == signal.SIGINT else f"ended by {signal.Signals(signum).name}"


class _Commands(typer.core.TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        """Run a command; Ctrl-C that it leaves to us is ours, and not typer's, to tell of."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise _Ended(signal.SIGINT) from None
        except Exception as error:
            # A lock of `threading` that is interrupted while it is taken says that it was never taken.
            before = error.__context__
            while before is not None and not isinstance(before, KeyboardInterrupt | _Ended):
                before = before.__context__
            if before is None:
                raise
            raise before if isinstance(before, _Ended) else _Ended(signal.SIGINT) from None


app = typer.Typer(
    cls=_Commands,
    name=_NAME,
    no_args_is_help=True,
    help="See, convert, prove and play reinforcement-learning checkpoints, without the program that "
    "wrote them. Nothing in a checkpoint is ever executed.",
    epilog="Start with: ckpttool inspect PATH",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        output.write(f"ckpttool {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # its callback does it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    limit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=N",
            help="Let files ask for more or less than the default (see ckpttool limits); repeatable.",
        ),
    ] = None,
) -> None:
    if limit:
        context.with_resource(limits.chosen(limit))
    context.with_resource(fetching(quiet=not {"-q", "--quiet"}.isdisjoint(sys.argv)))


@app.command(
    epilog="Examples: ckpttool inspect runs/ckpt-15000 --glob 'actor/**' --depth 2; "
    "ckpttool inspect agent.pt --graph agent.svg"
)
def inspect(
    path: PathArgument,
    glob: Glob = None,
    depth: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Fold the modules at level N into one line each.")
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="ORDER",
            help="file, size or name, in every module.",
            autocompletion=completing.among("file", "size", "name"),
        ),
    ] = "file",
    keys: Annotated[bool, typer.Option("--keys", help="Show the native keys as well.")] = False,
    aliases: Annotated[
        bool, typer.Option("--aliases", help="Show every other path of each tensor as well.")
    ] = False,
    names: Annotated[
        bool, typer.Option("--names", help="Show what loading it would import and call, with verdicts.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 if loading it asks for more than plain data.")
    ] = False,
    graph: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Draw the modules instead, into a new .svg, .html or .dot file."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the drawing if it exists.")] = False,
    layout: LayoutOption = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Show what is inside: module tree, shapes, types, roles, totals, layout.

    Of a folder of checkpoints, show these, and what is inside the latest one.
    """
    import gc

    from ckpttool.cli import inspection

    # A listing makes many objects and no rubbish: collecting would cost a fifth of its time.
    gc.disable()
    view = inspection.view(keys=keys, aliases=aliases, depth=depth, sort=sort, names=names, quiet=quiet)
    found = inspection.look(path, glob, layout)
    status = 1 if strict and not inspection.is_plain(found) else 0
    drawn = inspection.draw(found, graph, depth, force=force) if graph is not None else None
    if as_json:
        output.write(output.document({**found.document(), **({"graph": drawn} if drawn else {})}))
    else:
        output.write(inspection.text(found, view, drawn))
        next_steps.tell(next_steps.after_inspect, found, quiet=quiet or drawn is not None)
    return status


@app.command(
    epilog="Examples: ckpttool digest agent.pt --json > saved.json; "
    "ckpttool digest agent.pt --check saved.json"
)
def digest(
    path: PathArgument,
    check: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Compare with a digest saved by --json, or with a sidecar."),
    ] = None,
    glob: Glob = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Print the sha256 of every tensor and of the whole; verify the format's checksums."""
    from ckpttool.ops import digest as op

    with progress("digest", quiet=quiet or as_json) as moving:
        found = op.digest(path, moving)
    compared = op.compare(found, check) if check is not None else None
    found = op.shown(found, glob)
    if as_json:
        output.write(output.document(_digest_document(found, compared)))
    else:
        from ckpttool.cli import tables

        output.write(tables.digest(found, compared, quiet=quiet))
        next_steps.tell(next_steps.after_digest, path, quiet=quiet)
    return 0 if compared is None or compared.equal else 1


def _digest_document(found: Any, compared: Any) -> dict[str, Any]:
    whole: dict[str, Any] = found.document()
    if compared is not None:
        whole["check"] = {
            "equal": compared.equal,
            "different": list(compared.different),
            "only_here": list(compared.only_here),
            "only_saved": list(compared.only_saved),
        }
    return whole


@app.command(
    epilog="Examples: ckpttool convert runs/ckpt-15000 agent.pt; ckpttool convert agent.pt ckpt-1 --to tf"
)
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="What to convert.", show_default=False)],
    target: Annotated[
        str,
        typer.Argument(
            metavar="DST", help="The file to write; for tf, tf1 and fujimoto the prefix.", show_default=False
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="What to write: torch, tf (TensorFlow objects), tf1 (TensorFlow variables by name), keras "
            "(a weights file), safetensors, npz, onnx (a policy that runs), or whose agent it is to be: "
            "fujimoto (the TD3 authors' files), cleanrl, sb3, sb2, tf2rl, tianshou, spinningup, "
            "d3rlpy (.d3), d3rlpy_model (.pt), rsl_rl, fasttd3, skrl, elegantrl, tf_agents, acme, "
            "keras_rl, rllib. Guessed from DST's suffix: .pt, .pth, .index, .h5, .cleanrl_model, "
            ".safetensors, .npz or .onnx.",
            autocompletion=completing.targets,
        ),
    ] = None,
    layout: LayoutOption = None,
    part: Annotated[
        str | None, typer.Option(metavar="PATH", help="Convert only what lies below this path in SRC.")
    ] = None,
    strip: Annotated[
        bool, typer.Option("--strip", help="Remove what wrappers put into names: module., _orig_mod., ...")
    ] = False,
    restore: Annotated[
        bool, typer.Option("--restore", help="Put back what --strip removed, as SRC's sidecar says it.")
    ] = False,
    fold_weight_norm: Annotated[
        bool, typer.Option("--fold-weight-norm", help="Make one weight of the two tensors of weight norm.")
    ] = False,
    rules: Annotated[
        str | None,
        typer.Option("--map", metavar="FILE", help="Your own rules, a TOML file: see docs/mapping.md."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=KIND",
            help="What a layer of several possible kinds is: 'enc/**=embedding', 'attn=attention:8' (heads).",
        ),
    ] = None,
    flatten: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=H,W,C",
            help="The shape of what a dense layer takes flattened: 'dense1=7,7,64', or 'dense1=no'.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="For onnx: which network, such as critic/q1. Default: actor."),
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="For onnx: the environment whose action bounds count.",
            autocompletion=completing.environments,
        ),
    ] = None,
    l2: Annotated[
        list[str] | None,
        typer.Option(
            "--l2",
            metavar="PATTERN=FACTOR",
            help="The weights that a Keras program penalised with l2(FACTOR): 'critic/**/kernel=0.01'. Torch "
            "gets parameter groups with that weight decay.",
        ),
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME/SETTING=VALUE",
            help="A setting of an optimizer that no file tells: critic_optimizer/momentum=0.9.",
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Fill your own model, which this class or function makes: 'package.module:factory'. Your "
            "code runs, in a process of its own, with the current folder on the path.",
        ),
    ] = None,
    like_args: LikeArgs = None,
    input_shape: InputShape = None,
    match: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE=TARGET", help="For --like: these two layers or modules belong together."
        ),
    ] = None,
    python: LikePython = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the mapping, write nothing.")] = False,
    glob: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="For --dry-run: show only moves from or to paths that match."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace DST if it exists.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Write even if something is unmapped.")
    ] = False,
    no_sync: Annotated[
        bool, typer.Option("--no-sync", help="Do not flush to disk before the rename: faster.")
    ] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not compare an agent's networks with what was written.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Move a checkpoint to another framework: mapped by rule, written whole or not at all, read back."""
    import gc

    # Modules and plans are many objects and no rubbish: collecting took a seventh of a small conversion.
    gc.disable()
    from ckpttool.ops import convert as op

    if glob is not None and not dry_run:
        raise UsageError("--glob is for --dry-run alone", hint="--part PATH converts what lies below a path")
    with progress("convert", quiet=quiet or as_json) as moving:
        done = op.convert(
            source,
            target,
            to=to,
            layout=layout,
            part=part,
            strip=strip,
            restore=restore,
            fold_weight_norm=fold_weight_norm,
            l2=l2 or (),
            optimizer=optimizer or (),
            rules=rules,
            kinds=kind or (),
            flatten=flatten or (),
            network=network,
            env=env,
            like=like_of(like, like_args, input_shape, python),
            match=match or (),
            allow_missing=allow_missing,
            dry_run=dry_run,
            force=force,
            sync=not no_sync,
            verify=not no_verify,
            progress=moving,
        )
    done = replace(done, report=done.report.shown(glob))
    if as_json:
        output.write(output.document(done.document()))
    else:
        from ckpttool.cli import tables

        output.write(tables.conversion(done, quiet=quiet, whole=dry_run))
        next_steps.tell(next_steps.after_convert, done, quiet=quiet)
    return 0 if done.within and (done.report.complete or allow_missing) else 1


@app.command(epilog="Example: ckpttool verify runs/ckpt-15000 agent.pt")
def verify(
    first: Annotated[str, typer.Argument(metavar="A", help="The source checkpoint.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="B", help="The converted one.", show_default=False)],
    tolerance: Annotated[
        float | None,
        typer.Option(
            metavar="ERROR",
            help="Largest error of B against float64, relative to the output's scale. "
            "Default: 2x the error of A's own framework, or rounding at the largest sum.",
        ),
    ] = None,
    train_step: Annotated[
        bool,
        typer.Option("--train-step", help="Also train both on, and compare how far the weights moved."),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="How many updates for --train-step.")] = 100,
    layout: LayoutOption = None,
    python: Annotated[
        str | None, typer.Option(metavar="INTERPRETER", help="The Python that runs the frameworks.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Run both checkpoints of one agent on fixed observations, each in its own framework's process."""
    from ckpttool.ops import verify as op

    with progress("verify", quiet=quiet or as_json) as moving:
        found = op.verify(
            first,
            second,
            tolerance=tolerance,
            steps=steps if train_step else None,
            layout=layout,
            python=python,
            progress=moving,
        )
    if as_json:
        output.write(output.document(found.document()))
    else:
        from ckpttool.cli import tables

        output.write(tables.parity(found, quiet=quiet))
        next_steps.tell(next_steps.after_verify, second, found, quiet=quiet)
    return 0 if found.within else 1


app.command("eval", epilog=evaluating.EXAMPLES)(evaluating.evaluate)
app.command(epilog="Examples: ckpttool stats agent.pt; ckpttool stats runs/ckpt-15000 --depth 1")(
    measuring.stats
)
app.command(epilog=reporting.EXAMPLES)(reporting.report)
app.command(epilog="Example: ckpttool doctor downloaded.pt --env HalfCheetah-v5")(measuring.doctor)
app.command(
    epilog="Examples: ckpttool check runs/; ckpttool check *.pt --shapes shapes.json; "
    "ckpttool check downloaded.pt --strict --no-numbers"
)(checking.check)
app.command(epilog="Example: ckpttool textconv agent.pt")(checking.textconv)
app.command(epilog=browsing.EXAMPLES)(browsing.browse)
app.command(epilog="Examples: ckpttool diff old.pt new.pt; ckpttool diff runs/ckpt-15000 agent.pt --json")(
    measuring.diff
)


@app.command(epilog="Example: ckpttool formats --json")
def formats(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List the formats: which can be read, which written."""
    return _listing("formats", as_json=as_json)


@app.command(epilog="Example: ckpttool layouts")
def layouts(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List the agent layouts: which are recognised, which can be written."""
    return _listing("layouts", as_json=as_json)


@app.command(epilog="Example: ckpttool backends")
def backends(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List the backends that play agents, and the extra that a missing one needs."""
    return _listing("backends", as_json=as_json)


@app.command("limits", epilog="Example: ckpttool --limit unpacked_ratio=1000 inspect old.npz")
def show_limits(as_json: AsJson = False, quiet: Quiet = False) -> int:  # noqa: ARG001
    """List what a file may ask of its reader, by the names that --limit takes."""
    if as_json:
        output.write(output.document({"limits": limits.document()}))
    else:
        from ckpttool.cli import tables

        output.write(tables.limits(limits.document()))
    return 0


app.command(epilog=describing.EXAMPLES)(describing.schema)


def _listing(kind: Any, *, as_json: bool) -> int:
    from ckpttool.ops.listing import listing

    found = listing(kind)
    if as_json:
        output.write(output.document({kind: [row.document() for row in found]}))
    else:
        from ckpttool.cli import tables

        output.write(tables.listing(kind, found))
    return 0


def _parser() -> Any:
    """Return the parser of the command that is named first, of all commands where that is none.

    Making that of all takes as long as importing numpy, and every run would make it.
    """
    every = app.registered_commands
    word = sys.argv[1] if len(sys.argv) > 1 else None
    named = [each for each in every if word == (each.name or getattr(each.callback, "__name__", None))]
    try:
        app.registered_commands = named or every
        return typer.main.get_command(app)
    finally:
        app.registered_commands = every


def run() -> None:
    """Run the command line; every way out of the program passes here."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        # What a parent told us to ignore, as nohup does, is not ours to take.
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _terminated)
    # TensorFlow's start-up chatter is not an answer to anything that was asked here.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    as_json = "--json" in sys.argv
    try:
        status = _parser()(prog_name=_NAME, standalone_mode=False)
    except CkpttoolError as error:
        output.fail(error, as_json=as_json)
        status = 2
    except BrokenPipeError:
        output.silence_stdout()
        status = 0
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except _Ended as ended:
        output.ended(ended.how)
        raise
    except Exception as error:  # noqa: BLE001  # the last line of defence: people never see a traceback
        status = _other(error, as_json=as_json)
    sys.exit(status or 0)


def _terminated(signum: int, frame: object) -> None:  # noqa: ARG001
    # It has been heard: a second one would stop what puts things in order.
    signal.signal(signum, signal.SIG_IGN)
    raise _Ended(signum)


def _other(error: Exception, *, as_json: bool) -> int:
    # typer's own usage errors carry their text and status; their class moved between its versions.
    message = getattr(error, "format_message", None)
    if callable(message):
        text = str(message()).strip()
        if type(error).__name__ != "NoArgsIsHelpError":
            output.fail(_misspelt(error, text), as_json=as_json)
        else:
            output.write(text)
        return 2
    if os.environ.get("CKPTTOOL_TRACEBACK"):
        raise error
    kind = type(error).__name__
    unexpected = CkpttoolError(
        f"an unexpected {kind}: {error}",
        hint="this is a fault of ckpttool; CKPTTOOL_TRACEBACK=1 shows where it is",
    )
    output.fail(unexpected, as_json=as_json)
    return 2


def _misspelt(error: Any, text: str) -> UsageError:
    """Return our sentence for a usage error of typer's, with what was probably meant."""
    context = getattr(error, "ctx", None)
    command = _NAME if context is None or context.parent is None else f"{_NAME} {context.info_name}"
    near = getattr(error, "possibilities", None)
    if getattr(error, "option_name", None) and near is not None:
        meant = f"did you mean {near[0]}; " if near else ""
        return UsageError(f"there is no option {error.option_name}", hint=f"{meant}{command} --help")
    word = next((each for each in sys.argv[1:] if not each.startswith("-")), "")
    if f"No such command {word!r}" in text and os.path.exists(word):
        # A path alone is somebody who wants to see it.
        return UsageError(
            f"there is no command {word!r}", hint=f"did you mean ckpttool inspect {shlex.quote(word)}"
        )
    return UsageError(text.rstrip("."), hint=f"{command} --help")
