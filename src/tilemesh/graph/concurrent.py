"""Running a program's independent branches at once, where a plan predicts that this is faster.

On a GPU the operators of each stream are recorded on a CUDA stream of their own, all of them as one CUDA graph, so
that the host does nothing while it runs. On a CPU each stream is a thread: torch's operators let others run meanwhile.
Where one after the other is predicted to be as fast, the program runs that way.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from tilemesh.core.hardware import Device
from tilemesh.graph.by_torch import evaluate_torch
from tilemesh.graph.emit import program
from tilemesh.graph.ir import Graph, Node
from tilemesh.graph.streams import StreamPlan, maker, plan_streams
from tilemesh.kernels.launch.tensors import read_device

Tensor = torch.Tensor
COPIED = ("constant", "iota")  # from the host, which cannot be recorded


class ConcurrentProgram:
    """A graph as a function. `plan` says what was predicted; `at_once` whether branches run side by side.

    at_once: None, as predicted. On a GPU, results of a recorded program are overwritten by its next run.
    """

    def __init__(
        self, graph: Graph, hardware: Device, device: torch.device | str = "cpu", streams: int = 4,
        at_once: bool | None = None,
    ) -> None:  # fmt: skip
        self.graph, self.device = graph, read_device(device)
        self.plan: StreamPlan = plan_streams(graph, hardware, streams)
        self.at_once = self.plan.pays if at_once is None else at_once
        self.serial = None if self.at_once else program(graph, self.device)
        self.order = [node for node in graph.nodes() if node not in graph.inputs]
        self.recorded: Any = None
        self.given: list[Tensor] = []
        self.constants: dict[Node, Any] = {}
        self.results: tuple[Any, ...] = ()
        self.pool = ThreadPoolExecutor(streams) if self.at_once and self.device.type == "cpu" else None

    def __call__(self, *tensors: Tensor) -> tuple[Any, ...]:
        if self.serial is not None:
            return self.serial(*tensors)
        with torch.no_grad():
            return self._by_threads(tensors) if self.device.type == "cpu" else self._replayed(tensors)

    def _stream(self, node: Node) -> int:
        """Where a node runs; what is no work for a device runs with what it names."""
        if node in self.plan.streams:
            return self.plan.streams[node]
        return self.plan.streams.get(maker(node), 0)

    def _by_threads(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        values: dict[Node, Any] = dict(zip(self.graph.inputs, tensors, strict=True))
        chains: dict[int, list[Node]] = {}
        for node in self.order:
            chains.setdefault(self._stream(node), []).append(node)
        done: dict[Node, Future[Any]] = {node: Future() for node in self.order}

        def run(chain: list[Node]) -> None:
            for node in chain:
                try:
                    inputs = [values[each] if each in values else done[each].result() for each in node.inputs]
                    done[node].set_result(evaluate_torch(node, inputs, {}, self.device))
                except BaseException as error:
                    for rest in chain:
                        if not done[rest].done():
                            done[rest].set_exception(error)
                    return

        assert self.pool is not None
        for chain in chains.values():
            self.pool.submit(run, chain)
        return tuple(values[node] if node in values else done[node].result() for node in self.graph.outputs)

    def _replayed(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        if self.recorded is None:
            self._record(tensors)
        for own, tensor in zip(self.given, tensors, strict=True):
            if own.data_ptr() != tensor.data_ptr():
                own.copy_(tensor)
        self.recorded.replay()
        return self.results

    def _record(self, tensors: tuple[Tensor, ...]) -> None:
        """The first call runs once on one stream (libraries set themselves up), then everything is recorded."""
        program(self.graph, self.device)(*tensors)
        torch.cuda.synchronize(self.device)
        self.given = [tensor.clone() for tensor in tensors]
        self.constants = {node: evaluate_torch(node, [], {}, self.device) for node in self.order if node.op in COPIED}
        self.recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.recorded):
            self.results = self._on_streams(torch.cuda.current_stream(self.device))

    def _on_streams(self, main: Any) -> tuple[Any, ...]:
        values: dict[Node, Any] = {**dict(zip(self.graph.inputs, self.given, strict=True)), **self.constants}
        stream: Any = torch.cuda.Stream
        others = {place: stream(self.device) for place in set(self.plan.streams.values()) - {0}}
        lanes = {0: main, **others}
        for lane in others.values():
            lane.wait_stream(main)
        made: dict[Node, Any] = {}  # when each value is there
        held = []  # memory of a value is not given to another stream while the recording goes on
        for node in self.order:
            if node in self.constants:
                continue
            lane = lanes[self._stream(node)]
            with torch.cuda.stream(lane):
                for value in node.inputs:
                    if value in made and made[value][0] is not lane:
                        lane.wait_event(made[value][1])
                values[node] = evaluate_torch(node, [values[value] for value in node.inputs], {}, self.device)
                held.append(values[node])
                event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(lane)
                made[node] = (lane, event)
        for lane in others.values():
            main.wait_stream(lane)
        return tuple(values[node] for node in self.graph.outputs)
