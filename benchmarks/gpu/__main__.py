"""Check and measure everything on one device: `python -m benchmarks.gpu [--device cuda|cpu|cuda:N]`.

It needs NumPy, PyTorch and ckpttool's core; what else is installed is used, and what is not is named. It ends
with status 1 if a check fails or a goal is broken, with 2 if there is no such device.

The result is one JSON object:

    schema     1
    device     kind ("cuda" or "cpu"), name, driver, capability, memory_bytes, cores, threads, processor
    versions   of Python and the libraries; `absent` has what is missing, and why
    date       UTC, when the run began; `seconds` how long it took; `command` what was typed, without paths
    quick      whether sizes were small; `only` the groups that ran, null for all
    checks     the parts that compare results: group, part, status (passed, failed, absent), error, seconds,
               and `checks`: name, status, measured (null: not finite), sense ("at most", "at least"),
               bound, unit, note
    residency  the same for copies between host and device
    speed      parts that measure: `figures`: name, value (null: not measured, see note), unit, settings
               (sizes), beside (ratios to other ways; above 1 this way is faster), note
    goals      name, measured, sense, bound, status (kept, BROKEN, not measured, not applicable)
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.groups import GROUPS, ROOT, TOTAL_S, run_group
from benchmarks.gpu.parts import ABSENT, FAILED, Context

RESULTS = ROOT / "benchmarks" / "results"
# Where a group's records go in the result.
SECTIONS = {**dict.fromkeys(("correctness", "contract", "sanitizer"), "checks"), "residency": "residency"}
ELSEWHERE = "speed"


def main(arguments: Sequence[str] | None = None, groups: Mapping[str, str] = GROUPS) -> int:
    """Run the groups, write the result, print the table."""
    options = _parsed(arguments, groups)
    started, start = datetime.datetime.now(datetime.UTC), time.perf_counter()
    chosen = [name for name in groups if options.only is None or name in options.only or name == "limits"]
    result: dict[str, Any] = {
        "schema": 1,
        "date": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": _command(options),
        "quick": options.quick,
        "only": options.only,
        "device": {"kind": options.device.partition(":")[0], "name": options.device},
        "versions": {"python": platform.python_version()},
        "absent": {},
        **{section: [] for section in ("checks", "residency", "speed")},
    }
    with tempfile.TemporaryDirectory(prefix="ckpttool-gpu-") as folder:
        context = Context(options.device, options.quick, folder)
        for name in chosen:
            for record in run_group(groups[name], context, start + options.seconds):
                _say(name, record, time.perf_counter() - start)
                if "facts" in record:
                    result |= record.pop("facts")
                if record["part"] == "device" and record["status"] == ABSENT:
                    sys.stderr.write(f"{record['error']}\n")
                    return 2
                result[SECTIONS.get(name, ELSEWHERE)].append({"group": name, **record})
    result |= {"goals": report.goals(result), "seconds": round(time.perf_counter() - start, 1)}
    sys.stdout.write(f"\n{report.table(result)}\n")
    _write(result, options)
    return status(result)


def status(result: Mapping[str, Any]) -> int:
    """Return 1 if a part failed or a goal is broken."""
    failed = any(record["status"] == FAILED for record in report.records(result))
    return int(failed or any(goal["status"] == report.BROKEN for goal in result["goals"]))


def _parsed(arguments: Sequence[str] | None, groups: Mapping[str, str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Check and measure everything on one device."
    )
    parser.add_argument("--device", default="cuda", type=_device, help="cuda, cuda:N or cpu [default: cuda]")
    parser.add_argument("--out", metavar="DIR", help="folder of the result [default: benchmarks/results]")
    parser.add_argument(
        "--only", action="append", choices=list(groups), help="run this group alone; may be repeated"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: whether everything runs")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_S, help="time limit of the whole run [default: %(default)g]"
    )
    return parser.parse_args(arguments)


def _device(name: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name):
        raise argparse.ArgumentTypeError(f"unknown device {name!r}; choose cpu, cuda or cuda:N")
    return name


def _command(options: argparse.Namespace) -> str:
    words = ["python -m benchmarks.gpu", "--device", options.device]
    words += [word for name in options.only or () for word in ("--only", name)]
    return " ".join([*words, *(["--quick"] if options.quick else [])])


def _say(group: str, record: Mapping[str, Any], elapsed_s: float) -> None:
    reason = f": {record['error']}" if record["error"] else ""
    outcome = f"{record['status']} ({record['seconds']:.1f} s)"
    sys.stdout.write(f"[{elapsed_s:5.0f} s] {group}: {record['part']}: {outcome}{reason}\n")
    sys.stdout.flush()


def _write(result: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Write the result whole or not at all; a partial run replaces no result unless a folder is named."""
    if options.out is None and not report.whole(result):
        sys.stdout.write("a part of a run: not kept (--out DIR keeps it)\n")
        return
    folder = Path(options.out) if options.out is not None else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{report.slug(result)}.json"
    new = target.with_name(f".{target.name}.{os.getpid()}")
    new.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    new.replace(target)
    sys.stdout.write(f"result: {target}\n")


if __name__ == "__main__":
    sys.exit(main())
