"""What a comparison shows: a table in Markdown, plots, and one page with both."""

import base64
import html
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from groups import Group, Row, Rows, Table
from methods import overlap_of
from rich.filesize import decimal
from runs import Config

from lowcomm.plan import Method, plan

# Hours are those of a model worth a network: 150 million parameters, and a step that
# takes a GPU 0.8 s. Bytes and seconds of a trial's own model would say nothing.
NUM_PARAMS = 150e6
STEP_S = 0.8
DDP_OVERLAP = 0.5  # of a step: gradients travel beside the backward pass
LINKS = {  # Gbit/s, and seconds of latency
    "10 Gbit/s": (10.0, 0.001),
    "1 Gbit/s": (1.0, 0.01),
    "100 Mbit/s": (0.1, 0.03),
}
PARETO_LINK = "1 Gbit/s"
MOST_CURVES = 12

PLANNED = {
    "ddp": "DDP",
    "local_sgd": "LocalSGD",
    "local_adam": "LocalAdam",
    "diloco": "DiLoCo",
    "streaming": "StreamingDiLoCo",
    "eager": "EagerDiLoCo",
    "noloco": "NoLoCo",
    "desloc": "DESLOC",
    "mtdao": "MTDAO",
    "slowmo": "DiLoCo",
}


# -------------------------------------------------------------------------------------
# Numbers


def hours(config: Config, ddp_ratio: float, link: str) -> float:
    """Hours of a run's steps on a link, at the size above, by `lowcomm.plan`.

    Args:
        config: the run.
        ddp_ratio: what it has sent, relative to DDP; rounds that grow are planned as
            if all had the mean length, which this says.
        link: one of `LINKS`.
    """
    if (config.workers or 1) < 2:
        return config.num_steps * STEP_S / 3600
    every = round(1 / ddp_ratio) if config.qsr else config.sync_every
    overlap: float = overlap_of(config)
    if config.method == "ddp":
        every, overlap = 1, DDP_OVERLAP
    fragments = config.fragments if config.method == "streaming" else 1
    method = Method(PLANNED[config.method], every, overlap, fragments)
    codec = config.codec
    return _hours(method, codec, config.workers or 1, config.num_steps, LINKS[link])


@cache
def _hours(
    method: Method,
    codec: str | None,
    workers: int,
    num_steps: int,
    link: tuple[float, float],
) -> float:
    gbit_s, latency_s = link
    answer = plan(
        num_params=NUM_PARAMS,
        num_workers=workers,
        gbit_s=gbit_s,
        latency_s=latency_s,
        step_s=STEP_S,
        num_steps=num_steps,
        methods=[method],
        codecs=[codec],
    )
    return answer.rows[0].hours


def ddp_bytes(row: Row) -> float:
    """What DDP would have sent in as many steps."""
    workers, parameters = row.config.workers or 1, row.trials[0].parameters
    return row.config.num_steps * 2 * 4 * parameters * (workers - 1) / workers


def ratio_to_ddp(row: Row) -> float:
    return row.bytes_sent / ddp_bytes(row) if ddp_bytes(row) else 0.0


def lines_of(rows: Rows) -> Table:
    """The rows as a table of texts."""
    lines = []
    for row in sorted(rows.values(), key=lambda row: row.loss):
        ratio = ratio_to_ddp(row)
        spread = "" if math.isnan(row.spread) else f" ± {row.spread:.3f}"
        line = {
            "": row.label,
            "validation loss": f"{row.loss:.3f}{spread}",
            "seeds": str(len(row.trials)),
            "bytes, each worker": decimal(round(row.bytes_sent)),
            "of DDP's": f"{ratio:.2%}",
        }
        line |= {f"h at {k}": f"{hours(row.config, ratio, k):.2f}" for k in LINKS}
        if any(row.note for row in rows.values()):
            line["rates"] = row.note
        lines.append(line)
    return lines


