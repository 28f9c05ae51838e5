"""AdamW over many parameters and the global norm: the Triton code by the interpreter, against torch's own."""

from __future__ import annotations

import importlib

import pytest
import torch
from kernel_bounds import norm_bound

import tilemesh as tm
from tilemesh.bench.kernel.adamw import BENCH
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess, unit

pytest.importorskip("triton")

SHAPES = ((3, 5), (1,), (0, 4), (1500,), (2, 1024), (7, 11, 3))
kernels = tm.kernels


def drawn(dtype=torch.float64, seed=0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def zeros(dtype=torch.float64):
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


def stepped(dtype, how, steps=3, **options):
    """Parameters and averages after a few steps of ours."""
    parameters, averages, squares = drawn(dtype), zeros(dtype), zeros(dtype)
    optimizer = kernels.AdamW(parameters, averages, squares, weight_decay=0.1, implementation=how, **options)
    for step in range(1, steps + 1):
        optimizer.step(drawn(dtype, seed=step), rate=0.01 * step, step=step)
    return parameters, averages, squares


def by_torch(dtype, steps=3):
    parameters = [torch.nn.Parameter(value) for value in drawn(dtype)]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.1, fused=True)
    for step in range(1, steps + 1):
        for parameter, gradient in zip(parameters, drawn(dtype, seed=step), strict=True):
            parameter.grad = gradient
        optimizer.param_groups[0]["lr"] = 0.01 * step
        optimizer.step()
    state = [optimizer.state[parameter] for parameter in parameters]
    return [p.detach() for p in parameters], [s["exp_avg"] for s in state], [s["exp_avg_sq"] for s in state]


