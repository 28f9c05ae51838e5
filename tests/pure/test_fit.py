"""Fits: curves, what follows from them, and what auto makes of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest

from tilemesh.bench.collective.fit import SIZES, between
from tilemesh.comm.runtime import fit as fits
from tilemesh.comm.runtime.arena import SEGMENT_BYTES
from tilemesh.comm.runtime.choose import Request, choose, explanation, predicted
from tilemesh.comm.runtime.fit import Curve, Fit, stored_fit
from tilemesh.comm.runtime.transport import Caps
from tilemesh.comm.schedules.collectives import COLLECTIVES
from tilemesh.core.calibration import Calibration


@dataclass
class Library:
    """As much of a transport as choosing looks at."""

    name: str = "mpi"
    size: int = 4
    caps: Caps = field(default_factory=lambda: Caps(frozenset({"all_reduce", "all_gather"}), True))

    def lacks(self, collective: str, dtype: str, op: str, uneven: bool) -> str | None:
        return None


EVERYTHING = Caps(frozenset(COLLECTIVES), arena=True, crowded=True)


def line(latency_s: float, bytes_per_s: float) -> Curve:
    return Curve(tuple((n, latency_s + n / bytes_per_s) for n in (16, 1 << 10, 1 << 16, 1 << 20, 1 << 26)))


FIT = Fit(
    "mpi",
    4,
    2,
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
    crowded = replace(FIT, layer_s=(0.1, 0.22), worked_s=4e-4)
    assert Fit.from_dict(json.loads(json.dumps(crowded.to_dict()))) == crowded
    with pytest.raises(ValueError, match="no measurement"):
        Fit.from_dict(FIT.to_dict() | {"layer_s": [0.1, 0.0]})
    with pytest.raises(ValueError, match="no measurement"):
        Fit.from_dict(FIT.to_dict() | {"worked_s": -1.0})
    again = Fit.from_dict(json.loads(json.dumps(FIT.to_dict())))
    assert again == FIT
    for damage in (
        {"curves": {"x": []}},
        {"curves": {"x": [[0, 1]]}},
        {"curves": {"x": [[1, -1]]}},
        {"curves": {"x": [[1, 1]]}, "spreads": {"x": [[1, 1], [1, 1]]}},
        {"curves": {"x": [[1, 1]]}, "spreads": {"x": [[1]]}},
    ):
        with pytest.raises(ValueError, match=r"no measurements|spreads|unpack"):
            Fit.from_dict(FIT.to_dict() | damage)


def test_what_has_no_curve_is_simulated_over_its_parts() -> None:
    ring = FIT.seconds("all_reduce", "ring", 1 << 20)
    assert ring is not None
    rounds = 6 * FIT.curves["message"].seconds((1 << 20) / 4) + 3 * FIT.reduce_s((1 << 20) / 4)
    assert ring == pytest.approx(rounds + FIT.copy_s(1 << 20) + 30e-6, rel=1e-6)
    assert FIT.seconds("all_gather", "native", 1000) is None
    assert FIT.seconds("all_gather", "flat", 1000) is None
    assert Fit("mpi", 4, 2, 1e-6, {}).seconds("all_reduce", "ring", 1000) is None


def test_auto_takes_what_is_predicted_to_be_quickest() -> None:
    picked = {n: choose(Request("all_reduce", n, "float32", "sum"), "auto", Library(), FIT) for n in (64, 1 << 24)}
    assert picked[64].algorithm == "flat"  # the only curve of a small one
    assert picked[64].direct is None
    assert picked[1 << 24].algorithm == "flat_slices"
    assert picked[1 << 24].direct == "direct+"
    for nbytes in (64, 1 << 16, 1 << 20, 1 << 24):
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
    choice = choose(request, "auto", Library(size=8), Fit("mpi", 8, 2, 1e-6, curves))
    assert choice.taken(in_arena=True) == ("direct" if goes_direct else "flat")
    assert choice.taken(in_arena=False) == "flat"


def test_a_call_that_may_go_direct_has_no_messages_to_fall_back_on() -> None:
    """What only the call itself finds out must leave it a way that needs no more than the arena, or the library."""
    quick = Fit("mpi", 4, 2, 1e-6, {**FIT.curves, "message": line(1e-9, 1e15), "call": Curve(((1, 1e-9),))})
    request = Request("all_reduce", 1 << 24, "float32", "sum")
    assert choose(request, "auto", Library(), quick).algorithm == "flat_slices"  # what was measured goes first
    slower = Fit("mpi", 4, 2, 1e-6, {**FIT.curves, "message": line(1e-6, 2.4e9), "all_reduce/direct": line(1e-6, 1e12)})
    choice = choose(request, "auto", Library(), slower)
    assert choice.direct == "direct+"
    assert choice.algorithm == "flat_slices"


def test_without_memory_to_share_nothing_shared_is_taken() -> None:
    library = Library(caps=Caps(frozenset({"all_reduce"})))
    choice = choose(Request("all_reduce", 64, "float32", "sum"), "auto", library, FIT)
    assert choice.algorithm == "native"
    assert choice.direct is None


def by_size(*curves: tuple[str, list[float]]) -> Fit:
    """All_to_all measured at 1 KiB, 128 KiB and 1 MiB: microseconds of each algorithm."""
    sizes = (1 << 10, 128 << 10, 1 << 20)
    points = {
        f"all_to_all/{name}": Curve(tuple((size, us * 1e-6) for size, us in zip(sizes, times, strict=True)))
        for name, times in curves
    }
    return Fit("mpi", 4, 2, 1e-6, points)


@pytest.mark.parametrize(
    ("nbytes", "flat", "native", "picked"),
    [
        (128 << 10, [20, 40, 150], [25, 60, 100], "flat"),  # measured there: that settles it
        (256 << 10, [20, 40, 150], [25, 60, 100], "native"),  # they cross in between, nobody knows where
        (256 << 10, [20, 40, 90], [25, 60, 100], "flat"),  # quicker on both sides
        (256 << 10, [20, 59, 99], [25, 60, 100], "native"),  # alike: nothing to be gained
        (1 << 22, [20, 40, 150], [25, 60, 100], "native"),
        (16, [26, 40, 150], [25, 60, 100], "native"),
        (16, [20, 40, 150], [25, 60, 100], "flat"),
    ],
)
def test_the_librarys_own_is_taken_where_nothing_is_surely_quicker(
    nbytes: int, flat: list[float], native: list[float], picked: str
) -> None:
    """A line between two measured sizes does not know the steps of a curve: all_to_all of 256 KiB took 2.6 times as
    long as native between sizes at which flat was the quicker and the slower one."""
    fit = by_size(("flat", flat), ("native", native))
    assert choose(Request("all_to_all", nbytes, "float32", "sum"), "auto", Library(), fit).algorithm == picked


@pytest.mark.parametrize(("p80", "picked"), [(101e-6, "native"), (99e-6, "flat")])
def test_readings_that_overlap_those_of_the_librarys_own_are_no_reason_to_leave_it(p80: float, picked: str) -> None:
    """On x86-64 a fit took `flat` for an all_gather of 1 MiB, which then took 1.1 times native's time."""
    size = 1 << 20
    curves = {
        "all_gather/flat": Curve(((size, 90e-6),), ((85e-6, p80),)),
        "all_gather/native": Curve(((size, 110e-6),), ((100e-6, 120e-6),)),
    }
    fit = Fit("mpi", 2, 2, 1e-6, curves)
    assert Fit.from_dict(json.loads(json.dumps(fit.to_dict()))) == fit
    request = Request("all_gather", size, "float32", "sum")
    assert choose(request, "auto", Library(size=2), fit).algorithm == picked
    older = fit.to_dict()
    del older["spreads"]
    assert choose(request, "auto", Library(size=2), Fit.from_dict(older)).algorithm == "flat"


