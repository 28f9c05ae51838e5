"""The seam for operators: the registry, `@operator`, and the smallest operator there is (scale_shift)."""

from __future__ import annotations

import ast
import functools
import importlib
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget

import tilemesh as tm
from tilemesh.bench.kernel.book import bench_of
from tilemesh.core.cost import Cost
from tilemesh.core.errors import RunError, UsageError
from tilemesh.kernels import registry
from tilemesh.kernels.accuracy import accumulator, excess, rounding_error, sum_error, unit
from tilemesh.kernels.activations.names import ACTIVATIONS
from tilemesh.kernels.activations.reference import activate, slope
from tilemesh.kernels.context import Context, use
from tilemesh.kernels.launch import call, interpret
from tilemesh.kernels.launch.operator import operator
from tilemesh.kernels.launch.program import Operand, _typed, compile_step
from tilemesh.kernels.launch.steps import INT32_LIMIT, LaunchPlan, Pointer, Step
from tilemesh.kernels.operator_bench import FunctionBench
from tilemesh.kernels.scale_shift import kernel, reference
from tilemesh.kernels.scale_shift.cost import cost

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
scale_shift = tm.kernels.scale_shift


def inputs(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in (shape, shape[-1:], shape[-1:])]


def wrong_with(y, x, scale, shift, activation="none"):
    exact = reference.exact(x, scale, shift, activation)
    assert (y.dtype, y.shape) == (x.dtype, exact.shape)
    return excess(y, exact, reference.error_bound(x, scale, shift, activation))


# ---- scale_shift -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_and_dtype_is_within_its_bound(activation, dtype):
    given = inputs(9, 530, dtype=dtype)
    assert (
        wrong_with(scale_shift(*given, activation=activation, implementation="interpret"), *given, activation) is None
    )


def test_the_bound_sees_real_faults():
    x, scale, shift = inputs(37, 530)
    y = scale_shift(x, scale, shift, implementation="interpret")
    for fault in (y.bfloat16().float(), y.roll(1, 0), y + (torch.arange(530) == 529) * 1e-5):
        assert wrong_with(fault, x, scale, shift) is not None


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(
    shape=st.lists(st.integers(1, 9), min_size=0, max_size=2), columns=st.sampled_from([1, 5, 64, 513]),
    dtype=st.sampled_from(DTYPES), turned=st.booleans(), step=st.integers(1, 3), offset=st.integers(0, 3),
)  # fmt: skip
def test_any_shape_and_strides(shape, columns, dtype, turned, step, offset):
    x, scale, shift = inputs(*shape, offset + step * columns, dtype=dtype)
    x, scale, shift = (tensor[..., offset::step] for tensor in (x, scale, shift))
    x = x.transpose(0, 1) if turned and x.dim() == 3 else x
    assert wrong_with(scale_shift(x, scale, shift, implementation="interpret"), x, scale, shift) is None


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (2, 0, 3)])
@pytest.mark.parametrize("implementation", ["auto", "interpret"])
def test_sizes_of_zero(shape, implementation):
    given = [tensor.requires_grad_() for tensor in inputs(*shape)]
    y = scale_shift(*given, activation="silu", implementation=implementation)
    assert y.shape == shape
    y.sum().backward()
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in given)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_once_and_twice(activation):
    given = [tensor.requires_grad_() for tensor in inputs(3, 4, dtype=torch.float64, seed=1)]

    def interpreted(*tensors):
        return scale_shift(*tensors, activation=activation, implementation="interpret")

    torch.autograd.gradcheck(interpreted, given, fast_mode=True)
    if activation in ("none", "silu"):
        torch.autograd.gradgradcheck(interpreted, given, fast_mode=True)


