"""Threads that spend their time in native code, and end before the process does.

One that comes back from there while the interpreter is being taken down, be it only
from freeing what it held, would end the process by an abort.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

_LAST_WAIT_S = 4.0
_AFTER_FORCE_S = 1.0


class _Ends(NamedTuple):
    """How a thread is ended. Must not keep alive what the thread does not."""

    stop: Callable[[], None]
    force: Callable[[], None]


_started: weakref.WeakKeyDictionary[threading.Thread, _Ends] = (
    weakref.WeakKeyDictionary()
)


def _nothing() -> None:
    pass


def start(
    target: Callable[[], None],
    name: str,
    *,
    stop: Callable[[], None] = _nothing,
    force: Callable[[], None] = _nothing,
) -> threading.Thread:
    """Starts a thread.

    Args:
        target: what it does.
        name: of the thread.
        stop: called at the end of the process, to make it end.
        force: called when it has not ended some seconds later.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    _started[thread] = _Ends(stop, force)
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    deadline = time.monotonic() + _LAST_WAIT_S
    for ends in list(_started.values()):
        ends.stop()
    for thread in list(_started):  # those that have not ended
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [thread for thread in list(_started) if thread.is_alive()]
    for thread in late:
        _started[thread].force()
    for thread in late:
        thread.join(_AFTER_FORCE_S)
        if thread.is_alive():  # in a backend that knows no end of a wait
            for stream in (sys.__stdout__, sys.__stderr__):
                if stream is not None:
                    stream.flush()
            os._exit(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_started.clear)
