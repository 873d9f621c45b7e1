"""What can go wrong between workers.

.. code-block:: text

    SyncError
     x PeerLost       a worker did not answer, or its connection closed
     x PeerMismatch   workers disagree about what is being exchanged
"""


class SyncError(RuntimeError):
    """An exchange between workers failed.

    What it would have changed is as it was; the inner step before it has been taken.
    """


class PeerLost(SyncError):
    """A worker closed its connection, or was silent for `timeout_s` seconds.

    Args:
        message: what to say.
        rank: of that worker, if known.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerMismatch(SyncError):
    """Workers differ in a tensor, a setting, a round or an agreed value.

    Raised on every worker, before anything is averaged.
    """
