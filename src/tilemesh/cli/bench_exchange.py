"""`tilemesh bench exchange`: a training step with gradients exchanged during backward, after it, and naively."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from tilemesh.cli.targets import check_targets
from tilemesh.core.errors import UsageError, unknown

MOST_TOKENS = 1 << 20  # per rank and step: a benchmark that would take hours says so at once


def bench_exchange(
    ranks: Annotated[int, typer.Option(help="Replicas; each takes its own rows.")] = 2,
    transport: Annotated[str, typer.Option(help="mpi, torch or auto.")] = "auto",
    model: Annotated[str, typer.Option(help="small (3.7M parameters), medium (29M), or a preset.")] = "small",
    rows: Annotated[int, typer.Option(help="Sequences of one replica.")] = 4,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 128,
    bucket_bytes: Annotated[int, typer.Option(help="About how much travels together.")] = 8 << 20,
    algorithm: Annotated[str, typer.Option(help="Of the global-sum: auto, native, ring, …")] = "auto",
    repeats: Annotated[int, typer.Option(help="Readings of each.")] = 20,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Rows, one object a line.")] = None,
) -> None:
    """Time a step with the bucketed exchange against the naive one, and how much of the exchange backward hides."""
    from tilemesh.launch import call
    from tilemesh.measure.row import write_rows
    from tilemesh.measure.table import print_rows

    given: dict[str, Any] = {
        "model": model, "rows": rows, "tokens": tokens, "bucket_bytes": bucket_bytes, "algorithm": algorithm,
        "repeats": repeats,
    }  # fmt: skip
    _check(ranks, transport, given)
    check_targets(json=json_file)
    found = call(
        "tilemesh.cli.bench_exchange:on_a_rank", ranks, transport=transport,
        sink=lambda rank, stream, line: print(f"[{rank}] {line.decode(errors='replace')}", file=sys.stderr), **given,
    )  # fmt: skip
    made = rows_of(found[0], ranks)
    print_rows(made)
    if json_file is not None:
        write_rows(made, json_file)


def _check(ranks: int, transport: str, given: dict[str, Any]) -> None:
    """Refuse what cannot be before any rank is started."""
    from tilemesh.comm.schedules.book import algorithms
    from tilemesh.launch.job import check_ranks
    from tilemesh.launch.start import choose_transport

    config = config_of(given["model"])
    if ranks < 2:
        raise UsageError(f"--ranks {ranks}: an exchange needs at least 2")
    check_ranks(ranks)
    choose_transport(transport)
    for name in ("rows", "bucket_bytes", "repeats"):
        if not 1 <= given[name] < 1 << 40:
            raise UsageError(f"--{name.replace('_', '-')} {given[name]}: expected at least 1, and a number that fits")
    if not 1 <= given["tokens"] <= config.context:
        raise UsageError(f"--tokens {given['tokens']}: expected 1 to {config.context}, the model's context")
    if given["rows"] * given["tokens"] > MOST_TOKENS:
        raise UsageError(
            f"--rows {given['rows']} --tokens {given['tokens']}: expected at most {MOST_TOKENS:,} tokens per rank"
        )
    known = ("auto", "native", *algorithms("all_reduce"))
    if given["algorithm"] not in known:
        raise unknown("algorithm", given["algorithm"], known)


def config_of(name: str) -> Any:
    from tilemesh.model.config import ModelConfig, preset

    if name == "small":
        return ModelConfig(layers=4, width=256, heads=8, vocabulary=2048, context=256)
    if name == "medium":
        return ModelConfig(layers=8, width=512, heads=8, vocabulary=8192, context=256)
    return preset(name)


def rows_of(said: dict[str, Any], ranks: int) -> list[Any]:
    """The step's row, its limit the step without any exchange; and how much of the exchange is hidden."""
    from tilemesh.measure.machine import stamp
    from tilemesh.measure.ranks import ranks_case
    from tilemesh.measure.row import Row
    from tilemesh.measure.sample import Sample
    from tilemesh.parallel.overlap import hidden

    samples = {name: Sample(**sample) for name, sample in said["samples"].items()}
    case = {**ranks_case(ranks), **said["case"]}
    unknown_before = {
        "predicted": "the planner's figures are of GPUs; this machine's compute was not calibrated with it"
    }
    step = Row(
        name="step with gradient exchange", case=case, unit="s", predicted=None, measured=samples["bucketed"],
        limit=samples["compute"].median, peers={"naive": samples["naive"], "after backward": samples["after"]},
        missing=unknown_before, **stamp(),
    )  # fmt: skip
    fraction = hidden(samples)
    missing = {**unknown_before, "peers": "a ratio of our own times"}
    if fraction is None:
        missing["measured"] = "the exchange is too small to be told from noise"
    share = Row(
        name="exchange hidden behind backward", case=case, unit="fraction", predicted=None,
        measured=None if fraction is None else Sample(fraction, fraction, fraction, 1), limit=1.0, missing=missing,
        **stamp(),
    )  # fmt: skip
    return [step, share]


def on_a_rank(model: str, **given: Any) -> dict[str, Any]:
    """What a rank measured: every rank has the same, of the slowest one at each turn."""
    import dataclasses

    from tilemesh.comm import connect
    from tilemesh.model.work.weights import count_parameters
    from tilemesh.parallel.overlap import measure

    config = config_of(model)
    comm = connect()
    samples = measure(comm, config, **given)
    case = {
        "transport": comm.backend, "parameters": count_parameters(config).total, "rows": given["rows"],
        "tokens": given["tokens"], "bucket_bytes": given["bucket_bytes"], "algorithm": given["algorithm"],
    }  # fmt: skip
    return {"case": case, "samples": {name: dataclasses.asdict(sample) for name, sample in samples.items()}}
