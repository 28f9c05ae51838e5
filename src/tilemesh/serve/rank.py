"""What a rank of a served model does: its part of the model laid on the mesh, and a step for each message that comes.

All ranks of tp get the same message and compute the same step; the first answers with the logits. Where replicas share
experts, their ranks are of one mesh, and make a pass when any of them has a step (`joint.py`). The engine is a process
of its own (`serve_steps`), or on the first of these ranks, which have something else to do in between (`LeadingRunner`,
`follow_steps`).
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilemesh.comm import connect
from tilemesh.core.plan import ParallelPlan
from tilemesh.kernels.launch.tensors import read_device
from tilemesh.model.experts import ExpertChoice, Experts
from tilemesh.model.kinds import unpacked
from tilemesh.model.linear import CodedLinear
from tilemesh.model.lora import give_slots
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.agree import tell_bytes
from tilemesh.parallel.apply import lay
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import take
from tilemesh.serve.batch import token_span
from tilemesh.serve.load import load_served, read_dtype
from tilemesh.serve.request import ServeRequest
from tilemesh.serve.runner import RequestLogits, Runner
from tilemesh.serve.scheduler import ServeLimits, StepPlan
from tilemesh.serve.wire import (
    message_bytes,
    pack_step,
    pack_tensor,
    read_message,
    receive,
    send,
    unpack_step,
    unpack_tensor,
)


def serve_steps(address: str, source: str, limits: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Until the engine goes. `address`: the engine's socket; `limits`: its `ServeLimits`."""
    comm = connect()
    plan = ParallelPlan(dp=comm.size // options["tp"], tp=options["tp"], ep=options["ep"])
    mesh = Mesh(comm, dp=plan.dp, tp=plan.tp)
    device = f"cuda:{comm.rank}" if options["device"] == "cuda" else options["device"]
    place = read_device(device)
    served = load_served(source, dtype=read_dtype(options["dtype"]), device=place, step=options["step"])
    if options["adapters"]:
        give_slots(served.model, options["adapters"], options["adapter_rank"])
    runner = Runner(served.model, ServeLimits(**limits), place, options["invariant"]) if comm.size == 1 else None
    if runner is None:
        # `lay` prepares a model to be trained; here nothing is. Codes of compressed matrices never are.
        for part in served.model.modules():
            if not isinstance(part, CodedLinear):
                for parameter in part.parameters(recurse=False):
                    parameter.requires_grad_(True)
        laid = lay(served.model, mesh, plan, gradients="naive")
        served.model.eval().requires_grad_(False)
        runner = CuttingRunner(laid, ServeLimits(**limits), place, options["invariant"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        send(connection, {"rank": comm.rank})
        while True:
            try:
                header, body = receive(connection)
            except (EOFError, ConnectionError):
                return  # the engine has closed
            if header.get("order") == "stand by":
                stand_by(served.model)
                continue
            if "order" in header:
                with torch.inference_mode(header["order"] == "embed"):
                    vector = obey(runner, header, _sent(connection))
                send(connection, {"rank": comm.rank, "vector": vector})
                continue
            rows = take_step(runner, header, body)
            if mesh.tp.index == 0:
                like = next(served.model.parameters())
                joined = torch.cat(rows) if rows else like.new_empty(0, served.model.config.vocabulary)
                send(connection, *pack_tensor(joined))


@torch.inference_mode()
def stand_by(model: Transformer) -> None:
    """While replicas that share experts with this one make a pass: what they exchange, with no tokens of its own."""
    like = next(model.parameters())
    for block in model.modules():
        if isinstance(block, Experts) and block.exchange is not None:
            picks = torch.zeros(0, block.config.experts_per_token, dtype=torch.int64, device=like.device)
            choice = ExpertChoice(picks, picks.new_zeros(block.config.experts))
            block.exchange(like.new_empty(0, block.config.width), choice)(block.compute)


def take_step(runner: Runner, header: Mapping[str, Any], body: bytearray) -> list[Tensor]:
    """Compute what a message says; returns the logits that are wanted, span by span."""
    plan, spans = unpack_step(header, body)
    with torch.inference_mode():
        runner.copy_pages(plan)
    computed = runner.compute(spans)
    return [computed[span.entry.request.name].logits_NV for span in spans if span.wanted]


def obey(runner: Runner, header: Mapping[str, Any], tensors: Iterator[tuple[str, Tensor]]) -> list[float]:
    """What is no step. Whatever fails here ends this rank, and with it the group."""
    vector: list[float] = []
    if header["order"] == "embed":
        vector = runner.embed(header["tokens"], header["pooling"], header["adapter"])
    elif header["order"] == "weights":
        runner.write_weights(tensors)
    elif header["order"] == "sleep":
        runner.sleep(header["level"])
    else:
        runner.wake()
    for _ in tensors:
        pass
    return vector


def _sent(connection: socket.socket) -> Iterator[tuple[str, Tensor]]:
    """Tensors, up to a message without a name."""
    while (message := receive(connection))[0]["name"] is not None:
        yield message[0]["name"], unpack_tensor(*message)


class LaidRunner(Runner):
    """A runner whose model is one rank's part: logits are joined over the ranks."""

    def __init__(self, laid: Laid, limits: ServeLimits, device: torch.device, invariant: bool, **options: Any) -> None:
        super().__init__(laid.model, limits, device, invariant, **options)
        self.laid = laid

    def _project(self, x_TD: Tensor) -> Tensor:
        return self.laid.seams.join_features(super()._project(x_TD), self.model.config.vocabulary)


class CuttingRunner(LaidRunner):
    """Is given whole tensors as weights, and takes its part."""

    def write_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        super().write_weights(pair for pair in tensors if pair[0] not in self.laid.elsewhere)

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        shard = self.laid.shards[name]
        if tensor.shape != shard.whole:  # codes that share bytes; here each has an element, so that they can be cut
            tensor = unpacked(self.model.get_submodule(name.rpartition(".")[0]), tensor, shard.whole[1])
        part: Tensor = take(shard, tensor)
        return part


class LeadingRunner(LaidRunner):
    """An engine's on the first rank of tp: the others, which `follow_steps`, do what it does. Weights alone every rank
    writes by itself, those of its part."""

    decode_rows = None  # the others are told plans

    def __init__(
        self, laid: Laid, model: Transformer, limits: ServeLimits, device: torch.device, invariant: bool,
        implementation: str, graphs: object, say: Callable[[str], None], packed: bool | None,
    ) -> None:  # fmt: skip
        """As a `Runner`, after what is laid. Steps meet the other ranks, so none is captured."""
        super().__init__(laid, limits, device, invariant, implementation=implementation, say=say, packed=packed)
        self._tell(dataclasses.asdict(limits))

    def run(
        self, plan: StepPlan, wants_all: Callable[[ServeRequest], bool] = lambda request: False
    ) -> Mapping[str, RequestLogits]:
        spans = [token_span(entry, wants_all(entry.request)) for entry in plan.entries]
        self._tell(*pack_step(plan, spans))
        with torch.inference_mode():
            self.copy_pages(plan)
        return self.compute(spans)

    def embed(self, tokens: Sequence[int], pooling: str, adapter: int = 0) -> list[float]:
        self._tell({"order": "embed", "tokens": list(tokens), "pooling": pooling, "adapter": adapter})
        return super().embed(tokens, pooling, adapter)

    def sleep(self, level: int) -> None:
        self._tell({"order": "sleep", "level": level})
        super().sleep(level)

    def wake(self) -> None:
        self._tell({"order": "wake"})
        super().wake()

    def release(self) -> None:
        """Let the others go back to what else they do; only while the engine takes no step."""
        self._tell({})

    def _tell(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        tell_bytes(self.laid.mesh.tp.comm, message_bytes(header, body))


def following_runner(laid: Laid, device: torch.device, invariant: bool, packed: bool | None = None) -> LaidRunner:
    """Beside a `LeadingRunner` that is being made (a collective call along tp)."""
    limits, _ = _heard(laid)
    return LaidRunner(laid, ServeLimits(**limits), device, invariant, packed=packed)


def follow_steps(runner: LaidRunner) -> None:
    """What the first rank of tp does, until it releases this one."""
    while (message := _heard(runner.laid))[0]:
        header, body = message
        if "order" in header:
            with torch.inference_mode(header["order"] == "embed"):
                obey(runner, header, iter(()))
        else:
            take_step(runner, header, body)


def _heard(laid: Laid) -> tuple[dict[str, Any], bytearray]:
    return read_message(tell_bytes(laid.mesh.tp.comm, b""))
