"""What recipes/compare.py can be asked: groups of trials, and what each is to show.

A group names a claim of a paper, the trials that test it here, and a verdict on their
numbers. Differences below the spread over seeds are no evidence, and verdicts say so.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import toys
from runs import Config, compare
from trials import Store, Trial


def middle(grid: Sequence[float]) -> float:
    """The default in a grid of rates."""
    return grid[len(grid) // 2]


class Choice(NamedTuple):
    """What the command line decides."""

    seeds: int = 3
    periods: tuple[int, ...] = (10, 30, 100)
    lrs: tuple[float, ...] = (2.5e-3, 5e-3, 1e-2)
    outer_lrs: tuple[float, ...] = ()  # none: each method's own
    num_steps: int | None = None  # None: those of the run `compare`

    def base(self) -> Config:
        config = compare()
        if self.num_steps is None:
            return config
        shorter = self.num_steps / config.num_steps
        every = max(1, round(config.eval_every * shorter))
        return replace(
            config,
            num_steps=self.num_steps,
            warmup_steps=max(1, round(config.warmup_steps * shorter)),
            log_every=every,
            eval_every=every,
            eval_windows=max(32, round(config.eval_windows * shorter)),
        )


class Row(NamedTuple):
    """The trials of one configuration, of as many seeds as there are."""

    label: str
    trials: list[Trial]
    note: str = ""

    @property
    def config(self) -> Config:
        return self.trials[0].config

    @property
    def losses(self) -> list[float]:
        return [trial.final.val_loss for trial in self.trials]

    @property
    def loss(self) -> float:
        return statistics.mean(self.losses)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; of one seed nobody knows."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else float("nan")

    @property
    def bytes_sent(self) -> float:
        return statistics.mean(trial.final.bytes_sent for trial in self.trials)


Rows = dict[str, Row]
Table = list[dict[str, Any]]


@dataclass(frozen=True)
class Group:
    """A question to ask.

    Args:
        title: what it is about.
        claim: what the paper says, and what would show it here.
        paper: where it says so; an arXiv number.
        rows: trains and gives the rows.
        toy: or a table, from small experiments; None while one of them is not there.
        judge: says in a sentence what the numbers say.
    """

    title: str
    claim: str
    paper: str
    judge: Callable[[Any], str]
    rows: Callable[[Store, Choice], Rows] | None = None
    toy: Callable[[Store], Table | None] | None = None


def collect(
    store: Store, cases: Sequence[tuple[str, Config]], seeds: int, notes: Any = None
) -> Rows:
    """The rows of configurations; seed by seed, so that a halt leaves all of them."""
    found: dict[str, list[Trial]] = {label: [] for label, _ in cases}
    for seed in range(seeds):
        for label, config in cases:
            trial = store.trial(replace(config, seed=seed))
            if trial is not None:
                found[label].append(trial)
    notes = notes or {}
    return {k: Row(k, v, notes.get(k, "")) for k, v in found.items() if v}


# -------------------------------------------------------------------------------------
# All methods, each with rates of its own


@dataclass(frozen=True)
class Variant:
    """A method in the comparison.

    Args:
        settings: its changes to the run `compare`.
        outer_lrs: grid of outer rates, the middle one for the inner grid; none: it has
            no outer rate.
        like: the variant whose rates it takes, instead of a grid of its own.
    """

    settings: dict[str, Any]
    outer_lrs: tuple[float, ...] = ()
    like: str | None = None


VARIANTS = {
    "ddp": Variant({"method": "ddp"}),
    "local_sgd": Variant({"method": "local_sgd"}),
    "local_adam": Variant({"method": "local_adam"}),
    "diloco": Variant({"method": "diloco"}, (0.4, 0.7, 1.0)),
    "diloco int8": Variant({"method": "diloco", "codec": "int8"}, like="diloco"),
    "streaming": Variant({"method": "streaming"}, (0.4, 0.7, 1.0)),
    "streaming int4": Variant(
        {"method": "streaming", "codec": "int4"}, like="streaming"
    ),
    "eager": Variant({"method": "eager"}, (0.2, 0.4, 0.7)),
    "noloco": Variant({"method": "noloco"}, (0.5, 0.7, 0.9)),
    "desloc": Variant({"method": "desloc"}),
    "mtdao": Variant({"method": "mtdao"}),
    "slowmo": Variant({"method": "slowmo"}, (0.5, 0.75, 1.0)),
}


def headline(store: Store, choice: Choice) -> Rows:
    """Tunes every method at one seed and the shortest period, then runs the rest."""
    base = choice.base()
    tuned = {}
    for name, variant in VARIANTS.items():
        config = replace(base, sync_every=choice.periods[0], **variant.settings)
        if variant.like is None:
            tuned[name] = tune(store, choice, config, variant)
        else:
            best, note = tuned[variant.like]
            rates = {"lr": best.lr, "outer_lr": best.outer_lr}
            tuned[name] = replace(config, **rates), note
    rows: Rows = {}
    for period in choice.periods:
        cases, notes = [], {}
        for name, (config, note) in tuned.items():
            if config.method == "ddp" and rows:
                continue  # it has no period
            label = name if config.method == "ddp" else f"{name}, H={period}"
            cases.append((label, replace(config, sync_every=period)))
            notes[label] = note
        rows |= collect(store, cases, choice.seeds, notes)
    return rows


def tune(
    store: Store, choice: Choice, config: Config, variant: Variant
) -> tuple[Config, str]:
    """The best inner rate at the middle outer rate, then the best outer rate at it.

    Returns:
        The configuration, and a note on its rates; an exclamation mark is at a rate
        that is the first or the last of its grid, beyond which a better one may be.
    """
    note = ""
    outer_lrs = (choice.outer_lrs or variant.outer_lrs) if variant.outer_lrs else ()
    if outer_lrs:
        config = replace(config, outer_lr=middle(outer_lrs))
    for name, grid in (("lr", choice.lrs), ("outer_lr", outer_lrs)):
        if not grid:
            continue
        losses = {}
        for value in grid:
            trial = store.trial(replace(config, **{name: value}))
            if trial is not None:
                losses[value] = trial.final.val_loss
        best = min(losses, key=losses.__getitem__, default=middle(grid))
        config = replace(config, **{name: best})
        edge = "!" if best in (grid[0], grid[-1]) and len(grid) > 1 else ""
        note += f"{name}={best:g}{edge} "
    return config, note.strip()


def judge_headline(rows: Rows) -> str:
    ddp = rows.get("ddp")
    if ddp is None:
        return "DDP is not there yet."
    others = [row for row in rows.values() if row is not ddp]
    if not others:
        return f"DDP comes to {ddp.loss:.3f}; nothing else is there yet."
    best = min(others, key=lambda row: row.loss)
    cheap = [row for row in others if row.loss <= 1.05 * ddp.loss]
    text = (
        f"DDP comes to {ddp.loss:.3f}. Nearest is {best.label} with {best.loss:.3f} "
        f"({best.loss / ddp.loss - 1:+.1%}) at {best.bytes_sent / ddp.bytes_sent:.1%} "
        "of its bytes."
    )
    if cheap:
        least = min(cheap, key=lambda row: row.bytes_sent)
        text += (
            f" Within 5% of DDP's loss, {least.label} sends least: "
            f"{least.bytes_sent / ddp.bytes_sent:.2%}."
        )
    return text


# -------------------------------------------------------------------------------------
# Claims on language models


LENGTHS = (1, 2, 4)  # times the steps of other trials


def lengths(store: Store, choice: Choice) -> Rows:
    base = replace(choice.base(), lr=middle(choice.lrs), sync_every=10)
    cases = [
        (
            f"{method}, {steps} steps",
            replace(base, num_steps=steps, method=method, outer_lr=outer_lr),
        )
        for steps in (factor * base.num_steps for factor in LENGTHS)
        for method, outer_lr in (
            ("ddp", None),
            ("local_adam", None),
            ("desloc", None),
            ("diloco", 0.7),
        )
    ]
    return collect(store, cases, 1)


def judge_lengths(rows: Rows) -> str:
    by_run: dict[tuple[str, int], float] = {
        (row.config.method, row.config.num_steps): row.loss for row in rows.values()
    }
    steps = sorted({num_steps for _, num_steps in by_run})
    told = []
    for method in dict.fromkeys(method for method, _ in by_run if method != "ddp"):
        gaps = [
            f"{by_run[method, n] / by_run['ddp', n] - 1:+.1%} at {n}"
            for n in steps
            if (method, n) in by_run and ("ddp", n) in by_run
        ]
        told.append(f"{method} {', '.join(gaps)}")
    gaps_told = "; ".join(told) or "nothing yet"
    return f"Against DDP of as many steps: {gaps_told}."


def late_models(store: Store, choice: Choice) -> Rows:
    base = replace(choice.base(), lr=middle(choice.lrs), outer_lr=0.4)
    cases = [
        (f"{method}, H={period}", replace(base, method=method, sync_every=period))
        for period in (10, 30, 60)
        for method in ("diloco", "eager")
    ]
    return collect(store, cases, choice.seeds)


def judge_late_models(rows: Rows) -> str:
    gaps = [
        f"{rows[eager].loss - rows[sync].loss:+.3f} at H={period}"
        for period in (10, 30, 60)
        if (sync := f"diloco, H={period}") in rows
        and (eager := f"eager, H={period}") in rows
    ]
    return f"Eager updates cost {', '.join(gaps) or 'what is not known yet'} nats."


def outer_rates(store: Store, choice: Choice) -> Rows:
    base = replace(choice.base(), lr=middle(choice.lrs), method="diloco")
    cases = [
        (
            f"M={workers}, H={period}, outer {outer_lr}",
            replace(base, workers=workers, sync_every=period, outer_lr=outer_lr),
        )
        for outer_lr in (0.3, 0.6, 0.9)
        for period in (5, 30)
        for workers in (1, 2, 4)
    ]
    return collect(store, cases, choice.seeds)


def judge_outer_rates(rows: Rows) -> str:
    best: dict[tuple[int, int], float] = {}
    for row in sorted(rows.values(), key=lambda row: -row.loss):
        config = row.config
        best[config.workers or 1, config.sync_every] = config.outer_lr or 0.0
    told = ", ".join(f"{eta} (M={m}, H={h})" for (m, h), eta in sorted(best.items()))
    falls = [
        (a, b)
        for a in best
        for b in best
        if a != b and a[0] <= b[0] and a[1] <= b[1] and best[a] > best[b]
    ]
    return (
        f"Best outer rates: {told}. "
        + ("They never fall with M or H." if not falls else "Not always rising.")
        + " Neighbours on the grid may be equal: see the spread."
    )


def codecs(store: Store, choice: Choice) -> Rows:
    base = replace(choice.base(), lr=middle(choice.lrs), outer_lr=0.7, sync_every=30)
    cases = [
        (str(codec or "fp32"), replace(base, codec=codec))
        for codec in (None, "bf16", "int8", "int4")
    ]
    return collect(store, cases, choice.seeds)


def judge_codecs(rows: Rows) -> str:
    return judge_against(rows, "fp32", ("bf16", "int8", "int4"))


def state_periods(store: Store, choice: Choice) -> Rows:
    base = replace(choice.base(), lr=middle(choice.lrs), sync_every=15, beta1=0.95)
    cases = moments_of(base) | {"no moments": replace(base, method="local_sgd")}
    return collect(store, [*cases.items()], choice.seeds)


def long_state_periods(store: Store, choice: Choice) -> Rows:
    base = replace(choice.base(), lr=middle(choice.lrs), sync_every=10)
    base = replace(base, num_steps=LENGTHS[-1] * base.num_steps)
    return collect(store, [*moments_of(base).items()], choice.seeds)


def moments_of(base: Config) -> dict[str, Config]:
    """Local Adam, and DES-LOC with half of its bytes in two ways."""
    every, desloc = base.sync_every, replace(base, method="desloc")
    together = replace(desloc, first_periods=4, second_periods=4)
    return {
        f"all at {every}": replace(base, method="local_adam"),
        f"moments at {3 * every} and {6 * every}": desloc,
        f"moments at {4 * every}": together,
    }


def judge_state_periods(rows: Rows) -> str:
    adam = (name for name, row in rows.items() if row.config.method == "local_adam")
    reference = next(adam, "all at the same steps")
    return judge_against(rows, reference, [name for name in rows if name != reference])


def growing_rounds(store: Store, choice: Choice) -> Rows:
    lr = middle(choice.lrs)
    base = replace(choice.base(), lr=lr, method="local_sgd")
    cases = [
        ("H=4", replace(base, sync_every=4)),
        ("H=8", replace(base, sync_every=8)),
        ("QSR from 4", replace(base, sync_every=4, qsr=2 * lr)),
    ]
    return collect(store, cases, choice.seeds)


def judge_growing_rounds(rows: Rows) -> str:
    return judge_against(rows, "H=4", ("H=8", "QSR from 4"))


def judge_against(rows: Rows, reference: str, others: Sequence[str]) -> str:
    """How losses and bytes differ from those of one row."""
    if reference not in rows:
        return f"{reference} is not there yet."
    base, told = rows[reference], []
    for row in (rows[label] for label in others if label in rows):
        gap = row.loss - base.loss
        spreads = [s for s in (base.spread, row.spread) if not math.isnan(s)]
        known = ""
        if spreads:
            clear = "beyond" if abs(gap) > max(spreads) else "within"
            known = f", {clear} the spread {max(spreads):.3f}"
        told.append(
            f"{row.label} {gap:+.3f} nats at {row.bytes_sent / base.bytes_sent:.0%} of "
            f"the bytes{known}"
        )
    return f"Against {reference}: " + ("; ".join(told) or "nothing yet") + "."


# -------------------------------------------------------------------------------------
# Claims on toys


def table(name: str, results: Sequence[tuple[dict[str, Any], Any]]) -> Table | None:
    """Lines of settings and a result of this name; None if one is not there."""
    if any(result is None for _, result in results):
        return None
    return [{**settings, name: result} for settings, result in results]


def spreads(store: Store) -> Table | None:
    settings = [{"lr": lr, "decays": False} for lr in (0.0125, 0.025, 0.05, 0.1)]
    settings.append({"lr": 0.1, "decays": True})
    return table(
        "spread", [(s, store.toy(toys.spread_of_noloco, **s)) for s in settings]
    )


def judge_spreads(lines: Table) -> str:
    *constant, decayed = lines
    lrs = [line["lr"] for line in constant]
    stds = [line["spread"] for line in constant]
    correlation = statistics.correlation(lrs, stds)
    return (
        f"Correlation of spread and rate {correlation:.3f}; a decay to zero leaves "
        f"{decayed['spread'] / stds[-1]:.0%} of it."
    )


def growths(store: Store) -> Table | None:
    results = []
    for workers in (8, 16, 64):
        for momentum in (0.5, 0.9):
            limit = toys.limit_of_gamma(workers, momentum)
            for part in (0.9, 1.1):
                gamma = round(part * limit, 4)
                settings = {"workers": workers, "momentum": momentum, "gamma": gamma}
                growth = store.toy(toys.growth_of_pairs, **settings)
                results.append(({**settings, "of the limit": part}, growth))
    return table("growth", results)


def judge_growths(lines: Table) -> str:
    agree = sum((line["growth"] > 1) == (line["of the limit"] > 1) for line in lines)
    return f"The limit tells growth from decay in {agree} of {len(lines)} settings."


def late_steps(store: Store) -> Table | None:
    lines: Table = []
    for sync_every in (5, 15, 30, 100):
        for outer_lr in (0.2, 0.7):
            settings = {"sync_every": sync_every, "outer_lr": outer_lr}
            losses = {
                timing: store.toy(toys.loss_of_late_steps, timing=timing, **settings)
                for timing in ("sync", "eager", "delayed")
            }
            if None in losses.values():
                return None
            lines.append({**settings, **losses})
    return lines


def judge_late_steps(lines: Table) -> str:
    ordered = sum(line["sync"] < line["eager"] < line["delayed"] for line in lines)
    grown = {
        timing: sum(not line[timing] < 1000 * line["sync"] for line in lines)
        for timing in ("eager", "delayed")
    }
    return (
        f"In {ordered} of {len(lines)} settings the order is sync, eager, delayed. "
        f"Delayed steps grow without bound in {grown['delayed']} of them, eager ones "
        f"in {grown['eager']}: take a lower outer rate with what comes late."
    )


def memories(store: Store) -> Table | None:
    lines: Table = []
    for beta in (0.9, 0.95, 0.99, 0.995, 0.999):
        cosines = store.toy(toys.memory_of_momenta, beta=beta)
        if cosines is None:
            return None
        line = {"beta": beta, "left of it": beta**32, "to the mean": cosines[0]}
        lines.append({**line, "to the last mean": cosines[1]})
    return lines


def judge_memories(lines: Table) -> str:
    rises = all(
        b[name] > a[name]
        for a, b in zip(lines, lines[1:], strict=False)
        for name in ("to the mean", "to the last mean")
    )
    last = lines[-1]
    return (
        f"Both cosines {'rise' if rises else 'do not always rise'} with beta, to "
        f"{last['to the mean']:.2f} and {last['to the last mean']:.2f}."
    )


# -------------------------------------------------------------------------------------

GROUPS = {
    "headline": Group(
        "All methods",
        "Methods that exchange every H steps come near data-parallel training at a "
        "small part of its bytes. Every method has the best of three inner and of "
        "three outer rates, found at one seed and the shortest period.",
        "2311.08105",
        judge_headline,
        rows=headline,
    ),
    "lengths": Group(
        "Longer runs: the gap to data-parallel training closes",
        "Workers that see the same gradient in other noise go apart less, the lower "
        "the rate and the later the step: the gap is less in longer runs.",
        "2311.08105",
        judge_lengths,
        rows=lengths,
    ),
    "J1": Group(
        "NoLoCo: workers are apart in proportion to the inner rate",
        "The deviation of weights over workers follows the inner learning rate, so a "
        "rate that decays brings consensus without a last mean. Correlation above 0.9, "
        "and a small rest after a decay.",
        "2506.10911",
        judge_spreads,
        toy=spreads,
    ),
    "J2": Group(
        "NoLoCo: which gamma keeps workers together",
        "Differences shrink below the limit of docs/methods/noloco.md and grow above "
        "it; for a momentum of 0.9 that is far below the range in the paper.",
        "2506.10911",
        judge_growths,
        toy=growths,
    ),
    "J3": Group(
        "Late outer steps: eager ones cost little, delayed ones much",
        "An outer step that comes a round late costs more, the longer the round; "
        "taking the own share at once repairs most of it. The order is sync, eager, "
        "delayed.",
        "2502.12996",
        judge_late_steps,
        toy=late_steps,
    ),
    "J3-models": Group(
        "Eager updates on language models",
        "Eager updates lose little against DiLoCo, also in longer rounds.",
        "2502.12996",
        judge_late_models,
        rows=late_models,
    ),
    "J5": Group(
        "DiLoCo: the best outer rate grows with workers and rounds",
        "The best outer rate does not fall when there are more workers, nor when "
        "rounds are longer. The batch of a worker is the same, so more workers read "
        "more.",
        "2503.09799",
        judge_outer_rates,
        rows=outer_rates,
    ),
    "J7": Group(
        "Codecs: eight bits cost nothing",
        "Pseudo-gradients in 8 or 16 bits lead to the loss of fp32. The difference is "
        "within the spread over seeds.",
        "2412.01152",
        judge_codecs,
        rows=codecs,
    ),
    "J8": Group(
        "MT-DAO: slow momenta remember the last exchange",
        "Of a momentum, beta^K is left after K steps. The slower it is, the nearer a "
        "worker's is to the mean, and to what was last agreed: both at least 0.8 at "
        "0.999.",
        "2510.05361",
        judge_memories,
        toy=memories,
    ),
    "J10": Group(
        "DES-LOC: moments may be averaged more rarely than parameters",
        "First moments every 3 and second every 6 periods lead to the loss of "
        "averaging all of them each time, at half of the bytes. Within 0.5%.",
        "2505.22549",
        judge_state_periods,
        rows=state_periods,
    ),
    "J10-long": Group(
        "DES-LOC in longer runs: both moments in the same steps",
        "Half of the bytes, the loss within 0.5%; by averaging first moments alone in "
        "some of the steps, or both together, which keeps Adam's bound on a step.",
        "2505.22549",
        judge_state_periods,
        rows=long_state_periods,
    ),
    "J13": Group(
        "QSR: rounds that grow beat rounds of one length",
        "Rounds that grow as the learning rate falls lead to no higher loss than their "
        "first length kept, with fewer exchanges.",
        "2310.14423",
        judge_growing_rounds,
        rows=growing_rounds,
    ),
}
