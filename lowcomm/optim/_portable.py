"""A wrapper's state in a form that never changes, for torch.distributed.checkpoint."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lowcomm.sync.rounds import without_debts
from lowcomm.sync.stream import Stream

if TYPE_CHECKING:
    from lowcomm.optim._wrapper import AbstractWrapper

_log = logging.getLogger(__name__)

#: Key of our part in a state_dict; loaders of the inner optimizer pass over it.
OWN_KEY = "lowcomm"

#: No warm-up is as long.
_LATE = 1 << 62


class Portable:
    """A wrapper as `torch.distributed.checkpoint` saves and loads it.

    When that loads, it fills the tensors that are there and adds none: of an optimizer
    that has taken no step, and has no moments, it would load none. So here all of them
    are there at any time, and room for each share that may be under way.

    Args:
        optimizer: the wrapper.
    """

    def __init__(self, optimizer: AbstractWrapper) -> None:
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The wrapper's, with everything that it may ever have; zeros where it has not.

        Keys are strings, as torch takes all keys for strings when it loads. It makes a
        key of its own of each that there is: what is not always there is one text.
        """
        optimizer = self._optimizer
        state = optimizer.state_dict()
        have, index = state["state"], 0
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and index not in have:
                    have[index] = optimizer._states.fresh(param)
                index += 1
        state["state"] = {str(index): have[index] for index in sorted(have)}
        own = state[OWN_KEY]
        under_way = {pending["stream"]: pending for pending in own["sync"]["pending"]}
        own["sync"]["stats"] = json.dumps(own["sync"]["stats"])
        own["sync"]["pending"] = {
            stream.name: _slot(stream, under_way.get(stream.name))
            for stream in optimizer._rounds.streams
            if not stream.schedule.never and stream.schedule.overlap_at(_LATE)
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes it back; with another number of workers, without shares under way."""
        own = state_dict[OWN_KEY]
        sync = own["sync"] | {"stats": json.loads(own["sync"]["stats"])}
        pending = [
            {"stream": name, "share": slot["share"], **json.loads(slot["facts"])}
            for name, slot in sync["pending"].items()
            if slot["facts"]
        ]
        pending.sort(key=lambda launch: launch["clock"])
        sync |= {"pending": pending}
        mine, saved = self._optimizer._settings()["workers"], own["config"]["workers"]
        if mine != saved:
            if pending:
                names = ", ".join(repr(launch["stream"]) for launch in pending)
                _log.warning(
                    "a state of %d workers is loaded by %d, without the shares under "
                    "way of %s",
                    saved,
                    mine,
                    names,
                )
            # Of a new worker, another owes what the codec has lost.
            is_new = saved is not None and self._optimizer._group.rank >= saved
            sync = without_debts(sync, keeps_residuals=not is_new)
        self._optimizer.load_state_dict(
            {
                **state_dict,
                "state": {int(index): s for index, s in state_dict["state"].items()},
                OWN_KEY: {
                    **own,
                    "config": {**own["config"], "workers": mine},
                    "sync": sync,
                },
            }
        )


def _slot(stream: Stream, pending: dict[str, Any] | None) -> dict[str, Any]:
    """A share under way, or room for one."""
    if pending is None:
        zeros: dict[str, Tensor] = stream.layout.read(stream.layout.new())
        return {"facts": "", "share": zeros}
    facts = {k: v for k, v in pending.items() if k not in ("stream", "share")}
    return {"facts": json.dumps(facts), "share": pending["share"]}
