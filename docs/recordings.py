"""Make the pictures of README and pages from real runs: `python -m docs.recordings [NAME ...]`.

Names are those of the files in docs/images, without the suffix. All need the extras of `make demo`; the
screenshots need chromium and chromedriver.
"""

from __future__ import annotations

import io
import json
import os
import pty
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from xml.sax.saxutils import escape

from docs.blocks import ROOT

if TYPE_CHECKING:
    from PIL.Image import Image
    from rich.segment import Segment

IMAGES = ROOT / "docs" / "images"
TF_SAMPLE = "sample_ckpts/td3_pendulum_tf/ckpt-15000"
TORCH_SAMPLE = "sample_ckpts/td3_pendulum_torch/ckpt-15000.pt"
TF_RUN = "sample_ckpts/td3_pendulum_tf"


# Commands.


def environment(**more: str) -> dict[str, str]:
    """Return the environment of the commands: the same on all machines."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    fixed = {"PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", "COLUMNS": "80", "TF_CPP_MIN_LOG_LEVEL": "3"}
    return {**kept, **fixed, **more}


def run(folder: Path, command: str) -> str:
    """Run a command of ckpttool in a folder and return its stdout."""
    words = [sys.executable, "-m", *shlex.split(command)]
    done = subprocess.run(  # noqa: S603  # our own program
        words, cwd=folder, env=environment(), stdout=subprocess.PIPE, check=True, text=True
    )
    return done.stdout


def run_on_terminal(folder: Path, command: str) -> str:
    """Run a command with a terminal as its stdout and return the output with its escape codes."""
    master, terminal = pty.openpty()
    env = environment(TERM="xterm-256color", LINES=str(LINES), PAGER="cat")
    words = [sys.executable, "-m", *shlex.split(command)]
    printed = b""
    with subprocess.Popen(  # noqa: S603  # our own program
        words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=terminal, stderr=subprocess.DEVNULL
    ) as process:
        os.close(terminal)
        with suppress(OSError):  # Linux raises EIO after the last writer
            while piece := os.read(master, 1 << 16):
                printed += piece
        os.close(master)
    if process.returncode:
        raise RuntimeError(f"{command} exited with {process.returncode}")
    return printed.decode().replace("\r\n", "\n")


def copy_samples(folder: Path) -> None:
    """Copy the samples into a folder."""
    shutil.copytree(ROOT / "sample_ckpts", folder / "sample_ckpts")


# The recording of a terminal: an SVG that shows one command after the other.


class Scene(NamedTuple):
    """A command, and the seconds for which its output is shown."""

    command: str
    seconds: int


SCENES = (
    Scene(f"ckpttool inspect {TF_SAMPLE}", 6),
    Scene(f"ckpttool convert {TF_SAMPLE} agent.pt", 6),
    Scene(f"ckpttool verify {TF_SAMPLE} agent.pt", 6),
    Scene("ckpttool eval agent.pt --episodes 100", 6),
)
LINES = 26
CELL_WIDTH, LINE_HEIGHT, MARGIN, FONT_SIZE = 8, 18, 16, 13
GROUND, TEXT, DIM, PROMPT = "#1b1f27", "#e4e6eb", "#a9b1bd", "#7ee787"
STYLE = """\
text{{font:{size}px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}}
text{{white-space:pre;fill:{text}}}
.d{{fill:{dim}}}.b{{font-weight:bold}}.p{{fill:{prompt}}}
.s{{opacity:0;animation:{total}s step-end infinite}}
{frames}
@media (prefers-reduced-motion:reduce){{.s{{animation:none}}.s0{{opacity:1}}}}
"""


def make_recording(folder: Path) -> bytes:
    """Return the recording."""
    screens = [terminal_lines(run_on_terminal(folder, scene.command)) for scene in SCENES]
    return render_recording(screens).encode()


def terminal_lines(output: str) -> list[list[Segment]]:
    """Return the styled pieces of each line of the terminal; lines below the screen are left out."""
    from rich.console import Console
    from rich.text import Text

    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    lines = console.render_lines(Text.from_ansi(output.rstrip("\n")), pad=False)
    return lines[: LINES - 1]


def render_recording(screens: list[list[list[Segment]]]) -> str:
    """Return an SVG that shows the screens in turn, each with its command."""
    width = 80 * CELL_WIDTH + 2 * MARGIN
    height = LINES * LINE_HEIGHT + 2 * MARGIN
    total, begin, frames, drawn = sum(scene.seconds for scene in SCENES), 0, [], []
    for number, (scene, lines) in enumerate(zip(SCENES, screens, strict=True)):
        first, last = (100 * moment / total for moment in (begin, begin + scene.seconds))
        before = "0%{opacity:0}" if number else ""
        frames.append(
            f".s{number}{{animation-name:s{number}}}"
            f"@keyframes s{number}{{{before}{first:g}%{{opacity:1}}{last:g}%{{opacity:0}}}}"
        )
        rows = [_prompt_line(scene.command), *(_svg_line(at, line) for at, line in enumerate(lines, start=1))]
        drawn.append(f'<g class="s s{number}">\n' + "".join(rows) + "</g>\n")
        begin += scene.seconds
    style = STYLE.format(
        size=FONT_SIZE, text=TEXT, dim=DIM, prompt=PROMPT, total=total, frames="\n".join(frames)
    )
    commands = "; ".join(scene.command for scene in SCENES)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img">\n<title>Terminal: {escape(commands)}</title>\n'
        f"<style>{style}</style>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>\n{"".join(drawn)}</svg>\n'
    )


def _prompt_line(command: str) -> str:
    return _svg_piece(0, 0, "$", "p") + _svg_piece(0, 2, command, "b")


def _svg_line(row: int, pieces: list[Segment]) -> str:
    column, drawn = 0, []
    for piece in pieces:
        if piece.text.strip():
            drawn.append(_svg_piece(row, column, piece.text, _class_name(piece)))
        column += piece.cell_length
    return "".join(drawn)


def _class_name(piece: Segment) -> str:
    style = piece.style
    if style is None:
        return ""
    return "d" if style.dim else "b" if style.bold else ""


def _svg_piece(row: int, column: int, text: str, name: str) -> str:
    """Draw a text whose first cell is given; the width of its cells does not depend on the font."""
    shown = text.rstrip()
    column += len(shown) - len(shown.lstrip())
    shown = shown.lstrip()
    x, y = MARGIN + column * CELL_WIDTH, MARGIN + row * LINE_HEIGHT + FONT_SIZE
    classed = f' class="{name}"' if name else ""
    return f'<text x="{x}" y="{y}" textLength="{len(shown) * CELL_WIDTH}"{classed}>{escape(shown)}</text>\n'


# Screenshots of a report.

SIZE = (1280, 900)
COLOURS = 128


def make_screenshot(scheme: str) -> Callable[[Path], bytes]:
    """Return a function that makes the screenshot of a report in a color scheme."""

    def make(folder: Path) -> bytes:
        run(folder, f"ckpttool convert {TF_SAMPLE} agent.pt --quiet --no-verify --force")
        played = run(
            folder, "ckpttool eval sample_ckpts/td3_pendulum_tf --env Pendulum-v1 --episodes 20 --json"
        )
        (folder / "run.json").write_text(played, encoding="utf-8")
        run(folder, "ckpttool report agent.pt --eval run.json --out report.html --force")
        return quantized(photograph(folder / "report.html", scheme))

    return make


def photograph(page: Path, scheme: str) -> bytes:
    """Return a PNG of the upper part of a page in a headless chromium."""
    import base64

    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for option in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(option)
    options.binary_location = str(shutil.which("chromium"))
    driver = webdriver.Chrome(options=options, service=Service(executable_path=shutil.which("chromedriver")))
    try:
        metrics = {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        driver.get(page.as_uri())
        data = driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    finally:
        driver.quit()
    return base64.b64decode(data)


def quantized(png: bytes) -> bytes:
    """Return a PNG with a palette, which takes a third of the bytes."""
    from PIL import Image

    out = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS).save(out, "PNG", optimize=True)
    return out.getvalue()


# A film of two episodes.

FILM_SIDE, FILM_STEP, FILM_DELAY_MS = 300, 2, 80


def make_film(folder: Path) -> bytes:
    """Return the best and the worst of 20 episodes, side by side, as a GIF."""
    words = f"ckpttool eval {TORCH_SAMPLE} --episodes 20 --video play.gif --video-width {FILM_SIDE}"
    words += " --video-episodes best,worst --json"
    document = json.loads(run(folder, words))
    frames = read_frames(folder / "play.gif")
    first = episode_length(document, frames)
    pairs = zip(frames[:first:FILM_STEP], frames[first::FILM_STEP], strict=False)
    return encode_gif([beside(*pair) for pair in pairs])


def episode_length(document: dict[str, Any], frames: list[Image]) -> int:
    """Return the number of images of the first of two equally long episodes."""
    lengths = {document["lengths"][episode["episode"]] for episode in document["video"]["episodes"]}
    if len(lengths) != 1:
        raise RuntimeError(f"the episodes have {lengths} steps, and the film would not show both")
    return len(frames) // 2


def read_frames(file: Path) -> list[Image]:
    """Return the images of a GIF."""
    from PIL import Image, ImageSequence

    with Image.open(file) as film:
        return [image.convert("RGB") for image in ImageSequence.Iterator(film)]


def beside(left: Image, right: Image) -> Image:
    """Return two images side by side, smaller."""
    from PIL import Image

    image = Image.new("RGB", (2 * FILM_SIDE, FILM_SIDE), "white")
    for at, half in enumerate((left, right)):
        image.paste(half.resize((FILM_SIDE, FILM_SIDE), Image.Resampling.LANCZOS), (at * FILM_SIDE, 0))
    return image


def encode_gif(frames: list[Image]) -> bytes:
    """Return a GIF of the images with one palette."""
    palette = frames[0].quantize(48)
    drawn = [frame.quantize(palette=palette, dither=0) for frame in frames]
    out = io.BytesIO()
    drawn[0].save(
        out, "GIF", save_all=True, append_images=drawn[1:], duration=FILM_DELAY_MS, loop=0, optimize=True
    )
    return out.getvalue()


PICTURES: dict[str, Callable[[Path], bytes]] = {
    "terminal.svg": make_recording,
    "report-light.png": make_screenshot("light"),
    "report-dark.png": make_screenshot("dark"),
    "best-and-worst.gif": make_film,
}


def main() -> int:
    """Make all pictures, or those given; return 1 for an unknown name."""
    named = set(sys.argv[1:])
    stems = {name.partition(".")[0] for name in PICTURES}
    if unknown := named - stems:
        sys.stderr.write(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(sorted(stems))}\n")
        return 1
    for name, make in PICTURES.items():
        if named and name.partition(".")[0] not in named:
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy_samples(Path(folder))
            content = make(Path(folder))
        IMAGES.mkdir(exist_ok=True)
        (IMAGES / name).write_bytes(content)
        sys.stderr.write(f"{name}: {len(content) / 1000:,.0f} kB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
