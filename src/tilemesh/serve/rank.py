"""What a rank of a served model does: its part of the model laid on the mesh, and a step for each message that comes.

All ranks of tp get the same message and compute the same step; rank 0 answers with the logits.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from tilemesh.comm import connect
from tilemesh.core.plan import ParallelPlan
from tilemesh.kernels.launch.tensors import read_device
from tilemesh.model.kinds import unpacked
from tilemesh.model.linear import CodedLinear
from tilemesh.model.lora import give_slots
from tilemesh.parallel.apply import lay
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.parallel.shard import take
from tilemesh.serve.load import load_served, read_dtype
from tilemesh.serve.runner import Runner
from tilemesh.serve.scheduler import ServeLimits
from tilemesh.serve.wire import pack_tensor, receive, send, unpack_step, unpack_tensor


def serve_steps(address: str, source: str, limits: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Until the engine goes. `address`: the engine's socket; `limits`: its `ServeLimits`."""
    comm = connect()
    mesh = Mesh(comm, tp=comm.size)
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
        laid = lay(served.model, mesh, ParallelPlan(tp=comm.size), gradients="naive")
        served.model.eval().requires_grad_(False)
        runner = LaidRunner(laid, ServeLimits(**limits), place, options["invariant"])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(address)
        send(connection, {"rank": comm.rank})
        while True:
            try:
                header, body = receive(connection)
            except (EOFError, ConnectionError):
                return  # the engine has closed
            if "order" in header:
                with torch.inference_mode(header["order"] == "embed"):
                    vector = obey(runner, header, _sent(connection))
                send(connection, {"rank": comm.rank, "vector": vector})
                continue
            plan, spans = unpack_step(header, body)
            with torch.inference_mode():
                runner.copy_pages(plan)
            computed = runner.compute(spans)
            if comm.rank == 0:
                rows = [computed[span.entry.request.name].logits_NV for span in spans if span.wanted]
                like = next(served.model.parameters())
                joined = torch.cat(rows) if rows else like.new_empty(0, served.model.config.vocabulary)
                send(connection, *pack_tensor(joined))


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

    def __init__(self, laid: Laid, limits: ServeLimits, device: torch.device, invariant: bool) -> None:
        super().__init__(laid.module, limits, device, invariant)  # type: ignore[arg-type]
        self._laid = laid

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        shard = self._laid.shards[name]
        if tensor.shape != shard.whole:  # codes that share bytes; here each has an element, so that they can be cut
            tensor = unpacked(self.model.get_submodule(name.rpartition(".")[0]), tensor, shard.whole[1])
        part: Tensor = take(shard, tensor)
        return part

    def _project(self, x_TD: Tensor) -> Tensor:
        return self._laid.seams.join_features(super()._project(x_TD), self.model.config.vocabulary)
