"""List what users could do at an older revision and can no longer: options, JSON keys, public names.

    python -m benchmarks.capabilities REVISION

The evidence are `docs/cli.md` (options of every command), `docs/json.md` and the JSON Schemas (keys),
`docs/api.md` (public names and their arguments), `docs/layouts.md` and the tables of README. Also prints
the number of lines and classes per package. Exit status 1 if something went away.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Lines that name a capability, by page: each match together with its section is one capability.
PATTERNS = {
    "docs/cli.md": r"^  (?:-\w, )?(--[\w-]+)|^  ([a-z]+) {2,}\S",
    "docs/json.md": r"^\| (`[^|]+`) \|",
    "docs/api.md": r"^    (\*{0,2}\w+)[=,:]|^### (\w+)",
    "docs/layouts.md": r"^\| (`?[^|]+`?) \|",
    "README.md": r"^\| ([^|]+) \|",
    "ckpttool/schemas/": r'^\s*"(\w+)": \{',
}
SECTION = re.compile(r"^##+ (.+)")


def run_git(*arguments: str) -> str:
    """Return what git prints; nothing if it fails, e.g. for a file that the revision lacks."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout


def read(revision: str | None, page: str) -> str:
    """Return the text of a file at a revision, or now; of a folder ("name/") all JSON files in one text."""
    if page.endswith("/"):
        names = sorted(path.name for path in (ROOT / page).glob("*.json"))
        return "\n".join(f"## {name}\n{read(revision, page + name)}" for name in names)
    if revision is None:
        path = ROOT / page
        return path.read_text() if path.exists() else ""
    return run_git("show", f"{revision}:{page}")


def list_capabilities(text: str, pattern: str) -> set[tuple[str, str]]:
    """Return (section, name) of every capability that a page lists."""
    section, capabilities = "", set()
    for line in text.splitlines():
        if title := SECTION.match(line):
            section = title[1]
        if match := re.match(pattern, line):
            names = next(group for group in match.groups() if group)
            capabilities |= {(section, name) for name in re.findall(r"`([^`]+)`", names) or [names.strip()]}
    return capabilities


def count_lines(revision: str | None) -> dict[str, Counter[str]]:
    """Return lines, files and classes of every package under ckpttool/."""
    if revision is None:
        names = [str(path.relative_to(ROOT)) for path in ROOT.glob("ckpttool/**/*.py")]
    else:
        listing = run_git("ls-tree", "-r", "--name-only", revision, "ckpttool")
        names = [name for name in listing.splitlines() if name.endswith(".py")]
    counts: dict[str, Counter[str]] = {}
    for name in names:
        text, parts = read(revision, name), name.split("/")
        package = parts[1] if len(parts) > 2 else "."
        count = counts.setdefault(package, Counter())
        count.update(lines=text.count("\n"), files=1, classes=len(re.findall(r"(?m)^\s*class \w", text)))
    return counts


def main(revision: str) -> int:
    """Print the capabilities that went away since `revision` and the sizes before and after."""
    lost = 0
    for page, pattern in PATTERNS.items():
        before, after = (list_capabilities(read(at, page), pattern) for at in (revision, None))
        print(f"{page}: {len(before)} before, {len(after)} now")
        for section, name in sorted(before - after):
            lost += 1
            print(f"  gone: {section}: {name}")
    before_sizes, after_sizes = count_lines(revision), count_lines(None)
    print(f"{'package':12} {'lines':>8} {'now':>8} {'files':>6} {'now':>6} {'classes':>8} {'now':>6}")
    totals = (Counter(), Counter())
    for package in sorted(before_sizes | after_sizes):
        sizes = before_sizes.get(package, Counter()), after_sizes.get(package, Counter())
        for total, size in zip(totals, sizes, strict=True):
            total.update(size)
        print_sizes(package, *sizes)
    print_sizes("sum", *totals)
    return 1 if lost else 0


def print_sizes(package: str, before: Counter[str], after: Counter[str]) -> None:
    """Print one row of the table of sizes."""
    print(
        f"{package:12} {before['lines']:8,} {after['lines']:8,} {before['files']:6} {after['files']:6}"
        f" {before['classes']:8,} {after['classes']:6,}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
