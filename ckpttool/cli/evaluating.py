"""`eval`: the command, its options and what it prints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckpttool.cli import output
from ckpttool.cli.options import AsJson, LayoutOption, Quiet
from ckpttool.cli.progress import progress
from ckpttool.errors import CkpttoolError

EXAMPLES = "Example: ckpttool eval agent.pt --env Pendulum-v1 --episodes 100"


def evaluate(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Checkpoints to play.", show_default=False)
    ],
    env: Annotated[
        str | None, typer.Option(metavar="ID", help="Gymnasium environment. Default: the sidecar's.")
    ] = None,
    episodes: Annotated[int, typer.Option(min=1, metavar="N", help="Episodes to play.")] = 10,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, metavar="N", help="Episode i is reset with seed + i.")
    ] = 1000,
    num_envs: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Environments at once. Default: up to 16.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:N or auto.")] = "cpu",
    backend: Annotated[str, typer.Option(metavar="NAME", help="numpy, torch or tensorflow.")] = "numpy",
    network: Annotated[str, typer.Option(metavar="NAME", help="actor or actor_target.")] = "actor",
    layout: LayoutOption = None,
    min_return: Annotated[
        float | None, typer.Option(metavar="RETURN", help="Exit with 1 if a mean return is below this.")
    ] = None,
    out: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the JSON document to a new file as well.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> int:
    """Restore agents and play them: fixed seeds, deterministic policy, undiscounted returns."""
    from ckpttool.ops import evaluate as op
    from ckpttool.ops.evaluation import Protocol

    if out is not None:
        op.require_new_result(out)  # before hours of playing, not after
    protocol = Protocol(episodes, seed, num_envs, device, backend, network)
    found, failure = _played(paths, env, protocol, layout, quiet=quiet or as_json)
    if not found and failure is not None:
        raise failure
    documents = [each.document() for each in found]
    content = documents[0] if len(paths) == 1 else {"evaluations": documents}
    if out is not None:
        op.save(out, output.document(content))
    if as_json:
        output.write(output.document(content))
    else:
        from ckpttool.cli import scores

        output.write(scores.evaluations(found, quiet=quiet))
    if failure is not None:
        output.fail(failure, as_json=False)
        return 2
    if any(each.rollout.interrupted for each in found):
        return 130
    return 1 if min_return is not None and any(e.statistics.mean < min_return for e in found) else 0


def _played(
    paths: list[str], env: str | None, protocol: Any, layout: str | None, *, quiet: bool
) -> tuple[list[Any], CkpttoolError | None]:
    """Play one checkpoint after the other; what is finished is kept when one fails or Ctrl-C comes."""
    from ckpttool.ops import evaluate as op

    found: list[Any] = []
    with progress("eval", quiet=quiet) as moving:
        for path in paths:
            try:
                found.append(op.evaluate(path, env, protocol, layout=layout, progress=moving))
            except CkpttoolError as error:
                return found, error
            except KeyboardInterrupt:
                if not found:
                    raise
                return found, CkpttoolError("interrupted", file=path)
            if found[-1].rollout.interrupted:
                break
    return found, None
