"""The options of `report`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from ckpttool.core.deferred import dataclass
from ckpttool.core.errors import UsageError

# Kinds of files that people expect --out to choose.
_NO_PAGES = (".csv", ".docx", ".json", ".md", ".pdf", ".png", ".svg", ".txt")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """The options of `report`, on the command line and as keywords of the function.

    In parentheses are the placeholders of values, and the names of options of the command line other than the
    field's.

    Report:
        out (FILE, --out -o): File to write. Default: PATH's name and .report.html.
        force (--force): Replace the file if it exists.
        evaluations (FILE, --eval): Results of eval --json or --out; repeatable.
        video (FILE): GIF, PNG or MP4 to show on the page of a run.
        conversion (FILE): Sidecar or convert --json output. Default: PATH's sidecar.
        verification (FILE): Output of verify --json: outputs and layers.
        glob (PATTERN): Only tensors whose path matches (** crosses levels).
        layout (NAME): Layout to read (see ckpttool layouts), or none.

    Play:
        env (ID): Play in this environment, score, and film the best.
        episodes (N): Episodes to play with --env. Default: 10.

    Processes:
        jobs (N, --jobs -j): Read a run in N processes.
        ray (ADDRESS): Read a run on a Ray cluster; local starts --jobs workers.
    """

    out: str | None = None
    force: bool = False
    evaluations: Sequence[str] = ()
    video: str | None = None
    conversion: str | None = None
    verification: str | None = None
    glob: str | None = None
    layout: str | None = None
    env: str | None = None
    episodes: int | None = None
    jobs: int | None = None
    ray: str | None = None

    def __post_init__(self) -> None:
        """Raise UsageError for episodes that nothing plays, and for a file that is no page."""
        if self.episodes is not None and self.env is None:
            raise UsageError("--episodes requires --env", hint="add --env ID, e.g. --env Pendulum-v1")
        if self.out is not None and self.out.lower().endswith(_NO_PAGES):
            hint = f"use --out {shlex.quote(os.path.splitext(self.out)[0] + '.html')}"
            raise UsageError("a report is an HTML page", file=self.out, hint=hint)
