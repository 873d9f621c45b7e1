"""The command line.

`python -m lowcomm plan`: what low-communication training costs on a link.
`python -m lowcomm lighthouse`: where workers meet that come and go.
`python -m lowcomm doctor`: what this machine has, and what the links between workers
carry.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TextIO

from lowcomm import doctor
from lowcomm.plan import METHODS, Method, Plan, Row, plan
from lowcomm.sync.errors import SyncError
from lowcomm.sync.schedule import check_positive

_THOUSANDS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def _parameters(text: str) -> float:
    """A number as models have it in their names: 150e6, 150M or 0.15B."""
    digits, factor = text, 1.0
    if text[-1:].upper() in _THOUSANDS:
        digits, factor = text[:-1], _THOUSANDS[text[-1].upper()]
    try:
        return float(digits) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a number, got {text!r}. Give 150e6, 150M or 0.15B."
        ) from None


#: Those that must be given, those that may be, and what they mean.
_NEEDED: dict[str, tuple[Any, str]] = {
    "num_params": (_parameters, "parameters of the model, as in 150e6 or 150M"),
    "num_workers": (int, "workers"),
    "gbit_s": (float, "rate at which each sends, in 10^9 bits per second"),
    "latency_s": (float, "of a message, in seconds"),
    "step_s": (float, "seconds of an inner step"),
    "num_steps": (int, "inner steps that each worker takes"),
}
_OPTIONAL: dict[str, tuple[Any, str]] = {
    "dtype_bytes": (float, "of a gradient in DDP's all-reduce (4)"),
    "jitter": (float, "standard deviation of the logarithm of a step's time (0)"),
    "mtbf_h": (float, "hours between failures of one worker (never)"),
    "checkpoint_every_s": (float, "seconds between checkpoints (1800)"),
    "restart_s": (float, "seconds until a failed worker is replaced (300)"),
    "utilization": (float, "part of the time to be spent in steps (0.95)"),
    "bucket_bytes": (int, "largest message (4 MiB)"),
    "seed": (int, "of step times and pairs (0)"),
}
_EXAMINED: dict[str, tuple[Any, str]] = {
    "mbytes": (float, "sent at most in each direction of a pair, in 10^6 bytes (16)"),
    "seconds": (float, "of each direction (1; less for more than 30 pairs)"),
    "num_params": (_parameters, "parameters of the model, for a plan; with --step-s"),
    "step_s": (float, "seconds of an inner step, for a plan; with --num-params"),
    "timeout_s": (float, "how long workers are waited for (30)"),
}
_TITLES = "method H t F codec MB/step of-DDP exch-s wait-s used hours GB H-min t-min"
_LEGEND = """\
H: steps between exchanges, t: of overlap, F: fragments. MB/step: sent by a worker.
exch-s: seconds on the wire in H steps. wait-s: seconds waited in a step. used: time
spent in steps. GB: extra memory. H-min: reaches {utilization:.0%} without overlap.
t-min: hides the exchange at this H."""
_FAILURES = """
A model of failures, {mtbf_h:g} h apart for one worker: how many there are in these
hours, and the hours they add if all go back to a checkpoint, or if the others go on."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        arguments: in place of those that the program was called with.
    """
    parser, commands = _parsers()
    given = vars(parser.parse_args(arguments))
    command = commands[given["command"]]
    if given["command"] == "lighthouse":
        try:
            return _lighthouse(given["bind"], given["heartbeat_s"])
        except (ImportError, RuntimeError, ValueError) as error:
            command.error(str(error))
    if given["command"] == "doctor":
        try:
            return _doctor(given)
        except (TypeError, ValueError) as error:
            command.error(str(error))
    settings = {k: v for k, v in given.items() if k in _NEEDED | _OPTIONAL}
    try:
        answer = plan(**settings, **_choices(given))
        if "png" in given:
            _draw(answer, given["png"])
    except (ImportError, TypeError, ValueError) as error:
        command.error(str(error))
    if "json" in given:
        print(json.dumps({**settings, "rows": answer.as_dicts()}, indent=2))
    else:
        print(*_lines(answer, settings), sep="\n")


def _parsers() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Of the whole command line, and of each command."""
    parser = argparse.ArgumentParser(prog="python -m lowcomm")
    commands = parser.add_subparsers(dest="command", required=True)
    light = commands.add_parser(
        "lighthouse", help="where the workers of an ElasticGroup meet; runs until ended"
    )
    light.add_argument(
        "--bind", default="0.0.0.0:29510", help="where to listen (%(default)s)"
    )
    light.add_argument(
        "--heartbeat-s",
        type=float,
        default=2.0,
        help="who is silent for longer is taken for dead (%(default)s)",
    )
    check = commands.add_parser(
        "doctor",
        help="what this machine has; with torchrun, what the links between workers "
        "carry; docs/doctor.md explains it",
        argument_default=argparse.SUPPRESS,
    )
    for name, (kind, words) in _EXAMINED.items():
        check.add_argument("--" + name.replace("_", "-"), type=kind, help=words)
    check.add_argument("--json", action="store_true", help="print JSON, no table")
    costs = commands.add_parser(
        "plan",
        help="bytes, waiting, hours and memory; docs/planner.md explains them",
        argument_default=argparse.SUPPRESS,
    )
    for name, (kind, words) in (_NEEDED | _OPTIONAL).items():
        flag = "--" + name.replace("_", "-")
        costs.add_argument(flag, type=kind, help=words, required=name in _NEEDED)
    names = [method.name for method in METHODS]
    costs.add_argument("--methods", nargs="+", choices=names, help="those to compare")
    costs.add_argument("--codecs", nargs="+", help="none bf16 int8 int4 topk")
    costs.add_argument("--sync-every", type=int, help="of all methods but DDP")
    costs.add_argument("--overlap", type=int, help="of all but DDP and EagerDiLoCo")
    costs.add_argument("--ddp-overlap", type=float, help="part of a step, 0 to 1")
    costs.add_argument("--fragments", type=int, help="of StreamingDiLoCo")
    costs.add_argument("--json", action="store_true", help="print JSON, no table")
    costs.add_argument("--png", metavar="FILE", help="draw it")
    return parser, commands.choices


