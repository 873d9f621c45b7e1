"""Where a worker is in its rounds, and what it does with shares and results by itself.

Nothing in here sends anything, or waits for another worker.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from lowcomm.sync.errors import PeerMismatch
from lowcomm.sync.fingerprint import fingerprint, mark, number_of
from lowcomm.sync.flat import Flats
from lowcomm.sync.mean import Header, Outcome, Wire, cut_name
from lowcomm.sync.seam import Group, Task
from lowcomm.sync.staging import Staged
from lowcomm.sync.stats import Stats
from lowcomm.sync.stream import Landing, Stream

_log = logging.getLogger(__name__)

#: At the most so many rounds pass until all of the agreed values have been compared.
_FINGERPRINT_PARTS = 64

#: What a codec owes: in a stream's state, all that is never agreed.
RESIDUAL = "residual"

_EQUAL_SHARES = (
    "gradients must differ between workers, got the same from ranks %s in the first "
    "round of %r. Take the model out of DistributedDataParallel over them, and give "
    "each of them other data."
)
_NOT_FINITE = "round %d of %r goes without %s share: it is not finite"


@dataclass
class Progress:
    """Where a stream is in its schedule."""

    stream: Stream
    due: int | None = None  # step of the next launch; None for not yet known, or never
    began: int | None = 0  # clock at the round's start, while `due` is not known
    round: int = 0
    launched_at: int = 0  # steps taken at its last launch
    landed_in: str = ""  # among whom its last round was
    settled_at: int = 0  # steps taken when workers were last made equal
    verified: bool = False  # whether the whole of `agreed` has been compared
    unmoved: int = 0  # mark of the share before the first step; 0 if unknown
    waiting: dict[str, Tensor] = field(default_factory=dict)  # to be taken in
    starts: dict[str, Tensor] = field(default_factory=dict)  # their values of then

    def plan(self, clock: int) -> None:
        """A round begins."""
        self.due, self.began = None, clock
        if not self.stream.schedule.is_late:
            self.decide()

    def decide(self) -> None:
        """Settles when the round ends."""
        if self.began is not None:
            self.due, self.began = self.stream.schedule.after(self.began), None


@dataclass(kw_only=True)
class Pending:
    """An exchange under way: everything that landing it needs."""

    progress: Progress
    clock: int  # at the launch
    steps: int  # at the launch
    finite: bool
    norm: float
    weight: float
    members: tuple[int, ...]
    partial: bool  # whether others may have rounds of their own at the same time
    declined: bool  # whether the others go on without this worker
    num_workers: int  # at the launch
    shares: Flats
    results: Flats
    serves: bool = False  # has no share, and was not launched by this worker
    lost: Flats | None = None
    staged: Staged | None = None
    in_place: bool = False  # alone and at once: shares are taken as they are applied
    epoch: str = ""  # among whom it was sent
    wire: Wire | None = None  # None before it is sent
    task: Task | None = None

    @property
    def kept(self) -> bool:
        """Whether the shares are still there when the result comes."""
        return self.results is not self.shares

    @property
    def lands(self) -> int:
        return self.clock + self.progress.stream.schedule.overlap_at(self.clock)


class Share(NamedTuple):
    """A worker's contribution to a round.

    Args:
        flats: its values.
        finite: whether all of them are.
        norm: its length, if that is limited; else 0.
    """

    flats: Flats
    finite: bool
    norm: float


class Rounds:
    """The rounds of one worker's streams.

    Args:
        streams: in the order in which they are launched.
        group: the workers; asked only for this one's rank and device, and whether
            there are others.
        heal: called when the worker has taken a result in place of a broken state.
    """

    def __init__(
        self, streams: Sequence[Stream], group: Group, heal: Callable[[], None]
    ) -> None:
        self._group = group
        self.heal = heal
        self.stats = Stats()
        # A dict subclass: torch's RemovableHandle refers to it weakly.
        self.hooks: OrderedDict[int, Callable[[Stats], None]] = OrderedDict()
        self._unreported: list[Stats] = []
        self.started = False
        #: counts steps as the schedules do; `finish` brings it to the same value
        #: everywhere, while `stats.steps` stays this worker's own
        self.clock = 0
        self.pending: list[Pending] = []
        self.progress = [Progress(stream) for stream in streams]
        #: clock of the next launch or landing
        self.next = math.inf
        self.plan()

    @property
    def streams(self) -> list[Stream]:
        """The streams in order."""
        return [progress.stream for progress in self.progress]

    # ------------------------------------------------------------------ when

    def plan(self) -> None:
        """Rounds begin on all streams."""
        for progress in self.progress:
            progress.plan(self.clock)
        self.look_ahead()

    def look_ahead(self) -> None:
        """Finds when the next launch or landing is."""
        due = [p.due for p in self.progress if p.due is not None]
        due += [0 for p in self.progress if p.began is not None]
        lands = [p.lands if p.task or p.in_place else 0 for p in self.pending]
        self.next = min(due + lands, default=math.inf)

    @property
    def due(self) -> list[Progress]:
        """Streams that are to be launched."""
        return [p for p in self.progress if p.due and p.due <= self.clock]

    @property
    def landing(self) -> list[Pending]:
        """Exchanges whose results are to be applied."""
        return [pending for pending in self.pending if pending.lands <= self.clock]

    @property
    def scheduled(self) -> list[Progress]:
        """Streams that are ever due."""
        return [p for p in self.progress if not p.stream.schedule.never]

    def find(self, name: str) -> Progress:
        """The stream that a header means."""
        for progress in self.progress:
            if cut_name(progress.stream.name) == name:
                return progress
        names = [progress.stream.name for progress in self.progress]
        raise PeerMismatch(
            f"workers must exchange the same streams, got {name!r} from another with "
            f"{names} on rank {self._group.rank}. Build all optimizers alike, and call "
            "their methods on all workers."
        )

    # ------------------------------------------------------------------ shares

    def start(self) -> None:
        """Called before the first inner step."""
        has_others = len(self._group.members(0)) > 1
        for progress in self.progress:
            stream = progress.stream
            stream.start_()
            if has_others and stream.has_parameters and not stream.schedule.never:
                progress.unmoved = _mark_of_share(stream)
        self.started = True

    def begin_share(self) -> None:
        """What this worker gives is counted from here."""
        for progress in self.progress:
            progress.launched_at = self.stats.steps

    def take_share(self, stream: Stream) -> Share:
        """This worker's contribution as it is now, with what an earlier code owes."""
        flats, sums, squares = stream.layout.empty(), [], []
        for chunk in stream.layout.chunks:
            stream.share_(chunk, out := flats[chunk])
            if stream.residual is not None:
                out.add_(stream.residual[chunk])
            if out.is_floating_point():
                sums.append(out.sum())
            if stream.robust.clip is not None:
                squares.append((chunk, out.dot(out)))
        # A sum hides no inf and no NaN; over finite values it may overflow.
        finite = all(math.isfinite(total) for total in map(float, sums)) or all(
            bool(flat.isfinite().all()) for flat in flats.tensors
        )
        # The part of a worker that is on another rank may be what is not finite.
        verdict = stream.layout.judge(finite, [(c, float(s)) for c, s in squares])
        return Share(flats, *verdict)

    def new_pending(
        self, progress: Progress, *, in_place: bool = False, **launch: Any
    ) -> Pending:
        """A launched exchange with memory for what will come of it."""
        stream, shares, device = progress.stream, launch["shares"], self._group.device
        lost = staged = None
        results = shares
        if not in_place:
            # What is still needed when the result comes is not overwritten by it.
            if stream.goes_alone or stream.schedule.overlap_at(launch["clock"]):
                results = stream.layout.empty()
            if stream.residual is not None:
                lost = stream.layout.empty(device)
            if any(flat.device.type != device.type for flat in shares.tensors):
                staged = Staged(shares, device, self._group.rank)
                results = stream.layout.empty(device)
        return Pending(
            progress=progress,
            in_place=in_place,
            results=results,
            lost=lost,
            staged=staged,
            **launch,
        )

    def header(self, pending: Pending) -> Header:
        """What this worker says of its share."""
        progress, stream = pending.progress, pending.progress.stream
        agreed = 0
        if stream.agreed is not None:
            chunks = stream.layout.chunks
            parts = min(_FINGERPRINT_PARTS, len(chunks)) if progress.verified else 1
            chunks = chunks[progress.round % max(parts, 1) :: max(parts, 1)]
            agreed = fingerprint([stream.agreed[chunk] for chunk in chunks])
        return Header(
            stream=cut_name(stream.name),
            round=progress.round,
            step=pending.clock,
            contributes=int(pending.finite),
            weight=pending.weight,
            agreed=agreed,
            tensors=stream.layout.fingerprint,
            members=0 if pending.partial else number_of(repr(pending.members)),
            norm=pending.norm,
            mark=self._mark(pending),
        )

    def _mark(self, pending: Pending) -> int:
        """By which the first shares are compared, where they can be."""
        if not pending.progress.unmoved or pending.in_place or not pending.finite:
            return 0
        chunks = pending.progress.stream.layout.chunks
        return mark(pending.shares[chunk] for chunk in chunks)

    def drop_unkept(self) -> None:
        """Forgets shares that results may have overwritten; they are taken anew."""
        for pending in [p for p in self.pending if not p.kept]:
            self.pending.remove(pending)
            if not pending.serves:
                pending.progress.due, pending.progress.began = pending.clock, None

    # ------------------------------------------------------------------ results

    def land(
        self,
        pending: Pending,
        outcome: Outcome | None,
        exposed_s: float = 0.0,
        *,
        settle: bool = False,
    ) -> None:
        """Applies the result of an exchange that has ended; None if alone.

        Args:
            pending: the exchange, which is no longer under way.
            outcome: what has come of it.
            exposed_s: seconds that it was waited for.
            settle: whether nothing of this worker's progress is kept on top.
        """
        self.pending.remove(pending)
        if pending.serves:
            assert outcome is not None
            self._land_served(pending, outcome)
            return
        progress, stream = pending.progress, pending.progress.stream
        applied, left_out, used = pending.finite, False, True
        if outcome is not None:
            self._count(stream, outcome, exposed_s)
            applied = bool(outcome.included)
            left_out = not pending.finite
            used = self._group.rank in outcome.included
            _log_left_out(progress, outcome)
            self._look_for_equal_shares(progress, outcome)
        elif not pending.finite:
            _log.warning(_NOT_FINITE, progress.round, stream.name, "this worker's")
        if applied:
            late = self.stats.steps - pending.steps
            landing = Landing(
                late=late,
                share=pending.shares if pending.kept and not left_out else None,
                settle=left_out or (settle and late == 0),
                num_workers=pending.num_workers,
            )
            _apply(stream, pending.results, landing, in_place=pending.in_place)
            if left_out:
                self.heal()
            elif used and pending.lost is not None and stream.residual is not None:
                pairs = zip(stream.residual.tensors, pending.lost.tensors, strict=True)
                for residual, lost in pairs:
                    residual.copy_(lost)
            progress.launched_at = pending.steps
            if stream.last is None and not pending.partial:
                progress.settled_at = pending.steps
        progress.landed_in = pending.epoch
        self._passed(progress, applied=applied)

    def _land_served(self, pending: Pending, outcome: Outcome) -> None:
        """Applies the result of others' round."""
        progress, stream = pending.progress, pending.progress.stream
        if stream.schedule.never:
            self.stats.setup_bytes += outcome.bytes_sent
            progress.round += 1
            return
        self._count(stream, outcome, 0.0)
        if outcome.included:
            keep = progress.settled_at < self.stats.steps
            landing = Landing(keep=keep, settle=not keep)
            _apply(stream, pending.results, landing)
        progress.landed_in = pending.epoch
        self._passed(progress, applied=bool(outcome.included))

    def _passed(self, progress: Progress, *, applied: bool) -> None:
        """Counts a round that is over."""
        progress.round += 1
        progress.verified = True
        if progress.waiting:
            self._extend(progress, progress.waiting, progress.starts)
            progress.waiting, progress.starts = {}, {}
        if not progress.stream.is_round:
            return
        if applied:
            self.stats.rounds += 1
            self.stats.of(progress.stream.name).rounds += 1
            if self.hooks:
                self._unreported.append(self.stats.snapshot())
        else:
            self.stats.skipped_rounds += 1

    def report(self) -> None:
        """Calls the hooks, when the step's rounds are over and may be saved."""
        rounds, self._unreported = self._unreported, []
        for stats in rounds:
            for hook in list(self.hooks.values()):
                hook(stats)

    def _look_for_equal_shares(self, progress: Progress, outcome: Outcome) -> None:
        """Warns, once, where workers might as well be one.

        Whatever has made their gradients equal, also beyond what is to be seen of the
        model, has made their first shares equal in every bit.
        """
        unmoved, progress.unmoved = progress.unmoved, 0
        marks = {rank: h.mark for rank, h in outcome.headers.items() if h.mark}
        if not unmoved or len(marks) < 2 or {*marks.values()} == {unmoved}:
            return
        for other in self.progress:
            other.unmoved = 0
        if len({*marks.values()}) == 1:
            _log.warning(_EQUAL_SHARES, [*marks], progress.stream.name)

    def _count(self, stream: Stream, outcome: Outcome, exposed_s: float) -> None:
        stats = self.stats.of(stream.name)
        self.count_bytes(stream, outcome.bytes_sent)
        for counts in (self.stats, stats):
            counts.exposed_s += exposed_s
        if outcome.likeness is not None:
            stats.share_norm, stats.mean_norm, stats.cosine = outcome.likeness

    def count_bytes(self, stream: Stream, bytes_sent: int) -> None:
        """Counts what was sent for a stream."""
        for counts in (self.stats, self.stats.of(stream.name)):
            counts.bytes_sent += bytes_sent

    # ------------------------------------------------------------------ tensors

    def extend(self, stream: Stream, tensors: Mapping[str, Tensor]) -> None:
        """Takes further tensors into a stream, once nothing of it is under way."""
        (progress,) = (p for p in self.progress if p.stream is stream)
        starts = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        if any(pending.progress is progress for pending in self.pending):
            progress.waiting |= tensors
            progress.starts |= starts
        else:
            self._extend(progress, tensors, starts)

    def _extend(
        self,
        progress: Progress,
        tensors: Mapping[str, Tensor],
        starts: Mapping[str, Tensor],
    ) -> None:
        stream = progress.stream
        residual = None
        if stream.residual is not None:
            residual = stream.layout.read(stream.residual)
        stream.extend_(tensors, starts)
        if residual is not None:
            stream.residual = stream.layout.new()
            stream.layout.write_(stream.residual, residual)
        progress.verified, progress.unmoved = False, 0

    # ------------------------------------------------------------------ state

    def agreed(self) -> dict[str, Any]:
        """Where each stream is, and what all workers agree on."""
        return {
            progress.stream.name: {
                "due": progress.due,
                "began": progress.began,
                "round": progress.round,
                "tensors": progress.stream.state(),
            }
            for progress in self.progress
        }

    def follow(self, clock: int, agreed: Mapping[str, Any]) -> None:
        """Takes another worker's clock and `agreed`, and keeps its own progress."""
        self.clock = clock
        for progress in self.progress:
            theirs = agreed[progress.stream.name]
            if progress.stream.is_round and not progress.stream.schedule.never:
                missed = theirs["round"] - progress.round
                self.stats.skipped_rounds += max(0, missed)
            progress.due, progress.began = theirs["due"], theirs["began"]
            progress.round = theirs["round"]
            progress.stream.locate()
            progress.stream.follow_(theirs["tensors"])

    def state_dict(self) -> dict[str, Any]:
        """Copies of all that the next step depends on, as tensors and plain types."""
        return {
            "started": self.started,
            "clock": self.clock,
            "stats": self.stats.state_dict(),
            "streams": {
                progress.stream.name: {
                    "due": progress.due,
                    "began": progress.began,
                    "round": progress.round,
                    "launched_at": progress.launched_at,
                    "settled_at": progress.settled_at,
                    "names": list(progress.stream.layout.specs),
                    "agreed": progress.stream.agreed is not None,
                    "tensors": _state_of(progress.stream),
                }
                for progress in self.progress
            },
            # Each share as it was sent. It is sent again: no other worker keeps it.
            "pending": [
                {
                    "stream": pending.progress.stream.name,
                    "clock": pending.clock,
                    "steps": pending.steps,
                    "finite": pending.finite,
                    "norm": pending.norm,
                    "weight": pending.weight,
                    "members": list(pending.members),
                    "partial": pending.partial,
                    "declined": pending.declined,
                    "share": pending.progress.stream.layout.read(pending.shares),
                }
                for pending in self.pending
            ],
            # By which a loader sees that one was lost on the way.
            "num_pending": len(self.pending),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool) -> None:
        """Copies everything back; the next exchange compares all agreed values.

        Args:
            state: what `state_dict` returned.
            strict: whether streams and schedules are those of the state. If not, each
                tensor goes by its name, rounds are planned anew, and what was under
                way is dropped.
        """
        self.started = state["started"]
        self.clock = state["clock"]
        self.stats.load_state_dict(state["stats"])
        tensors: dict[str, dict[str, Tensor]] = {}
        for saved in state["streams"].values():
            for kind, named in saved["tensors"].items():
                tensors.setdefault(kind, {}).update(named)
        rounds = [saved["round"] for saved in state["streams"].values()]
        for progress in self.progress:
            stream = progress.stream
            saved = state["streams"].get(stream.name, {})
            progress.plan(self.clock)
            if strict:
                progress.due, progress.began = saved["due"], saved["began"]
            # Streams that pair workers must do it alike.
            progress.round = saved["round"] if strict else max(rounds, default=0)
            progress.launched_at = saved.get("launched_at", self.stats.steps)
            progress.settled_at = saved.get("settled_at", self.stats.steps)
            progress.verified, progress.unmoved = False, 0
            stream.load_(tensors)
            if stream.residual is not None:
                stream.residual = stream.layout.new()
                stream.layout.write_(stream.residual, tensors.get(RESIDUAL, {}))
        by_name = {progress.stream.name: progress for progress in self.progress}
        self.pending = [
            self._reloaded(saved, by_name[saved["stream"]])
            for saved in (state["pending"] if strict else ())
        ]
        self.look_ahead()

    def _reloaded(self, saved: Mapping[str, Any], progress: Progress) -> Pending:
        layout = progress.stream.layout
        if layout.specs.keys() != saved["share"].keys():
            raise ValueError(
                f"the share under way must hold the tensors of {saved['stream']!r}, "
                f"got {sorted(saved['share'])} with {sorted(layout.specs)}: a group "
                "came in meanwhile. Load an earlier or a later checkpoint, or drop the "
                "share with strict=False."
            )
        layout.write_(shares := layout.empty(), saved["share"])
        launch = {k: v for k, v in saved.items() if k not in ("stream", "share")}
        launch["members"] = tuple(saved["members"])
        launch.setdefault("num_workers", len(saved["members"]))
        return self.new_pending(progress, shares=shares, **launch)


