"""Plots: what is drawn, where, the same for the same numbers; names from files are only names."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ckpttool.cli import figures
from ckpttool.core import CkpttoolError, MissingExtraError
from ckpttool.evaluation import algorithms, ranking
from ckpttool.evaluation.protocol import Evaluation, Protocol, TrainingRun
from ckpttool.evaluation.ranking import LearningCurvePoint, ScoredCheckpoint
from ckpttool.evaluation.rollout import Rollout
from ckpttool.evaluation.statistics import summarize
from ckpttool.evaluation.training_logs import TrainingCurve
from tests.conftest import TORCH_SAMPLE, ckpttool, in_process, refused
from tests.golden_texts import Golden

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
needs_plotext = pytest.mark.skipif(
    importlib.util.find_spec("plotext") is None, reason="plotext is not installed"
)


def evaluation(
    path: str, returns: Sequence[float] | np.ndarray, terminated: int = 0, env: str = "Hopper-v5"
) -> Evaluation:
    values = np.asarray(returns, np.float64)
    n = len(values)
    over = np.arange(n) < terminated
    played = Rollout(values, 100 + np.arange(n), over, ~over, 1000 + np.arange(n), n, 4, 100 * n, 1.0, 0)
    return Evaluation(path, env, Protocol(n), "cpu", {}, played, summarize(values), (), ())


def run(folder: str, offset: float = 0.0, env: str = "Hopper-v5") -> list[ScoredCheckpoint]:
    rng = np.random.default_rng(round(offset))
    steps = range(10_000, 90_000, 10_000)
    returns = {step: rng.normal(step / 40 + offset, 200, 10) for step in steps}
    return [
        ScoredCheckpoint(evaluation(f"{folder}/ckpt-{step}", returns[step], env=env), step) for step in steps
    ]


def logged(folder: str = "/runs/a") -> TrainingCurve:
    steps = np.arange(1, 101) * 1000
    file = f"{folder}/events.out.tfevents.1"
    return TrainingCurve((file,), "eval/mean_reward", "evaluation", steps, np.sqrt(steps), 100)


def drawn(target: Path, *what: object) -> ElementTree.Element:
    figures.write_plot(str(target), figures.PlotData(*what))  # type: ignore[arg-type]  # as the callers give them
    return ElementTree.parse(target).getroot()


def texts(picture: ElementTree.Element) -> list[str]:
    return ["".join(node.itertext()).strip() for node in picture.iter() if node.tag.endswith("}text")]


def pixels(target: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(target) as image:
        return np.asarray(image.convert("RGB"))


def compared_runs(
    last: int,
    counts: Sequence[int] = (3, 4),
    envs: Sequence[str] = ("Hopper-v5",),
    names: Sequence[str] = ("td3", "sac"),
    apart: float = 900.0,
) -> tuple[object, ...]:
    """Return what is drawn of one or two algorithms, each with runs in every environment."""
    sides, every = [], []
    for name, offset, runs in zip(names, (0.0, apart), counts, strict=False):
        requested = []
        for env in envs:
            for number in range(runs):
                folder = f"/{name}/{env}_{number}"
                scored = run(folder, offset + 200 * number, env)[-last:]
                every += scored
                requested.append(TrainingRun(folder, tuple(saved.evaluation.checkpoint for saved in scored)))
        algorithm = algorithms.summarize_runs(requested, every, last)
        assert algorithm is not None
        sides.append(algorithm)
    return (
        [checkpoint.evaluation for checkpoint in every],
        ranking.build_learning_curve(every),
        (),
        tuple(sides),
        algorithms.compare_algorithms(*sides) if len(sides) == 2 else None,
    )


MIXED = np.concatenate((np.linspace(100, 400, 20), np.linspace(2900, 3100, 60)))
CASES: dict[str, tuple[object, ...]] = {
    "one": ([evaluation("a.pt", MIXED, terminated=20)],),
    "few": ([evaluation("a.pt", [1.0, 2.0, 3.0])],),
    "a single episode": ([evaluation("a.pt", [5.0])],),
    "equal": ([evaluation("a.pt", [5.0] * 20)],),
    "one, logged": ([evaluation("a.pt", MIXED)], (), [logged()]),
    "a run": ([checkpoint.evaluation for checkpoint in run("/a")], ranking.build_learning_curve(run("/a"))),
    "runs, logged": (
        [checkpoint.evaluation for checkpoint in (*run("/a"), *run("/b", 500))],
        ranking.build_learning_curve([*run("/a"), *run("/b", 500)]),
        [logged(), logged("/runs/b")],
    ),
    "no steps": ([checkpoint.evaluation for checkpoint in run("/a")],),
    "algorithms by their last checkpoint": compared_runs(1),
    "algorithms by their last three": compared_runs(3),
    "algorithms in two environments": compared_runs(8, (3, 5), ("HalfCheetah-v5", "Swimmer-v5")),
    "one run each, long names": compared_runs(
        8, (1, 1), names=("td3_with_layer_norm_and_a_long_name", "td3_with_batch_norm_and_a_long_name")
    ),
    "algorithms nearly equal": compared_runs(1, (1, 1), ("Hopper-v5", "Walker2d-v5"), ("td3", "sac"), 0.5),
    "one algorithm": compared_runs(8, (6,), ("Pendulum-v1",)),
    "many names": ([evaluation(f"/runs/agent_with_a_long_name_{n}.pt", [1.0, 2.0, n]) for n in range(40)],),
}
# What is written twice: every panel and every kind of file is among it.
TWICE = {"one": (".svg",), "runs, logged": (".svg", ".pdf")}


# --- files ------------------------------------------------------------------------------------------


SCALES = {"large": 1e12, "small": 1e-9, "negative": -3e7, "plain": 1.0}


@needs_matplotlib
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_ticks_are_whole_numbers(scale: float, offset: float) -> None:
    """Each tick shows its own value: neither a factor nor an offset stands elsewhere."""
    values = scale * (offset + np.linspace(1, 3, 20))
    with figures._plot_style(figures.LIGHT):
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        figure = figures._draw_figure(figures.PlotData([evaluation("a.pt", values)]), figures.LIGHT)
        FigureCanvasAgg(figure).draw()
        axis = figure.axes[0].xaxis
        assert not axis.get_offset_text().get_text()
        places = axis.get_majorticklocs()
        shown = [float(label.get_text().replace("\u2212", "-")) for label in axis.get_majorticklabels()]
        assert shown == pytest.approx(places, abs=np.ptp(places) / 1000)
        low, high = axis.get_view_interval()
        labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        assert labels
        boxes = [label.get_window_extent() for label in labels]
        assert not any(one.overlaps(other) for one, other in itertools.pairwise(boxes))
        legend = figure.axes[0].get_legend()
        assert legend is not None
        (mean,) = (text.get_text() for text in legend.get_texts() if text.get_text().startswith("mean"))
    assert float(mean.split()[1].replace("\u2212", "-").replace(",", "")) == pytest.approx(
        values.mean(), rel=0.01
    )


@needs_matplotlib
@pytest.mark.parametrize(("counts", "known"), [((1, 1), False), ((1, 5), True), ((4, 4), True)])
def test_intervals_are_named_where_they_are_drawn(counts: Sequence[int], known: bool) -> None:
    scored = [
        ScoredCheckpoint(evaluation(f"/r/ckpt-{step}", np.arange(n, dtype=float)), step)
        for step, n in enumerate(counts)
    ]
    evaluations, curve = [saved.evaluation for saved in scored], ranking.build_learning_curve(scored)
    for data in (figures.PlotData(evaluations, curve), figures.PlotData(evaluations)):
        figure = figures._draw_figure(data, figures.LIGHT)
        legend = figure.axes[0].get_legend()
        assert legend is not None
        named = [text.get_text() for text in legend.get_texts()]
        assert any("CI" in label for label in named) == known
        assert ("CI" in figures._figure_caption(data, compared=False)) == known


@pytest.mark.parametrize("number", [1, 2])
def test_the_caption_names_each_seed_once(number: int, golden: Golden) -> None:
    one = evaluation("a.pt", [5.0] * number)
    golden(figures._figure_caption(figures.PlotData([one], []), compared=False))


@needs_matplotlib
@pytest.mark.parametrize("case", TWICE)
def test_the_same_numbers_give_the_same_bytes(case: str, tmp_path: Path) -> None:
    for suffix in TWICE[case]:
        twice = [tmp_path / f"{name}{suffix}" for name in ("a", "b")]
        for target in twice:
            figures.write_plot(str(target), figures.PlotData(*CASES[case]))  # type: ignore[arg-type]
        assert twice[0].read_bytes() == twice[1].read_bytes()


@needs_matplotlib
@pytest.mark.parametrize("case", CASES)
def test_no_text_covers_another_and_nothing_is_cut_off(case: str) -> None:
    with figures._plot_style(figures.LIGHT):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.text import Text

        figure = figures._draw_figure(figures.PlotData(*CASES[case]), figures.LIGHT)  # type: ignore[arg-type]
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        shown = [item for item in figure.findobj(Text) if item.get_text().strip() and item.get_visible()]
        boxes = {artist: artist.get_window_extent() for artist in shown}
        picture = np.asarray(canvas.buffer_rgba())[..., :3]
    heights = {"logged": 1320, "one algorithm": 1150, "algorithms": 1200, "one run each": 1200}
    height = next((heights[kind] for kind in heights if kind in case), 800)
    assert picture.shape == (height, 1600, 3), "100 pixels per inch, at twice the density"
    # The outermost lines are paper, and what lies within is not.
    edge = np.concatenate((picture[0], picture[-1], picture[:, 0], picture[:, -1]))
    assert (edge == 255).all()
    assert (picture != 255).any(axis=2).mean() > 0.02
    # The labels of ticks outside the axes are made and not drawn.
    for axes in figure.axes:
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, sorted(axes.get_ylim()))):
            for tick in axis.get_major_ticks():
                boxes.pop(tick.label2, None)
                if not low <= tick.get_loc() <= high:
                    boxes.pop(tick.label1, None)
    for text, box in boxes.items():
        assert box.x0 >= 0 <= box.y0, text
        assert box.x1 <= 1600, text
        assert box.y1 <= height, text
    # Slanted ones are side by side although the boxes around them are not.
    pairs = itertools.combinations([item for item in boxes.items() if not item[0].get_rotation() % 90], 2)
    covered = [
        (one.get_text(), other.get_text()) for (one, here), (other, there) in pairs if here.overlaps(there)
    ]
    assert not covered


@needs_matplotlib
def test_an_svg_follows_the_page_and_a_theme_is_fixed(tmp_path: Path) -> None:
    data = figures.PlotData(*CASES["one"])  # type: ignore[arg-type]
    for theme in (None, "light", "dark"):
        figures.write_plot(str(tmp_path / f"{theme}.svg"), data, theme)
    adapting, light, dark = ((tmp_path / f"{theme}.svg").read_text() for theme in (None, "light", "dark"))
    ElementTree.fromstring(adapting)
    rules = re.search(r"<style>@media \(prefers-color-scheme: dark\)\{.*\}</style>\n", adapting)
    assert rules is not None
    assert adapting.replace(rules[0], "") == light.replace('version="1.1">\n', 'version="1.1">\n\n', 1)
    # The rules turn each light color that is used into the one of the dark file.
    used = {colour for text in (light, dark) for colour in re.findall(r"(?:fill|stroke): (#\w{6})", text)}
    swaps = dict(re.findall(r"fill: (#\w{6})\"\]\{fill:(#\w{6})", rules[0]))
    assert {swaps.get(colour, colour) for colour in re.findall(r"(?:fill|stroke): (#\w{6})", light)} == set(
        re.findall(r"(?:fill|stroke): (#\w{6})", dark)
    )
    assert "#000000" not in used
    figures.write_plot(str(tmp_path / "dark.png"), data, "dark")
    assert pixels(tmp_path / "dark.png")[0, 0].tolist() == [0x0D, 0x11, 0x17]
    with pytest.raises(CkpttoolError):
        figures.require_theme("blue")


@needs_matplotlib
@pytest.mark.parametrize("last", [1, 3])
def test_two_algorithms_are_two_rows_with_intervals_over_runs(
    tmp_path: Path, last: int, golden: Golden
) -> None:
    what = compared_runs(last)
    shown = texts(drawn(tmp_path / "a.svg", *what))
    joined = " ".join(shown)
    assert "td3" in joined
    assert "sac" in joined
    assert any("0.00" in text for text in shown)
    assert not any("save_counter" in text for text in shown)
    golden(
        re.sub(
            r"[-\u2212]?[\d,]+\.\d", "N", "\n".join(text for text in shown if re.search("[A-Za-z]{2}", text))
        )
    )


@needs_matplotlib
def test_one_checkpoint_shows_its_distribution(tmp_path: Path, golden: Golden) -> None:
    labels = texts(drawn(tmp_path / "a.svg", *CASES["one"]))
    result = evaluation("a.pt", MIXED).statistics
    assert f"mean {result.mean:,.1f}" in labels
    assert f"IQM {result.iqm:,.1f}" in labels
    golden("\n".join(text for text in labels if re.search("[A-Za-z]{2}", text)))


@needs_matplotlib
def test_runs_are_told_apart_and_the_best_is_marked(tmp_path: Path) -> None:
    scored = [*run("/x/seed1/ckpts"), *run("/x/seed2/ckpts", 500)]
    evaluations = [checkpoint.evaluation for checkpoint in scored]
    labels = texts(drawn(tmp_path / "a.svg", evaluations, ranking.build_learning_curve(scored), [logged()]))
    assert {"seed1/ckpts", "seed2/ckpts", "training steps", "eval/mean_reward"} <= set(labels)
    best = max(scored, key=lambda checkpoint: checkpoint.evaluation.statistics.mean)
    assert f"best mean {best.evaluation.statistics.mean:,.1f} at {best.step:,}" in labels


@needs_matplotlib
def test_single_checkpoints_of_several_runs_are_side_by_side(tmp_path: Path) -> None:
    """Their steps count different things, and an interval at one step would have no width."""
    scored = [run(f"/{name}/seed_0", offset)[-1] for name, offset in (("ppo", 0.0), ("ddpg", 500.0))]
    evaluations, curve = [saved.evaluation for saved in scored], ranking.build_learning_curve(scored)
    labels = texts(drawn(tmp_path / "a.svg", evaluations, curve))
    assert {"mean with 95 % CI", "ppo/seed_0/ckpt-80000", "ddpg/seed_0/ckpt-80000"} <= set(labels)
    assert "training steps" not in labels
    # Beside a run of several steps, a single one has its interval as a bar.
    mixed = [*run("/td3/seed_0", 900.0), scored[0]]
    with figures._plot_style(figures.LIGHT):
        from matplotlib.figure import Figure

        axes = Figure().add_subplot()
        figures.draw_learning_curve(
            axes, [checkpoint.evaluation for checkpoint in mixed], ranking.build_learning_curve(mixed)
        )
    low, high = scored[0].evaluation.statistics.ci95 or (0, 0)
    bars = [line.get_ydata() for line in axes.lines if list(line.get_xdata()) == [80_000] * 2]
    assert [list(bar) for bar in bars] == [[low, high]]


@needs_matplotlib
def test_runs_named_by_numbers_have_the_folder_above(tmp_path: Path) -> None:
    for path, name in (
        ("/runs/td3/seed_0", "td3/seed_0"),
        ("/runs/td3/3", "td3/3"),
        ("/runs/td3/checkpoints", "td3/checkpoints"),
        ("/runs/td3_lr3e-4", "td3_lr3e-4"),
        ("/7", "7"),
    ):
        assert figures._run_name(path) == name
    scored = run("/runs/td3/seed_0")
    labels = texts(
        drawn(tmp_path / "a.svg", [e.evaluation for e in scored], ranking.build_learning_curve(scored))
    )
    assert "td3/seed_0 in Hopper-v5: 8 checkpoints" in labels


@needs_matplotlib
def test_equal_lengths_need_no_panel(tmp_path: Path) -> None:
    one = evaluation("a.pt", MIXED)
    one.rollout.lengths[:] = 200
    labels = texts(drawn(tmp_path / "a.svg", [one]))
    assert "episode length (steps)" not in labels
    assert any(text.startswith("80 episodes of 200 steps (seeds") for text in labels)
    one.rollout.lengths[0] = 199
    assert "episode length (steps)" in texts(drawn(tmp_path / "b.svg", [one]))


@needs_matplotlib
def test_names_from_files_are_only_names(tmp_path: Path) -> None:
    # Mathematics, markup, what reverses the line, what no typeface has, and a length that would not fit.
    names = [r"$\frac{1}{0}$.pt", "<b>&amp;.pt", "a\u202eb\x07.pt", "模型.pt", "$" * 300, "x_{y}^2$"]
    for name in names:
        shown = name if name.isprintable() else r"a\u202eb\x07.pt"
        assert figures.title_name(f"/runs/{name}") == (shown if len(shown) <= 42 else f"...{shown[-39:]}")
    picture = drawn(tmp_path / "one.svg", [evaluation(f"/runs/{names[0]}", MIXED)])
    assert any(text.startswith(f"{names[0]} ") for text in texts(picture))
    several = [evaluation(f"/runs/{name}", [1.0, 2.0]) for name in names]
    labels = texts(drawn(tmp_path / "several.svg", several))
    assert {names[0], names[1], names[3]} <= set(labels)


@needs_matplotlib
def test_a_plot_asks_for_no_display_and_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from tests.test_plots import CASES; from ckpttool.cli import figures\n"
        f"figures.write_plot({str(tmp_path / 'a.png')!r}, figures.PlotData(*CASES['one']))\n"
        "import matplotlib\n"
        "assert matplotlib.rcParams['text.parse_math'] and matplotlib.rcParams['svg.hashsalt'] is None\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_returns_that_are_not_finite_are_not_drawn(tmp_path: Path, golden: Golden) -> None:
    one = evaluation("a.pt", [*MIXED, np.nan])
    with pytest.raises(CkpttoolError) as caught:
        figures.write_plot(str(tmp_path / "a.svg"), figures.PlotData([one]))
    golden(caught.value)
    assert figures.render_chart([one], []) == []
    assert not list(tmp_path.iterdir())


@needs_matplotlib
def test_curves_share_their_steps_only_where_these_are_alike(tmp_path: Path) -> None:
    checkpoints = run("/a")
    evaluations, curve = [row.evaluation for row in checkpoints], ranking.build_learning_curve(checkpoints)
    steps = [np.arange(1, 101) * factor for factor in (1000, 1_000_000)]
    for number, (step, ticks) in enumerate(zip(steps, ("100k", "100M"), strict=True)):
        other = TrainingCurve(("/a/events",), "train", "training", step, np.sqrt(step), 100)
        labels = texts(drawn(tmp_path / f"{number}.svg", evaluations, curve, [other]))
        assert ticks in labels
        # The curve above has the whole width either way.
        assert "60k" in labels


def test_what_cannot_be_plotted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    there = tmp_path / "there.png"
    there.write_bytes(b"mine")
    with pytest.raises(CkpttoolError) as caught:
        figures.require_plot(str(tmp_path / "a.jpg"))
    golden(caught.value)
    with pytest.raises(CkpttoolError) as caught:
        figures.require_plot(str(there))
    golden(caught.value)
    with pytest.raises(CkpttoolError) as caught:
        figures.require_plot(str(tmp_path / "nowhere" / "a.png"))
    golden(caught.value)
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="matplotlib"):
        figures.require_plot(str(tmp_path / "a.png"))


@needs_matplotlib
@pytest.mark.environment
def test_the_command_plots_a_run_and_charts_it(tmp_path: Path, golden: Golden) -> None:
    pytest.importorskip("gymnasium")
    target = tmp_path / "curve.svg"
    ran = in_process("eval", TORCH_SAMPLE.parent, "--episodes", 2, "--plot", target, "--chart")
    assert ran.status == 0, ran.err
    assert ran.out.endswith(f"wrote {target}\n")
    labels = texts(ElementTree.parse(target).getroot())
    assert any("Pendulum-v1" in text for text in labels)
    # Its steps are those that the checkpoints count.
    assert "updates" in labels
    assert sum("│" in line for line in ran.out.splitlines()) == 9
    refusal = in_process("eval", TORCH_SAMPLE, "--episodes", 10**8, "--plot", target)
    golden(refused(refusal))


# --- the terminal -----------------------------------------------------------------------------------


@pytest.fixture(params=["utf-8", "ascii"])
def encoding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """An encoding of stdout: with blocks, lines and braille, or without."""
    monkeypatch.setattr(figures, "_can_encode", lambda _: request.param != "ascii")
    return str(request.param)


def test_a_histogram_counts_every_episode_and_fits(encoding: str) -> None:
    lines = figures.render_histogram(MIXED, 80)
    assert sum(int(re.split(r"\s{2,}", line)[1]) for line in lines) == 80
    assert max(map(len, lines)) <= 80
    assert all(line.isascii() for line in lines) is (encoding == "ascii")
    # The longest bar is that of the most, and what is not empty can be seen.
    bars = {int(re.split(r"\s{2,}", line)[1]): re.sub(r".*\d\s*", "", line) for line in lines}
    assert len(bars[max(bars)]) == max(map(len, bars.values())) > 30
    assert all(bool(bar) == bool(amount) for amount, bar in bars.items())


def test_an_outlier_makes_no_more_bars() -> None:
    values = np.concatenate((np.linspace(0, 1e-9, 99), [1e9]))
    assert len(figures.render_histogram(values, 80)) <= 8


@pytest.mark.parametrize("values", [[1.0] * 7, [3.0] * 50], ids=["few", "equal"])
def test_what_has_no_shape_has_no_histogram(values: list[float]) -> None:
    assert figures.render_histogram(np.array(values), 80) == []


def points(*means: float, run: str = "a", interval: float | None = None) -> list[LearningCurvePoint]:
    spans = [None if interval is None else (mean - interval, mean + interval) for mean in means]
    pairs = enumerate(zip(means, spans, strict=True))
    return [LearningCurvePoint(1000 * (1 + n), mean, span, run, f"{run}/{n}") for n, (mean, span) in pairs]


def inked(lines: list[str]) -> np.ndarray:
    """Return which cells of a chart [rows, columns] are drawn on, without its frame."""
    inner = [line for line in lines if re.match(r"\s*[-\d.,]*[│┤|+]", line) and not re.search("--|──", line)]
    rows = [re.split(r"[│┤|+]", line)[1:] for line in inner]
    assert {len(row) for row in rows} == {2}, "a line is not framed"
    return np.array([[cell not in " \u2800" for cell in row] for row, _ in rows])


@needs_plotext
def test_a_line_goes_from_corner_to_corner(encoding: str) -> None:
    lines = figures.render_learning_curve(points(0, 1, 2, 3), 60)
    assert all(line.isascii() for line in lines) is (encoding == "ascii")
    assert max(map(len, lines)) <= 60
    columns = inked(lines)
    assert columns.any(axis=0).all(), "the line has gaps"
    heights = columns.argmax(axis=0)
    assert (heights[0], heights[-1]) == (len(columns) - 1, 0)
    assert (np.diff(heights) <= 0).all()
    assert [line.split() for line in lines[-2:]] == [["1,000", "4,000"], ["training", "steps"]]
    assert figures.render_learning_curve(points(0, 1, 2, 3), 60, "updates")[-1].strip() == "updates"


@needs_plotext
def test_intervals_are_drawn_for_one_run_and_not_for_two() -> None:
    alone = inked(figures.render_learning_curve(points(0, 0, 0, interval=5), 60))
    assert alone[:, 0].all()
    assert alone[:, -1].all()
    two = points(0, 0, 0, interval=5) + points(1, 1, 1, run="b", interval=5)
    lines = figures.render_learning_curve(sorted(two, key=lambda p: p.step), 60)
    assert inked(lines)[:, 0].sum() == 2


@needs_plotext
def test_flat_curves_and_single_steps_are_drawn_too() -> None:
    assert inked(figures.render_learning_curve(points(7, 7, 7), 60)).any(axis=0).all()
    same = [LearningCurvePoint(5, float(n), None, "a", str(n)) for n in range(3)]
    assert figures.render_learning_curve(same, 60)
    evaluations = [evaluation(str(n), [1.0]) for n in range(3)]
    assert figures.render_chart(evaluations, same) == []


def test_without_plotext_no_curve_is_drawn_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    evaluations = [evaluation(str(n), [1.0]) for n in range(3)]
    assert figures.render_chart(evaluations, points(1, 2, 3)) == []
    assert figures.render_chart([evaluation("a.pt", MIXED)], []) != []
    with pytest.raises(MissingExtraError, match="plotext"):
        figures.require_chart()


@needs_matplotlib
@pytest.mark.environment
def test_a_pipe_gets_a_chart_when_asked_in_ascii_where_it_must(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    common = ("eval", TORCH_SAMPLE, "--episodes", 20, "--chart")
    process = in_process(*common, "--json", "--plot", tmp_path / "a.png")
    assert process.json()["plot"] == str(tmp_path / "a.png")
    requested = ckpttool(*common, env={"PYTHONIOENCODING": "ascii"})
    assert requested.status == 0, requested.err
    lines = requested.out[requested.out.index("\nhistogram ") + 1 :].splitlines()
    assert len(lines) >= 4
    assert all(line.isascii() and len(line) <= 80 for line in lines)
    assert any("###" in line for line in lines)
    assert "\\u" not in requested.out


@needs_plotext
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e9])
def test_axis_numbers_are_round_and_without_exponents(scale: float) -> None:
    lines = figures.render_learning_curve(points(-1348 * scale, -556 * scale, -1.8 * scale), 80)
    numbers = [match[1] for line in lines if (match := re.match(r"\s*([-\d.,e+]+)[┤+]", line))]
    assert len(numbers) >= 2
    assert not any("e" in number for number in numbers)
    values = [float(number.replace(",", "")) for number in numbers]
    steps = {round((a - b) / scale) for a, b in itertools.pairwise(values)}
    assert steps == {500}
