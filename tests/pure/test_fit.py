"""Fits: curves, what follows from them, and what auto makes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from tilemesh.comm.runtime import fit as fits
from tilemesh.comm.runtime.choose import Request, choose, explanation, predicted
from tilemesh.comm.runtime.fit import Curve, Fit, stored_fit
from tilemesh.comm.runtime.transport import Caps
from tilemesh.core.calibration import Calibration


@dataclass
class Library:
    """As much of a transport as choosing looks at."""

    name: str = "mpi"
    size: int = 4
    caps: Caps = field(default_factory=lambda: Caps(frozenset({"all_reduce", "all_gather"}), True))

    def lacks(self, collective: str, dtype: str, op: str, uneven: bool) -> str | None:
        return None


def line(latency_s: float, bytes_per_s: float) -> Curve:
    return Curve(tuple((n, latency_s + n / bytes_per_s) for n in (16, 1 << 10, 1 << 16, 1 << 20, 1 << 26)))


FIT = Fit(
    "mpi",
    4,
    10e-6,
    {
        "message": line(20e-6, 1e9),
        "reduce": line(1e-6, 4e9),
        "copy": line(1e-6, 8e9),
        "call": Curve(((1, 30e-6),)),
        "all_reduce/native": line(30e-6, 1e9),
        "all_reduce/flat": line(15e-6, 0.5e9),
        "all_reduce/flat_slices": line(40e-6, 1.5e9),
        "all_reduce/direct": line(45e-6, 2e9),
        "all_reduce/direct_slices": line(50e-6, 3e9),
    },
)


def test_a_curve_goes_through_its_points_and_straight_beyond() -> None:
    curve = Curve(((16, 1e-6), (1600, 1e-5), (16000, 1e-3)))
    assert curve.seconds(1) == 1e-6
    assert curve.seconds(16) == 1e-6
    assert curve.seconds(1600) == pytest.approx(1e-5)
    assert curve.seconds(160) == pytest.approx(1e-6 * 10**0.5)  # half way in logarithms
    assert curve.seconds(32000) == pytest.approx(2e-3)
    assert curve.latency_s == 1e-6
    assert curve.bytes_per_s()[1] == (1600, 16000, pytest.approx(14400 / 0.99e-3))


def test_a_fit_survives_being_stored() -> None:
    again = Fit.from_dict(json.loads(json.dumps(FIT.to_dict())))
    assert again == FIT
    for damage in ({"curves": {"x": []}}, {"curves": {"x": [[0, 1]]}}, {"curves": {"x": [[1, -1]]}}):
        with pytest.raises(ValueError, match="no measurements"):
            Fit.from_dict(FIT.to_dict() | damage)


def test_what_has_no_curve_is_simulated_over_its_parts() -> None:
    ring = FIT.seconds("all_reduce", "ring", 1 << 20)
    assert ring is not None
    rounds = 6 * FIT.curves["message"].seconds((1 << 20) / 4) + 3 * FIT.reduce_s((1 << 20) / 4)
    assert ring == pytest.approx(rounds + FIT.copy_s(1 << 20) + 30e-6, rel=1e-6)
    assert FIT.seconds("all_gather", "native", 1000) is None
    assert FIT.seconds("all_gather", "flat", 1000) is None
    assert Fit("mpi", 4, 1e-6, {}).seconds("all_reduce", "ring", 1000) is None


def test_auto_takes_what_is_predicted_to_be_quickest() -> None:
    picked = {n: choose(Request("all_reduce", n, "float32", "sum"), "auto", Library(), FIT) for n in (64, 1 << 24)}
    assert picked[64].algorithm == "flat"  # the only curve of a small one
    assert picked[64].direct is None
    assert picked[1 << 24].algorithm == "flat_slices"
    assert picked[1 << 24].direct == "direct+"
    for nbytes in (64, 5000, 1 << 18, 1 << 24):
        request = Request("all_reduce", nbytes, "float32", "sum")
        costs = {
            name: s
            for name, s in predicted(request, Library(), FIT).items()
            if name in ("native", "flat", "flat_slices")
        }
        assert choose(request, "auto", Library(), FIT).algorithm == min(costs, key=lambda name: costs[name])


def test_what_is_taken_depends_on_where_the_arrays_lie() -> None:
    """A bench prints what ran: arrays of `empty` do not go the way of ordinary ones."""
    small, large = (choose(Request("all_reduce", n, "float32", "sum"), "auto", Library(), FIT) for n in (64, 1 << 24))
    assert [small.taken(in_arena=there) for there in (False, True)] == ["flat", "flat"]
    assert [large.taken(in_arena=there) for there in (False, True)] == ["flat_slices", "direct_slices"]
    gathered = choose(Request("all_gather", 1 << 24, "float32", "sum"), "auto", Library())
    assert [gathered.taken(in_arena=there) for there in (False, True)] == ["flat", "direct"]


@pytest.mark.parametrize(
    ("nbytes", "flat_s", "direct_s", "goes_direct"),
    [
        (1 << 26, 19.6e-3, 21.2e-3, True),  # as good as alike: the one that copies less
        (1 << 26, 19.6e-3, 22.0e-3, False),
        (1 << 18, 40e-6, 41e-6, False),  # a small one costs meetings, not bytes
        (1 << 18, 40e-6, 39e-6, True),  # … and here the fit knows better than the rule of thumb
        (1 << 15, 40e-6, 10e-6, False),  # but asking whose arrays lie where is not worth it for any small call
    ],
)
def test_of_two_that_are_predicted_alike_the_one_that_copies_less(
    nbytes: int, flat_s: float, direct_s: float, goes_direct: bool
) -> None:
    curves = {"all_gather/flat": Curve(((nbytes, flat_s),)), "all_gather/direct": Curve(((nbytes, direct_s),))}
    request = Request("all_gather", nbytes, "float32", "sum")
    choice = choose(request, "auto", Library(size=8), Fit("mpi", 8, 1e-6, curves))
    assert choice.taken(in_arena=True) == ("direct" if goes_direct else "flat")
    assert choice.taken(in_arena=False) == "flat"


def test_a_call_that_may_go_direct_has_no_messages_to_fall_back_on() -> None:
    """What only the call itself finds out must leave it a way that needs no more than the arena, or the library."""
    quick = Fit("mpi", 4, 1e-6, {**FIT.curves, "message": line(1e-9, 1e15), "call": Curve(((1, 1e-9),))})
    request = Request("all_reduce", 1 << 24, "float32", "sum")
    assert choose(request, "auto", Library(), quick).algorithm == "flat_slices"  # what was measured goes first
    slower = Fit("mpi", 4, 1e-6, {**FIT.curves, "message": line(1e-6, 2.4e9), "all_reduce/direct": line(1e-6, 1e12)})
    choice = choose(request, "auto", Library(), slower)
    assert choice.direct == "direct+"
    assert choice.algorithm == "flat_slices"


def test_without_memory_to_share_nothing_shared_is_taken() -> None:
    library = Library(caps=Caps(frozenset({"all_reduce"})))
    choice = choose(Request("all_reduce", 64, "float32", "sum"), "auto", library, FIT)
    assert choice.algorithm == "native"
    assert choice.direct is None


def test_before_any_fit_there_are_sane_choices() -> None:
    def name(collective: str, nbytes: int, library: Library) -> str:
        return choose(Request(collective, nbytes, "float32", "sum"), "auto", library).algorithm

    assert name("all_reduce", 1000, Library()) == "flat_one"
    assert name("all_gather", 1000, Library()) == "flat"
    assert name("all_reduce", 1 << 26, Library()) == "flat_slices"
    assert name("all_reduce", 1000, Library(caps=Caps(frozenset({"all_reduce"})))) == "native"
    assert name("all_reduce", 1000, Library(size=1)) == "naive"


def test_an_explanation_says_what_each_would_cost() -> None:
    text = explanation(Library(), Request("all_reduce", 1 << 20, "float32", "sum"), None, FIT)  # type: ignore[arg-type]
    first, second, *rest = text.splitlines()
    assert "all_reduce of 1 MiB float32 on 4 ranks over mpi: flat_slices" in first
    assert "predicted from this machine's fit" in first
    assert "comm.empty()" in second
    costs = {line.split()[0]: line for line in rest}
    assert "1.08 ms" in costs["native"]
    assert "739 µs" in costs["flat_slices"]
    assert "messages" in costs["ring"]
    unfitted = explanation(Library(), Request("all_reduce", 1 << 20, "float32", "sum"), None)  # type: ignore[arg-type]
    assert "not fitted; run `tilemesh bench collective --fit`" in unfitted


def test_a_damaged_fit_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def stored(section: object) -> str:
        found = Calibration("m", "words", "now", extra={"collectives": section})
        monkeypatch.setattr(fits, "find", lambda identity: found)
        return stored_fit("mpi", 4)

    assert Fit.from_dict(json.loads(stored({"mpi/4": FIT.to_dict()}))) == FIT
    assert stored({"mpi/8": FIT.to_dict()}) == ""
    assert stored({"mpi/4": {"curves": 3}}) == ""
    assert stored("nonsense") == ""
    monkeypatch.setattr(fits, "find", lambda identity: None)
    assert stored_fit("mpi", 4) == ""