def without_debts(
    state: Mapping[str, Any], *, keeps_residuals: bool = False
) -> dict[str, Any]:
    """A state without shares under way, which are another's or of another number.

    Args:
        state: what `Rounds.state_dict` returned.
        keeps_residuals: whether what a codec owes to the next shares stays in it.
    """
    streams = state["streams"]
    if not keeps_residuals:
        streams = {name: _without_residual(s) for name, s in streams.items()}
    return {**state, "pending": [], "num_pending": 0, "streams": streams}


def _mark_of_share(stream: Stream) -> int:
    """The mark of the share as it would be now."""
    stream.locate()
    scratch = stream.layout.scratch()

    def parts() -> Iterator[Tensor]:
        for chunk in stream.layout.chunks:
            stream.share_(chunk, out := scratch[chunk])
            yield out

    return mark(parts())


def _without_residual(stream: Mapping[str, Any]) -> dict[str, Any]:
    tensors = {k: v for k, v in stream["tensors"].items() if k != RESIDUAL}
    return {**stream, "tensors": tensors}


def _state_of(stream: Stream) -> dict[str, dict[str, Tensor]]:
    state = stream.state()
    if stream.residual is not None:
        state[RESIDUAL] = stream.layout.read(stream.residual)
    return state


def _apply(
    stream: Stream, results: Flats, landing: Landing, *, in_place: bool = False
) -> None:
    if not in_place:  # then it has been located just now
        stream.locate()
    for chunk in stream.layout.chunks:
        result = results[chunk]
        if in_place:
            stream.share_(chunk, result)
        device = stream.layout.device_of(chunk)
        stream.apply_(chunk, result.to(device, non_blocking=True), landing)


def _log_left_out(progress: Progress, outcome: Outcome) -> None:
    """Says whose shares were not finite, and whose were too long."""
    round, stream = progress.round, progress.stream.name
    for rank, header in outcome.headers.items():
        if not header.contributes and not header.absent:
            _log.warning(_NOT_FINITE, round, stream, f"rank {rank}'s")
        if rank in outcome.factors:
            words = "round %d of %r takes %.2g times rank %d's share: it is %.2g long"
            _log.warning(words, round, stream, outcome.factors[rank], rank, header.norm)
