"""What Python 3.10 lacks; goes when its support does."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from builtins import BaseExceptionGroup, ExceptionGroup
else:
    from exceptiongroup import BaseExceptionGroup, ExceptionGroup

__all__ = ["BaseExceptionGroup", "ExceptionGroup", "add_note"]


def add_note(error: BaseException, note: str) -> None:
    """`error.add_note(note)`; shown in Python 3.10 by groups of exceptions only."""
    error.__notes__ = [*getattr(error, "__notes__", ()), note]
