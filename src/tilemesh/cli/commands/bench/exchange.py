"""Time the bucketed gradient exchange beside a naive one. And how much of the exchange backward hides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tilemesh.cli.output import Output
from tilemesh.core.advice import NextCommand
from tilemesh.core.errors import UsageError, unknown
from tilemesh.core.options import ROWS, OutFile, option
from tilemesh.core.ranges import Range

MOST_TOKENS = 1 << 20  # per rank and step: a benchmark that would take hours says so at once
_Some = Annotated[int, Range(1, (1 << 40) - 1)]


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    ranks: Annotated[int, Range(2)] = option(2, "Replicas; each takes its own rows.")
    transport: str = option("auto", "mpi, torch or auto.")
    model: str = option("small", "small (3.7M parameters), medium (29M), or a preset.")
    rows: _Some = option(4, "Sequences of one replica.")
    tokens: int = option(128, "Tokens of a sequence.")
    bucket_bytes: _Some = option(8 << 20, "About how much travels together.")
    algorithm: str = option("auto", "Of the global-sum: auto, native, ring, …")
    repeats: _Some = option(20, "Readings of each.")
    json: OutFile | None = option(None, ROWS, "FILE")


def exchange(options: ExchangeOptions) -> Output:
    from tilemesh.bench.train.exchange import config_of, exchange_rows
    from tilemesh.comm.schedules.book import algorithms
    from tilemesh.launch.job import check_ranks
    from tilemesh.launch.start import choose_transport

    # Refuse what cannot be before any rank is started.
    config, rows, tokens = config_of(options.model), options.rows, options.tokens
    check_ranks(options.ranks)
    choose_transport(options.transport)
    Range(1, config.context).check("--tokens", tokens, whole=True)
    if rows * tokens > MOST_TOKENS:
        raise UsageError(f"--rows {rows} --tokens {tokens}: expected at most {MOST_TOKENS:,} tokens per rank")
    known = ("auto", "native", *algorithms("all_reduce"))
    if options.algorithm not in known:
        raise unknown("algorithm", options.algorithm, known)
    measured = exchange_rows(**{name: value for name, value in vars(options).items() if name != "json"})
    return Output([measured], measured, next=NextCommand("bench collective all_reduce --fit"))