def _doctor(given: dict[str, Any]) -> None:
    settings = {k: v for k, v in given.items() if k in _EXAMINED}
    if "mbytes" in settings:
        settings["max_mbytes"] = settings.pop("mbytes")
    try:
        report = doctor.examine(**settings)
    except SyncError as error:
        sys.exit(str(error))
    # Nor do others fail: torchrun would end the first one before it has spoken.
    if os.environ.get("RANK", "0") != "0":
        return
    if "json" in given:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        print(*doctor.lines(report), sep="\n")
    sys.stdout.flush()
    if not report.is_well:
        sys.exit(1)


def _lighthouse(bind: str, heartbeat_s: float) -> None:
    try:
        from torchft.coordination import LighthouseServer
    except ImportError:
        raise ImportError(
            "torchft must be installed for a lighthouse. Run `pip install "
            "'lowcomm[elastic]'`."
        ) from None
    check_positive("heartbeat_s", heartbeat_s)
    # It logs several lines for each list of workers that it gives, some times a second.
    with _silent() as out:
        server = LighthouseServer(
            bind=bind,
            min_replicas=1,
            join_timeout_ms=1000,
            quorum_tick_ms=50,
            heartbeat_timeout_ms=round(1000 * heartbeat_s),
        )
        print("lighthouse at", server.address().removeprefix("http://"), file=out)
        out.flush()
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


@contextlib.contextmanager
def _silent() -> Iterator[TextIO]:
    """Sends what native code writes nowhere; gives the output that was there."""
    kept = [os.dup(stream) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        with os.fdopen(os.dup(kept[0]), "w") as out:
            yield out
    finally:
        for stream, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, stream)
            os.close(copy)
        os.close(nowhere)


def _choices(given: dict[str, Any]) -> dict[str, Any]:
    """Methods and codecs, where they are not the usual ones."""
    chosen = given.get("methods") or [method.name for method in METHODS]
    choices: dict[str, Any] = {
        "methods": [_adapted(m, given) for m in METHODS if m.name in chosen]
    }
    if "codecs" in given:
        choices["codecs"] = [None if c == "none" else c for c in given["codecs"]]
    return choices


def _adapted(method: Method, given: dict[str, Any]) -> Method:
    if method.name == "DDP":
        return replace(method, overlap=given.get("ddp_overlap", method.overlap))
    names = ["sync_every"]
    names += ["overlap"] if method.name != "EagerDiLoCo" else []
    names += ["fragments"] if method.name == "StreamingDiLoCo" else []
    return replace(method, **{name: given[name] for name in names if name in given})


def _lines(answer: Plan, settings: dict[str, Any]) -> Iterator[str]:
    rows = answer.rows
    notes = [*dict.fromkeys(row.note for row in rows if row.note)]
    table = [_TITLES.split(), *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells, row in zip(table, (None, *rows), strict=True):
        name, *others = (c.rjust(w) for c, w in zip(cells, widths, strict=True))
        mark = f" [{notes.index(row.note) + 1}]" if row and row.note else ""
        yield " ".join([name.strip().ljust(widths[0]), *others]) + mark
    for i, note in enumerate(notes, start=1):
        yield from textwrap.wrap(f"[{i}] {note}", 88)
    yield _LEGEND.format(utilization=settings.get("utilization", 0.95))
    if "mtbf_h" in settings:
        yield _FAILURES.format(mtbf_h=settings["mtbf_h"])
        yield f"{'method':<15} codec  number  back-h    on-h"
        for row in rows:
            numbers = (row.failures, row.restart_h, row.go_on_h)
            cells = [f"{row.method.name:<15} {row.codec or '-':>5}"]
            yield " ".join(cells + [_short(number).rjust(7) for number in numbers])


def _cells(row: Row) -> list[str]:
    method = row.method
    return [
        method.name,
        str(method.sync_every),
        _short(method.sync_every if method.name == "EagerDiLoCo" else method.overlap),
        str(method.fragments),
        row.codec or "-",
        _short(row.bytes_per_step / 1e6),
        f"{100 * row.ratio:.3g}%",
        _short(row.exchange_s),
        _short(row.exposed_s),
        f"{row.compute_utilization:.1%}",
        _short(row.hours),
        _short(row.extra_gb),
        _short(row.shortest_period),
        _short(row.smallest_overlap),
    ]


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def _draw(answer: Plan, file: str) -> None:
    """Bars of the utilization, with the hours beside them."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            f"png must be left out without matplotlib, got {file}. Install it: "
            "pip install matplotlib"
        ) from None
    labels = [f"{row.method.name} {row.codec or ''}".strip() for row in answer.rows]
    used = [100 * row.compute_utilization for row in answer.rows]
    figure = Figure(figsize=(7, 1 + 0.25 * len(labels)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(labels, used)
    axes.bar_label(bars, [f" {_short(row.hours)} h" for row in answer.rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 115)
    axes.set_xlabel("time spent in steps, per cent; and hours of the run")
    figure.savefig(file, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1:])
