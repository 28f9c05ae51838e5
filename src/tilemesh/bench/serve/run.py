"""`tilemesh bench serve`: what is measured, in which order, and the rows it gives.

Everything is predicted before it is measured. Offline: all requests at once, ours and each peer in turn, several times.
Online: one rate after the other, requests at random times. Decode steps: so many sequences of one length.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tilemesh.bench.harness import Estimate, KeptRows, exactly, make_row
from tilemesh.bench.profile import kernel_times, write_kernel_times
from tilemesh.bench.serve.load import Lengths, LoadRequest, make_load, other_prompts
from tilemesh.bench.serve.ours import fit_engine, fitting_batches, predict_load, run_load
from tilemesh.bench.serve.peers import PeerProcess, write_folder
from tilemesh.core.energy import EnergyMeter
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.hardware import Cluster, device_for, make_node
from tilemesh.measure.gpu import energy_meter
from tilemesh.measure.machine import this_machine, usable_gpus
from tilemesh.measure.row import CaseValue, Row
from tilemesh.measure.sample import Sample
from tilemesh.model.config import ModelConfig
from tilemesh.model.work.decoding import SequencePart
from tilemesh.plan.local import local_machine
from tilemesh.plan.serving_clock import StepClock
from tilemesh.serve.engine import Engine
from tilemesh.serve.figures import LoadFigures, ServeGoal, load_figures
from tilemesh.serve.history import RequestRecord, ServeHistory
from tilemesh.serve.replicas import Replicas

Clock = Callable[[Sequence[SequencePart]], float]
_WARM_TOKENS = 16
_NOT_ADDED_UP = "not measured: the energy of several processes' GPUs is not added up"


@dataclass
class LoadPoint:
    """A load at one rate (None: all at once), as predicted and as it was."""

    rate: float | None
    predicted: LoadFigures
    measured: LoadFigures
    history: ServeHistory


@dataclass
class ServeFindings:
    """All that a benchmark found."""

    rows: KeptRows = field(default_factory=lambda: KeptRows(None))
    points: list[LoadPoint] = field(default_factory=list)
    fitted_error: float | None = None


def machine_clock(
    model: ModelConfig, dtype: str, device: str, tp: int = 1, replicas: int = 1, ep: int = 1
) -> tuple[StepClock | None, str]:
    """Step times from what this machine was measured to do, or from its GPU's datasheet; or why there are none."""
    ranks = tp * replicas
    try:
        if device == "cpu":
            local = local_machine(f"{ranks}xlocal-cpu", this_machine())
            return StepClock(model, local.cluster, dtype, tp, local.rates, ep), ""
        try:
            local = local_machine(f"{ranks}xlocal", this_machine())
            return StepClock(model, local.cluster, dtype, tp, local.rates, ep), ""
        except UsageError:
            gpus = usable_gpus()
            known = device_for(gpus[0]) if gpus else None
            if known is None:
                return None, f"no datasheet of {gpus[:1]} is known here and it was not measured: run tilemesh calibrate"
            return StepClock(model, Cluster((make_node(known, ranks),)), dtype, tp, ep=ep), ""
    except (UsageError, RunError) as error:
        return None, str(error)


