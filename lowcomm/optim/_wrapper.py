"""What torch, schedulers and checkpoints expect of an optimizer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# Not torch.compiler.disable: that imports the compiler here, which takes a second.
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lowcomm.optim._inner import JoinedState, build_inner, load_inner_, unscale_
from lowcomm.optim._portable import OWN_KEY, Portable
from lowcomm.optim._states import States
from lowcomm.optim._streams import (
    Accompanying,
    Anchored,
    Average,
    AverageState,
    FirstWorkers,
)
from lowcomm.sync.codec import Codec, make_codec
from lowcomm.sync.engine import Engine
from lowcomm.sync.flat import Layout, check_device
from lowcomm.sync.group import check_sharded, resolve_group
from lowcomm.sync.mean import Robust
from lowcomm.sync.rounds import Rounds, without_debts
from lowcomm.sync.schedule import (
    Periodic,
    check_number,
    check_overlap,
    check_period,
    check_positive,
)
from lowcomm.sync.seam import Group
from lowcomm.sync.shard import Sharding, local_of
from lowcomm.sync.stats import Stats
from lowcomm.sync.stream import Stream

#: Attributes that a copy makes anew, or that others have put there.
_NOT_COPIED = (
    "_engine",
    "_evaluation",
    "_states",
    "_params",
    "_swapped",
    "step",  # patched by a scheduler, bound to the original
    "grad_scale",
    "found_inf",
)


class AbstractWrapper(Optimizer):
    """An optimizer around an inner optimizer, with an exchange between workers.

    Subclasses say which streams they are made of. `param_groups`, `state` and
    `defaults` are the inner optimizer's own objects: whoever changes a learning rate
    here changes it there.

    Args:
        params: what `torch.optim.AdamW` takes (then AdamW is the inner optimizer), a
            built optimizer, or a list of optimizers over disjoint parameters.
        group: the workers: a process group, a one-dimensional device mesh or a `Group`;
            if None the default process group, or a world of one without it. Of sharded
            workers, the ranks that hold the same shards, as in `mesh["replicate"]`.
        overlap: inner steps from launching an exchange to applying its result; smaller
            than the period. 0: step() waits for it.
        codec: puts what is sent into fewer bits: "bf16", "int8", "int4", "topk" or a
            `lowcomm.sync.Codec`. None sends the outer state's dtype, fp32 or wider.
        error_feedback: keep what the codec lost and add it to the next share; one copy.
        anchor_device: where anchors and outer momenta live, for methods that have them;
            beside the parameters if None.
        weight: this worker's weight in the mean: "equal", "steps", or a function that
            returns it.
        clip_shares: pseudo-gradients that are longer than so many times the median of
            the workers' are shortened to it; None for no limit. Logged.
        trim_shares: of each value of the pseudo-gradients, so many of the largest and
            of the smallest workers' are left out of the mean, if there are more.
        buffers: a module or tensors. Floating buffers are averaged in each round,
            others are taken from rank 0.
        bucket_bytes: largest message, in bytes.
        timeout_s: bound of every wait for another worker, in seconds; that of the
            group if None, which is 600 s where it says nothing.
        init_sync: start from rank 0's parameters and buffers.
        inner: keyword arguments for AdamW.

    Raises:
        TypeError: if a keyword is none that the method or the inner optimizer has, or
            is for the inner optimizer and that is built already.
        ValueError: if a setting is out of its range, or settings exclude each other.
        PeerMismatch: if workers were built differently.
        PeerLost: if one of them does not come.
    """

    # torch then calls step() for skipped steps too, and workers stay in phase.
    _step_supports_amp_scaling = True
    #: what is built over parameters
    _inner_class: type[Optimizer] = torch.optim.AdamW
    #: attributes that may be set during a run, and are saved
    _adjustable: tuple[str, ...] = ()
    _swapped = False
    #: names in each fragment, where that is settled
    _parts: list[list[str]] | None = None
    #: the step for which the weight function was last called, and what it said
    _weighed: tuple[int, float] | None = None

    def __init__(
        self,
        params: Any,
        *,
        group: Any = None,
        overlap: int = 0,
        codec: str | Codec | None = None,
        error_feedback: bool = False,
        anchor_device: torch.device | str | None = None,
        weight: str | Callable[[], float] = "equal",
        clip_shares: float | None = None,
        trim_shares: int = 0,
        buffers: nn.Module | Iterable[Tensor] | None = None,
        bucket_bytes: int = 4 << 20,
        timeout_s: float | None = None,
        init_sync: bool = True,
        **inner: Any,
    ) -> None:
        check_number("bucket_bytes", bucket_bytes, int, least=1)
        if timeout_s is not None:
            check_positive("timeout_s", timeout_s)
        if not (callable(weight) or weight in ("equal", "steps")):
            raise ValueError(
                f"weight must be 'equal', 'steps' or a function, got {weight=}."
            )
        self._overlap = check_period("overlap", overlap, least=0)
        self._codec = make_codec(codec)
        if error_feedback and self._codec is None:
            raise ValueError(
                "error_feedback must be False without a codec, got True: nothing is "
                "lost that could be kept."
            )
        self._error_feedback = error_feedback
        self._anchor_device = check_device("anchor_device", anchor_device)
        self.inner = build_inner(
            params, inner, self._inner_class, type(self), AbstractWrapper
        )
        self._robust = _check_robust(clip_shares, trim_shares, weight)
        self._weight = weight
        self._buffers = _named_buffers(buffers)
        self._bucket_bytes = bucket_bytes
        self._init_sync = init_sync
        self._group: Group = resolve_group(group)
        self._timeout_s = self._group.timeout_s if timeout_s is None else timeout_s
        # Not Optimizer.__init__, which would lay out groups and state of its own. This
        # is how torch makes an optimizer from parts: it adds hooks and patches step.
        Optimizer.__setstate__(self, {})
        self._build()
        first = {**self._named(), **self._buffers} if init_sync else {}
        self._engine.enter(self._plan(), first)

    # ------------------------------------------------------------- for subclasses

    @abstractmethod
    def _streams(self, params: dict[str, Tensor], states: States) -> list[Stream]:
        """The method: what is exchanged, when, and what the result does.

        Args:
            params: the trainable parameters by name; grows with `add_param_group`.
            states: the inner optimizer's state tensors.
        """

    @abstractmethod
    def _config(self) -> dict[str, Any]:
        """The settings that all workers and a checkpoint must share, plain types."""

    # ------------------------------------------------------------- construction

    def _build(self) -> None:
        """Makes the engine for the inner optimizer's parameters as they are now."""
        self._states = States(self._inners)
        self._params = {n: p for n, p in self._named().items() if p.requires_grad}
        self._flags = self._trainable()
        if not self._params:
            raise ValueError(
                "params must contain a parameter that requires grad, got "
                f"{len(self._named())} that do not."
            )
        self._check_kinds(self._named())
        streams = self._streams(self._params, self._states)
        for stream in streams:
            check_overlap(self._overlap, stream.schedule.shortest)
            if self._error_feedback and stream.codec is not None:
                stream.residual = stream.layout.new()
        if self._codec is not None and all(stream.codec is None for stream in streams):
            raise ValueError(
                f"codec must be None with {type(self).__name__}, got {self._codec!r}: "
                "nothing that it exchanges is coded."
            )
        lasts = [stream.last for stream in streams if stream.last is not None]
        streams += dict.fromkeys(lasts)
        if self._robust != Robust():
            displacements = [stream for stream in streams if stream.compares]
            if not displacements:
                raise ValueError(
                    "clip_shares and trim_shares must be left out with "
                    f"{type(self).__name__}, got {self._robust}: its "
                    "workers exchange no pseudo-gradients. Take DiLoCo, which with "
                    "outer_lr=1 and outer_momentum=0 is Local SGD."
                )
            for stream in displacements:
                stream.robust = self._robust
        if self._buffers:
            streams += self._buffer_streams(streams[0])
        self._evaluation = Average("evaluation", Layout(self._params), Periodic(0))
        self._engine = Engine(
            [*streams, self._evaluation],
            self._group,
            weight=self._weigh,
            timeout_s=self._timeout_s,
            bucket_bytes=self._bucket_bytes,
            heal=self._states.heal_,
            check=self._check_trainable,
            give=self._give,
            take=self._take,
        )

    @property
    def _rounds(self) -> Rounds:
        return self._engine.rounds

    def _check_kinds(self, params: Mapping[str, Tensor]) -> None:
        for name, param in params.items():
            if param.is_meta:
                raise ValueError(
                    f"params must be in memory, got {name!r} on the meta device. Build "
                    "the optimizer after the model's to_empty() and its weights."
                )
            if getattr(param, "_fsdp_flattened", False):
                raise ValueError(
                    "params must be whole, or sharded by FSDP2, got "
                    f"{name!r} of a FullyShardedDataParallel (FSDP1). Shard the model "
                    "with torch.distributed.fsdp.fully_shard."
                )
        check_sharded(self._group, params.values())

    def _buffer_streams(self, like: Stream) -> list[Stream]:
        # A mask of infinities is no statistic, and would keep all others out.
        averaged = {
            name: buffer
            for name, buffer in self._buffers.items()
            if buffer.is_floating_point() and bool(buffer.isfinite().all())
        }
        taken = {n: b for n, b in self._buffers.items() if n not in averaged}
        kinds = (
            (Accompanying, "buffers", averaged),
            (FirstWorkers, "integer buffers", taken),
        )
        return [
            kind(
                name,
                Layout(buffers),
                like.schedule,
                peers=like.peers,
                goes_alone=like.goes_alone,
            )
            for kind, name, buffers in kinds
            if buffers
        ]

    def _trainable(self) -> list[bool]:
        """Whether each parameter requires grad, in the order of the groups."""
        return [p.requires_grad for g in self.param_groups for p in g["params"]]

    def _check_trainable(self) -> None:
        """Raises if a parameter was frozen or unfrozen since it got its place."""
        if self._flags == self._trainable():
            return
        for name, param in self._named().items():
            if param.requires_grad != (name in self._params):
                raise ValueError(
                    f"requires_grad of {name!r} must stay as it was when the optimizer "
                    f"was built, got {param.requires_grad}. Build the optimizer again, "
                    "or give the parameter a group with a learning rate of 0."
                )

    def _weigh(self, steps: int) -> float:
        if self._weight == "equal":
            return 1.0
        if not callable(self._weight):
            return float(steps)
        now = self._rounds.stats.steps
        if self._weighed is None or self._weighed[0] != now:  # once for all streams
            self._weighed = (now, self._call_weight(self._weight))
        return self._weighed[1]

    def _call_weight(self, function: Callable[[], float]) -> float:
        weight = function()
        try:
            is_weight = math.isfinite(weight) and weight >= 0
        except TypeError:
            is_weight = False
        if not is_weight:
            raise ValueError(
                f"weight must return a finite number of at least 0, got {weight!r}."
            )
        return float(weight)

    def _settings(self) -> dict[str, Any]:
        """What a run is made of besides its tensors, in plain types."""
        return {
            "method": type(self).__name__,
            **self._config(),
            "overlap": self._overlap,
            "codec": repr(self._codec),
            "error_feedback": self._error_feedback,
            "clip_shares": self._robust.clip,
            "trim_shares": self._robust.trim,
            "weight": self._weight if isinstance(self._weight, str) else "a function",
            "workers": None if self._group.is_elastic else len(self._group.members(0)),
        }

    def _give(self) -> dict[str, Any]:
        """The whole state, for a worker that comes: it begins as a copy of this one."""
        optimizer = self.state_dict()
        sync = without_debts(optimizer[OWN_KEY]["sync"])
        optimizer[OWN_KEY] |= {"sync": sync}
        return {"optimizer": optimizer, "tensors": {**self._named(), **self._buffers}}

    def _take(self, state: Mapping[str, Any]) -> None:
        """Takes it, but not the giver's own progress: that is in its own share."""
        with torch.no_grad():
            for name, tensor in {**self._named(), **self._buffers}.items():
                tensor.copy_(state["tensors"][name])
        self.load_state_dict(state["optimizer"])
        for stream in self._rounds.streams:
            if isinstance(stream, Anchored) and self._rounds.started:
                stream.layout.scatter_all_(stream.anchor)
        self._rounds.begin_share()

    def _state_streams(self) -> list[AverageState]:
        return [s for s in self._rounds.streams if isinstance(s, AverageState)]

    def _plan(self) -> dict[str, Any]:
        """Everything in which workers must not differ, as named lines."""
        tensors = {**self._named(), **self._buffers}
        lines = [
            f"{name} {tuple(t.shape)} {t.dtype}".replace("torch.", "")
            + ("" if t.is_contiguous() else f" stride {t.stride()}")
            + (" trainable" if t.requires_grad else "")
            + (f" {sharding.spell()}" if (sharding := Sharding.of(t)) else "")
            for name, t in tensors.items()
        ]
        settings = self._settings() | {
            "bucket_bytes": self._bucket_bytes,
            "init_sync": self._init_sync,
        }
        parts = {
            f"the tensors of {stream.name!r}": list(stream.layout.specs)
            for stream in self._rounds.streams
            if stream.has_parameters
        }
        tensor_lines = {f"tensor {i}": line for i, line in enumerate(lines)}
        return settings | tensor_lines | parts

    @property
    def _inners(self) -> tuple[Optimizer, ...]:
        return self.inner if isinstance(self.inner, tuple) else (self.inner,)

    def _named(self) -> dict[str, Tensor]:
        """All parameters, each once, by the user's names or by group and position."""
        named: dict[str, Tensor] = {}
        seen: set[int] = set()
        for i, inner in enumerate(self._inners):
            prefix = f"{i}." if len(self._inners) > 1 else ""
            for g, group in enumerate(inner.param_groups):
                names = group.get("param_names")
                for p, param in enumerate(group["params"]):
                    if id(param) in seen:
                        continue
                    seen.add(id(param))
                    name = names[p] if names else f"{prefix}{g}.{p}"
                    if name in named:
                        raise ValueError(
                            f"params must have different names, got {name!r} twice."
                        )
                    named[name] = param
        return named

    # ------------------------------------------------------------- torch's side

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The inner optimizer's own list; of several, all their groups in order."""
        if isinstance(self.inner, tuple):
            return [group for inner in self.inner for group in inner.param_groups]
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The inner optimizer's own state; of several, all of it as one mapping."""
        if isinstance(self.inner, tuple):
            return JoinedState(self.inner)
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The inner optimizer's own defaults; of several, the first one's first."""
        if isinstance(self.inner, tuple):
            merged: dict[str, Any] = {}
            for inner in reversed(self.inner):
                merged |= inner.defaults
            return merged
        return self.inner.defaults

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One inner step, then whatever exchange is due.

        Args:
            closure: for the inner optimizer.
        """
        # torch.compile takes the inner step: an exchange is no graph of operators.
        traced = torch.compiler.is_compiling()
        begins = _begin_untraced(self) if traced else self._begin()
        loss = self._step_inner(closure)
        if begins:
            _advance_untraced(self) if traced else self._engine.advance()
        return loss

    def _begin(self) -> bool:
        """Whether what follows is a step, and not a distributed checkpoint's probe."""
        if self._swapped:
            self._refuse_when_swapped("step")
        if not self._rounds.started:
            if self._is_probe():
                return False
            self._rounds.start()
        return True

    def _step_inner(self, closure: Callable[[], Any] | None) -> Any:
        found_inf = self.__dict__.get("found_inf")
        if found_inf is not None:
            return self._step_scaled(found_inf)
        if not isinstance(self.inner, tuple):
            return self.inner.step() if closure is None else self.inner.step(closure)
        first, *others = self.inner
        loss = first.step() if closure is None else first.step(closure)
        for inner in others:
            inner.step()
        return loss

    def _step_scaled(self, found_inf: Any) -> Any:
        """A step under a GradScaler, which has set `found_inf` and `grad_scale`."""
        scale = self.__dict__.get("grad_scale")
        skip, loss = bool(found_inf), None
        for inner in self._inners:
            if getattr(inner, "_step_supports_amp_scaling", False):
                inner.found_inf, inner.grad_scale = found_inf, scale  # type: ignore[attr-defined]
                try:
                    loss = inner.step()
                finally:
                    del inner.found_inf, inner.grad_scale  # type: ignore[attr-defined]
            elif not skip:
                if scale is not None:
                    unscale_(inner, scale)
                loss = inner.step()
        return loss

    def _is_probe(self) -> bool:
        """Whether this is the step by which a distributed checkpoint has state made.

        torch takes it on a fresh optimizer, with rates and gradients of zero.
        """
        if len(self.state) or any(float(g.get("lr", 1)) for g in self.param_groups):
            return False
        params = [p for g in self.param_groups for p in g["params"]]
        grads = [p.grad for p in params if p.requires_grad]
        moves = any(grad is None or bool(local_of(grad).any()) for grad in grads)
        # Gradients may be zero in one shard alone.
        return self._evaluation.layout.judge(not moves).finite

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(self.inner, tuple):
            raise ValueError(
                "add_param_group must know which optimizer is meant, got "
                f"{len(self.inner)} inner optimizers. Build the optimizer again, with "
                "the group in one of them."
            )
        if self._group.is_elastic:
            raise ValueError(
                "add_param_group must be called with a fixed group of workers, got an "
                "ElasticGroup: not all would add it at the same time. Build the "
                "optimizer with all groups, some with a learning rate of 0."
            )
        before = self._named()
        self.inner.add_param_group(param_group)
        added = {n: p for n, p in self._named().items() if n not in before}
        self._engine.talk.agree(self._plan())
        if self._init_sync:
            self._engine.talk.broadcast(added)
        trainable = {n: p for n, p in added.items() if p.requires_grad}
        self._params |= trainable
        self._flags = self._trainable()
        states = self._states.names(trainable) if self._state_streams() else {}
        for stream in self._state_streams():
            self._rounds.extend(stream, states.get(stream.state_name, {}))
        fragments = [s for s in self._rounds.streams if s.has_parameters]
        smallest = min(fragments, key=lambda s: s.layout.num_bytes)
        self._rounds.extend(smallest, trainable)
        self._evaluation.extend_(trainable, {})

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state_dict with our part under a key of its own.

        The inner part refers to live tensors, as torch's does; ours is a copy.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        merged: dict[str, Any] = {"state": {}, "param_groups": []}
        for inner, first in self._with_offsets():
            part = inner.state_dict()
            for key, value in part["state"].items():
                merged["state"][key + first if isinstance(key, int) else key] = value
            merged["param_groups"] += [
                {**group, "params": [i + first for i in group["params"]]}
                for group in part["param_groups"]
            ]
        merged[OWN_KEY] = {
            "config": self._settings(),
            "adjusted": {name: getattr(self, name) for name in self._adjustable},
            "sync": self._rounds.state_dict(),
            # By which a loader sees that something was lost on the way.
            "num_states": _num_states(merged),
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            result = post_hook(self, merged)
            merged = merged if result is None else result
        return merged

    def load_state_dict(
        self, state_dict: dict[str, Any], *, strict: bool = True
    ) -> None:
        """Copies a state_dict back: what comes next is what would have come then.

        Args:
            state_dict: what `state_dict()` returned; left as it is.
            strict: whether the configuration and the number of workers must be those
                of the checkpoint. If not, what fits is loaded.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            result = pre_hook(self, state_dict)
            state_dict = state_dict if result is None else result
        own = state_dict.get(OWN_KEY)
        self._check_loadable(state_dict, own, strict=strict)
        groups = iter(state_dict["param_groups"])
        for inner, first in self._with_offsets():
            mine = [next(groups) for _ in inner.param_groups]
            ids = {i: i - first for group in mine for i in group["params"]}
            load_inner_(
                inner,
                {ids.get(i, i): s for i, s in state_dict["state"].items() if i in ids},
                [{**g, "params": [ids[i] for i in g["params"]]} for g in mine],
            )
        if own is not None:
            self._recut(own["sync"]["streams"])
            for name, value in own["adjusted"].items():
                if name in self._adjustable:
                    setattr(self, name, value)
            self._rounds.load_state_dict(own["sync"], strict=strict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def portable(self) -> Portable:
        """This optimizer for `torch.distributed.checkpoint`, also onto another mesh.

        With a key of its own for each worker: torch saves what has the same key once.
        All that the next step depends on is saved; a fresh optimizer need take no step
        before it loads.

        Example::

            worker = mesh["replicate"].get_local_rank()
            parts = {f"model {worker}": model, f"opt {worker}": opt.portable()}
            torch.distributed.checkpoint.save(parts, checkpoint_id=path)

        With another number of workers, shares under way are dropped; whose rank is new
        takes another's state, without what its codec owes.
        """
        return Portable(self)

    def _check_loadable(
        self, state_dict: Mapping[str, Any], own: Any, *, strict: bool
    ) -> None:
        """Raises before anything has been changed."""
        if self._group.is_elastic and self._rounds.stats.steps:
            raise ValueError(
                "state_dict must be loaded before the first step of a run whose "
                f"workers come and go, got a run at step {self._rounds.stats.steps}. A "
                "worker that comes has its state from the others: load only `if "
                "opt.stats.steps == 0`."
            )
        if own is None and strict:
            raise ValueError(
                f"state_dict must have an entry {OWN_KEY!r}, got "
                f"{sorted(state_dict)}. Load a checkpoint of the bare inner optimizer "
                "with `.inner.load_state_dict`."
            )
        if own is not None:
            _check_complete(state_dict, own, strict=strict)
        mine, saved = self._settings(), own["config"] if strict else {}
        for key in mine | saved if strict else ():
            if mine.get(key) != saved.get(key):
                raise ValueError(
                    f"{key} must be as in the checkpoint, got {key}={mine.get(key)!r} "
                    f"with {key}={saved.get(key)!r} in the checkpoint. Build the "
                    "optimizer alike, or load what fits with strict=False."
                )
        streams = own["sync"]["streams"] if own is not None and strict else {}
        names = {n for stream in streams.values() for n in stream["names"]}
        known = {n for s in self._rounds.streams for n in s.layout.specs}
        if not names <= known:
            raise ValueError(
                "names of the parameters must be those of the checkpoint, got "
                f"{sorted(known)[:3]} with {sorted(names - known)[:3]} in the "
                "checkpoint. Pass model.named_parameters() in both runs or in none."
            )
        lengths = [len(group["params"]) for group in state_dict["param_groups"]]
        if lengths != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                "param_groups must be as in the checkpoint, got groups of "
                f"{[len(group['params']) for group in self.param_groups]} parameters "
                f"with {lengths} in the checkpoint."
            )

    def _recut(self, saved: Mapping[str, Any]) -> None:
        """Cuts fragments as a checkpoint has them, where a group came in later."""
        mine = {s.name: list(s.layout.specs) for s in self._rounds.streams}
        parts = [
            saved[s.name]["names"]
            for s in self._rounds.streams
            if s.has_parameters and s.name in saved
        ]
        if all(saved[n]["names"] == names for n, names in mine.items() if n in saved):
            return
        if sorted(sum(parts, [])) == sorted(self._params):
            hooks, self._parts = self._rounds.hooks, parts
            self._build()
            self._rounds.hooks.update(hooks)

    def _with_offsets(self) -> Iterator[tuple[Optimizer, int]]:
        """The inner optimizers, each with the number of parameters before its own."""
        first = 0
        for inner in self._inners:
            yield inner, first
            first += sum(len(group["params"]) for group in inner.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k not in _NOT_COPIED}
        state = {k: v for k, v in state.items() if not k.endswith("_hooks")}
        # Fragments as they are: a split of what there is now might be another one.
        state["_parts"] = [
            list(s.layout.specs) for s in self._rounds.streams if s.has_parameters
        ]
        return state | {OWN_KEY: self._rounds.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        own = state.pop(OWN_KEY)
        super().__setstate__(state)
        self._build()
        self._rounds.load_state_dict(own, strict=True)

    # ------------------------------------------------------------- our own side

    @property
    def stats(self) -> Stats:
        """What synchronization has done so far: a snapshot."""
        return self._rounds.stats.snapshot()

    def register_round_hook(self, hook: Callable[[Stats], None]) -> RemovableHandle:
        """Calls `hook(stats)` after each applied round, until the handle is removed."""
        if not callable(hook):
            raise TypeError(f"hook must be a function of the stats, got {hook!r}.")
        handle = RemovableHandle(self._rounds.hooks)
        self._rounds.hooks[handle.id] = hook
        return handle

    def finish(self, *, timeout_s: float | None = None) -> None:
        """Ends in step with the others: all workers then hold equal parameters.

        Waits for what is in flight, then exchanges once more what has changed since its
        last exchange. A worker that comes early serves the others' rounds until all are
        there. A second call does nothing; training may go on.

        Args:
            timeout_s: bound of each wait in here, in seconds, for workers that come at
                different times; None for that of the optimizer.
        """
        self._refuse_when_swapped("finish")
        if timeout_s is not None:
            check_positive("timeout_s", timeout_s)
        self._engine.finish(timeout_s)

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Inside, the model holds the global parameters; then the local ones are back.

        They are the anchors where the method has them, and nothing is sent; else the
        mean of the workers' parameters now, and every worker must enter. A model that
        is sharded by FSDP2 sees them after `model.reshard()`, and the local ones again
        after another: its outermost module keeps what it has gathered.
        """
        self._refuse_when_swapped("global_parameters")
        layout = self._evaluation.layout
        local = layout.gather_all_(layout.empty())
        agreed = [s for s in self._rounds.streams if s.holds_global]
        mean = None if agreed else self._engine.average(self._evaluation)
        self._swapped = True
        try:
            if mean is not None:
                layout.scatter_all_(mean)
            elif self._rounds.started:
                for stream in agreed:
                    assert stream.agreed is not None
                    stream.layout.scatter_all_(stream.agreed)
            yield
        finally:
            layout.scatter_all_(local)
            self._swapped = False

    def _refuse_when_swapped(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(
                f"{what} must be called with the local parameters in the model, got a "
                "call inside `global_parameters()`. Leave it first."
            )


class OuterRateWrapper(AbstractWrapper):
    """A wrapper whose outer learning rate may be set during a run."""

    _adjustable = ("outer_lr",)
    #: what it was built with, which workers and a checkpoint must share
    _first_outer_lr: float | None = None

    @property
    def outer_lr(self) -> float:
        return self._outer_lr

    @outer_lr.setter
    def outer_lr(self, outer_lr: float) -> None:
        check_number("outer_lr", outer_lr, float)
        self._check_outer_lr(outer_lr)
        self._outer_lr = float(outer_lr)
        if self._first_outer_lr is None:
            self._first_outer_lr = self._outer_lr

    def _check_outer_lr(self, outer_lr: float) -> None:
        """Raises if the method cannot take this rate."""


@_disable_dynamo
def _begin_untraced(optimizer: AbstractWrapper) -> bool:
    return optimizer._begin()


@_disable_dynamo
def _advance_untraced(optimizer: AbstractWrapper) -> None:
    optimizer._engine.advance()


def _num_states(state_dict: Mapping[str, Any]) -> int:
    """How many states of single parameters there are."""
    states = state_dict["state"].values()
    return sum(len(state) for state in states if isinstance(state, dict))


def _check_complete(
    state_dict: Mapping[str, Any], own: Mapping[str, Any], *, strict: bool
) -> None:
    """Raises if what was saved is not there."""
    sync = own["sync"]
    lost = [
        (what, now, saved)
        for what, now, saved in (
            ("inner states", _num_states(state_dict), own["num_states"]),
            ("shares under way", len(sync["pending"]), sync["num_pending"]),
        )
        if now < saved and (strict or what == "inner states")
    ]
    for what, now, saved in lost:
        raise ValueError(
            f"state_dict must hold all {what} that were saved, got {now} of {saved}. "
            "torch.distributed.checkpoint loads nothing for which there is no place: "
            "give it `optimizer.portable()` in place of the optimizer, to save and to "
            "load."
        )


def _check_robust(clip: float | None, trim: int, weight: object) -> Robust:
    if clip is not None:
        check_number("clip_shares", clip, float)
        if clip < 1:
            raise ValueError(
                f"clip_shares must be at least 1, got clip_shares={clip}: less would "
                "shorten the median share too."
            )
    check_number("trim_shares", trim, int)
    if trim and weight != "equal":
        raise ValueError(
            f"trim_shares must be 0 with weights, got {trim} with {weight=}."
        )
    return Robust(clip, trim)


def _named_buffers(
    buffers: nn.Module | Iterable[Tensor] | None,
) -> dict[str, Tensor]:
    if buffers is None:
        return {}
    if isinstance(buffers, nn.Module):
        return {f"buffer {name}": buffer for name, buffer in buffers.named_buffers()}
    if not isinstance(buffers, Iterable):
        raise TypeError(f"buffers must be a module or tensors, got {buffers!r}.")
    tensors = list(buffers)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                "buffers must be a module or tensors, got a "
                f"{type(tensor).__name__} among them."
            )
    return {f"buffer {i}": tensor for i, tensor in enumerate(tensors)}