def test_gradients_of_many_rows_add_up_in_a_fixed_order():
    given = [tensor.requires_grad_() for tensor in inputs(3, 50, 70)]
    grad = torch.randn(3, 50, 70)
    found = []
    for _ in range(2):
        y = scale_shift(*given, activation="gelu", implementation="interpret")
        found.append(torch.autograd.grad(y, given, grad))
    assert all(torch.equal(first, again) for first, again in zip(*found, strict=True))
    x, scale, shift = wide = [tensor.detach().double().requires_grad_() for tensor in given]
    total = x * scale + shift
    exact = torch.autograd.grad(activate(total, "gelu"), wide, grad.double())
    # What the slope is taken at is off by two roundings, and no slope changes faster than by 2; its own arithmetic errs
    # as in `gradient_error_bounds` of the matmul. Then 150 rows are added up.
    size, single = total.abs(), unit(torch.float32)
    slope_error = 4 * ((x * scale).abs() + shift.abs()) * single + (8 + 2 * size) * (1 + size) * single
    steep, wrong = slope(total, "gelu").abs() * grad.abs(), slope_error * grad.abs()
    for mine, true, factor in zip(found[0], exact, (scale, x, torch.ones_like(x)), strict=True):
        terms = x.numel() // true.numel()
        sizes = (steep * factor.abs()).sum_to_size(true.shape)
        bound = (wrong * factor.abs()).sum_to_size(true.shape) + sum_error(sizes, terms + 2, torch.float32)
        assert (over := excess(mine, true.detach(), 1.01 * bound.detach())) is None, over


def test_only_what_needs_a_gradient_gets_one():
    x, scale, shift = inputs(4, 6)
    scale.requires_grad_()
    scale_shift(x, scale, shift, implementation="interpret").sum().backward()
    torch.testing.assert_close(scale.grad, x.sum(0))
    assert x.grad is None
    assert shift.grad is None


@pytest.mark.parametrize(("implementation", "ours_in_graph"), [("auto", False), ("interpret", True)])
def test_it_compiles_to_one_graph_forward_and_backward(implementation, ours_in_graph, recording):
    def function(*tensors):
        return scale_shift(*tensors, activation="silu", implementation=implementation) * 2

    backend, recorded = recording
    ours, plain = ([t.requires_grad_() for t in inputs(6, 5)] for _ in range(2))
    torch.compile(function, fullgraph=True, backend=backend)(*ours).sum().backward()
    (scale_shift(*plain, activation="silu", implementation="torch") * 2).sum().backward()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    called = ["tilemesh.scale_shift.default", "tilemesh.scale_shift_backward.default"] if ours_in_graph else []
    assert [name for name in recorded if name.startswith("tilemesh.")] == called


def test_transforms_inside_compile_see_through_it(recording):
    """They cannot see into an operator of ours: there, the compiled graph holds the reference."""
    backend, recorded = recording
    x, scale, shift = inputs(6, 5)

    def function(x):
        return scale_shift(x, scale, shift, activation="silu", implementation="interpret")

    for transformed in (
        lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),)),
        torch.func.grad(lambda x: function(x).sum()),
        torch.func.vmap(function),
        torch.func.jacfwd(lambda x: function(x).sum(0)),
    ):
        compiled = torch.compile(transformed, fullgraph=True, backend=backend)
        torch.testing.assert_close(compiled(x), transformed(x))
    assert not [name for name in recorded if name.startswith("tilemesh.")]


