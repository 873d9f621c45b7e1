"""Compares the methods: losses, bytes, and hours on networks of three speeds.

    python recipes/compare.py headline --dry-run          # what would be trained
    python recipes/compare.py headline J7 --budget-minutes 60
    python recipes/compare.py all --seeds 1 --steps 100

Four workers are simulated in this process, on one core and to the same bits every time.
Every finished trial is kept in out/compare/, so a comparison that was killed, or had no
time left, goes on when it is called again. Writes report.html there, the same as
report.md, and the plots. Groups of trials are in groups.py.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from data import load_corpus
from groups import GROUPS, Choice
from pages import Section, section, write_html, write_markdown
from trials import Store

SECONDS_A_STEP = 0.019  # of one worker, with validations; measured on one core


@dataclass(frozen=True)
class Options:
    """Trains groups of trials and compares what they come to."""

    groups: tyro.conf.Positional[tuple[str, ...]]
    """Names of groups, or all."""
    seeds: int = 3
    """Seeds of each configuration."""
    periods: tuple[int, ...] = (10, 30, 100)
    """Steps between exchanges in `headline`; rates are tuned at the first one."""
    lrs: tuple[float, ...] = (2.5e-3, 5e-3, 1e-2)
    """Grid of inner learning rates; claims take the middle one."""
    outer_lrs: tuple[float, ...] = ()
    """Grid of outer rates for every method that has one. None: each method's own."""
    steps: int | None = None
    """Steps of each trial. None: 600."""
    budget_minutes: float = float("inf")
    """No trial is begun after so many minutes."""
    dry_run: bool = False
    """Only say what would be trained, and for how long."""
    data: Path | None = None
    """What to train on, as in pretrain.py."""
    cache: Path = Path("out/cache")
    """Where tokenizers and tokens are kept."""
    out: Path = Path("out/compare")
    """Where trials and reports go."""

    def __post_init__(self) -> None:
        unknown = [name for name in self.groups if name not in (*GROUPS, "all")]
        if unknown or not self.groups:
            raise ValueError(
                f"groups must be of {', '.join(GROUPS)} or all, got "
                f"{', '.join(unknown) or 'none'}."
            )
        for name in ("seeds", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}.")
        for name in ("periods", "lrs"):
            if not getattr(self, name) or min(getattr(self, name)) <= 0:
                value = getattr(self, name)
                raise ValueError(f"{name} must be positive numbers, got {value}.")

    @property
    def names(self) -> list[str]:
        return list(GROUPS) if "all" in self.groups else list(self.groups)

    @property
    def choice(self) -> Choice:
        return Choice(self.seeds, self.periods, self.lrs, self.outer_lrs, self.steps)


def look(options: Options, store: Store) -> dict[str, str]:
    """Goes through the groups without training; says what each still needs."""
    told = {}
    for name in options.names:
        group, before = GROUPS[name], dict(store.missing)
        if group.toy is not None:
            ready = group.toy(store) is not None
            told[name] = "there" if ready else "a minute or two"
            continue
        assert group.rows is not None
        group.rows(store, options.choice)
        new = [config for file, config in store.missing.items() if file not in before]
        steps = sum(config.num_steps * (config.workers or 1) for config in new)
        minutes = steps * SECONDS_A_STEP / 60
        told[name] = f"{len(new)} trials, {minutes:.0f} minutes of one core"
    return told


def compare(options: Options, store: Store) -> list[Section]:
    """Trains what is missing, then shows every group of which something is there."""
    sections = []
    for name in options.names:
        group = GROUPS[name]
        if group.toy is not None:
            found = group.toy(store)
        else:
            assert group.rows is not None
            found = group.rows(store, options.choice)
        if found:
            sections.append(section(name, group, found, options.out))
            write(sections, options.out)  # after each: the next may take an hour
            print(f"{name}: {sections[-1].verdict}", flush=True)
        else:
            print(f"{name}: nothing is there yet.", flush=True)
    return sections


def write(sections: Sequence[Section], out: Path) -> None:
    write_markdown(sections, out / "report.md")
    write_html(sections, out / "report.html")


def main(arguments: Sequence[str]) -> None:
    options = tyro.cli(Options, prog="compare.py", args=arguments)
    torch.set_num_threads(1)  # more of them make other bits, and one is as fast here
    base = options.choice.base()
    corpus = load_corpus(options.data, base.vocab_size, options.cache, make=True)
    options.out.mkdir(parents=True, exist_ok=True)
    seen = Store(options.out / "trials", corpus, trains=False)
    for name, needs in look(options, seen).items():
        print(f"{name}: {needs}", flush=True)
    if not options.dry_run:
        deadline = time.monotonic() + 60 * options.budget_minutes
        if compare(options, Store(seen.folder, corpus, deadline=deadline)):
            print(f"The report is in {options.out / 'report.html'}.")


if __name__ == "__main__":
    main(sys.argv[1:])