@dataclass
class ServeBench:
    """One engine under measurement. `clock`: the machine's; `predict`: which step times loads are predicted with."""

    engine: Engine
    case: Mapping[str, CaseValue]
    clock: StepClock | None
    why_no_clock: str
    goal: ServeGoal
    say: Callable[[str], None]
    watched: bool = True
    """Whether steps are recorded, which takes the host's time."""
    predict: Clock | None = None
    findings: ServeFindings = field(default_factory=ServeFindings)
    seconds: float = math.inf
    """About how long all may take: on a slow machine less is measured, but never nothing."""
    replicas: Replicas | None = None
    """Where several share the requests, of which `engine` is the first: each is predicted to get as many, and requests
    are timed, not steps."""
    on_gpus: bool = False
    """Whether it is GPUs that the processes of `replicas` compute on."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()

    @property
    def device(self) -> torch.device:
        device = next(self.engine.served.model.parameters()).device
        return torch.device("cpu") if device.type == "meta" else device  # other processes have the weights

    @property
    def left_s(self) -> float:
        return self.seconds - (time.monotonic() - self._began)

    def fit(self, most: int) -> None:
        """Warm the engine up and fit step times to it, of at most so many sequences."""
        batches = fitting_batches(min(most, self.engine.limits.running))
        fitted = fit_engine(self.engine, batches, time.monotonic() + self.left_s / 3)
        self.predict, self.findings.fitted_error = fitted, fitted.error
        self.say(f"step times fitted to {fitted.steps} steps, median error {fitted.error:.1%}")

    # ---- decode steps ------------------------------------------------------------------------------------------

    def steps(
        self,
        batches: Sequence[int],
        length: int,
        plain: Engine | None = None,
        profile: Path | None = None,
        count: int = 40,
    ) -> None:
        """A decode step of so many sequences, each with about `length` tokens. `plain`: the same engine with every
        kernel launched by itself, beside it. `profile`: a folder for a step's kernels. `count`: tokens decoded."""
        page = self.engine.limits.page_tokens
        for batch in batches:
            parts = [SequencePart(1, length, 1)] * batch
            guess = None if self.clock is None else self.clock(parts)
            # A token after whole pages: all else of a prompt that was computed before is there.
            begin = max(0, round((length - count / 2) / page)) * page + 1
            load = make_load(batch, Lengths(begin, begin), Lengths(count, count), self.engine.config.vocabulary, seed=7)
            limit = None if self.clock is None else self.clock.limit(parts)
            measured = _step_times(self.engine, load, self.watched)
            peers = {} if plain is None else {"kernel by kernel": _step_times(plain, load, self.watched)}
            missing = {} if peers else {"peers": "see the offline rows"}
            case: dict[str, CaseValue] = {"batch": batch, "tokens": length}
            self._row("serve, decode step", case, "s", guess, limit, measured, peers, missing)
            if profile is not None:
                self._profile(load, profile / f"decode-{batch}.txt")

    def _profile(self, load: Sequence[LoadRequest], path: Path) -> None:
        """Of the same load, prompts included."""
        times = kernel_times(lambda: run_load(self.engine, load, watched=False), self.device)
        count = load[0].output
        each = [(seconds / count, calls / count, name) for seconds, calls, name in times]
        self.say(f"{len(load)} sequences: {write_kernel_times(each, path)}")

    # ---- offline -----------------------------------------------------------------------------------------------

    def offline(self, load: Sequence[LoadRequest], blocks: int, peers: Sequence[PeerProcess]) -> float:
        """Output tokens per second with all requests there from the beginning; everyone in turn. Returns how many
        requests per second ours served."""
        load = self._affordable(load)
        expected = self._expected(load)
        guess = None if expected is None else self._figures(expected)
        # Everyone warms up with prompts of these lengths and the beginnings of their answers. Every turn has prompts of
        # its own: what is timed is computing them, not finding them in a cache.
        vocabulary = self.engine.config.vocabulary
        short = [replace(request, output=min(request.output, _WARM_TOKENS)) for request in load]
        short = other_prompts(short, vocabulary, blocks)
        run_load(self.replicas or self.engine, short, self.watched)
        for peer in peers:
            peer.run(short)
        ours: list[float] = []
        joules: list[float] = []
        meter = EnergyMeter(_NOT_ADDED_UP) if self.replicas and self.on_gpus else energy_meter(self.device)
        theirs: dict[str, list[float]] = {peer.name: [] for peer in peers}
        tokens = sum(request.output for request in load)
        for block in range(blocks):
            begun_s = self.left_s
            load = other_prompts(load, vocabulary, block)
            meter.take()
            history = run_load(self.replicas or self.engine, load, self.watched)
            if (drawn := meter.take()) is not None:
                joules.append(drawn / tokens)
            ours.append(load_figures(history.requests.values()).tokens_per_s)
            for peer in peers:
                seconds = peer.run(load)
                if seconds is not None:
                    theirs[peer.name].append(tokens / seconds)
            self.say(f"offline, turn {block + 1} of {blocks}: ours {ours[-1]:,.0f} tokens/s" + "".join(
                f", {name} {rates[-1]:,.0f}" for name, rates in theirs.items() if rates
            ))  # fmt: skip
            if 2 * self.left_s < begun_s and block + 1 < blocks:
                self.say(f"no time for more than {block + 1} of {blocks} turns (--seconds)")
                break
        measured = load_figures(history.requests.values(), self.goal)
        if guess is not None:
            self.findings.points.append(LoadPoint(None, guess, measured, history))
        missing = {peer.name: peer.why or "it gave no answer" for peer in peers if not theirs[peer.name]}
        if not peers:
            missing["peers"] = "none was asked for"
        self._row(
            "serve, offline", {"requests": len(load)}, "tokens/s", None if guess is None else guess.tokens_per_s,
            self._limit_rate(history if history.steps else expected), Sample.of(ours),
            {name: Sample.of(rates) for name, rates in theirs.items() if rates}, missing,
        )  # fmt: skip
        self._energy_row({"requests": len(load)}, None if guess is None else guess.tokens_per_s, joules, meter.why_none)
        return Sample.of(ours).median * len(load) / tokens

    def _energy_row(
        self, case: Mapping[str, CaseValue], tokens_per_s: float | None, joules: Sequence[float], source: str
    ) -> None:
        """Joules per output token. Predicted: the board at its limit for as long as an answer is predicted to take."""
        gpu = None if self.device.type == "cpu" else device_for(torch.cuda.get_device_name(self.device))
        why = "step times were not fitted" if tokens_per_s is None else "no power is known of this device"
        guess = None if not tokens_per_s or gpu is None or not gpu.power_w else gpu.power_w / tokens_per_s
        row = make_row(
            "serve, energy per token", {**self.case, **case}, Sample.of(joules) if joules else None, unit="J",
            predicted=Estimate(guess, why), limit=Estimate(None, "no least energy of a token is known"),
            missing={} if joules else {"measured": source}, no_peers="of a peer's process none is counted apart",
        )  # fmt: skip
        self.findings.rows.add([row])

    def _limit_rate(self, history: ServeHistory | None) -> float | None:
        """Tokens per second if every step of this schedule took its least time."""
        if self.clock is None or history is None:
            return None
        tokens = sum(len(record.output) for record in history.requests.values())
        least_s = sum(self.clock.limit(step.works) for step in history.steps if step.parts)
        return (1 if self.replicas is None else len(self.replicas.engines)) * tokens / least_s

    # ---- online ------------------------------------------------------------------------------------------------

    def online(self, load: Sequence[LoadRequest], rate: float, more: Mapping[str, CaseValue] | None = None) -> None:
        """Requests at their times. `more`: what the load's rows say of it."""
        if self.findings.rows and self.left_s < 0:
            self.say(f"{rate:g} requests/s: no time left (--seconds)")
            return
        load = self._affordable(load)
        guess = self._predicted(load)
        history = run_load(self.replicas or self.engine, load, self.watched)
        records = list(history.requests.values())
        measured = load_figures(records, self.goal)
        if guess is not None:
            self.findings.points.append(LoadPoint(rate, guess, measured, history))
        self.say(
            f"{rate:g} requests/s: first token {measured.ttft_p50:.3f} s, between tokens {measured.itl_p50:.4f} s, "
            f"{measured.tokens_per_s:,.0f} tokens/s, {measured.goodput:.0%} within the goal"
        )
        mean = sum(len(request.prompt) for request in load) // len(load)
        least = (None, None) if self.clock is None else (
            self.clock.limit([SequencePart(mean, mean, 1)]), self.clock.limit([SequencePart(1, mean, 1)])
        )  # fmt: skip
        limits = {"ttft_p50": least[0], "itl_p50": least[1], "itl_p99": least[1], "goodput": 1.0}
        predicted = {} if guess is None else guess.to_dict()
        case = {"rate": rate, "requests": len(load), **(more or {})}
        for name, unit, key, sample in _load_samples(records, measured):
            peers = {"peers": "give --url a peer's server"}
            self._row(f"serve, {name}", case, unit, predicted.get(key), limits.get(key), sample, {}, peers)

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _expected(self, load: Sequence[LoadRequest]) -> ServeHistory | None:
        clock = self.predict or self.clock
        every = 1 if self.replicas is None else len(self.replicas.engines)
        return None if clock is None else predict_load(self.engine, load[::every], clock)

    def _figures(self, expected: ServeHistory) -> LoadFigures:
        """Of all replicas, where this is expected of one."""
        figures = load_figures(expected.requests.values(), self.goal)
        every = 1 if self.replicas is None else len(self.replicas.engines)
        summed = ("requests", "output_tokens", "tokens_per_s", "requests_per_s", "inside")
        return replace(figures, **{name: every * getattr(figures, name) for name in summed})

    def _affordable(self, load: Sequence[LoadRequest]) -> Sequence[LoadRequest]:
        """The first of these, as many as can be answered in half of the time that is left; one at least."""
        count = len(load)
        while count > 1 and self._seconds_of(load[:count]) > max(self.left_s, 0) / 2:
            count = (count + 1) // 2
        if count < len(load):
            self.say(f"a slow machine: {count} of {len(load)} requests (--seconds)")
        return load[:count]

    def _seconds_of(self, load: Sequence[LoadRequest]) -> float:
        guess = None if self.seconds == math.inf else self._predicted(load)
        return 0.0 if guess is None else sum(request.output for request in load) / guess.tokens_per_s

    def _predicted(self, load: Sequence[LoadRequest]) -> LoadFigures | None:
        expected = self._expected(load)
        return None if expected is None else self._figures(expected)

    def _row(
        self, name: str, case: Mapping[str, CaseValue], unit: str, predicted: float | None, limit: float | None,
        measured: Sample, peers: Mapping[str, Sample], missing: Mapping[str, str],
    ) -> None:  # fmt: skip
        row = make_row(
            name, {**self.case, **case}, measured, unit=unit, peers=peers, missing=missing,
            predicted=Estimate(predicted, self.why_no_clock or "step times were not fitted"),
            limit=Estimate(limit, self.why_no_clock or "it depends on the load"),
        )  # fmt: skip
        self.findings.rows.add([row])


