"""The mesh: every rank's place on named axes, and communicators along them.

The one idea: any number of axes, one keyword each (`Mesh(comm, dp=2, tp=2, pp=2)`), and a group for any of them or
several at once. Which ranks stand where is arithmetic (`core/axes.py`): model-major, so `tp` varies fastest, then `cp`,
`dp`, `pp`, then axes of other names in the order given. An axis of size 1, or not named at all, exchanges nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilemesh.comm.connection import connect
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.axes import ORDER, Blocks, coordinates, members, ordered, rank_at, ranks_of, size_of, strided
from tilemesh.core.errors import UsageError, unknown
from tilemesh.parallel.agree import agree

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Axis:
    """One axis as this rank sees it: itself and the ranks that differ from it along this axis alone."""

    name: str
    size: int
    index: int
    members: tuple[int, ...]
    """Their ranks in the mesh, in order of index."""
    comm: Communicator


class Mesh:
    """Ranks of a communicator on a grid. A collective call: every rank of `comm` makes the same mesh."""

    def __init__(self, comm: Communicator, **sizes: int) -> None:
        self.comm = comm
        chosen = {"dp": 1, "tp": 1} | sizes
        # Ranks that make different groups would wait for one another for ever.
        agree(comm, {"mesh": list(chosen)} | {f"mesh.{name}": size for name, size in chosen.items()})
        self.shape = ordered(chosen)
        """(name, size) of every axis, fastest first."""
        if ranks_of(self.shape) != comm.size:
            raise UsageError(
                f"a mesh of {self} needs {ranks_of(self.shape)} ranks and there are {comm.size}: "
                "start as many, or change the sizes"
            )
        self._groups: dict[tuple[str, Blocks], Communicator] = {}
        self._alone = connect("alone")
        self._across: dict[tuple[str, int], Communicator] = {}
        self.axes: dict[str, Axis] = {}
        self.stage, self._ranks_of_stage = comm, tuple(range(comm.size))
        """The ranks of this one's pipeline stage."""
        for name, _ in self.shape:
            self.axes[name] = self._axis(name)
        if self.pp.size > 1:
            names = [name for name, _ in self.shape if name != "pp"]
            self.stage, self._ranks_of_stage = self.group(*names), self.members(*names)

    @classmethod
    def of_device_mesh(cls, comm: Communicator, device_mesh: DeviceMesh) -> Mesh:
        """The mesh that a `DeviceMesh` of torch over all ranks of `comm` is, its dims as axes of the same names.

        UsageError where its ranks stand otherwise than on a mesh of these axes here.
        """
        names = device_mesh.mesh_dim_names
        if not names:
            raise UsageError("a DeviceMesh without names of its dims: give mesh_dim_names, such as ('dp', 'tp')")
        sizes = dict(zip(names, device_mesh.mesh.shape, strict=True))
        slowest_first = [name for name, _ in reversed(ordered({"dp": 1, "tp": 1} | sizes)) if name in sizes]
        ranks = device_mesh.mesh.permute([names.index(name) for name in slowest_first]).flatten().tolist()
        if ranks != list(range(comm.size)):
            raise UsageError(
                f"a DeviceMesh of {' × '.join(f'{name}={size}' for name, size in sizes.items())} whose ranks are "
                f"{ranks} in the order of {', '.join(slowest_first)}: expected 0 to {comm.size - 1} in that order, as "
                "init_device_mesh makes it with its dims named so"
            )
        return cls(comm, **sizes)

    def device_mesh(self, device: str = "cpu") -> DeviceMesh:
        """The same mesh as torch's, slowest axis first. Its own process groups join the ranks: torch.distributed has to
        be initialised, with as many ranks."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized() or dist.get_world_size() != self.comm.size:
            there = dist.get_world_size() if dist.is_initialized() else "no"
            raise UsageError(
                f"a DeviceMesh of {self} needs torch.distributed with {self.comm.size} ranks and it has {there}: start "
                "with torchrun, or call init_process_group"
            )
        shape = tuple(reversed(self.shape))
        return init_device_mesh(
            device, tuple(size for _, size in shape), mesh_dim_names=tuple(name for name, _ in shape)
        )

    def _axis(self, name: str) -> Axis:
        index = coordinates(self.comm.rank, self.shape)[name]
        along = members(self.comm.rank, ((name, size_of(self.shape, name)),), self.shape)
        return Axis(name, len(along), index, along, self.group(name))

    def axis(self, name: str) -> Axis:
        """An axis by its name; one that the mesh was not given has size 1."""
        return self.axes.get(name) or Axis(name, 1, 0, (self.comm.rank,), self._alone)

    def _require(self, name: str) -> None:
        """Refuse what is neither an axis of this mesh nor one that a mesh may do without."""
        if name not in (known := [*dict(self.shape), *ORDER]):
            raise unknown("axis", name, list(dict.fromkeys(known)))

    @property
    def tp(self) -> Axis:
        """The ranks that share each matrix."""
        return self.axis("tp")

    @property
    def cp(self) -> Axis:
        """The ranks that share each sequence."""
        return self.axis("cp")

    @property
    def dp(self) -> Axis:
        """The ranks that hold the same part of the model and take different rows of the batch."""
        return self.axis("dp")

    @property
    def pp(self) -> Axis:
        """The ranks that share the layers."""
        return self.axis("pp")

    def part_of_batch(self) -> int:
        """Which rows of the batch this rank is given: ranks of cp are given the same, and take other tokens."""
        return self.dp.index

    def is_first_of_part(self) -> bool:
        """Whether this rank is the first of those that are given the same part of the batch."""
        return all(axis.index == 0 for name, axis in self.axes.items() if name != "dp")

    def group(self, *names: str) -> Communicator:
        """The ranks that differ from this one along these axes alone (`group("dp", "cp")`), in order of rank."""
        for name in names:
            self._require(name)
        return self.among(tuple((name, size) for name, size in self.shape if name in names))

    def members(self, *names: str) -> tuple[int, ...]:
        """Their ranks in the mesh."""
        wanted = tuple((name, self.axis(name).size) for name in names)
        return members(self.comm.rank, tuple(block for block in wanted if block[0] in self.axes), self.shape)

    def among(self, blocks: Blocks, name: str = "") -> Communicator:
        """The ranks in one block with this one, such as `(("tp", 2),)` where kv heads are held by two ranks of tp each.

        `name`: of a group of its own, counted under it. Made once and kept. A collective call of this rank's pipeline
        stage, or of the whole mesh where `blocks` names pp: every rank asks for the same blocks, in one order.
        """
        if not (blocks := tuple((axis, count) for axis, count in blocks if count > 1)):
            return self._alone
        if (key := (name, blocks)) not in self._groups:
            # A group of its own even where it is all ranks: calls along axes then never mix with those on `comm`.
            # A part of one axis is split from that axis, so that whoever observes an axis sees its parts too.
            axis = self.axes.get(strided(blocks[0][0])[0]) if len(blocks) == 1 and not name else None
            # One within a stage is split from the stage: another may hold other parameters, and need other groups.
            is_of_stage = all(strided(name)[0] != "pp" for name, _ in blocks)
            parent, along = self.comm, tuple(range(self.comm.size))
            if axis is not None:
                parent, along = axis.comm, axis.members
            elif is_of_stage:
                parent, along = self.stage, self._ranks_of_stage
            ranks = members(self.comm.rank, blocks, self.shape)
            expected = [along.index(rank) for rank in ranks]
            group = parent.split(ranks[0], key=self.comm.rank, expected=expected)
            assert group is not None
            self._groups[key] = group
        return self._groups[key]

    def across(self, axis: str, block: int) -> Communicator:
        """The ranks that stand at this one's place in the other blocks of so many along an axis.

        Made once and kept. A collective call of the whole mesh.
        """
        self._require(axis)
        along = self.axis(axis)
        if block >= along.size:
            return self._alone
        if (axis, block) not in self._across:
            place = along.index % block
            group = along.comm.split(place, expected=range(place, along.size, block))
            assert group is not None
            self._across[axis, block] = group
        return self._across[axis, block]

    @property
    def groups(self) -> Mapping[tuple[str, Blocks], Communicator]:
        """The communicators made so far, by name and what of which axes they join (`among`); `comm` is none of them."""
        return self._groups

    def axes_of(self, label: str) -> str:
        """The axes along which a communicator joins ranks, by its label: "dp+cp".

        Those of the nearest group of this mesh that it is or was split from; empty where there is none.
        """
        named = {
            group.label: own_name or "+".join(name for name, _ in reversed(blocks))
            for (own_name, blocks), group in self._groups.items()
        }
        while label not in named and "/" in label:
            label = label.rpartition("/")[0]
        return named.get(label, "")

    def close(self) -> None:
        """Give the groups back (a collective call); `comm` stays."""
        for group in (*self._across.values(), *self._groups.values(), self._alone):
            group.close()

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in reversed(self.shape))

    def describe(self) -> str:
        """The mesh as text: a column for each rank of tp, a row for each of dp, a grid for each place on other axes."""
        others = [(name, size) for name, size in reversed(self.shape) if name not in ("tp", "dp")]
        lines = []
        for there in itertools.product(*(range(size) for _, size in others)):
            place = {name: index for (name, _), index in zip(others, there, strict=True)}
            head = ["", *(f"tp {tp}" for tp in range(self.tp.size))]
            rows = [
                [f"dp {dp}", *(str(rank_at(place | {"dp": dp, "tp": tp}, self.shape)) for tp in range(self.tp.size))]
                for dp in range(self.dp.size)
            ]
            width = max(len(cell) for row in (head, *rows) for cell in row) + 2
            if place:
                lines.append(", ".join(f"{name} {index}" for name, index in place.items()))
            lines += ["".join(cell.rjust(width) for cell in row) for row in (head, *rows)]
        here = ", ".join(f"{name} {self.axes[name].index}" for name, _ in reversed(self.shape))
        title = f"mesh {self}, {self.comm.size} ranks over {self.comm.backend}; this is rank {self.comm.rank}: {here}"
        return "\n".join([title, *lines])