def test_what_reads_arrays_in_place_must_not_be_slower_than_the_librarys_own_either() -> None:
    """From 1 MiB on what copies less is taken when it is predicted within a tenth; but not for a loss."""
    request = Request("all_to_all", 1 << 20, "float32", "sum")
    slower = by_size(("native", [25, 60, 100]), ("flat", [20, 80, 150]), ("direct", [40, 70, 105]))
    assert choose(request, "auto", Library(), slower).direct is None
    quicker = by_size(("native", [25, 60, 100]), ("flat", [20, 80, 95]), ("direct", [40, 70, 98]))
    assert choose(request, "auto", Library(), quicker).direct == "direct"


def test_what_is_put_around_the_librarys_own_counts_against_it() -> None:
    """16-bit floats are widened first, the least and largest are turned into whole numbers: no fit measured that."""
    curves = {"all_reduce/native": line(10e-6, 2e9), "all_reduce/flat_slices": line(15e-6, 1e9)}
    fit = Fit("mpi", 4, 2, 1e-6, curves)
    picked = {
        (dtype, op): choose(Request("all_reduce", 1 << 20, dtype, op), "auto", Library(), fit).algorithm
        for dtype, op in (("float32", "sum"), ("bfloat16", "sum"), ("float32", "max"))
    }
    assert list(picked.values()) == ["native", "flat_slices", "flat_slices"]


def test_sizes_are_measured_closer_where_another_is_the_quickest() -> None:
    measured = {
        16: {"native": 1.0, "flat": 2.0},
        256: {"native": 2.0, "flat": 1.0},
        512: {"native": 1.0, "flat": 2.0},  # twice the size: there is nothing between
        8192: {"native": 1.0, "flat": 2.0},
        65536: {"native": 1.0, "flat": 2.0, "direct": 0.1},  # needs arrays of another kind
    }
    assert between(measured) == [64]
    assert between({64: measured[16], 4096: measured[256]}) == [512]