def test_opcheck_fake_tensors_and_transforms():
    given = [tensor.requires_grad_() for tensor in inputs(6, 5)]
    torch.library.opcheck(torch.ops.tilemesh.scale_shift.default, (*given, "gelu", "interpret"))
    with FakeTensorMode():
        fake = [torch.empty(2, 3, 4), torch.empty(4), torch.empty(4)]
        assert scale_shift(*fake, implementation="interpret").shape == (2, 3, 4)
        with pytest.raises(UsageError, match="do not fit"):
            scale_shift(torch.empty(3), *fake[1:])
    x, scale, shift = inputs(6, 5)
    value = torch.func.grad(lambda x: scale_shift(x, scale, shift, implementation="interpret").sum())(x)
    torch.testing.assert_close(value, scale.expand(6, 5))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x, s, t: scale_shift(x, s, t.double()), "shift float64: expected one dtype"),
        (lambda x, s, t: scale_shift(x, s, t.to("meta")), "different devices"),
        (lambda x, s, t: scale_shift(x, s[:2], t), r"scale \(2,\)"),
        (lambda x, s, t: scale_shift(x, s, None), "shift is None"),
        (lambda x, s, t: scale_shift(None, None, None), "x is None"),
        (lambda x, s, t: tm.kernels.attention(None, None, None), "is None: expected a torch.Tensor"),
        (lambda x, s, t: scale_shift(x, s), "missing: shift"),
        (lambda x, s, t: scale_shift(x, s, [1.0]), "shift is a list"),
        (lambda x, s, t: scale_shift(x.int(), s.int(), t.int()), "x int32"),
        (lambda x, s, t: scale_shift(x.to_sparse(), s, t), "x has layout"),
        (lambda x, s, t: scale_shift(x, s, t, activation="rellu"), "did you mean 'relu'"),
        (lambda x, s, t: scale_shift(x, s, t, activatoin="relu"), "did you mean 'activation'"),
        (lambda x, s, t: scale_shift(x, s, t, activation=t), "activation is a Tensor: expected a str"),
        (lambda x, s, t: scale_shift(x, s, t, "relu"), "got 4 arguments; give activation by name"),
        (lambda x, s, t: scale_shift(x, s, t, shift=s), "given shift twice"),
        (lambda x, s, t: scale_shift(x, s, t, implementation="trition"), "unknown implementation"),
        (lambda x, s, t: scale_shift(x, s, t, implementation="triton"), "needs CUDA tensors"),
    ],
)
def test_bad_input_is_refused_with_what_was_given(function, words):
    with pytest.raises(UsageError, match=words):
        function(*inputs(4, 5))


def test_what_is_launched_is_planned_once_per_signature(monkeypatch):
    """On a GPU that is not here: programs are kept in the context by all that they were planned from."""
    made, ran = [], []

    class Pretended:
        def __init__(self, plan, tensors, device, constants):
            made.append((plan, constants["activation"]))

        def launch(self, addresses):
            ran.append(addresses)

    monkeypatch.setattr(call, "_compile", Pretended)
    x, scale, shift = inputs(4, 64)

    def launch(x, activation):
        given = {"x": x, "scale": scale, "shift": shift, "y": x}
        call.compiled(max, given, ("y",), activation=activation)

    with use(Context()):
        for tensor in (x, x.clone(), x.t().contiguous().t(), x[:, 1:], x[:2]):
            launch(tensor, "relu")
        launch(x, "gelu")
    assert len(ran) == 6
    assert len(made) == 5  # a clone lies as the original does
    with use(Context()):
        launch(x, "relu")
    assert len(made) == 6


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_kernels_compile_for_an_h200_that_is_not_here(dtype):
    def place(*shape, dtype=dtype):
        return call.Place(shape, tuple(math.prod(shape[at + 1 :]) for at in range(len(shape))), dtype, True)

    vectors = {"scale": place(100), "shift": place(100)}
    sums = place(2, 2, 100, dtype="float64" if dtype == "float64" else "float32")
    backward = {"grad": place(50, 100), "x": place(50, 100), **vectors, "dx": place(50, 100), "sums": sums}
    for plan, places in (
        (kernel.forward_plan, {"x": place(50, 100), **vectors, "y": place(50, 100)}),
        (kernel.backward_plan, backward),
    ):
        (step,) = plan(places, activation="gelu").steps
        operands = {name: Operand(where.dtype) for name, where in places.items()}
        assert compile_step(step, operands, GPUTarget("cuda", 90, 32)).asm["ptx"]


