"""Checkpoints: written beside training, whole or absent, resumed to the bit.

.. code-block:: text

    runs/a/step-00000120/
        manifest.json   step, configuration, size and sha256 of each file
        global.pt       what all workers agree on: anchors and outer momenta
        worker-0.pt     all else of worker 0, its random generators too
        worker-1.pt

Where workers are sharded, each rank has a file, and each shard a global one.
It is written as `step-00000120.<run>-<number>.unfinished` and renamed when every worker
has written its part. `torch.load` reads its files as it does by default.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import inspect
import json
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from lowcomm._folder import (
    MANIFEST,
    Broken,
    Folder,
    Manifest,
    probe,
    read_tensors,
    seal,
    sees,
    sizes,
    write_json,
    write_tensors,
)
from lowcomm._snapshot import (
    Memory,
    Snapshot,
    adapt_,
    digest_of,
    has_sync,
    inside,
    merge_,
    rename_,
    rng_state,
    seed_anew,
    set_rng_state,
)
from lowcomm.sync.errors import SyncError
from lowcomm.sync.group import check_has_shards, resolve_group
from lowcomm.sync.schedule import check_number, check_positive
from lowcomm.sync.seam import Exchange
from lowcomm.sync.shard import meshes_of, unpack
from lowcomm.sync.talk import Talk

_log = logging.getLogger(__name__)

_FORMAT = 2

#: Saves of this process whose own files are being written.
_writing: set[_Save] = set()

#: When the process is to end, others' files are waited for so long after the last news.
_LAST_WAIT_S = 10.0
_FIRST_POLL_S, _LONGEST_POLL_S = 0.01, 0.5

# What a new worker takes from another one, whether or not all have had the same.
_CORE = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class Stateful(Protocol):
    """What can be put into a checkpoint."""

    def state_dict(self) -> Any:
        """Tensors and plain types in dictionaries, lists and tuples."""

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Takes all of it back."""


@dataclass(frozen=True)
class Report:
    """How a checkpoint was loaded.

    Args:
        step: of the checkpoint.
        num_workers_saved: workers that have written it.
        num_workers: workers that have read it.
        dropped: what is in it and was not taken, and what new workers start without.
    """

    step: int
    num_workers_saved: int
    num_workers: int
    dropped: list[str]


