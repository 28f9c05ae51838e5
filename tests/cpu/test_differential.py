"""The judge of the differential gates: it must see each fault that it is there for."""

from __future__ import annotations

import pytest
import torch
from differential import KINDS, disagreement, planted

EXACT = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
EAGER = EXACT.float()


def changed(value: float) -> torch.Tensor:
    found = EAGER.clone()
    found[4, 2] = value
    return found


def test_what_is_right_passes() -> None:
    assert disagreement(EAGER, EAGER, EXACT) is None
    assert disagreement(EAGER * (1 + 2**-23), EAGER, EXACT) is None
    assert disagreement(EAGER[:0], EAGER[:0], EXACT[:0]) is None
    far = EXACT * 1e39  # neither of the two can hold it
    assert disagreement(far.float(), far.float(), far) is None
    assert disagreement(EAGER, changed(torch.nan), EXACT) is None  # better than eager


def test_a_row_that_eager_has_lost_is_not_judged_and_hides_no_other() -> None:
    for lost in (torch.nan, torch.inf, 100.0):
        assert disagreement(changed(-7.0), changed(lost), EXACT) is None
        assert disagreement(changed(-7.0).flip(0), changed(lost), EXACT) is not None


@pytest.mark.parametrize(
    "found",
    [
        changed(torch.nan),
        changed(torch.inf),
        changed(1.01 * float(EAGER[4, 2])),
        EAGER + 1e-5,
        EAGER.double(),
        EAGER.t(),
    ],
)
def test_what_is_wrong_is_named(found: torch.Tensor) -> None:
    assert disagreement(found, EAGER, EXACT) is not None


def test_infinities_and_nan_are_told_apart() -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan])
    for at, value in enumerate((-torch.inf, torch.nan, 0.0)):
        found = special.clone()
        found[at] = value
        assert disagreement(found, special, special.double()) is not None
    assert disagreement(special.clone(), special, special.double()) is None


def test_one_great_row_hides_no_other() -> None:
    scale = torch.ones(6, 1, dtype=torch.float64)
    scale[0] = 1e30
    eager = (EXACT * scale).float()
    assert disagreement(eager + torch.tensor([0, 0, 1e-3, 0, 0, 0])[:, None], eager, EXACT * scale) is not None


def test_signs_of_zeros_count_where_they_are_asked_for() -> None:
    zeros = torch.zeros(3)
    assert disagreement(-zeros, zeros, zeros.double()) is None
    assert "3 of 3" in str(disagreement(-zeros, zeros, zeros.double(), signs=True))
    assert disagreement(torch.tensor([1, 2]), torch.tensor([1, 3]), torch.tensor([1, 3])) is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_special_values_are_there(dtype: torch.dtype) -> None:
    made = {kind: planted(EXACT.to(dtype), kind) for kind in KINDS}
    limits = torch.finfo(dtype)
    assert torch.equal(made["plain"], EXACT.to(dtype))
    assert made["nan"].isnan().sum() == made["inf"].isposinf().sum() == made["-inf"].isneginf().sum() == 1
    assert (made["zeros"] == 0).sum() == 36
    assert (made["zeros"].signbit() & (made["zeros"] == 0)).sum() == 18
    assert (made["largest"].amin(), made["largest"].amax()) == (limits.min, limits.max)
    small = made["subnormal"].abs()
    assert ((small > 0) & (small < limits.smallest_normal)).any()
    assert made["offset"].unique().numel() > 12
    with pytest.raises(ValueError, match="unknown kind of values"):
        planted(EXACT, "odd")