def compiles_for_an_h200(plan, places, **constants):
    """Types of a loop's values, for one, are checked by the compiler alone."""
    for step in plan(places, **constants).steps:
        operands = {name: Operand(place.dtype) for name, place in places.items()}
        assert compile_step(step, operands, GPUTarget("cuda", 90, 32)).asm["ptx"]


def test_a_number_is_as_precise_as_the_tensors_beside_it():
    """A float argument of a step is given at each launch: other values share the kernel."""
    step = Step("module:function", (1, 1), {"x": Pointer("x"), "scale": 0.1}, {})
    for dtype, kind in (("bfloat16", "fp32"), ("float32", "fp32"), ("float64", "fp64")):
        others = {"not_given": Operand("float64")}
        assert _typed(step, "scale", {"x": Operand(dtype), **others}) == (kind, None, 1)
    for real, exact in ((tl.float32, 0.10000000149011612), (tl.float64, 0.1)):  # the interpreter's too
        scalar = interpret._value(0.1, {}, real)
        assert (scalar.dtype, scalar.handle.data.item()) == (real, exact)


def test_a_place_says_when_offsets_need_64_bits():
    meta = torch.empty(2, INT32_LIMIT // 2, device="meta")
    assert call.Place(tuple(meta.shape), meta.stride(), "float32", True).wide
    assert not call.Place((2, 8), (8, 1), "float32", True).wide


def test_cost_counts_each_element_once():
    work = cost(100, 30, "float16")
    assert (work.bytes_read, work.bytes_written, work.flops) == (2 * (3000 + 60), 6000, 6000)


# ---- the registry ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", registry.names())
def test_every_operator_has_its_parts(name):
    entry = registry.find(name)
    assert callable(entry.load("public"))
    assert callable(entry.load("reference"))
    assert entry.load("public") is getattr(tm.kernels, entry.public.partition(":")[2])
    if entry.tuner is not None:
        assert entry.load("tuner").tables.operator == name
    form, bench = entry.load("form"), bench_of(entry)
    assert (bench.form, bench.name) == (form, entry.public.partition(":")[2])
    count = form.sizes.count("x") + 1
    digits = {2: "64", 5: "25342"}  # the last one even, as int4 packs pairs; of five sizes, two of them count programs
    shape = "x".join(digits.get(count, "65432"[:count]))
    known = form.settings["dtype"].known
    is_exact = "float32" in known
    settings = {
        "dtype": "float32" if is_exact else known[0],
        **({"passes": "forward"} if "passes" in form.settings else {}),
    }
    problem = form.problem(shape, settings)
    assert isinstance(form.cost(problem), Cost)
    assert form.cost_of(form.case(shape, settings)) == form.cost(problem)
    for listed in form.suite:
        form.problem(listed, {})
    given = bench.arguments(problem, torch.device("cpu"), 0)
    ours, interpret = bench.calls(problem)["ours"], functools.partial(entry.load("public"), implementation="interpret")
    by_name = {key: value for key, value in getattr(problem, "options", {}).items() if key != "passes"}
    if isinstance(bench, FunctionBench):  # which may make more of a problem, such as the dtype of its result
        by_name = bench._options(problem)
    interpreted = interpret(*given, **by_name)
    assert (interpreted is None) == bench.in_place
    if bench.in_place:
        before, after = (bench.arguments(problem, torch.device("cpu"), 0) for _ in range(2))
        assert bench.wrong(problem, before, after) is not None
        ours(*after)
        assert bench.wrong(problem, before, after) is None
        return
    torch.testing.assert_close(interpreted, ours(*given))
    first = interpreted[0] if isinstance(interpreted, tuple) else interpreted
    assert bench.wrong(problem, given, first) is None
    assert bench.wrong(problem, given, first + (0.01 if is_exact else 1.0)) is not None


JOINED = """
import sys, torch, tilemesh as tm
from tilemesh.bench.kernel.book import bench_of
from tilemesh.bench.kernel.cases import cases_of
from tilemesh.cli.main import main
from tilemesh.kernels import registry
assert "softsign" in registry.names() and registry.find_function("softsign") is registry.find("softsign")
x = torch.randn(5, 7)
for implementation in ("torch", "interpret"):
    torch.testing.assert_close(tm.kernels.softsign(x, implementation=implementation), torch.nn.functional.softsign(x))
bench = bench_of(registry.find("softsign"))
problem = bench.form.problem("5x7", {"dtype": "float32"})
assert bench.wrong(problem, (x,), tm.kernels.softsign(x)) is None
assert bench.wrong(problem, (x,), tm.kernels.softsign(x) + 0.01) is not None
assert {case.shape for case in cases_of(["all"]) if case.operator == "softsign"} == {*bench.form.suite}
sys.exit(main(["bench", "kernel", "softsing"]))
"""


def test_an_operator_of_another_package_joins_by_an_entry_point(tmp_path):
    """As docs/extending.md has it: the three files of the example, an entry point, and nothing else."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(encoding="utf-8"), re.S)
    package, about = tmp_path / "your_package" / "softsign", tmp_path / "your_package-1.0.dist-info"
    package.mkdir(parents=True)
    for name, mark in {"reference": "def softsign(x", "kernel": "def softsign_pass(", "cost": "def cost(",
                       "__init__": "ENTRY = folder("}.items():  # fmt: skip
        code = next(block for block in blocks if mark in block)
        (package / f"{name}.py").write_text(code.replace("tilemesh.kernels.softsign", "your_package.softsign"))
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: your_package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[tilemesh.operators]\nsoftsign = your_package.softsign:ENTRY\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH"), str(ROOT / "src")]))
    line = [sys.executable, "-c", JOINED]
    done = subprocess.run(line, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert "did you mean 'softsign'?" in done.stderr
    (package / "__init__.py").write_text("ENTRY = 1\n")
    failed = [sys.executable, "-c", "from tilemesh.kernels import registry; registry.names()"]
    done = subprocess.run(failed, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120)
    assert "your_package.softsign:ENTRY is int: expected OperatorEntry (tilemesh.operators)" in done.stderr


def test_every_decorated_operator_is_in_the_registry():
    """Found in the source: what is decorated with @operator can be measured, listed and called by its name."""
    found = set()
    for file in (ROOT / "src" / "tilemesh" / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                named = {ast.unparse(decorator).partition("(")[0] for decorator in node.decorator_list}
                found |= {node.name} if "operator" in named else set()
    assert len(found) >= 24
    assert found <= {entry.public.partition(":")[2] for entry in map(registry.find, registry.names())}


def test_an_unknown_operator_gets_the_nearest_known():
    with pytest.raises(UsageError, match="did you mean 'matmul'"):
        registry.find("matmull")
    with pytest.raises(UsageError, match="'scale_shift' has nothing to tune; these have: matmul"):
        registry.find("scale_shift").load("tuner")
    with pytest.raises(UsageError, match="is there already"):
        registry.register(registry.find("matmul"))


def test_the_registry_loads_neither_torch_nor_triton():
    code = (
        "import sys; from tilemesh.kernels import registry, context; import tilemesh.kernels; "
        "registry.find('matmul'); dir(tilemesh.kernels); assert not {'torch', 'triton', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- the document ----------------------------------------------------------------------------------------------------


def test_the_documents_example_works(tmp_path, monkeypatch, recording):
    """An operator made of docs/extending.md alone, in a package of its own: three files and a registration."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    section = text[text.index("## Add an operator") :]
    folder, home = tmp_path / "documented" / "softsign", "documented.softsign"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    for name in ("reference", "kernel", "cost"):
        code = section[section.index(f"`kernels/softsign/{name}.py`") :].split("```python\n", 1)[1].split("```", 1)[0]
        (folder / f"{name}.py").write_text(code.replace("tilemesh.kernels.softsign", home))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "_operators", dict(registry._operators))
    registry.register(registry.folder("softsign", home))
    test_every_operator_has_its_parts("softsign")
    softsign = registry.find("softsign").load("public")
    for dtype in DTYPES:
        whole = torch.randn(7, 300).to(dtype)
        for x in (whole, whole.t(), whole[0, ::2], whole[:, 3], whole[:1].expand(5, 300), whole[0, 0].expand(4)):
            exact = 2.1 * x.double() / (1 + x.double().abs())
            bound = rounding_error(exact, dtype) + 8 * unit(accumulator(dtype)) * exact.abs()
            assert excess(softsign(x, scale=2.1, implementation="interpret"), exact, bound) is None
    for dtype in ("bfloat16", "float64"):
        place = call.Place((3000,), (1,), dtype, aligned=True)
        plan = importlib.import_module(f"{home}.kernel").plan
        compiles_for_an_h200(plan, {"x": place, "y": place}, scale=0.1)
    wide = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: softsign(x, scale=0.1, implementation="interpret"), wide, fast_mode=True)
    x = torch.randn(3, 5, requires_grad=True)
    (found,) = torch.autograd.grad(softsign(x, implementation="interpret").sum(), x)
    torch.testing.assert_close(found, 1 / (1 + x.detach().abs()) ** 2)
    backend, recorded = recording
    compiled = torch.compile(lambda x: softsign(x, implementation="interpret"), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(x), softsign(x))
    assert "tilemesh.softsign.default" in recorded
    scaled = torch.compile(
        lambda x, s: softsign(x, scale=s, implementation="interpret"), fullgraph=True, backend=backend
    )
    for scale in (0.5, 0.7, 2, 3.25):
        torch.testing.assert_close(scaled(x, scale), softsign(x, scale=scale))
    with pytest.raises(UsageError, match="expected a number above 0"):
        softsign(x, scale=-1.0)
    assert torch.equal(softsign(x, scale=2), softsign(x, scale=2.0))
    for wrong, words in (("3", "'3', a str: expected a float"), (True, "a bool"), (torch.tensor(3.0), r"\.item\(\)")):
        with pytest.raises(UsageError, match=f"scale is .*{words}"):
            softsign(x, scale=wrong)
    del tm.kernels.softsign  # what the package looked up it keeps


