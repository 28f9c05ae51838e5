"""Show that every layout computes what one process computes. Trains and compares every dp × tp × sequence parallel
× accumulation, every schedule of a pipeline, and every pair of settings (ZeRO and recomputation too) in at least
one layout; each optimizer, a scaled loss, and one process beside a Transformer written from the papers.

tilemesh verify --ranks 8
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tilemesh.cli.output import Output, console_beside
from tilemesh.core.errors import UsageError
from tilemesh.core.files import naming
from tilemesh.core.options import Known, OutFile, Words, option

if TYPE_CHECKING:
    from tilemesh.comm.runtime.communicator import Communicator
    from tilemesh.parallel.gate.compare import GateResult
    from tilemesh.parallel.gate.plant_numerics import Plant
    from tilemesh.parallel.laid import Laid
    from tilemesh.train.optimizer import Optimizer

TIMEOUT_S = 180.0  # for one case, under a second on free cores: ranks that a layout does not need wait until it is done


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    ranks: int = option(8, "1, 2, 4 or 8: all layouts of up to so many ranks.")
    transport: Literal["auto", "mpi", "torch", "threads"] = option("auto", "One of: auto, mpi, torch, threads.")
    precision: str = option("fp64", "fp64 (bound 1e-10), fp32 or bf16 (bound: another order).")
    models: Words = option(
        (), "Of gpt, llama, post, query, gemma, neox, experts, spread, dropped; default: all.", "A,B,..."
    )
    device: Literal["cpu", "cuda"] = option("cpu", "cpu, or cuda, which ranks share where they outnumber the GPUs.")
    plant: Annotated[str, Known("bug", "tilemesh.parallel.gate.plant:PLANTS")] | None = option(
        None, "Plant this bug, until a case shows it.", "BUG"
    )
    pairs: bool = option(True, "Also every pair of settings, with ZeRO and recomputation.")
    json: OutFile | None = option(None, "Each case, a line of JSON.", "FILE")


def verify(options: VerifyOptions) -> Output | int:
    """The ranks yield each result as it is found; the table is made here, so it looks the same whoever started them."""
    from tilemesh.core.context import membership

    _require(options)
    table = LayoutTable(options.json)
    if membership() is not None:  # inside mpiexec, srun or torchrun: this is one of the ranks
        from tilemesh.comm import connect

        comm = connect("auto" if options.transport == "threads" else options.transport, timeout_s=TIMEOUT_S)
        for line in results(comm, options):
            table.add(line)
        failed = comm.max_over_ranks([float(table.failed)])[0] > 0
        return table.end() if comm.rank == 0 else int(failed)
    (_on_threads if options.transport == "threads" else _in_processes)(options, table)
    return table.end()


def results(comm: Communicator, options: VerifyOptions) -> Iterator[dict[str, Any]]:
    """What rank 0 has to tell, case by case; the others take part and tell nothing."""
    import torch

    from tilemesh.parallel.gate.compare import Gate
    from tilemesh.parallel.gate.pairs import every_case
    from tilemesh.parallel.gate.plant import PLANTS

    if options.device == "cpu":
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")  # a CPU without bf16: slow, and right
        torch.set_num_threads(1)  # the models are tiny, and there are as many ranks as asked for
    plant = PLANTS.get(options.plant or "")
    cases = every_case(options.ranks, options.models, options.precision, options.pairs)
    chosen = [case for case in cases if plant is None or plant.applies(case)]
    gate = Gate(comm, options.device, plant, stops_when_found=plant is not None, optimizer=train_optimizer)
    for result in gate.run(chosen):
        yield _fields(result, plant is not None)


def train_optimizer(name: str, laid: Laid, precision: str) -> Optimizer:
    """The optimizer that training runs step by, as the gate's settings have it."""
    from tilemesh.parallel.gate.cases import SETTINGS, rate_of
    from tilemesh.parallel.matrices import MatrixGroup
    from tilemesh.train.config import OptimizerConfig
    from tilemesh.train.optimizer import Optimizer

    values: dict[str, Any] = {"name": name, "lr": rate_of(name), **SETTINGS}
    matrices = MatrixGroup(laid.mesh, laid.plan) if name == "muon" else None
    return Optimizer(OptimizerConfig(**values), laid.gradients.stepped, precision, matrices=matrices)


def _fields(result: GateResult, planted: bool) -> dict[str, Any]:
    case = result.case
    return {
        "model": case.model, "layout": str(case), "ranks": case.layout.world, "precision": case.precision,
        "apart": {name: value if math.isfinite(value) else None for name, value in vars(result.apart).items()},
        "bound": dataclasses.asdict(result.bound), "planted": planted, "passed": result.passed, "where": result.where,
    }  # fmt: skip


def _require(options: VerifyOptions) -> None:
    """Refuse what cannot be before any rank is started."""
    from tilemesh.parallel.gate.pairs import every_case

    if not every_case(options.ranks, options.models, options.precision, options.pairs):
        more = next(ranks for ranks in (2, 4, 8) if every_case(ranks, options.models, options.precision, options.pairs))
        words = f"--ranks {options.ranks} --models {','.join(options.models)}"
        raise UsageError(f"{words}: no layout of so few ranks has these: nothing would be shown; give --ranks {more}")
    if options.device == "cuda":
        if options.transport == "threads" and options.ranks > 1:  # they would wait for one another in it for good
            raise UsageError(
                "--transport threads with --device cuda: torch runs all backward passes of a GPU in one thread, and "
                "ranks exchange in theirs; give --transport torch or mpi"
            )
        from tilemesh.kernels.launch.tensors import read_device

        read_device(options.device)
    if options.plant is not None:
        from tilemesh.parallel.gate.plant import PLANTS

        _require_a_place(options, PLANTS[options.plant])