def text_of(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def markdown(lines: Table) -> str:
    names = list(lines[0])
    cells = [names, ["---"] * len(names)]
    cells += [[text_of(line[name]) for name in names] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells)


# -------------------------------------------------------------------------------------
# Plots


class Axis(NamedTuple):
    """What a curve is drawn against."""

    label: str
    of: Callable[[Row, int], float]  # at a point of the row's trials, by number
    is_log: bool = False


def _hours_until(row: Row, number: int) -> float:
    part = row.trials[0].points[number].step / row.config.num_steps
    return part * hours(row.config, ratio_to_ddp(row), PARETO_LINK)


AXES = (
    Axis("tokens, all workers", lambda row, i: row.trials[0].points[i].tokens),
    Axis(
        "bytes sent by each worker",
        lambda row, i: statistics.mean(t.points[i].bytes_sent for t in row.trials),
        is_log=True,
    ),
    Axis(f"hours at {PARETO_LINK}", _hours_until, is_log=True),
)


def curves(rows: Rows) -> list[Row]:
    """The rows that are drawn as curves: of many, those of the shortest period."""
    shortest = min(row.config.sync_every for row in rows.values())
    chosen = list(rows.values())
    if len(chosen) > MOST_CURVES:
        chosen = [
            row
            for row in chosen
            if row.config.method == "ddp" or row.config.sync_every == shortest
        ]
    return chosen[:MOST_CURVES]


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points to which no other is both cheaper and better.

    >>> pareto_front([(3, 1), (1, 3), (2, 4), (2, 2)])
    [(1, 3), (2, 2), (3, 1)]
    """
    front: list[tuple[float, float]] = []
    for cost, loss in sorted(points):
        if not front or loss < front[-1][1]:
            front.append((cost, loss))
    return front


def plot(rows: Rows, file: Path) -> None:
    """Draws losses against tokens, bytes and hours, and what is worth its hours."""
    import matplotlib

    matplotlib.use("Agg")  # draws to files: needs no display
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
    colors = plt.get_cmap("tab20")
    for place, axis in zip(places.flat, AXES, strict=False):
        for number, row in enumerate(curves(rows)):
            count = range(len(row.trials[0].points))
            losses = [
                statistics.mean(t.points[i].val_loss for t in row.trials) for i in count
            ]
            xs = [axis.of(row, i) for i in count]
            place.plot(xs, losses, color=colors(number), label=row.label)
        place.set(xlabel=axis.label, ylabel="validation loss")
        if axis.is_log:  # what comes before the first exchange has no logarithm
            place.set_xscale("log", nonpositive="mask")
    places[0, 0].legend(fontsize=7, ncols=2)
    _plot_front(rows, places[1, 1])
    for place in places.flat:
        place.grid(alpha=0.3)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _plot_front(rows: Rows, place: Any) -> None:
    points = {
        label: (hours(row.config, ratio_to_ddp(row), PARETO_LINK), row.loss)
        for label, row in rows.items()
    }
    front = pareto_front(points.values())
    place.plot(*zip(*front, strict=True), color="black", linewidth=1, label="front")
    for label, point in points.items():
        place.plot(*point, "o", color="black" if point in front else "silver")
        if point in front or len(points) <= MOST_CURVES:
            place.annotate(
                label, point, fontsize=7, xytext=(3, 3), textcoords="offset points"
            )
    place.set(xlabel=f"hours at {PARETO_LINK}", ylabel="validation loss at the end")
    place.set_xscale("log")
    place.legend(fontsize=7)


# -------------------------------------------------------------------------------------
# Pages


class Section(NamedTuple):
    """What a group has come to."""

    name: str
    group: Group
    lines: Table
    verdict: str
    picture: Path | None


def section(name: str, group: Group, found: Any, folder: Path) -> Section:
    """Judges what a group has found, and draws it."""
    if group.toy is not None:
        return Section(name, group, found, group.judge(found), None)
    picture = folder / f"{name}.png"
    plot(found, picture)
    return Section(name, group, lines_of(found), group.judge(found), picture)


def write_markdown(sections: Sequence[Section], file: Path) -> None:
    parts = []
    for one in sections:
        parts += [
            f"## {one.name}: {one.group.title}",
            f"{one.group.claim} ([paper]({link_to(one)}))",
            markdown(one.lines),
            one.verdict,
        ]
        if one.picture:
            parts.append(f"![losses]({one.picture.name})")
    file.write_text("\n\n".join([*parts, legend()]) + "\n", encoding="utf-8")


def link_to(one: Section) -> str:
    return f"https://arxiv.org/abs/{one.group.paper}"


def legend() -> str:
    return (
        "Loss: of the global parameters on the same windows in all trials, mean ± "
        "standard deviation over seeds. Bytes: counted as sent, DDP's by the formula. "
        f"Hours: of as many steps of a model of {NUM_PARAMS / 1e6:.0f} million "
        f"parameters with {STEP_S} s a step, planned for the link. Rates: best of "
        "their grids at one seed; ! is at an end of its grid."
    )


STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% }
"""


def write_html(sections: Sequence[Section], file: Path) -> None:
    """One file that needs no other: plots are in it."""
    parts = [
        f"<!doctype html><meta charset=utf-8><title>Comparison</title><style>{STYLE}"
    ]
    parts.append("</style><h1>Methods compared</h1>")
    for one in sections:
        link = f"https://arxiv.org/abs/{one.group.paper}"
        parts.append(f"<h2>{html.escape(f'{one.name}: {one.group.title}')}</h2>")
        parts.append(f"<p>{html.escape(one.group.claim)} <a href={link}>Paper</a></p>")
        parts.append(html_table(one.lines))
        parts.append(f"<p><b>{html.escape(one.verdict)}</b></p>")
        if one.picture:
            inline = base64.b64encode(one.picture.read_bytes()).decode()
            parts.append(f'<img alt="losses" src="data:image/png;base64,{inline}">')
    parts.append(f"<p>{html.escape(legend())}</p>")
    file.write_text("\n".join(parts) + "\n", encoding="utf-8")


def html_table(lines: Table) -> str:
    def row(tag: str, cells: Iterable[Any]) -> str:
        inside = "".join(f"<{tag}>{html.escape(text_of(c))}</{tag}>" for c in cells)
        return f"<tr>{inside}</tr>"

    body = [row("td", line.values()) for line in lines]
    return "\n".join(["<table>", row("th", lines[0]), *body, "</table>"])
