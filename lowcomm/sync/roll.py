"""Who is there: each worker's entry, seen by all in the same order.

A lighthouse of torchft collects the entries of all living workers again and again, and
gives each of them the same sheet. What follows from a sheet is a function of the sheet
alone, so workers that never ask each other come to the same decision.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

from lowcomm.sync import threads

_log = logging.getLogger(__name__)

_BEAT_S = 0.2
_ASK_S = 0.15
# One that is not there is tried again soon.
_CONNECT = timedelta(seconds=1)
_ANSWER = timedelta(seconds=5)
# A busy machine misses a sheet, of which there are some in a second. After an outage
# all find the lighthouse again within a try for a connection, and two more to be sure.
_MISSING_S = 0.4
_OUTAGE_S = 3.0
_RETURN_S = 3.0
#: A sheet that not all have asked for comes when the lighthouse stops waiting.
_SHEET = timedelta(seconds=4)


@dataclass(frozen=True)
class Entry:
    """What a worker says of itself.

    Args:
        run: the run it belongs to.
        token: proof that it may, as a digest.
        store: where the workers meet if it is the first of them.
        rank: its number; None before it has one.
        generation: how often the workers it is among had been settled; 0 before.
        epoch: the name of their last settlement.
        among: the stores of those, by name: another one that has taken the name of one
            of them is not that one.
        misses: whether it is sure that some of them are gone.
        ready: whether it waits for them to be settled anew.
        waited_s: for how long.
        progress: grows while it gives a state to another.
        is_done: whether it has no more rounds to come, so that none is waited for.
        leaves: whether it is about to go.
        min_workers: it goes on with no fewer.
        start_with: and begins with no fewer.
        patience_s: it waits so long for those that are not ready.
    """

    run: str
    token: str
    store: str
    rank: int | None = None
    generation: int = 0
    epoch: str = ""
    among: Mapping[str, str] = field(default_factory=dict)
    misses: bool = False
    ready: bool = False
    waited_s: float = 0.0
    progress: int = 0
    is_done: bool = False
    leaves: bool = False
    min_workers: int = 1
    start_with: int = 1
    patience_s: float = 60.0


Sheet = Mapping[str, Entry]


class Settlement(NamedTuple):
    """Who is among whom from now on.

    Args:
        generation: counts settlements.
        epoch: a name for it that no other has.
        ranks: by worker's name.
        main: ranks of those that were among each other before.
        store: where they meet.
    """

    generation: int
    epoch: str
    ranks: dict[str, int]
    main: tuple[int, ...]
    store: str


def latest(sheet: Sheet) -> tuple[int, str]:
    """The latest settlement that somebody is in: its generation and name.

    If workers were cut off from each other there may be two of one generation; then it
    is that of the most.
    """
    sizes = Counter((entry.generation, entry.epoch) for entry in sheet.values())
    if not sizes:
        return 0, ""
    return max(sizes, key=lambda place: (place[0], sizes[place], place[1]))


def settle(sheet: Sheet) -> list[str] | None:
    """The names of those who go on together, if that is decided; else None.

    All who are ready, once nobody is missing: of those who are among each other at
    present, everybody must be ready, or be gone, or have been waited for long enough.
    Others, who come or come back, wait for them.
    """
    everybody, sheet = sheet, staying(sheet)
    ready = sorted(name for name, entry in sheet.items() if entry.ready)
    if not ready:
        return None
    generation, epoch = latest(sheet)
    least = max(sheet[name].min_workers for name in ready)
    if generation == 0:
        least = max(sheet[name].start_with for name in ready)
    members = [entry for entry in sheet.values() if entry.epoch == epoch]
    waiting = [entry for entry in members if entry.ready]
    if len(ready) < least or not waiting:
        return None
    is_late = any(not entry.ready and not entry.is_done for entry in members)
    for entry in waiting:
        is_missing = not entry.among.items() <= stores_of(everybody).items()
        if entry.waited_s >= entry.patience_s:
            return ready
        if not is_late and (entry.misses or not is_missing):
            return ready
    return None


def settlement(sheet: Sheet, names: Sequence[str], key: str) -> Settlement:
    """What a sheet of this name settles for those who go on together."""
    generation = latest(sheet)[0] + 1
    # Who leaves counts no more, but for the numbers that it has used.
    _, epoch = latest(staying(sheet))
    ranks = ranks_of(sheet, names)
    first = min(ranks, key=lambda name: ranks[name])
    main = sorted(ranks[name] for name in names if sheet[name].epoch == epoch)
    return Settlement(
        generation,
        f"{generation}-{key}",
        ranks,
        tuple(main),
        sheet[first].store,
    )


def stores_of(sheet: Sheet) -> dict[str, str]:
    """Which store each has, by which one is told from another of its name."""
    return {name: entry.store for name, entry in sheet.items()}


def staying(sheet: Sheet) -> Sheet:
    """Without those that are about to go."""
    return {name: entry for name, entry in sheet.items() if not entry.leaves}


def ranks_of(sheet: Sheet, names: Sequence[str]) -> dict[str, int]:
    """A number for each: its own, or the smallest that nobody has."""
    ranks: dict[str, int] = {}
    # Who has been there longest keeps its number, if two have the same.
    for name in sorted(names, key=lambda name: -sheet[name].generation):
        rank = sheet[name].rank
        if rank is not None and rank not in ranks.values():
            ranks[name] = rank
    taken = {entry.rank for entry in sheet.values()} | set(ranks.values())
    # "worker-10" comes after "worker-9".
    for name in sorted(names, key=lambda name: (len(name), name)):
        if name not in ranks:
            rank = min(set(range(len(taken) + 1)) - taken)
            ranks[name] = rank
            taken.add(rank)
    return ranks


class Absences:
    """Since when sheets have lacked somebody.

    A sheet now and then lacks a worker whose machine is busy. And when the lighthouse
    was away, the first sheets lack all that have not noticed yet that it is back.
    """

    def __init__(self) -> None:
        self._last = -math.inf  # when the last sheet came
        self._sure_from = math.inf
        self._lacking_since: float | None = None

    def note(self, now: float, lacks: bool) -> bool:
        """Takes a sheet into account: is somebody gone?"""
        if now - self._last > _OUTAGE_S:
            self._sure_from = now + _RETURN_S
        self._last = now
        if not lacks:
            self._lacking_since = None
            return False
        if self._lacking_since is None:
            self._lacking_since = now
        return self.is_sure and now - self._lacking_since >= _MISSING_S

    @property
    def is_sure(self) -> bool:
        """Whether sheets have come for long enough to show everybody."""
        return self._last >= self._sure_from


class Roll:
    """This worker's entry, and what the others' say.

    Two threads, which have connections of their own: one says that this worker is
    alive, the other asks for sheets. Without a lighthouse they go on trying, and all
    else goes on without them.

    Args:
        lighthouse: its address, host:port.
        name: of this worker, which no other has.
        entry: what is said of it.
        on_sheet: called in a thread with each sheet and its name, in order.
    """

    def __init__(
        self,
        lighthouse: str,
        name: str,
        entry: Entry,
        on_sheet: Callable[[Sheet, str], None],
    ) -> None:
        client_class()  # here, where its absence is an error
        self.name = name
        self.address = lighthouse
        self.entry = entry
        self._on_sheet = on_sheet
        self._ready_since = 0.0
        self._absences = Absences()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._unread: set[str] = set()
        #: what has ended the thread that asks, if anything
        self.error: Exception | None = None

    def start(self) -> None:
        """Begins to speak and to hear."""
        for target in (self._beat, self._ask):
            threads.start(target, "lowcomm roll", stop=self.close)

    @property
    def is_sure(self) -> bool:
        """Whether the sheets are known to show everybody."""
        return self._absences.is_sure

    def say(self, **changes: Any) -> None:
        """Changes what is said of this worker, from its next sheet on."""
        with self._lock:
            if changes.get("ready") and not self.entry.ready:
                self._ready_since = time.monotonic()
            self.entry = replace(self.entry, **changes)

    @property
    def is_closed(self) -> bool:
        """Whether it says nothing more."""
        return self._closed.is_set()

    def close(self) -> None:
        """Says nothing more."""
        self._closed.set()

    def _beat(self) -> None:
        lighthouse = _Lighthouse(self.address)
        while not self._closed.wait(_BEAT_S):
            lighthouse.call(lambda client: client.heartbeat(self.name, _ANSWER))

    def _ask(self) -> None:
        lighthouse = _Lighthouse(self.address, _log.warning)
        while not self._closed.wait(_ASK_S):
            quorum = lighthouse.call(
                lambda client: client.quorum(
                    self.name, _SHEET, data=asdict(self._current())
                )
            )
            if quorum is not None and not self._closed.is_set():
                try:
                    self._take(quorum)
                except Exception as error:  # which the main thread is to raise
                    self.error = error
                    _log.exception("what others have said cannot be read")
                    return

    def _current(self) -> Entry:
        with self._lock:
            if not self.entry.ready:
                return self.entry
            waited_s = time.monotonic() - self._ready_since
            return replace(self.entry, waited_s=waited_s)

    def _take(self, quorum: Any) -> None:
        sheet = {}
        for worker in quorum.participants:
            name = worker.replica_id
            try:
                sheet[name] = Entry(**worker.data)
            except TypeError:  # who speaks of something else, as another release may
                if name not in self._unread:
                    _log.warning("%s is not understood, and passed over", name)
                self._unread.add(name)
        # Who has said goodbye is not missed.
        stores = stores_of(sheet)
        among = {
            name: store
            for name, store in self.entry.among.items()
            if stores.get(name) != store or not sheet[name].leaves
        }
        lacks = not among.items() <= stores.items()
        misses = self._absences.note(time.monotonic(), lacks)
        self.say(among=among, misses=misses)
        created = quorum.created
        self._on_sheet(sheet, f"{created.seconds}.{created.nanos:09d}")


class _Lighthouse:
    """A connection that is made again after a failure.

    Args:
        address: host:port.
        tell: called with what is to be known of failures.
    """

    def __init__(
        self, address: str, tell: Callable[..., None] = lambda *_: None
    ) -> None:
        self._address = address
        self._tell = tell
        self._client: Any = None
        self._answers = True

    def call(self, call: Callable[[Any], Any]) -> Any:
        """What the client answers; None without an answer."""
        try:
            if self._client is None:
                self._client = client_class()(f"http://{self._address}", _CONNECT)
            result = call(self._client)
        except Exception as error:  # whatever comes out of native code
            self._client = None
            if self._answers:
                what = str(error).partition(", details")[0]
                self._tell("no answer of the lighthouse %s: %s", self._address, what)
            self._answers = False
            return None
        if not self._answers:
            self._tell("the lighthouse %s answers again", self._address)
        self._answers = True
        return result


def client_class() -> Any:
    """torchft's client of a lighthouse."""
    try:
        from torchft.coordination import LighthouseClient
    except ImportError:
        raise ImportError(
            "torchft must be installed for workers that come and go. Run `pip install "
            "'lowcomm[elastic]'`."
        ) from None
    return LighthouseClient


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except socket.gaierror as error:
            raise ValueError(
                f"lighthouse must be at a host that this machine knows, got {host!r} "
                f"({error.strerror}). Give its IPv4 address."
            ) from None
        return str(probe.getsockname()[0])