def _require_a_place(options: VerifyOptions, planted: Plant) -> None:
    """A bug that no layout has would leave the gate green and prove nothing."""
    from tilemesh.parallel.gate.cases import MODELS
    from tilemesh.parallel.gate.pairs import every_case

    def has_place(ranks: int, models: tuple[str, ...], pairs: bool) -> bool:
        cases = every_case(ranks, models, options.precision, pairs)
        return any(planted.applies(case) for case in cases)

    if has_place(options.ranks, options.models, options.pairs):
        return
    wider = ((pairs, ranks, models) for pairs in (options.pairs, True) for ranks in (2, 4, 8) if ranks >= options.ranks
             for models in (options.models, *((name,) for name in MODELS)))  # fmt: skip
    pairs, ranks, models = next(choice for choice in wider if has_place(choice[1], choice[2], choice[0]))
    words = f"--ranks {ranks}" + f" --models {','.join(models)}" * bool(models)
    words += " without --no-pairs" * (pairs and not options.pairs)
    raise UsageError(
        f"--plant {options.plant}: none of the layouts and models asked for can have this bug, so the gate would pass "
        f"with nothing planted; give {words}"
    )


def _on_threads(options: VerifyOptions, table: LayoutTable) -> None:
    from tilemesh.comm import run_threads

    if options.device != "cpu":
        raise UsageError(f"device {options.device} over threads: expected cpu; use --transport torch or mpi")

    def main(comm: Communicator) -> None:
        for line in results(comm, options):
            table.add(line)

    run_threads(options.ranks, main, timeout_s=TIMEOUT_S)


def _in_processes(options: VerifyOptions, table: LayoutTable) -> None:
    from tilemesh.launch import call

    call(
        "tilemesh.cli.commands.verify:on_a_rank", options.ranks, dataclasses.asdict(options),
        transport=options.transport,
        sink=lambda rank, stream, line: print(f"[{rank}] {line.decode(errors='replace')}", file=sys.stderr),
        hear=lambda rank, line: table.add(line),
    )  # fmt: skip


def on_a_rank(options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One of the ranks that `_in_processes` started: what it has to tell, as it comes."""
    from tilemesh.comm import connect

    yield from results(connect(timeout_s=TIMEOUT_S), VerifyOptions(**options))


class LayoutTable:
    """A row per layout, printed when all its models are in: of each difference the one nearest to its bound."""

    def __init__(self, file: str | None) -> None:
        self.file = file
        self.console = console_beside(file)
        self.layout: list[dict[str, Any]] = []
        self.lines: list[dict[str, Any]] = []
        self.failed = 0

    def add(self, line: dict[str, Any]) -> None:
        if not self.lines:
            self._print(f"{'layout':<{_NAME}}" + "".join(f"{name:>9}" for name in _COLUMNS) + "  cases")
        if self.layout and line["layout"] != self.layout[0]["layout"]:
            self._print_layout()
        self.lines.append(line)
        self.layout.append(line)
        self.failed += not line["passed"]
        if self.file not in (None, "-"):  # at once: a run which is stopped leaves what it has found
            with naming(self.file), Path(self.file).open("a" if len(self.lines) > 1 else "w", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)
        self.console.file.flush()

    def _print_layout(self) -> None:
        name = self.layout[0]["layout"]
        # NaN, or what was refused before it ran, is the worst of all: `_ratio` puts it first.
        worst = [max(self.layout, key=lambda line: _ratio(line, kind)) for kind in _DIFFERENCES]
        values = [line["apart"][kind] for line, kind in zip(worst, _DIFFERENCES, strict=True)]
        cells = "".join(f"{'–':>9}" if value is None else f"{value:>9.1e}" for value in values)
        share = max(_ratio(line, kind) for line, kind in zip(worst, _DIFFERENCES, strict=True))
        red = [line for line in self.layout if not line["passed"]]
        verdict = f"{len(self.layout)} pass" if not red else f"{len(red)} of {len(self.layout)} FAIL"
        start = f"{name:<{_NAME}}" if len(name) < _NAME else f"{name}\n{'':<{_NAME}}"
        self._print(f"{start}{cells}{share:>9.0e}  {verdict}")
        for line in red:
            self._print(f"  {line['model']}: {line['where']}")
        self.layout = []

    def end(self) -> Output:
        """What all layouts came to."""
        if self.layout:
            self._print_layout()
        text = []
        if planted := [line for line in self.lines if line["planted"]]:
            failures = sum(not line["passed"] for line in planted)
            text.append(f"planted in {_cases(len(planted))}, found in {failures} of them")
        verdict = "every layout computes what one process computes" if not self.failed else f"{self.failed} FAIL"
        text.append(f"{_cases(len(self.lines))}: {verdict}")
        return Output(text, self.lines, exit_code=int(self.failed > 0))


_DIFFERENCES = ("loss", "gradient", "weights", "norm")
_COLUMNS = (*_DIFFERENCES, "of bound")
_NAME = 54  # columns for a layout's name; a longer one has a line to itself


def _cases(count: int) -> str:
    return f"{count} case{'s' * (count > 1)}"


def _ratio(line: dict[str, Any], name: str) -> float:
    value = line["apart"][name]
    return math.inf if value is None else float(value) / float(line["bound"][name])
