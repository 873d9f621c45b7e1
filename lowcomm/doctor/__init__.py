"""What a machine has for training over a network, and what its links carry.

Asked before a run: who reaches whom, at which address, how fast. `python -m lowcomm
doctor` prints it.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations

from lowcomm.doctor.machine import Machine, look
from lowcomm.doctor.meeting import (
    Answering,
    Meeting,
    Two,
    environ_number,
    reached_from,
)
from lowcomm.doctor.report import NO_CONNECTION, NOT_REACHED, Pair, Report, lines
from lowcomm.plan import Method, Row, plan
from lowcomm.sync.errors import SyncError
from lowcomm.sync.measure import measure
from lowcomm.sync.schedule import check_number, check_positive

__all__ = ["Machine", "Pair", "Report", "examine", "lines", "look"]

_SILENT_S = 10.0
#: A pair that says nothing for so long has ended.
_PAIR_S = 60.0
#: One that has all the results ends at once.
_END_S = 2.0
#: All pairs together, as far as nothing else is said.
_TOTAL_S = 60.0


def examine(
    *,
    max_mbytes: float = 16.0,
    seconds: float | None = None,
    num_params: float | None = None,
    step_s: float | None = None,
    timeout_s: float = 30.0,
) -> Report:
    """Looks at this machine, and with other workers at the links between them.

    Workers are those of the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT),
    as torchrun sets it; all of them call it. Pairs are measured one after another.

    >>> report = examine()
    >>> len(report.machines), report.is_well
    (1, True)

    Args:
        max_mbytes: so much is sent at most in each direction of a pair, in 10^6 bytes.
        seconds: about so long each direction is measured; if None 1, or less, so that
            all pairs take about a minute.
        num_params: parameters of the model, for what an exchange would take.
        step_s: seconds of an inner step, for the same.
        timeout_s: how long others are waited for, in seconds.

    Raises:
        SyncError: if the workers do not meet, or the environment lacks what is needed.
        ValueError: if an argument, or a number of the environment, is out of its range.
    """
    check_positive("max_mbytes", max_mbytes)
    check_positive("timeout_s", timeout_s)
    if seconds is not None:
        check_positive("seconds", seconds)
    if (num_params is None) != (step_s is None):
        raise ValueError(
            "num_params and step_s must be given together, got "
            f"{num_params=} and {step_s=}. A plan needs both."
        )
    if num_params is not None and step_s is not None:
        check_number("num_params", num_params, float, least=1)
        check_positive("step_s", step_s)
    size = environ_number("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1
    if size == 1:
        return Report((look(),), {0: {}}, ())
    rank = environ_number("RANK")
    if not 0 <= rank < size:
        raise ValueError(
            f"RANK must be from 0 to WORLD_SIZE - 1 = {size - 1}, got {rank}. Start "
            "the workers with torchrun."
        )
    meeting = Meeting(rank, size, timeout_s)
    try:
        machines, reached = _meet(meeting)
        pairs = _all_pairs(meeting, machines, reached, seconds, round(1e6 * max_mbytes))
        rows = _rows(pairs, size, num_params, step_s)
        report = Report(tuple(machines.values()), reached, pairs, rows, step_s)
        # Whoever has the store ends last.
        meeting.tell(f"end {rank}", True)
        if rank == 0:
            for other in range(size):
                meeting.ask(f"end {other}", _END_S)
    except RuntimeError as error:
        if isinstance(error, SyncError):
            raise
        raise SyncError(
            f"the store must be there to the end, got on rank {rank}: "
            f"{_first_sentence(error)}. See what has ended rank 0."
        ) from error
    return report


def _meet(
    meeting: Meeting,
) -> tuple[dict[int, Machine], dict[int, dict[int, list[str]]]]:
    """The workers, and at which addresses they reach each other."""
    token = uuid.uuid4().hex
    answering = Answering(token)
    try:
        mine = asdict(look(meeting.rank)) | {"port": answering.port, "token": token}
        told = meeting.gather("machine", mine)
        machines = {rank: Machine(**words) for rank, words in told.items()}
        found = meeting.gather("reached", reached_from(meeting.rank, machines))
    finally:
        answering.close()
    reached = {
        rank: {int(other): addresses for other, addresses in row.items()}
        for rank, row in found.items()
    }
    return machines, reached


def _all_pairs(
    meeting: Meeting,
    machines: Mapping[int, Machine],
    reached: Mapping[int, Mapping[int, Sequence[str]]],
    seconds: float | None,
    max_bytes: int,
) -> tuple[Pair, ...]:
    """Measures one pair after another; all workers wait for each of them."""
    all_ranks = list(combinations(sorted(machines), 2))
    if seconds is None:
        seconds = min(1.0, max(0.1, _TOTAL_S / (2 * len(all_ranks))))
    pairs = []
    for ranks in all_ranks:
        low, high = ranks
        # gloo decides which of the two connects.
        if not (
            machines[high].listens in reached[low][high]
            or machines[low].listens in reached[high][low]
        ):
            pairs.append(Pair(ranks, error=NOT_REACHED))
            continue
        if meeting.rank in ranks:
            pair = _measured(meeting, ranks, seconds, max_bytes)
            if meeting.rank == low:
                meeting.tell(f"pair {low} {high}", pair)
        told = meeting.ask(f"pair {low} {high}", _PAIR_S)
        if told is None:
            told = [ranks, None, None, None, f"rank {low} says nothing any more"]
        pairs.append(Pair(ranks, *told[1:]))
    return tuple(pairs)


def _rows(
    pairs: Sequence[Pair], size: int, num_params: float | None, step_s: float | None
) -> tuple[Row, ...]:
    """What DiLoCo costs over links that are all as slow as the slowest."""
    rate = min(pair.slower_gbit_s for pair in pairs)
    if num_params is None or step_s is None or rate == 0:
        return ()
    return plan(
        num_params=num_params,
        num_workers=size,
        gbit_s=rate,
        latency_s=max(pair.latency_s or 0.0 for pair in pairs),
        step_s=step_s,
        num_steps=1_000_000,
        # So long a round that there is an overlap which hides the exchange.
        methods=[Method("DiLoCo", sync_every=100_000)],
        codecs=[None, "int8"],
    ).rows


def _measured(
    meeting: Meeting, ranks: tuple[int, int], seconds: float, max_bytes: int
) -> Pair:
    """Measures this worker's link to another one, which does so too."""
    rank = meeting.rank
    store = meeting.corner(f"pair {ranks}")
    try:
        two = Two(store, ranks, rank)
    except RuntimeError as error:
        return Pair(ranks, error=f"{NO_CONNECTION}: {_first_sentence(error)}")
    try:
        measured = measure(
            two,
            sum(ranks) - rank,
            seconds=seconds,
            max_bytes=max_bytes,
            timeout_s=_SILENT_S,
        )
    except SyncError as error:
        two.close()
        return Pair(ranks, error=_first_sentence(error))
    return Pair(ranks, *measured)


def _first_sentence(error: Exception) -> str:
    """Without the advice and the stack that torch adds."""
    return str(error).splitlines()[0].partition(". ")[0]