class Checkpointer:
    """Saves and loads everything that the next step depends on.

    A save costs the training loop one copy of the state to host memory; a thread writes
    it. No message is sent: the lowest rank of those that see the directory completes
    the checkpoint when the others' files are there, so machines may share a directory
    or have disks of their own. A kill at any moment leaves the one before it whole.

    What workers agree on, anchors and outer momenta, is written once; everything else
    by each worker, with the states of torch's, numpy's and Python's random generators.

    Build the optimizer before `load`: building it gives all workers rank 0's
    parameters. All workers build and load; all save at the same steps.

    >>> import tempfile, torch, lowcomm
    >>> def build():
    ...     model = torch.nn.Linear(2, 1)
    ...     return model, lowcomm.DiLoCo(model.parameters(), lr=0.1, sync_every=10)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model, opt = build()
    ...     with Checkpointer(folder, model=model, optimizer=opt) as ckpt:
    ...         for step in range(ckpt.load() + 1, 6):
    ...             model(torch.ones(4, 2)).sum().backward()
    ...             opt.step()
    ...             opt.zero_grad()
    ...             if step % 5 == 0:
    ...                 ckpt.save(step)
    ...     again, opt = build()
    ...     step = Checkpointer(folder, model=again, optimizer=opt).load()
    >>> step, opt.stats.steps, torch.equal(model.weight, again.weight)
    (5, 5, True)

    Host memory: a copy of this worker's state, used again by every save; of anchors and
    outer momenta one only while they are written.

    Args:
        directory: of this run's checkpoints and nothing else; made if it is missing.
        group: the workers, with all ranks of each where they are sharded: a process
            group, a one-dimensional device mesh or a `Group`; if None the default
            process group, or a world of one without it.
        config: the settings of the run in plain types; `load` refuses other ones.
        keep: how many of the newest whole checkpoints stay, at least 2. On machines
            with disks of their own at least as many as are saved between two exchanges:
            so far may workers be apart.
        timeout_s: bound of every wait for another worker, in seconds.
        parts: whatever has `state_dict` and `load_state_dict`, by name: model,
            optimizers, scheduler, loader. Whether `torch.compile` was used, or
            `DistributedDataParallel`, may differ between `save` and `load`.

    Raises:
        TypeError: if a part cannot be saved and loaded, or `config` is not plain.
        ValueError: if a setting is out of its range.
        OSError: if some worker cannot write to the directory.
    """

    #: how the last `load` went; None before, and if there was nothing to load
    report: Report | None = None

    def __init__(
        self,
        directory: str | os.PathLike[str],
        /,
        *,
        group: Any = None,
        config: Mapping[str, Any] | None = None,
        keep: int = 3,
        timeout_s: float = 600.0,
        **parts: Stateful,
    ) -> None:
        check_number("keep", keep, int, least=2)
        check_positive("timeout_s", timeout_s)
        if not parts:
            raise ValueError(
                "parts must be named as keywords, got none. Pass what is to be saved: "
                "model=model, optimizer=optimizer."
            )
        for name, part in parts.items():
            for verb in ("state_dict", "load_state_dict"):
                if not callable(getattr(part, verb, None)):
                    raise TypeError(
                        f"{name} must have state_dict and load_state_dict, got a "
                        f"{type(part).__name__}. Put it into a class that has them."
                    )
        self._parts = {name: inside(part) for name, part in parts.items()}
        self._config = _plain(config)
        self._keep = keep
        self._timeout_s = timeout_s
        self._group = resolve_group(group)
        if self._group.is_elastic:
            raise ValueError(
                "group must be of fixed workers, got an ElasticGroup. Leave it out: "
                "one worker saves, and others that come have their state from it."
            )
        self._rank = self._group.rank
        self._num_workers = len(self._group.members(0))
        self._talk = Talk(self._group, timeout_s, bucket_bytes=1 << 20)
        self._memory: Memory | None = None  # of the last snapshot
        self._saves: list[_Save] = []  # that may not have ended
        self._num_saves = 0
        path = Path(directory).absolute()  # wherever the process goes later
        self._run, self._here = self._look_around(path)
        self._leads = self._rank == self._here[0]
        self._look_at_shards()
        self._folder = Folder(path, self._run)

    def _look_around(self, path: Path) -> tuple[str, list[int]]:
        """A name for this run, and the ranks that see the same directory."""
        token, problem, mine = secrets.token_hex(8), None, None
        try:
            mine = probe(path, token)
        except OSError as error:
            problem = str(error)
        told = self._talk.gather([token, problem])
        for rank, (_, theirs) in told.items():
            if theirs is not None:
                raise OSError(
                    "directory must be one that all workers can write to, got rank "
                    f"{rank}'s {theirs}."
                )
        seen = [rank for rank, (other, _) in told.items() if sees(path, other)]
        pairs = [
            {rank, other}
            for rank, ranks in self._talk.gather(seen).items()
            for other in ranks
        ]
        assert mine is not None
        mine.unlink(missing_ok=True)
        # A network file system may show a new file to some later than to others: it is
        # enough that one of two sees the other.
        here = {self._rank}
        for _ in told:
            here = here.union(*(pair for pair in pairs if pair & here))
        return told[min(told)][0], sorted(here)

    def _look_at_shards(self) -> None:
        """Finds who holds the same parts of tensors; one of them writes the agreed."""
        tensors = [t for part in self._parts.values() for t in _tensors_of(part)]
        check_has_shards(self._group, tensors)
        self._meshes = meshes_of(tensors)
        self._places = [[*map(list, place)] for place in self._meshes]
        told = self._talk.gather(self._places)
        alike = [rank for rank in self._here if told[rank] == self._places]
        self._writes_agreed = self._rank == alike[0]
        shards: list[Any] = []
        for shard in told.values():
            if shard not in shards:
                shards.append(shard)
        number = f"-{shards.index(self._places)}" if len(shards) > 1 else ""
        self._agreed_file = f"global{number}.pt"

    # ------------------------------------------------------------- saving

    def save(self, step: int) -> None:
        """Copies everything as it is now; the copy is written while training goes on.

        Waits for the writing of the save before.

        Args:
            step: how many have been taken, at least 1. Names the checkpoint, which
                replaces one of the same step.

        Raises:
            TypeError: if a state holds more than tensors and plain types.
            Exception: what has gone wrong in the background since the last save.
        """
        check_number("step", step, int, least=1)
        self._num_saves += 1  # also if it fails here: the others count it
        if self._saves:
            self._saves[-1].written.wait()
        self._raise_error()
        # What others write to later must be no inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            states = {name: part.state_dict() for name, part in self._parts.items()}
            snapshot = Snapshot(states, self._memory, with_agreed=self._writes_agreed)
            save = _Save(
                step=step,
                number=self._num_saves,
                path=self._folder.unfinished(step, self._num_saves),
                snapshot=snapshot,
                rng=rng_state(),
                before=self._saves[-1].thread if self._saves else None,
            )
        self._memory = snapshot.memory
        save.thread = threading.Thread(
            # No daemon: a process that ends waits for it.
            target=self._finish,
            args=(save,),
            name=f"checkpoint {step}",
            daemon=False,
        )
        self._saves.append(save)
        _writing.add(save)
        save.thread.start()

    def wait(self) -> None:
        """Returns when what this worker has saved is on disk.

        On the lowest rank of those that see the directory, when all have written their
        parts and the checkpoint is whole.

        Raises:
            PeerLost: if another worker has ended without saving.
            Exception: what has gone wrong in the background since the last save.
        """
        for save in list(self._saves):
            save.written.wait()
            if self._leads and not save.done:
                try:
                    self._group.run(_until(_Completion(self, save))).wait(math.inf)
                except SyncError as error:
                    save.end(error)
        self._raise_error()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:  # else others may never save, and the loop's error is told
            self.wait()

    def _raise_error(self) -> None:
        """Forgets saves that have ended; raises what has gone wrong in one of them."""
        ended = [save for save in self._saves if save.done]
        self._saves = [save for save in self._saves if not save.done]
        for save in ended:
            if save.error is not None:
                raise save.error

    # ------------------------------------------------------------- in the background

    def _finish(self, save: _Save) -> None:
        """Writes this worker's files; the leader also completes the checkpoint."""
        try:
            self._write(save)
        except Exception as error:
            save.end(error)
            with contextlib.suppress(OSError):  # so that the leader need not wait
                facts = {"error": f"{type(error).__name__}: {error}"}
                write_json(save.part(self._rank), facts)
        finally:
            save.snapshot = None
            _writing.discard(save)
            save.written.set()
        if self._leads:
            self._complete(save)
        save.end()

    def _write(self, save: _Save) -> None:
        assert save.snapshot is not None
        save.snapshot.wait()
        save.path.mkdir(parents=True, exist_ok=True)
        files = {}
        if self._writes_agreed:
            name, agreed = self._agreed_file, save.snapshot.agreed
            files[name] = write_tensors(save.path / name, agreed)
        name, own = _file_of(self._rank), save.snapshot.own
        files[name] = write_tensors(save.path / name, {"parts": own, "rng": save.rng})
        facts = {
            "files": files,
            "agreed": self._agreed_file,
            "meshes": self._places,
            "shares": save.snapshot.shares,
            "residuals": save.snapshot.residuals,
            # Of what may be the same on all workers.
            "digests": {n: digest_of(own[n]) for n in own if not self._is_core(n)},
        }
        write_json(save.part(self._rank), facts)

    def _is_core(self, name: str) -> bool:
        return isinstance(self._parts[name], _CORE)

    def _complete(self, save: _Save) -> None:
        """Returns when all workers of this directory have written their parts."""
        if save.before is not None:
            save.before.join()
            save.before = None
        pause_s, since, before = _FIRST_POLL_S, time.monotonic(), None
        while not self._try_to_complete(save):
            if (now := sizes(save.path)) != before:
                since, before = time.monotonic(), now
            limit_s = self._timeout_s
            if not threading.main_thread().is_alive():
                limit_s = min(limit_s, _LAST_WAIT_S)
            if time.monotonic() - since > limit_s:
                save.end(
                    TimeoutError(
                        f"rank {self._missing(save)} did not write its part of step "
                        f"{save.step} within {limit_s} s. Let all workers save at the "
                        "same steps, and raise timeout_s if it is only slow."
                    )
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)

    def _missing(self, save: _Save) -> int | None:
        """The first worker here that has not written its part."""
        for rank in self._here:
            if not save.part(rank).exists():
                return rank
        return None

    def _try_to_complete(self, save: _Save) -> bool:
        """Completes a checkpoint if all parts are there; says whether it has ended."""
        with save.lock:
            if not save.done and self._missing(save) is None:
                try:
                    self._make_whole(save)
                    save.end()
                except Exception as error:
                    save.end(error)
            return save.done

    def _make_whole(self, save: _Save) -> None:
        files: dict[str, Any] = {}
        workers: dict[str, Any] = {}
        for rank in self._here:
            facts = json.loads(save.part(rank).read_text(encoding="utf-8"))
            if "error" in facts:
                raise OSError(f"rank {rank} could not write its part: {facts['error']}")
            files |= facts.pop("files")
            workers[str(rank)] = facts
        manifest = {
            "format": _FORMAT,
            "step": save.step,
            "save": f"{self._run}-{save.number}",
            "num_workers": self._num_workers,
            "parts": sorted(self._parts),
            "config": self._config,
            "versions": {"lowcomm": _version(), "torch": str(torch.__version__)},
            "files": files,
            "workers": workers,
        }
        write_json(save.path / MANIFEST, seal(manifest))
        for rank in self._here:
            save.part(rank).unlink()
        self._folder.publish(save.path, save.step)
        self._folder.remove_old(save.step, self._keep)
        self._folder.clean(save.number)

    # ------------------------------------------------------------- loading

    def load(self, *, strict: bool = True) -> int:
        """Loads the newest checkpoint that is whole for all workers.

        One that is broken is skipped with a warning if an older one is whole.

        With another number of workers each takes the part of its rank, and new ones
        that of worker `rank % saved`, but for random generators, what a codec owes, and
        parts in which workers differed (a loader): these start afresh. Shares under way
        are dropped. `report` says all that.

        Args:
            strict: whether `config`, the names of the parts and the optimizers' own
                settings must be those of the checkpoint. If not, what fits is loaded.

        Returns:
            Its step; 0 if there is none.

        Raises:
            ValueError: if there are checkpoints and none can be loaded: says which
                file, and why. Nothing has been changed then.
        """
        self.wait()
        self.report = None
        offers = self._offers()
        broken = [(step, why) for o in offers.values() for step, why in o["broken"]]
        found = self._newest(offers, broken, strict=strict)
        if found is None:
            self._check_nothing(offers, [why for _, why in broken])
            return 0
        step = found.report.step
        for other, why in dict.fromkeys(broken):
            if other > step:
                _log.warning("step %d is loaded: %s", step, why)
        self._take(found, strict=strict)
        if self._leads:
            self._folder.clean(self._num_saves)
        return step

    def _offers(self) -> dict[int, Any]:
        """What each directory holds, by the rank that leads it: the same on all."""
        if self._leads:
            self._folder.bring_back()
        self._talk.gather(None)  # what others have saved is whole now
        offer = None
        if self._leads:
            whole, broken = self._folder.inspect()
            begun = self._folder.begun()
            offer = {"whole": whole, "broken": broken, "begun": begun}
        offers = self._talk.gather(offer)
        return {rank: offer for rank, offer in offers.items() if offer is not None}

    def _newest(
        self, offers: Mapping[int, Any], broken: list[tuple[int, str]], *, strict: bool
    ) -> _Found | None:
        """Reads the newest checkpoint that all can read; adds others to `broken`."""
        manifests = {m["step"]: m for m in offers[self._here[0]]["whole"]}
        for step in _common_steps(offers):
            found, problem = None, None
            try:
                found = self._read(manifests[step], strict=strict)
            except Broken as error:
                problem = ["broken", str(error)]
            except ValueError as error:
                problem = ["refused", str(error)]
            problems = [p for p in self._talk.gather(problem).values() if p]
            for kind, why in problems:
                if kind == "refused":
                    raise ValueError(why)
            if not problems:
                return found
            broken += [(step, why) for _, why in problems]
        return None

    def _check_nothing(self, offers: Mapping[int, Any], broken: list[str]) -> None:
        """Raises unless there is nothing that could have been loaded."""
        if broken:
            raise ValueError(
                "a checkpoint must be whole on all workers to be loaded, got "
                f"{'; '.join(dict.fromkeys(broken))}. Bring the files back; or start "
                "anew, in another directory."
            )
        whole = {r: {m["save"] for m in o["whole"]} for r, o in offers.items()}
        for rank, offer in offers.items():
            # The first one may have been completed on one machine only, before a kill.
            if set().union(*whole.values()) - whole[rank] - {*offer["begun"]}:
                steps = {r: [m["step"] for m in o["whole"]] for r, o in offers.items()}
                raise ValueError(
                    "a checkpoint must be whole on all workers to be loaded, got the "
                    f"steps {steps} in the directories that begin with these ranks. "
                    "Bring back the directory of the machine that lacks one; or start "
                    "anew, in another directory."
                )

    def _read(self, manifest: Manifest, *, strict: bool) -> _Found:
        """Reads and checks all that this worker takes, and changes nothing."""
        step, saved = manifest["step"], manifest["num_workers"]
        if manifest["format"] != _FORMAT:
            raise ValueError(
                f"the format of a checkpoint must be {_FORMAT}, got "
                f"{manifest['format']} in step {step}. Load it with lowcomm "
                f"{manifest['versions']['lowcomm']}, which has written it."
            )
        if strict:
            self._check_settings(manifest)
        source, others = self._rank % saved, saved != self._num_workers
        present = sorted(map(int, manifest["workers"]))
        if source not in present or (others and len(present) < saved):
            needed = f"all {saved} workers" if others else f"worker {source}"
            raise ValueError(
                f"a checkpoint of {saved} workers must hold the parts of {needed} to be"
                f" loaded on rank {self._rank} of {self._num_workers}, got those of "
                f"{present} in step {step}. Start as many workers, on each machine the "
                "ranks that it had; or use a directory that all machines share."
            )
        facts = manifest["workers"][str(source)]
        if facts["meshes"] != self._places:
            raise ValueError(
                f"meshes must be as in the checkpoint, got {_spell(self._places)} with "
                f"{_spell(facts['meshes'])} in step {step}, on rank {self._rank}. From "
                "one mesh to another goes torch.distributed.checkpoint, with "
                "`optimizer.portable()`."
            )
        path, files = self._folder.of_step(step), manifest["files"]
        agreed = read_tensors(path / facts["agreed"], files[facts["agreed"]])
        own = read_tensors(path / _file_of(source), files[_file_of(source)])
        merge_(own["parts"], agreed)
        if self._meshes:
            unpack(own["parts"], self._meshes)
        is_new = self._rank >= saved
        left_out = self._fresh(manifest) if is_new else ()
        states = {
            name: state
            for name, state in own["parts"].items()
            if name in self._parts and name not in left_out
        }
        if others:
            for state in states.values():
                adapt_(state, saved, self._num_workers, is_new=is_new)
        dropped = self._dropped(manifest) if others or not strict else []
        report = Report(step, saved, self._num_workers, dropped)
        return _Found(states, own["rng"], is_new, report)

    def _check_settings(self, manifest: Manifest) -> None:
        if sorted(self._parts) != manifest["parts"]:
            raise ValueError(
                f"parts must be those of the checkpoint, got {sorted(self._parts)} with"
                f" {manifest['parts']} in step {manifest['step']}. Name them alike; or "
                "load those that are in both, with strict=False."
            )
        mine, theirs = self._config, manifest["config"]
        if mine is None or theirs is None:
            return
        for key in mine | theirs:
            # As text, in which NaN equals NaN.
            if json.dumps(mine.get(key)) != json.dumps(theirs.get(key)):
                raise ValueError(
                    f"{key} must be as in the checkpoint, got {key}={mine.get(key)!r} "
                    f"with {key}={theirs.get(key)!r} in step {manifest['step']}. Start "
                    "with the same config; or load what fits, with strict=False."
                )

    def _fresh(self, manifest: Manifest) -> list[str]:
        """Parts that a new worker does not take from another one."""
        digests = [worker["digests"] for worker in manifest["workers"].values()]
        return [
            name
            for name in self._parts
            if not self._is_core(name) and len({d.get(name) for d in digests}) > 1
        ]

    def _dropped(self, manifest: Manifest) -> list[str]:
        """What is not taken of a checkpoint that is not loaded as it was."""
        lines, fresh = [], self._fresh(manifest)
        workers = {int(rank): facts for rank, facts in manifest["workers"].items()}
        for rank, facts in sorted(workers.items()):
            lost = [f"share under way of {stream!r}" for stream in facts["shares"]]
            if rank >= self._num_workers:
                lost += [f"residual of {stream!r}" for stream in facts["residuals"]]
                own = [n for n in self._parts if self._is_core(n) or n in fresh]
                lost += [*map(repr, own), "random generators"]
            lines += [f"{what} of worker {rank}" for what in lost]
        for rank in range(manifest["num_workers"], self._num_workers):
            lines += [f"{name!r} for worker {rank}, which is new" for name in fresh]
        return lines

    def _take(self, found: _Found, *, strict: bool) -> None:
        """Loads what was read."""
        # Our optimizers first: they refuse other settings before they change anything.
        for name in sorted(found.states, key=lambda n: not has_sync(found.states[n])):
            part: Any = self._parts[name]
            load, state = part.load_state_dict, found.states[name]
            if isinstance(part, nn.Module | torch.optim.Optimizer):
                rename_(state, part)
            if not strict and has_sync(state) and _takes_strict(load):
                load(state, strict=False)
            else:
                load(state)
        if found.is_new:
            seed_anew(found.rng, self._rank)
        else:
            set_rng_state(found.rng)
        self.report = report = found.report
        if report.dropped:
            _log.warning(
                "step %d of %d workers is loaded by %d, without: %s",
                report.step,
                report.num_workers_saved,
                report.num_workers,
                ", ".join(report.dropped),
            )