def test_the_documents_kept_tensor_works(tmp_path, monkeypatch, recording):
    """The second example: a sum over rows, with a result kept in more digits than it is returned in."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
    blocks = [part.split("```", 1)[0] for part in text.split("```python\n")[1:]]
    home = tmp_path / "documented_sum"
    home.mkdir()
    for name in ("reference", "kernel"):
        (code,) = (part for part in blocks if part.startswith(f"# {name}.py\n"))
        (home / f"{name}.py").write_text(code.replace("tilemesh.kernels.log_sum_exp", "documented_sum"))
    monkeypatch.syspath_prepend(str(tmp_path))
    log_sum_exp = importlib.import_module("documented_sum.reference").log_sum_exp

    def interpreted(x):
        return log_sum_exp(x, implementation="interpret")

    for x in (
        torch.randn(3, 1500),
        torch.randn(40, 5).t(),
        torch.randn(2, 3, 8)[..., ::2],
        torch.randn(7).expand(2, 7),
    ):
        torch.testing.assert_close(interpreted(x), log_sum_exp(x))
    for dtype, sums in (("bfloat16", "float32"), ("float64", "float64")):
        places = {"x": call.Place((30, 100), (100, 1), dtype, aligned=True)}
        places |= {
            name: call.Place((30,), (1,), kind, aligned=True) for name, kind in (("y", dtype), ("precise", sums))
        }
        compiles_for_an_h200(importlib.import_module("documented_sum.kernel").plan, places)
    wide = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(interpreted, wide, fast_mode=True)
    torch.autograd.gradgradcheck(interpreted, wide, fast_mode=True)
    narrow = (9 + torch.randn(4, 64)).bfloat16().requires_grad_()
    exact = torch.softmax(narrow.detach().double(), -1)
    backend, recorded = recording
    for function in (interpreted, torch.compile(interpreted, fullgraph=True, backend=backend)):
        (grad,) = torch.autograd.grad(function(narrow).sum(), narrow)
        bound = rounding_error(exact, torch.bfloat16) + 1e-4 * exact
        assert excess(grad, exact, bound) is None
    assert {"tilemesh.log_sum_exp.default", "tilemesh.log_sum_exp_backward.default"} <= set(recorded)


# ---- what an author can get wrong ------------------------------------------------------------------------------------


@pytest.fixture
def author(tmp_path, monkeypatch):
    """Makes an operator `name(a, b)` from the source of its kernel module."""

    def make(name, source, **options):
        (tmp_path / f"kernel_of_{name}.py").write_text(source)
        monkeypatch.syspath_prepend(str(tmp_path))

        def added(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

        added.__name__ = name
        return operator(kernel=f"kernel_of_{name}", **options)(added)

    return make


FORWARD = "def forward(launch, a, b):\n    return a + b\n"


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("bare", "gradients[0]", "returned 1 gradients for 2 tensors: a, b"),
        ("nothing", "None", "returned 0 gradients for 2 tensors"),
        ("many", "gradients * 3", "returned 3 gradients for 2 tensors"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_backward_of_too_few_or_many_gradients_is_refused(author, name, answer, words, compiled):
    name = f"toy_{name}_{'compiled' if compiled else 'eager'}"
    toy = author(name, f"{FORWARD}def backward(launch, gradients, arguments, kept):\n    return {answer}\n")
    a, b = (torch.randn(2, 3, requires_grad=True) for _ in range(2))

    def function(a, b):
        return toy(a, b, implementation="interpret")

    y = (torch.compile(function, backend="aot_eager") if compiled else function)(a, b)
    with pytest.raises(RunError, match=f"backward of {name} {words}"):
        y.sum().backward()


@pytest.mark.parametrize("compiled", [False, True])
def test_none_in_place_of_a_gradient_stays_in_its_place(author, compiled):
    backward = "def backward(launch, gradients, arguments, kept):\n    return None, gradients[0] * 2\n"
    toy = author(f"toy_none_{'compiled' if compiled else 'eager'}", FORWARD + backward)
    a, b = (torch.randn(2, 3, requires_grad=True) for _ in range(2))

    def function(a, b):
        return toy(a, b, implementation="interpret")

    (torch.compile(function, backend="aot_eager") if compiled else function)(a, b).sum().backward()
    assert a.grad is None or not a.grad.any()
    assert torch.equal(b.grad, torch.full((2, 3), 2.0))


def test_what_is_kept_must_be_declared_and_returned(author):
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    toy = author("toy_undeclared", "def forward(launch, a, b):\n    return a + b, a\n")
    with pytest.raises(
        RunError, match="returned 2 tensors: expected 1 as the reference returns and 0 declared in kept="
    ):
        toy(a, b, implementation="interpret")
    toy = author("toy_unreturned", FORWARD, kept=(lambda a, b: torch.empty_like(a),))
    with pytest.raises(RunError, match="returned 1 tensors: expected 1 as the reference returns and 1 declared"):
        toy(a, b, implementation="interpret")


def no_annotation(a: torch.Tensor, b) -> torch.Tensor: ...
def wrong_type(a: torch.Tensor, b: list) -> torch.Tensor: ...
def no_return(a: torch.Tensor): ...
def wrong_return(a: torch.Tensor) -> list[torch.Tensor]: ...
def any_number(a: torch.Tensor) -> tuple[torch.Tensor, ...]: ...
def many_given(*a: torch.Tensor) -> torch.Tensor: ...
def no_tensor(a: int) -> torch.Tensor: ...


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (no_annotation, "b of no_annotation is annotated with nothing: expected Tensor"),
        (wrong_type, "b of wrong_type is annotated with list: expected Tensor"),
        (no_return, "no_return returns nothing"),
        (wrong_return, r"wrong_return returns list\[torch.Tensor\]: expected"),
        (any_number, "any_number returns tuple"),
        (many_given, r"many_given takes \*a"),
        (no_tensor, "no_tensor takes no tensor"),
    ],
)
def test_a_reference_that_cannot_be_an_operator_is_refused(reference, words):
    with pytest.raises(UsageError, match=words):
        operator(kernel="nowhere")(reference)


@pytest.mark.parametrize(("pointer", "written"), [("z", "y"), ("y", "z")])
def test_a_plan_that_names_no_tensor_is_refused(pointer, written):
    step = Step("tilemesh.kernels.scale_shift.kernel:forward_pass", (1, 1), {"y": Pointer(pointer)}, {})
    with pytest.raises(UsageError, match=r"unknown tensor in .* 'z': .*known are x, y"):
        interpret.run(LaunchPlan((step,)), {"x": torch.ones(2), "y": torch.ones(2)}, (written,))


# ---- several results, and what is kept for the backward pass -------------------------------------------------------

UNIT_ROWS = {
    "reference": """