def test_a_fit_measures_both_sides_of_where_segments_begin() -> None:
    """Between two fitted sizes far apart nobody would see that `flat` loses its lead on the step alone."""
    assert any(SEGMENT_BYTES / 2 <= size <= SEGMENT_BYTES for size in SIZES)
    assert any(SEGMENT_BYTES < size <= 2 * SEGMENT_BYTES for size in SIZES)
    sizes = (256 << 10, 1 << 20, 4 << 20)
    curves = {
        f"all_gather/{name}": Curve(tuple(zip(sizes, (n * 1e-6 for n in seconds), strict=True)))
        for name, seconds in {"native": (35, 103, 700), "flat": (27, 112, 560)}.items()
    }
    fit = replace(FIT, curves=FIT.curves | curves)
    taken = {n: choose(Request("all_gather", n, "float32", "sum"), "auto", Library(), fit).algorithm for n in sizes}
    assert taken == {256 << 10: "flat", 1 << 20: "native", 4 << 20: "flat"}
    assert between(
        {n: {name: curves[f"all_gather/{name}"].seconds(n) for name in ("native", "flat")} for n in sizes}
    ) == [
        512 << 10,
        2 << 20,
    ]


def unfitted_names(collective: str, library: Library) -> list[str]:
    sizes = (8, 1 << 10, 32 << 10, 256 << 10, 8 << 20)
    return [choose(Request(collective, n, "float32", "sum"), "auto", library).algorithm for n in sizes]


def test_before_any_fit_only_what_is_quick_on_any_machine_replaces_the_librarys_own() -> None:
    crowded, roomy = Library(caps=EVERYTHING), Library(caps=replace(EVERYTHING, crowded=False))
    assert unfitted_names("all_to_all", crowded) == ["flat", "flat", "flat", "native", "native"]
    assert unfitted_names("all_to_all", roomy) == ["flat", "flat", "flat", "native", "native"]
    assert unfitted_names("all_gather", crowded) == ["flat", "flat", "flat", "native", "native"]
    assert unfitted_names("all_gather", roomy) == ["flat"] * 5
    assert unfitted_names("all_gather", replace(roomy, size=2))[3:] == ["native", "native"]
    assert unfitted_names("all_reduce", crowded) == ["native", "flat_one", "flat_one", "native", "flat_slices"]
    assert unfitted_names("all_reduce", roomy) == ["native", "flat", "flat_slices", "flat_slices", "flat_slices"]
    assert unfitted_names("all_reduce", replace(roomy, size=2))[2] == "flat"
    assert unfitted_names("reduce_scatter", crowded) == ["native", "flat", "flat", "native", "flat"]
    assert unfitted_names("reduce_scatter", roomy) == ["native", "flat", "flat", "flat", "flat"]


def test_before_any_fit_a_library_that_sends_over_sockets_is_never_safe() -> None:
    for caps in (EVERYTHING, replace(EVERYTHING, crowded=False)):
        for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
            assert "native" not in unfitted_names(collective, Library(name="torch", caps=caps))
    assert (
        unfitted_names("all_reduce", Library(name="torch", caps=EVERYTHING)) == ["flat_one"] * 3 + ["flat_slices"] * 2
    )
    request = Request("all_reduce", 256 << 10, "bfloat16", "sum")  # over MPI it would be widened first
    assert choose(request, "auto", Library(caps=EVERYTHING)).algorithm == "flat_slices"


def test_before_any_fit_arrays_in_shared_memory_are_read_where_they_are() -> None:
    for collective in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
        choice = choose(Request(collective, 1 << 20, "float32", "sum"), "auto", Library(caps=EVERYTHING))
        assert choice.taken(in_arena=True).startswith("direct")
        small = choose(Request(collective, 32 << 10, "float32", "sum"), "auto", Library(caps=EVERYTHING))
        assert small.direct is None


def test_without_shared_memory_the_librarys_own_is_taken() -> None:
    def name(collective: str, nbytes: int, library: Library) -> str:
        return choose(Request(collective, nbytes, "float32", "sum"), "auto", library).algorithm

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
        return stored_fit("mpi", 4, 2)

    assert Fit.from_dict(json.loads(stored({"mpi/4/2": FIT.to_dict()}))) == FIT
    assert stored({"mpi/8/2": FIT.to_dict(), "mpi/4/16": FIT.to_dict(), "mpi/4": FIT.to_dict()}) == ""
    assert stored({"mpi/4/2": {"curves": 3}}) == ""
    assert stored("nonsense") == ""
    monkeypatch.setattr(fits, "find", lambda identity: None)
    assert stored_fit("mpi", 4, 2) == ""
