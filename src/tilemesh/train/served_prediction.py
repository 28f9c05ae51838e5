"""What a step by parameter servers takes, before its first rank starts: the simulator with this machine's figures.

The planner says what a worker computes and what an update takes; the link between ranks what a message takes. The rest
is `methods/simulate.py`: servers that take one message at a time, and workers that wait as their bound says.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tilemesh.core.hardware import Cluster
from tilemesh.methods.rules import bound_of
from tilemesh.methods.simulate import NAP_S, ServerTimes, simulate_server
from tilemesh.model.adapter import adapter_parameters
from tilemesh.model.work.weights import count_parameters
from tilemesh.plan.prediction import Prediction
from tilemesh.train.config import TrainConfig

_CLOCKS = 40
_NAPS = 5
"""In which a message of a step is noticed half a nap late: a worker's push and pull, a server's two headers and a
gradient."""


def served_figures(config: TrainConfig, predicted: Prediction, cluster: Cluster) -> dict[str, Any]:
    """What differs from the prediction for data parallelism, by the same names. `exchanges` count one worker's bytes of
    weights and of gradients in a step, to all servers together."""
    method, workers = config.method, config.plan.dp
    trained = (
        adapter_parameters(config.model, config.lora) if config.lora.rank else count_parameters(config.model).total
    )
    nbytes = trained * (8 if config.plan.precision == "fp64" else 4)
    inside_s = predicted.times.tp_s + predicted.times.pp_s
    computing_s = predicted.times.total_s - predicted.times.dp_s - predicted.times.optimizer_s
    link = cluster.node.intra
    copied_s = 2 * nbytes / cluster.device.memory_bytes_per_s
    on_the_way_s = 2 * nbytes / method.servers / link.bytes_per_s + 4 * link.latency_s + _NAPS * NAP_S / 2
    times = ServerTimes(copied_s, copied_s + predicted.times.optimizer_s, on_the_way_s / 4, method.servers)
    bound = bound_of(method.consistency, method.staleness)
    run = simulate_server(workers, _CLOCKS, lambda worker, clock: computing_s, bound, times, method.batch)
    step_s = workers / run.throughput
    slower = predicted.step_time_s / step_s
    outside_s = step_s - computing_s
    return {
        "step_time_s": step_s,
        "tokens_per_s": predicted.tokens / step_s,
        "mfu": predicted.mfu * slower,
        "hfu": predicted.hfu * slower,
        "exchange_share": (inside_s + outside_s) / step_s,
        "exposed_communication_s": inside_s + outside_s,
        "times": {
            **dataclasses.asdict(predicted.times),
            "dp_s": outside_s,
            "optimizer_s": 0.0,
        },
        "traffic": {**_inside(predicted.traffic), "server": nbytes},
        "exchanges": {**_inside(predicted.exchanges), "server": {"push": nbytes, "pull": nbytes}},
    }


def _inside(moved: dict[str, Any]) -> dict[str, Any]:
    """What the ranks of a worker exchange among themselves."""
    return {axis: nbytes for axis, nbytes in moved.items() if axis != "dp"}