@dataclass
class _Found:
    """What was read of a checkpoint, and is to be loaded."""

    states: dict[str, Any]
    rng: dict[str, Any]
    is_new: bool  # whether this worker takes another one's part
    report: Report


@dataclass(eq=False, kw_only=True)
class _Save:
    """A checkpoint that is being written."""

    step: int
    number: int
    path: Path
    snapshot: Snapshot | None  # until it is written
    rng: dict[str, Any]
    before: threading.Thread | None
    thread: threading.Thread = field(init=False)
    written: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: bool = False
    error: BaseException | None = None

    def part(self, rank: int) -> Path:
        """What a worker writes last, with the digests of its files."""
        return self.path / f"worker-{rank}.json"

    def end(self, error: BaseException | None = None) -> None:
        """There is nothing more to do for it. What was said first holds."""
        if self.done:
            return
        if error is not None:
            error.add_note(f"while the checkpoint of step {self.step} was written")
            _log.error("the checkpoint of step %d: %s", self.step, error)
        self.error, self.done = error, True


class _Completion:
    """What a worker waits for if others have not written their parts yet.

    A thread will complete the checkpoint. Workers that take turns are all here: who has
    had its turn is writing now, who has not must be given one.
    """

    time = 0.0

    def __init__(self, checkpointer: Checkpointer, save: _Save) -> None:
        self.peer = checkpointer._rank
        self._checkpointer = checkpointer
        self._save = save

    def ready(self) -> bool:
        for save in list(_writing):
            save.written.wait()
        missing = self._checkpointer._missing(self._save)
        self.peer = self.peer if missing is None else missing
        return self._checkpointer._try_to_complete(self._save)

    def wait(self) -> None:
        self._save.thread.join()


