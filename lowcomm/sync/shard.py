"""Shards: a `DTensor` becomes this rank's part of it here, and a `DTensor` again.

Whatever is computed and sent is computed on local parts. The other ranks of a worker do
the same with theirs, at the same time and with the same result of every decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = (Tensor, nn.Parameter)


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a `DTensor`."""
    if type(tensor) in _PLAIN:
        return False
    from torch.distributed.tensor import DTensor  # takes over half a second

    return isinstance(tensor, DTensor)


@torch.no_grad()
def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory; a plain tensor as it is."""
    return tensor.to_local() if is_sharded(tensor) else tensor


class Sharding(NamedTuple):
    """How a tensor lies on the ranks of a worker.

    Args:
        mesh: the ranks.
        placements: what each dimension of the mesh does with the tensor.
        shape: of the whole.
        stride: of the whole.
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Sharding | None:
        """That of a tensor; None of a plain one."""
        if not is_sharded(tensor):
            return None
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return cls(tensor.device_mesh, tuple(tensor.placements), shape, stride)

    def spell(self) -> str:
        """The same on all ranks that hold this part of a tensor, and on no others."""
        here = Coordinates.of(self.mesh)
        names = ", ".join(map(repr, self.placements))
        return f"{names} at {here.at} of {here.sizes}"

    def join(self, local: Tensor) -> Tensor:
        """The tensor that has `local` as this rank's part, in the same memory."""
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local,
            self.mesh,
            self.placements,
            run_check=False,
            shape=torch.Size(self.shape),
            stride=self.stride,
        )

    @torch.no_grad()
    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor that lies alike, or is here as a whole."""
        from torch.distributed.tensor import DTensor, Replicate

        if not is_sharded(tensor):
            whole = [Replicate()] * self.mesh.ndim
            tensor = DTensor.from_local(
                tensor.to(self.mesh.device_type), self.mesh, whole, run_check=False
            )
        if tensor.device_mesh != self.mesh:
            raise ValueError(
                f"{name!r} must be on the mesh of its parameter, got one on "
                f"{tensor.device_mesh} with {self.mesh}. Load it with "
                "torch.distributed.checkpoint, which goes from one mesh to another."
            )
        return tensor.redistribute(placements=self.placements).to_local()


class Coordinates(NamedTuple):
    """This rank in a mesh, in plain types; alike on the same rank of every worker.

    Args:
        names: of the dimensions.
        sizes: of the dimensions.
        at: this rank's coordinates.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    at: tuple[int, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Coordinates:
        """This rank's place in a mesh."""
        names = tuple(mesh.mesh_dim_names or ())
        return cls(names, tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))


def meshes_of(tensors: Iterable[Tensor]) -> dict[Coordinates, DeviceMesh]:
    """The meshes on which there are tensors, each once, by this rank's place."""
    meshes = {t.device_mesh for t in tensors if is_sharded(t)}
    places = {Coordinates.of(mesh): mesh for mesh in meshes}
    if len(places) < len(meshes):
        raise ValueError(
            "meshes must have dimensions of different names to be told apart when a "
            f"checkpoint is loaded, got {meshes}. Name them with mesh_dim_names."
        )
    return dict(sorted(places.items()))


def ranks_of_worker(tensors: Iterable[Tensor]) -> set[int]:
    """Global ranks that hold parts of these tensors, or copies of parts."""
    meshes = {t.device_mesh for t in tensors if is_sharded(t)}
    return {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}


class Shards:
    """The ranks of one worker, on which its tensors lie, and what they decide together.

    Args:
        shardings: of the tensors; without any, this rank is the worker.
    """

    def __init__(self, shardings: Iterable[Sharding]) -> None:
        # Every dimension once: meshes that were cut out of one have its groups. In the
        # order of the tensors, which is that of all ranks.
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._device = "cpu"
        for mesh in dict.fromkeys(sharding.mesh for sharding in shardings):
            self._device = mesh.device_type
            for group in mesh.get_all_groups():
                if group.size() > 1:
                    self._groups.setdefault(group.group_name, group)

    def copies_of(self, sharding: Sharding | None) -> int:
        """On how many ranks each value of a tensor lies."""
        ways = 1
        for group in self._groups.values():
            ways *= group.size()
        if sharding is None:
            return ways
        for size, placement in zip(
            sharding.mesh.shape, sharding.placements, strict=True
        ):
            ways //= 1 if placement.is_replicate() else size
        return ways

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """The sum of each number over all ranks, which all call this."""
        if not self._groups:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        for group in self._groups.values():
            dist.all_reduce(sums, group=group)
        result: list[float] = sums.tolist()
        return result


# --- in plain types -------------------------------------------------------------------

#: Kinds of placements, and what makes one. The last: FSDP2 over tensor parallelism.
_PLACEMENTS = {
    "Shard": ("dim",),
    "Replicate": (),
    "_StridedShard": ("dim", "split_factor"),
}
#: What marks the dictionary that stands for a part of a tensor.
_MARK = "part of a tensor"


def pack(tensor: DTensor, local: Tensor) -> dict[str, Any]:
    """What says all of a sharded tensor, for `torch.load` as it is by default.

    Args:
        tensor: the tensor.
        local: this rank's part, or a copy.
    """
    placements = []
    for placement in tensor.placements:
        kind = type(placement).__name__
        if kind not in _PLACEMENTS:
            raise TypeError(
                "sharded tensors must be cut along a dimension or be copies, got a "
                f"placement {placement}. Save with torch.distributed.checkpoint."
            )
        placements.append([kind, *(getattr(placement, a) for a in _PLACEMENTS[kind])])
    return {
        _MARK: list(Coordinates.of(tensor.device_mesh)),
        "placements": placements,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "values": local,
    }


def unpack(state: Any, meshes: Mapping[Coordinates, DeviceMesh]) -> Any:
    """A state with tensors for what stands for them."""
    if isinstance(state, dict) and _MARK in state:
        from torch.distributed.tensor import placement_types

        names, sizes, at = state[_MARK]
        mesh = meshes[Coordinates(tuple(names), tuple(sizes), tuple(at))]
        placements = tuple(
            getattr(placement_types, kind)(
                **dict(zip(_PLACEMENTS[kind], values, strict=True))
            )
            for kind, *values in state["placements"]
        )
        shape, stride = tuple(state["shape"]), tuple(state["stride"])
        part = state["values"].to(mesh.device_type)
        return Sharding(mesh, placements, shape, stride).join(part)
    if isinstance(state, dict):
        for key, value in state.items():
            state[key] = unpack(value, meshes)
    elif isinstance(state, list):
        state[:] = [unpack(value, meshes) for value in state]
    elif type(state) is tuple:
        return tuple(unpack(value, meshes) for value in state)
    return state
