"""The process in which parts of one group run: `python -m benchmarks.gpu.child MODULE`.

Without options it runs all parts of the module on the CPU and prints their records. `--events` gives a file
descriptor that gets a line of JSON when a part begins and when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.gpu.groups import parts_of
from benchmarks.gpu.parts import ABSENT, FAILED, Context, run_part


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; stop after the first that raised, whose process may be unusable."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.child")
    parser.add_argument("module")
    parser.add_argument("--parts", type=json.loads, default=None)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--events", type=int, default=None)
    options = parser.parse_args(arguments)
    if options.events is not None:
        # What a part starts must not keep the pipe open after this process has died.
        os.set_inheritable(options.events, False)
    parts = [part for part in parts_of(options.module) if options.parts is None or part.name in options.parts]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        context = Context(options.device, options.quick, options.folder or folder)
        for part in parts:
            _send(options.events, {"part": part.name})
            record = run_part(part, context)
            _send(options.events, {"part": part.name, "record": record})
            failed |= record["status"] == FAILED
            if record["error"] is not None and record["status"] != ABSENT:
                break
    return int(failed) if options.events is None else 0


def _send(events: int | None, document: object) -> None:
    line = json.dumps(document) + "\n"
    if events is None:
        sys.stdout.write(line)
        return
    data = line.encode()
    while data:
        data = data[os.write(events, data) :]


if __name__ == "__main__":
    # A library's thread that does not end must not keep a finished child.
    _status = main()
    sys.stdout.flush()
    os._exit(_status)