def _step_times(engine: Engine, load: Sequence[LoadRequest], watched: bool) -> Sample:
    """Of the steps in which all requests decode. Their prompts are computed before: the first answer would else be over
    when the last prompt is through."""
    run_load(engine, [replace(request, output=1) for request in load], watched=False)
    history = run_load(engine, load, watched)
    steps = [step.seconds for step in history.steps if step.decode_tokens == len(load) and not step.prefill_tokens]
    if history.steps and not steps:
        raise RunError(f"no step had all {len(load)} sequences in it: set --step-tokens higher")
    steps = steps or [gap for record in history.requests.values() for gap in record.gaps_s[load[0].output // 4 :]]
    return Sample.of(steps[2:] or steps)


def server_rows(records: Sequence[RequestRecord], goal: ServeGoal, case: Mapping[str, CaseValue]) -> list[Row]:
    """What a server elsewhere did with a load; nothing is known of its model, so nothing is predicted."""
    figures = load_figures(records, goal)
    unknown = Estimate(None, "nothing is known of the server's model")
    return [
        make_row(
            f"server, {name}", case, sample, unit=unit, predicted=unknown, limit=unknown,
            no_peers="the server is the peer",
        )
        for name, unit, _, sample in _load_samples(records, figures)
    ]  # fmt: skip


def _load_samples(records: Sequence[RequestRecord], figures: LoadFigures) -> list[tuple[str, str, str, Sample]]:
    """Of a load at random times: what it is called, its unit, its name among the figures, and the sample."""
    firsts = Sample.of([record.first_token_s or 0.0 for record in records if record.token_ns])
    gaps = Sample.of([gap for record in records for gap in record.gaps_s] or [figures.itl_p50])
    return [
        ("first token", "s", "ttft_p50", firsts),
        ("between tokens", "s", "itl_p50", gaps),
        ("between tokens, p99", "s", "itl_p99", exactly(figures.itl_p99)),
        ("tokens", "tokens/s", "tokens_per_s", exactly(figures.tokens_per_s)),
        ("within the goal", "fraction", "goodput", exactly(figures.goodput)),
    ]


def open_peers(names: Sequence[str], engine: Engine, dtype: str, device: str, closing: ExitStack) -> list[PeerProcess]:
    """Those asked for, each over a folder with the engine's own weights."""
    if not names:
        return []
    folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="tilemesh-peers-")))
    write_folder(engine.served.model, folder)
    return [closing.enter_context(PeerProcess(name, folder, dtype, device)) for name in names]


def point_figures(point: LoadPoint) -> dict[str, Any]:
    """For the run's summary and its page."""
    return {
        "rate": point.rate, "measured": point.measured.to_dict(), "predicted": point.predicted.to_dict(),
    }  # fmt: skip