def _until(completion: _Completion) -> Exchange:
    yield completion


def _tensors_of(part: Any) -> Iterator[Tensor]:
    """The tensors of a part that may be sharded."""
    if isinstance(part, nn.Module):
        yield from part.parameters()
    elif isinstance(part, torch.optim.Optimizer):
        for group in part.param_groups:
            yield from group["params"]


def _spell(places: list[Any]) -> str:
    """Where a rank is in the meshes of its tensors."""
    spelled = [f"place {at} of {names} {sizes}" for names, sizes, at in places]
    return ", ".join(spelled) or "none"


def _file_of(rank: int) -> str:
    return f"worker-{rank}.pt"


def _common_steps(offers: Mapping[int, Any]) -> list[int]:
    """Steps of which all directories have the same checkpoint, newest first."""
    whole = [{(m["step"], m["save"]) for m in o["whole"]} for o in offers.values()]
    return sorted((step for step, _ in set.intersection(*whole)), reverse=True)


def _plain(config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The configuration as it will be read from a manifest."""
    if config is None:
        return None
    plain = {}
    for key, value in config.items():
        try:
            plain[key] = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            raise TypeError(
                f"config must be of plain types, got {key}={value!r}. Convert it, or "
                "leave it out."
            ) from None
    return plain


def _takes_strict(load: Callable[..., Any]) -> bool:
    return "strict" in inspect.signature(load).parameters


def _version() -> str:
    try:
        return importlib.metadata.version("lowcomm")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
