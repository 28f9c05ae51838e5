"""A rank of a run that trains a module of the user's: `python -m tilemesh.train.module_rank RUN`, or `train_here`.

The one idea: such a run is a run. The module is placed and laid, its function's batches are the source, its result is
the loss; steps, checkpoints by boxes, resuming and records are those of every run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.core.config import to_dict
from tilemesh.core.errors import RunError, UsageError
from tilemesh.graph.joint import ModuleCall, trace_joint
from tilemesh.measure.machine import stamp, this_machine
from tilemesh.model.dropout import fold_seed
from tilemesh.parallel.agree import agree
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.placed import Pins, PlacedJoint, PlacedModule, place_call
from tilemesh.parallel.staged import Chained
from tilemesh.plan.local import local_machine
from tilemesh.plan.place.cost import MeshCost
from tilemesh.runs.folder import write_prediction
from tilemesh.runs.kind import MODULE, Kind
from tilemesh.runs.manifest import STATE
from tilemesh.train import rank
from tilemesh.train.config import ModuleRun, TrainConfig
from tilemesh.train.lessons import Lessons
from tilemesh.train.module_stages import StagedCall, by_place, cut_rows
from tilemesh.train.placed_step import lay_placed, step_figures
from tilemesh.train.programs import read_program
from tilemesh.train.record import Recorder
from tilemesh.train.result import Result
from tilemesh.train.servers import Seat
from tilemesh.train.source import Microbatch, Objective, Source


def main(argv: Sequence[str]) -> int:
    return rank.main(argv, train_here)


def train_here(config: TrainConfig, folder: Path, comm: Communicator, **options: Any) -> Result:
    """As one rank of `comm`."""
    return rank.train_here(config, folder, comm, lessons=partial(ModuleLessons, folder=folder), **options)


@dataclass
class ModuleLessons(Lessons):
    """A module of the user's, and what its function gives to train it on."""

    kind: Kind = MODULE
    folder: Path = Path()
    is_steady = False

    def open(self) -> None:
        assert isinstance(self.config, ModuleRun)
        self.module = self.config.module
        torch.manual_seed(self.config.train.seed)
        self.program = read_program(self.module.program)
        self.first = self.call(1)
        if _digest(self.first) != _digest(self.call(1)):
            raise UsageError(
                f"{self.module.program} gives two different batches for step 1: let them follow from the step's number "
                "alone, such as by a generator with that seed, so that a run can go on"
            )

    def call(self, step: int) -> ModuleCall:
        try:
            return ModuleCall.example(self.program.call(step))
        except Exception as error:
            raise RunError(
                f"what {self.module.program} gives for step {step} fails: {type(error).__name__}: {error}"
            ) from error

    @property
    def microbatches(self) -> int:
        """Of a step, one after the other; stages cut a batch themselves."""
        plan = self.config.plan
        return plan.accumulation if plan.pp == 1 else 1

    def fingerprint(self) -> str:
        return hashlib.sha256(Path(self.module.program.rpartition(":")[0]).read_bytes()).hexdigest()[:16]

    def lay(self, mesh: Mesh, device: torch.device) -> Laid:
        agree(mesh.comm, {"the batch of step 1": _digest(self.first)})
        model = self.program.module.to(device).train()
        example = _on(self.first, device)
        pins = dict(pin.rpartition("=")[::2] for pin in self.module.pins)
        ranks = mesh.comm.size
        placed: PlacedModule | StagedCall

        def joint(module: nn.Module, mesh: Mesh, pins: Pins, call: ModuleCall) -> PlacedJoint | None:
            if self.module.choose is None:
                return None
            from tilemesh.parallel.choose.joint import choose_joint  # late: solvers

            if isinstance(cost := _cost(mesh, ranks, device), str):
                raise UsageError(f"module.choose is {self.module.choose} and nothing is known of this machine: {cost}")
            trace, most = trace_joint(module, call), cost.device.usable_bytes
            return choose_joint(trace, mesh.shape, cost, self.module.choose, most, pins, comm=mesh.comm)

        if mesh.pp.size == 1:
            example = dataclasses.replace(example, tensors=cut_rows(example.tensors, self.microbatches)[0])
            placed = place_call(model, mesh, pins, example, joint=joint(model, mesh, pins, example))
        else:
            if not isinstance(model, Chained):
                raise UsageError(
                    f"plan.pp is {mesh.pp.size} and {self.module.program} returns one module: return a list of "
                    "modules, each called with what the one before gives, the last with the rest of a batch besides"
                )
            placed = StagedCall(
                model, mesh, self.config.plan, by_place(pins, example.names, model), example.tensors,
                lambda module, mesh, pins, tensors: joint(module, mesh, pins, ModuleCall.of(tensors, {})),
            )  # fmt: skip
        self.placed = placed
        self.predict(_cost(mesh, ranks, device), mesh.comm)
        names = {id(value): name for name, value in (*model.named_parameters(), *model.named_buffers())}
        state = model.state_dict(keep_vars=True).items()  # with tied weights, without buffers that are not persistent
        self.state = {name: names[id(value)] for name, value in state if id(value) in names}
        return lay_placed(placed, self.config.plan, names.values(), self.microbatches)

    def written_by(self) -> dict[str, Any]:
        return {STATE: self.state}

    def predict(self, cost: MeshCost | str, comm: Communicator) -> None:
        """What its step is expected to take, before the first is made."""
        predicted: dict[str, Any] = {"missing": cost} if isinstance(cost, str) else {}
        if not isinstance(cost, str):
            figures = step_figures(self.placed, cost, self.microbatches)
            predicted = {"step_time_s": figures.seconds, "sent_bytes": figures.sent_bytes, "limit_s": figures.limit_s}
        if comm.rank == 0:
            write_prediction(self.folder, {**stamp(), **predicted})

    def source(self, laid: Laid, recorder: Recorder, seat: Seat | None) -> Source:
        return ModuleBatches(self, next(laid.module.parameters()).device, recorder)

    def objective(self, laid: Laid, source: Source) -> Objective:
        assert isinstance(source, ModuleBatches)

        def loss(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            if self.placed.training and not source.recorder.at_pass.microbatch:
                # Dropout's numbers follow from the step's, so that a run can go on.
                for number, generator in self.placed.generators.items():
                    generator.manual_seed(fold_seed(self.config.train.seed, source.recorder.step, number))
            args, kwargs = self.first.arguments(tensors)
            return self._loss(self.placed(*args, **kwargs)), torch.ones(())

        def held_out(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                return loss(*tensors)

        return Objective(loss, held_out)

    def _loss(self, returned: Any) -> Tensor:
        named = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
        loss = returned if named is None else named
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            words = f"a tensor of {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise UsageError(
                f"the module of {self.module.program} returns {words}: expected its loss, one number, or what has it "
                "as .loss; wrap it in a module that computes the loss"
            )
        return loss.reshape(())

    def words(self) -> str:
        weights = self._weights
        own = sum(parameter.numel() for parameter in self.placed.parameters())
        name, steps = type(self.program.module).__name__, self.config.train.steps
        return f"{self.module.program}: {name}, {weights:,} parameters, {own:,} of them here; {steps} steps"

    @property
    def _weights(self) -> int:
        return sum(parameter.numel() for parameter in self.program.module.parameters())

    def notes(self) -> str:
        return ""

    def sample(self, loop: Any) -> None:
        return None

    def figures(self) -> dict[str, Any]:
        plan = self.config.plan
        return {
            "module": {**to_dict(self.module), "placements": self.placed.placements()},
            "model": type(self.program.module).__name__,
            "plan": {"dp": plan.dp, "tp": plan.tp} | ({"pp": plan.pp} if plan.pp > 1 else {}),
            "parameters": self._weights,
        }


class ModuleBatches(Source):
    """What the user's function gives, whole and the same on every rank: the placed module takes its parts."""

    names: Sequence[str]
    counts = "examples"

    def __init__(self, lessons: ModuleLessons, device: torch.device, recorder: Recorder) -> None:
        self.lessons, self.device, self.recorder = lessons, device, recorder
        self.names = lessons.first.names

    def fetch(self, number: int) -> list[Microbatch]:
        call = self.lessons.first if number == 1 else self.lessons.call(number)
        cut = cut_rows(self._tensors(call, f"step {number}"), self.lessons.microbatches)
        return [Microbatch(tensors, 0) for tensors in cut]

    def held_out(self) -> Iterator[Microbatch]:
        for example in self.lessons.program.held_out:
            yield Microbatch(self._tensors(ModuleCall.example(example), "held-out data"), 0)

    def _tensors(self, call: ModuleCall, of: str) -> tuple[Tensor, ...]:
        """Of a call that takes what step 1 does, in the same order."""
        first = self.lessons.first
        if call.key[1:] != first.key[1:]:
            raise UsageError(
                f"{of} is called with {', '.join(call.names)} and step 1 with {', '.join(first.names)}, or with other "
                "values beside its tensors: give all alike"
            )
        return _on(call, self.device).tensors

    def tokens(self, number: int) -> int:
        return next(iter(self.lessons.first.tensors[0].shape), 1)

    def fingerprint(self) -> str:
        return self.lessons.fingerprint()

    def go_on(self, steps: int, position: int) -> None:
        return


def _cost(mesh: Mesh, ranks: int, device: torch.device) -> MeshCost | str:
    """Of this machine with so many ranks, as it was measured; or why there is none."""
    try:
        here = local_machine(f"{ranks}xlocal" + ("" if device.type == "cuda" else "-cpu"), this_machine())
    except UsageError as error:
        return str(error)
    return MeshCost(
        tuple((axis, size) for axis, size in mesh.shape if size > 1 and axis != "pp"), here.cluster, here.rates
    )


def _on(call: ModuleCall, device: torch.device) -> ModuleCall:
    return dataclasses.replace(call, tensors=tuple(tensor.to(device) for tensor in call.tensors))


def _digest(call: ModuleCall) -> str:
    digest = hashlib.sha256(repr((call.names, [tuple(tensor.shape) for tensor in call.tensors])).encode())
    for tensor in call.tensors:
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