from torch import Tensor
from tilemesh.kernels.launch.operator import operator

@operator(kernel="toy_unit_rows.kernel", kept=(lambda x, bias: x.new_empty(x.shape[:1]),), keeps_results=True)
def unit_rows(x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x = x if bias is None else x + bias
    square = x.square().sum(-1, keepdim=True)
    return x / square.sqrt(), square
""",
    "kernel": """
def forward(launch, x, bias):
    x = x if bias is None else x + bias
    square = x.square().sum(-1, keepdim=True)
    length = square.sqrt()
    return x / length, square, length.squeeze(-1).clone()

def backward(launch, gradients, arguments, kept):
    x, bias = arguments
    unit, square, length = kept
    assert (unit.shape, square.shape, length.shape) == (x.shape, (len(x), 1), (len(x),))
    along = (gradients[0] * unit).sum(-1, keepdim=True)
    dx = (gradients[0] - unit * along) / length[:, None] + 2 * gradients[1] * unit * length[:, None]
    return dx, None if bias is None else dx.sum(0)
""",
}


def test_tuples_optional_tensors_and_what_is_kept(tmp_path, monkeypatch, recording):
    (tmp_path / "toy_unit_rows").mkdir()
    for name, code in UNIT_ROWS.items():
        (tmp_path / "toy_unit_rows" / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    unit_rows = importlib.import_module("toy_unit_rows.reference").unit_rows
    x, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 3), (3,)))

    def interpreted(*tensors):
        return unit_rows(*tensors, implementation="interpret")

    for leaves in ((x,), (x, bias)):
        torch.autograd.gradcheck(interpreted, leaves, fast_mode=True)
        torch.autograd.gradgradcheck(interpreted, leaves, fast_mode=True)
        for which in (0, 1):  # the other result's gradient is zero
            found = torch.autograd.grad(interpreted(*leaves)[which].sum(), leaves)
            wanted = torch.autograd.grad(unit_rows(*leaves)[which].sum(), leaves)
            torch.testing.assert_close(found, wanted)
    backend, recorded = recording
    compiled = torch.compile(lambda *t: interpreted(*t)[0] * 2, fullgraph=True, backend=backend)
    found = torch.autograd.grad(compiled(x, bias).square().sum() + compiled(x, bias)[0, 0], (x, bias))
    wanted = unit_rows(x, bias)[0] * 2
    torch.testing.assert_close(found, torch.autograd.grad(wanted.square().sum() + wanted[0, 0], (x, bias)))
    assert {"tilemesh.unit_rows.default", "tilemesh.unit_rows_backward.default"} <= set(recorded)
    torch.library.opcheck(torch.ops.tilemesh.unit_rows.default, (x, None, "interpret"))
    with pytest.raises(UsageError, match="x is None"):
        unit_rows(None)
