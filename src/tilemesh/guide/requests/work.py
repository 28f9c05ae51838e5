"""What chapter 8 runs: a small model in the real engine, static batches, and the real scheduler on a clock."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tilemesh.bench.serve.models import SHAPES, random_served
from tilemesh.guide.clock import repeated
from tilemesh.measure.sample import Sample
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.history import RequestRecord, ServeHistory, StepRecord
from tilemesh.serve.load import ServedModel
from tilemesh.serve.scheduler import ServeLimits, StepPlan
from tilemesh.serve.simulate import NS, SimRequest, fresh_requests, poisson_arrivals, simulate

MODEL = SHAPES["llama-27m"]


class Load(NamedTuple):
    """A request of the simulations: when it comes, and how many tokens it has and wants."""

    at_s: float
    prompt: int
    output: int


def random_model() -> ServedModel:
    """27 million random weights: the tokens mean nothing, the times are those of a trained model."""
    return random_served("llama-27m", MODEL, torch.float32)


def weight_bytes(served: ServedModel) -> int:
    """What every decode step reads: all weights but the embedding, of which a token reads one row."""
    return sum(
        weight.numel() * weight.element_size()
        for name, weight in served.model.named_parameters()
        if "embedding" not in name
    )


def product_seconds(rows: int) -> float:
    """A matrix of 128 MiB times so many vectors: one token of each of so many requests."""
    matrix, vectors = torch.ones(4096, 8192), torch.ones(rows, 8192)
    return statistics.median(repeated(lambda: torch.nn.functional.linear(vectors, matrix)))


PRODUCT_BYTES = 4096 * 8192 * 4
"""Of the matrix in `product_seconds`."""


def serve(served: ServedModel, batch: int, prompt: int, output: int) -> ServeHistory:
    """So many requests at once through the engine; what it did in each step, and when each token came."""
    history = ServeHistory()
    sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
    # No two prompts share their beginning: nothing is found in the prefix cache.
    prompts = [[(31 * number + 7 * place) % MODEL.vocabulary for place in range(prompt)] for number in range(batch)]
    with Engine(served, history=history, pages=batch * (prompt + output) // 16 + batch + 1) as engine:
        list(engine.generate(prompts, sampling))
    return history


def decode_seconds(steps: Sequence[StepRecord]) -> Sample:
    """Of those steps in which every request got one token."""
    return Sample.of([step.seconds for step in steps if step.decode_tokens and not step.prefill_tokens])


# The same requests, batched in two ways -------------------------------------------------------------------------------


def static_batches(loads: Sequence[Load], size: int, step_s: Callable[[int], float]) -> list[RequestRecord]:
    """Wait for a batch, compute it until its longest answer is done, then take the next: as scripts do."""
    records = [_record(number, load) for number, load in enumerate(loads)]
    now = 0.0
    for first in range(0, len(loads), size):
        batch = list(zip(loads, records, strict=True))[first : first + size]
        now = max(now, *(load.at_s for load, _ in batch))
        for step in range(max(load.output for load, _ in batch)):
            # Rows that have ended are computed on: a batch is one array. Prompts go into its first step.
            now += step_s(len(batch) + (sum(load.prompt - 1 for load, _ in batch) if step == 0 else 0))
            for load, record in batch:
                if step < load.output:
                    record.token_ns.append(round(now * NS))
    return records


def continuous(loads: Sequence[Load], limits: ServeLimits, step_s: Callable[[int], float]) -> ServeHistory:
    """tilemesh's own scheduler on the same clock: who ends leaves at once, who comes joins the next step."""

    def duration(plan: StepPlan) -> int:
        return round(step_s(plan.tokens) * NS)

    return simulate(limits, _requests(loads), duration)


def _requests(loads: Sequence[Load]) -> list[SimRequest]:
    arrivals, prompts, outputs = zip(*loads, strict=True)
    return fresh_requests([round(at * NS) for at in arrivals], prompts, outputs)


def _record(number: int, load: Load) -> RequestRecord:
    at_ns = round(load.at_s * NS)
    return RequestRecord(f"{number + 1}/0", at_ns, at_ns, number, tuple(range(load.prompt)), load.output)


def poisson_loads(rate_per_s: float, count: int, prompt: int, output: int) -> list[Load]:
    """Requests that come independently of each other, at this rate on average."""
    return [Load(at_ns / NS, prompt, output) for at_ns in poisson_arrivals(rate_per_s, count)]


def mean_in_system(records: Sequence[RequestRecord]) -> float:
    """How many requests were waiting or running on average, counted at a thousand moments."""
    begin = min(record.asked_ns for record in records)
    end = max(record.token_ns[-1] for record in records)
    moments = [begin + (end - begin) * (2 * place + 1) // 2000 for place in range(1000)]
    return statistics.mean(sum(record.asked_ns <= moment < record.token_ns[-1] for record in records)
                           for moment in moments)  # fmt: skip
