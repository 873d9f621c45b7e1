"""Threads that spend their time in native code, and end before the process does.

One that comes back from there while the interpreter is being taken down would end the
process by an abort.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable

_LAST_WAIT_S = 5.0

_started: weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]] = (
    weakref.WeakKeyDictionary()
)


def start(
    target: Callable[[], None], name: str, stop: Callable[[], None] = lambda: None
) -> threading.Thread:
    """Starts a thread.

    Args:
        target: what it does.
        name: of the thread.
        stop: called at the end of the process, to make it end.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    _started[thread] = stop
    thread.start()
    return thread


@atexit.register
def _end_all() -> None:
    threads = [thread for thread in _started if thread.is_alive()]
    for thread in threads:
        _started[thread]()
    deadline = time.monotonic() + _LAST_WAIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
        os._exit(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_started.clear)
