"""What the host needs for a step: the line through two depths, and the same code measured where there is no GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from tilemesh.core.calibration import Calibration, Rates
from tilemesh.measure.calibrate import calibrate_further
from tilemesh.measure.figure import Figure, FigureOutcome
from tilemesh.measure.sample import Sample
from tilemesh.train import host
from tilemesh.train.host import HostCosts, Read, host_figures, small_step, split


def test_a_line_through_two_depths() -> None:
    # Passes 2 ms + 1 ms a layer; what follows 0.5 ms + 0.1 ms a layer.
    found = split(Read(4e-3, 0.7e-3), Read(8e-3, 1.1e-3), (2, 6))
    assert found == pytest.approx({"passes": 2e-3, "passes-layer": 1e-3, "update": 0.5e-3, "update-layer": 0.1e-3})


def test_noise_makes_no_negative_cost() -> None:
    found = split(Read(4e-3, 0.5e-3), Read(3.9e-3, 0.4e-3))
    assert min(found.values()) > 0
    assert found["passes"] == pytest.approx(4e-3, rel=0.01)
    assert found["update"] == pytest.approx(0.5e-3, rel=0.01)


def test_figures_are_named_for_the_planner_and_foretell_nothing() -> None:
    figures = host_figures("cpu")
    assert {one.key for one in figures} >= {"gpt-compiled-passes", "llama-eager-update-layer"}
    assert len({one.key for one in figures}) == len(figures) == 16
    assert all(one.predicted is None and one.missing["predicted"] for one in figures)
    assert all(one.rate == "host_s" and one.part == "gpu" for one in figures)


@pytest.mark.parametrize("kind", host.KINDS)
def test_eager_steps_are_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "STEPS", 1)
    monkeypatch.setattr(host, "WARM_STEPS", 1)
    costs = HostCosts(kind, "eager", "cpu", rounds=3)
    samples = [costs.outcome(part).measured for part in host.PARTS]
    assert all(one is not None and one.n == 3 and one.median > 0 for one in samples)


@pytest.mark.slow
@pytest.mark.parametrize("kind", host.KINDS)
def test_compiled_steps_are_measured(kind: str) -> None:
    sample = HostCosts(kind, "compiled", "cpu", rounds=3).outcome("passes-layer").measured
    assert sample is not None
    assert sample.median > 0


def test_only_a_whole_step_moves_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.nn.Module] = []
    kept = host.Transformer
    monkeypatch.setattr(host, "Transformer", lambda *given, **named: made.append(kept(*given, **named)) or made[-1])
    step = small_step("gpt", "eager", "cpu", 1)
    weight = next(made[0].parameters())
    before = weight.detach().clone()
    step.passes()
    assert torch.equal(weight, before)
    assert weight.grad is not None
    step.update()
    assert not torch.equal(weight, before)
    assert weight.grad is None


def test_an_interrupted_step_moves_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of a block takes a hundred times as long; passes 3 ms, update 1 ms otherwise."""
    now = 0.0

    def takes(*seconds: float) -> Callable[[], None]:
        each = itertools.cycle(seconds)

        def part() -> None:
            nonlocal now
            now += next(each)

        return part

    monkeypatch.setattr(host.time, "perf_counter", lambda: now)
    step = host.SmallStep(takes(3e-3, 3e-3, 0.3, 3e-3), takes(1e-3, 1e-3, 1e-3, 0.1))
    found = HostCosts("gpt", "eager", "cpu")._read(step)
    assert (found.passes_s, found.update_s) == pytest.approx((3e-3, 1e-3))


def test_figures_are_added_to_what_is_stored() -> None:
    def figure(key: str, value: float | None) -> Figure:
        return Figure(
            part="gpu", rate="host_s", name="host", case={}, unit="s", predicted=1.0, limit=None,
            missing={"limit": "none", "peers": "none"}, key=key,
            measure=lambda: FigureOutcome(None if value is None else Sample.of([value])),
        )  # fmt: skip

    stored = Calibration("id", "a box", "then", gpu=Rates({"bf16": 1e12}, host_s={"a": 1.0, "b": 2.0}), extra={"x": 1})
    found = calibrate_further(stored, [figure("b", 3.0), figure("c", 4.0), figure("d", None)])
    assert found.calibration.gpu is not None
    assert found.calibration.gpu.host_s == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert found.calibration.gpu.matmul_flops_per_s == {"bf16": 1e12}
    assert found.calibration.extra == {"x": 1}
    assert len(found.rows) == 3