@pytest.mark.parametrize("how", ["interpret", "torch"])
def test_in_float64_it_is_torchs(how):
    for mine, theirs in zip(stepped(torch.float64, how), by_torch(torch.float64), strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_in_float32_it_is_within_rounding():
    """Three steps of some 12 roundings each, of values up to the parameter's size and a move of less than 1."""
    exact = stepped(torch.float64, "torch")
    for mine, true in zip(stepped(torch.float32, "interpret")[0], exact[0], strict=True):
        start_rounding = 3 * unit(torch.float32) * (true.abs() + 1)  # of drawn values, and of slopes in the averages
        assert excess(mine, true, start_rounding + 36 * unit(torch.float32) * (true.abs() + 1)) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_of_16_bit_parameters(dtype):
    parameters, masters = drawn(dtype), [value.float() for value in drawn(dtype)]
    averages, squares = zeros(torch.float32), zeros(torch.float32)
    gradients = drawn(dtype, seed=1)
    others = [[value.clone() for value in values] for values in (masters, averages, squares)]
    kernels.adamw(parameters, gradients, averages, squares, masters, rate=0.01, implementation="interpret")
    kernels.adamw(others[0], [g.float() for g in gradients], *others[1:], rate=0.01, implementation="interpret")
    for parameter, master, other in zip(parameters, masters, others[0], strict=True):
        assert torch.equal(master, other)
        assert torch.equal(parameter, master.to(dtype))


def test_some_parameters_have_masters_and_some_have_none():
    """As a step under autocast has them: 16-bit weights of products beside float32 norms and tables."""
    wide, narrow = drawn(torch.float32), drawn(torch.bfloat16, seed=3)
    masters = [value.float() for value in narrow]
    gradients = [*drawn(torch.float32, seed=1), *drawn(torch.bfloat16, seed=2)]
    apart = [value.clone() for value in (*wide, *masters)]
    averages, squares, *others = ([*zeros(torch.float32), *zeros(torch.float32)] for _ in range(4))
    options = {"rate": 0.01, "implementation": "interpret"}
    kernels.adamw([*wide, *narrow], gradients, averages, squares, [None] * len(wide) + masters, **options)
    kernels.adamw(apart, [gradient.float() for gradient in gradients], *others, **options)
    for one, other in zip([*wide, *masters], apart, strict=True):
        assert torch.equal(one, other)
    for parameter, master in zip(narrow, masters, strict=True):
        assert torch.equal(parameter, master.bfloat16())
    with pytest.raises(UsageError, match="1 masters for"):
        kernels.adamw([*wide, *narrow], gradients, averages, squares, [None], **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_rows_check_sees_a_wrong_step(dtype):
    problem = BENCH.form.problem("3x1500", {"dtype": dtype})

    def interpreted(parameters, gradients, averages, squares, masters, **changed):
        options = {"rate": 1e-3, "step": 10, "implementation": "interpret", **changed}
        kernels.adamw(parameters, gradients, averages, squares, masters, **options)

    def wrong(function=interpreted, **changed):
        before, after = (BENCH.arguments(problem, torch.device("cpu"), 5) for _ in range(2))
        function(*after, **changed)
        return BENCH.wrong(problem, before, after)

    assert wrong() is None
    assert wrong(BENCH.calls(problem)["eager"]) is None
    assert "tensor 0" in wrong(lambda *given: None)
    for changed in ({"rate": 1.01e-3}, {"step": 9}, {"divisor": 1.001}, {"weight_decay": 0.011}, {"eps": 1e-3}):
        assert "tensor 0" in wrong(**changed), changed


def test_scalars_on_the_device_and_a_divisor():
    found = []
    for rate, step, divisor in ((0.01, 7, 4.0), tuple(torch.tensor(x, dtype=torch.float64) for x in (0.01, 7, 4.0))):
        for how in ("interpret", "torch"):
            parameters, averages, squares = drawn(), zeros(), zeros()
            options = {"rate": rate, "step": step, "divisor": divisor, "implementation": how}
            kernels.adamw(parameters, [4 * g for g in drawn(seed=1)], averages, squares, **options)
            found.append(parameters)
    plain = drawn()
    kernels.adamw(plain, drawn(seed=1), zeros(), zeros(), rate=0.01, step=7, implementation="torch")
    for parameters in found:
        for one, other in zip(parameters, plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_decay_and_dtypes_by_parameter_and_gradients_at_new_addresses():
    parameters = [torch.ones(5), torch.ones(5, dtype=torch.float64), torch.ones(9)[1:6]]
    states = [[torch.zeros(5, dtype=p.dtype) for p in parameters] for _ in range(2)]
    optimizer = kernels.AdamW(parameters, *states, weight_decay=[0.5, 0.0, 0.5], implementation="interpret")
    for step in (1, 2):
        optimizer.step([torch.zeros(5, 2, dtype=p.dtype)[:, 0] for p in parameters], rate=0.1, step=step)
    for parameter, wanted in zip(parameters, (0.95**2, 1.0, 0.95**2), strict=True):
        torch.testing.assert_close(parameter, torch.full_like(parameter, wanted))


@pytest.mark.parametrize("how", ["interpret", "torch"])
def test_the_global_norm(how):
    tensors = [*drawn(torch.float32), drawn(torch.bfloat16, seed=1)[3], torch.ones(9000)]
    exact = torch.cat([tensor.double().flatten() for tensor in tensors]).norm()
    found = kernels.global_norm(tensors, implementation=how)
    assert found.dtype == torch.float32
    assert excess(found, exact, norm_bound(exact, torch.float32, sum(tensor.numel() for tensor in tensors))) is None
    assert torch.equal(found, kernels.global_norm(tensors, implementation=how))
    wide = [tensor.double() for tensor in tensors]
    torch.testing.assert_close(kernels.global_norm(wide, implementation=how), exact, rtol=1e-13, atol=0)
    assert kernels.global_norm([torch.zeros(0)], implementation=how) == 0


def one(dtype=torch.float32, size=4):
    return [torch.ones(size, dtype=dtype)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: kernels.adamw(one(), [], one(), one()), "0 gradients for 1 parameters"),
        (lambda: kernels.adamw(one(), one(size=3), one(), one()), "gradients[0] is float32 (3,): expected"),
        (lambda: kernels.adamw(one(), [None], one(), one()), "gradients[0] is None"),
        (lambda: kernels.adamw(one(), one(torch.int64), one(), one()), "expected floating point"),
        (lambda: kernels.adamw(one(torch.float16), one(), one(torch.float16), one()), "contiguous float32 tensor"),
        (lambda: kernels.adamw([torch.ones(4, 2)[:, 0]], one(), one(), one()), "expected a contiguous"),
        (lambda: kernels.adamw(one(), one(), one(), one(), betas=(0.9, 1.0)), "betas are"),
        (lambda: kernels.adamw(one(), one(), one(), one(), weight_decay=[0.1, 0.1]), "weight_decay has 2"),
        (lambda: kernels.adamw(one(), one(), one(), one(), weight_decay=10**400), "weight_decay has 1"),
        (lambda: kernels.adamw(one(), one(), one(), one(), eps=10**400), "eps is a whole number of 1329 bits"),
        (lambda: kernels.adamw(one(), one(), one(), one(), rate=torch.ones(2)), "rate has shape (2,)"),
        (lambda: kernels.adamw(one(), one(), one(), one(), step=0), "step is 0: expected a whole number, at least 1"),
        (lambda: kernels.adamw(one(), one(), one(), one(), step=1.5), "step is 1.5: expected a whole number"),
        (lambda: kernels.adamw(one(), one(), one(), one(), rate="a"), "rate is 'a': expected a number"),
        (lambda: kernels.adamw(one(), one(), one(), one(), rate=float("nan")), "rate is nan: expected 0 or more"),
        (lambda: kernels.adamw(one(), one(), one(), one(), divisor=0.0), "divisor is 0: expected"),
        (lambda: kernels.adamw(one(), one(), one(), one(), implementation="cuda"), "unknown implementation"),
        (lambda: kernels.adamw(one(), one(), one(), one(), implementation="triton"), "needs CUDA tensors"),
        (lambda: kernels.global_norm([]), "at least one"),
    ],
)
def test_bad_arguments_get_a_reason(call, words):
    with pytest.raises(UsageError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize("how", ["interpret", "torch"])
@pytest.mark.parametrize("with_masters", [False, True])
def test_a_compiled_step_is_the_one_outside(how, with_masters):
    """One operator of a graph, clipping included; a number that changes makes no new graph when it is a tensor."""
    dtype = torch.bfloat16 if with_masters else torch.float32
    shapes = ((3, 5), (1500,))

    def step(parameters, gradients, averages, squares, masters, rate, count):
        norm = kernels.global_norm(gradients, implementation=how)
        kernels.adamw(
            parameters, gradients, averages, squares, masters, rate=rate, step=count, divisor=norm.clamp(min=1.0),
            weight_decay=[0.1, 0.0], implementation=how,
        )  # fmt: skip
        return norm

    made = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        parameters = drawn(dtype, shapes=shapes)
        averages, squares = ([torch.zeros(shape) for shape in shapes] for _ in range(2))
        masters = [parameters[0].float(), None] if with_masters else None
        if with_masters:
            parameters[1] = parameters[1].float()
        for count in (1, 2):
            gradients = [g.to(p.dtype) for g, p in zip(drawn(seed=count, shapes=shapes), parameters, strict=True)]
            numbers = torch.tensor(0.01 * count), torch.tensor(count)
            norm = function(parameters, gradients, averages, squares, masters, *numbers)
        made.append([*parameters, *averages, *squares, norm, *[m for m in masters or () if m is not None]])
    for ours, other in zip(*made, strict=True):
        assert torch.equal(ours, other)


def test_the_operators_of_a_graph_are_sound():
    def given():
        lists = [drawn(torch.float32, seed, ((3, 5), (7,))) for seed in range(2)]
        averages = [[torch.ones(3, 5), torch.ones(7)] for _ in range(2)]
        numbers = [torch.full((1,), value, dtype=torch.float64) for value in (0.01, 2.0, 1.0)]
        return [*lists, *averages, [], [], *numbers, [0.9, 0.99], 1e-8, [0.1, 0.0], "interpret"]

    torch.library.opcheck(torch.ops.tilemesh.adamw.default, tuple(given()))
    torch.library.opcheck(torch.ops.tilemesh.global_norm.default, (given()[0], "interpret"))


@pytest.mark.parametrize("how", ["interpret", "torch"])
def test_fake_tensors_are_stepped(how):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        parameters, gradients, averages, squares = ([torch.ones(3, 5)] for _ in range(4))
        kernels.adamw(parameters, gradients, averages, squares, rate=0.1, step=1, implementation=how)
        assert parameters[0].shape == (3, 5)
        assert kernels.global_norm(gradients, implementation=how).shape == ()
    with FakeTensorMode(), pytest.raises(UsageError, match="step is 0"):
        kernels.adamw(parameters, gradients, averages, squares, step=0, implementation=how)


class Program:
    """What a launch leaves: counts how often it was launched, and on which memory."""

    def __init__(self, name, addresses):
        self.name, self.launched = name, [addresses]

    def launch(self, addresses):
        self.launched.append(list(addresses))


@pytest.fixture
def programs(monkeypatch):
    """AdamW as on a GPU, with launches that do nothing; those that were compiled or looked up, in order."""
    reference = importlib.import_module("tilemesh.kernels.adamw.reference")
    made = []

    def launch(plan, tensors, written, **constants):
        made.append(Program(plan.__name__, [tensor.data_ptr() for tensor in tensors.values()]))
        return made[-1]

    monkeypatch.setattr(reference, "implementation_of", lambda implementation, tensors: "triton")
    monkeypatch.setattr(reference.call, "compiled", launch)
    return made


def test_a_step_on_the_same_memory_is_launched_again_and_not_planned(programs):
    parameters, gradients, rate, step = drawn(), drawn(seed=1), torch.tensor(0.01), torch.tensor(1.0)
    optimizer = kernels.AdamW(parameters, zeros(), zeros())
    for _ in range(3):
        optimizer.step(gradients, rate=rate, step=step)
    names = [program.name for program in programs]
    assert names.count("correct_plan") == 1
    assert all(len(program.launched) == 3 and program.launched[0] == program.launched[2] for program in programs)


@pytest.mark.parametrize(
    "changed",
    [
        lambda given: given["gradients"].__setitem__(0, given["gradients"][0].clone()),
        lambda given: given["gradients"].__setitem__(3, given["gradients"][3].to(torch.float32)),
        lambda given: given.update(divisor=2.0),
        lambda given: given.update(divisor=torch.tensor(2.0)),
        lambda given: given.update(rate=given["rate"].clone()),
        lambda given: given.update(rate=0.01),
        lambda given: given.update(step=2),
        lambda given: setattr(given["parameters"][0], "data", given["parameters"][0].clone()),
    ],
)
def test_a_step_that_differs_is_planned_anew(programs, changed):
    given = {"gradients": drawn(seed=1), "rate": torch.tensor(0.01), "step": torch.tensor(1.0), "divisor": 1.0}
    parameters = drawn()
    optimizer = kernels.AdamW(parameters, zeros(), zeros())
    optimizer.step(given["gradients"], **{name: given[name] for name in ("rate", "step", "divisor")})
    before = len(programs)
    given["parameters"] = parameters
    changed(given)
    optimizer.step(given["gradients"], **{name: given[name] for name in ("rate", "step", "divisor")})
    assert len(programs) > before
    assert all(len(program.launched) == 1 for program in programs)


def test_a_gradient_of_another_shape_is_refused_after_a_step_too(programs):
    parameters, gradients, rate = drawn(), drawn(seed=1), torch.tensor(0.01)
    optimizer = kernels.AdamW(parameters, zeros(), zeros())
    optimizer.step(gradients, rate=rate, step=torch.ones(1))
    gradients[0] = gradients[0].view(5, 3)
    with pytest.raises(UsageError, match=r"gradients\[0\]"):
        optimizer.step(gradients, rate=rate, step=torch.ones(1))
    with pytest.raises(UsageError, match="gradients for"):
        optimizer.step(gradients[1:], rate=rate, step=torch.ones(1))


def test_steps_that_are_kept_to_be_repeated_are_few(programs):
    optimizer = kernels.AdamW(drawn(), zeros(), zeros())
    rate, others = torch.tensor(0.01), [drawn(seed=seed) for seed in range(20)]
    for gradients in others:
        optimizer.step(gradients, rate=rate, step=torch.ones(1))
    assert len(optimizer._repeated) == 8


@pytest.mark.parametrize("how", ["torch", "interpret"])
@pytest.mark.parametrize(
    "step", [torch.tensor([0]), torch.tensor(0.0), torch.tensor(-1), torch.tensor(float("nan")), 0]
)
def test_a_step_before_the_first_is_refused_wherever_it_lies(how, step):
    parameters = drawn()
    before = [parameter.clone() for parameter in parameters]
    with pytest.raises(UsageError, match="step is"):
        kernels.adamw(parameters, drawn(seed=1), zeros(), zeros(), rate=0.1, step=step, implementation=how)
    assert all(torch.equal(one, other) for one, other in zip(parameters, before, strict=True))
