"""The fused matmul on a CPU: plain torch under `auto`, and every Triton kernel of the family in the interpreter.

Errors against float64 are held to bounds from arithmetic (`reference.error_bound`): operation counts, units of rounding
and the sizes of what is added, element by element.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilemesh as tm
from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import excess
from tilemesh.kernels.context import Context, default_context, use
from tilemesh.kernels.matmul import op, reference
from tilemesh.kernels.matmul.arguments import apart

pytest.importorskip("triton")

Config = tm.kernels.Config
fused = tm.kernels.fused_matmul

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "squared_relu")
C_KINDS = ("full", "row", "column", "none")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

# One of each path through each kernel; tiles of 64 and more, which the interpreter runs far faster than small ones.
FAMILY = [
    Config("pointer", 64, 64, 64),
    Config("pointer", 64, 128, 32, subtile=4),
    Config("pointer", 128, 64, 64, c_first=True, group=1),
    Config("tma", 64, 64, 64),
    Config("tma", 64, 128, 64, tma_epilogue=True, subtile=2),
    Config("tma", 64, 64, 64, c_first=True),
    Config("tma", 64, 64, 64, c_early=True, tma_epilogue=True),
    Config("tma", 64, 64, 64, copy="ab", tail=True, split_k=2),
    Config("persistent", 64, 64, 64, tma_epilogue=True, subtile=2),
    Config("persistent", 64, 64, 64, flatten=False, c_first=True, per_sm=2),
    Config("persistent", 64, 64, 64, tail=True, split_k=3, prefetch=True),
    Config("split", 64, 64, 32, split_k=3),
    Config("split", 64, 64, 32, split_k=2, tma_loads=False),
    Config("library"),
]


def draw(shape, dtype, seed, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def inputs(m, n, k, dtype=torch.float16, c_kind="full", turned=(False, False), seed=0):
    a = draw((k, m), dtype, seed).t() if turned[0] else draw((m, k), dtype, seed)
    b = draw((n, k), dtype, seed + 1).t() if turned[1] else draw((k, n), dtype, seed + 1)
    shape = {"full": (m, n), "row": (n,), "column": (m, 1), "none": None}[c_kind]
    return a, b, None if shape is None else draw(shape, dtype, seed + 2)


def assert_close(result, a, b, c, activation, *, separate=True):
    """separate: rounded between the product, the sum and the activation, as torch's and the library's results are."""
    assert result.dtype == a.dtype
    exact = reference.exact(a, b, c, activation)
    assert result.shape == exact.shape
    bound = reference.error_bound(a, b, c, activation, separate=separate)
    assert (wrong := excess(result, exact, bound)) is None, wrong


@pytest.mark.parametrize("number", range(len(FAMILY)), ids=[config.label for config in FAMILY])
def test_every_kernel(number):
    """Odd and aligned sizes, each layout, C kind, activation and dtype, shared out over the family."""
    config = FAMILY[number]
    turns = list(itertools.product((False, True), repeat=2))
    for step, shape in enumerate([(130, 100, 100), (136, 72, 96), (1, 40, 16), (70, 5, 3)]):
        at = number + step
        dtype, turned, c_kind = DTYPES[at % 3], turns[at % 4], C_KINDS[(at + number) % 4]
        a, b, c = inputs(*shape, dtype, c_kind, turned, seed=at)
        activation = ACTIVATIONS[(at * 5) % 6]
        d = fused(a, b, c, activation=activation, implementation="interpret", config=config)
        assert_close(d, a, b, c, activation, separate=config.kind == "library")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("c_kind", C_KINDS)
def test_every_activation_and_c_kind(activation, c_kind):
    a, b, c = inputs(70, 66, 40, c_kind=c_kind)
    for implementation in ("auto", "interpret"):
        d = fused(a, b, c, activation=activation, implementation=implementation)
        assert_close(d, a, b, c, activation, separate=implementation == "auto")


sizes = st.one_of(st.integers(1, 20), st.integers(60, 70), st.sampled_from([128, 130]))


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    m=sizes, n=sizes, k=sizes, config=st.sampled_from(FAMILY[:-1]), dtype=st.sampled_from(DTYPES),
    c_kind=st.sampled_from(C_KINDS), activation=st.sampled_from(ACTIVATIONS),
    turned=st.tuples(st.booleans(), st.booleans()), offset=st.integers(0, 3),
)  # fmt: skip
def test_any_shape_stride_and_dtype(m, n, k, config, dtype, c_kind, activation, turned, offset):
    a, b, c = inputs(m, n, k + offset, dtype, c_kind, turned)
    a, b = a[:, offset:], b[offset:]  # views: unaligned addresses, rows longer than K
    d = fused(a, b, c, activation=activation, implementation="interpret", config=config)
    assert_close(d, a, b, c, activation, separate=False)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    m=st.integers(0, 40), n=st.integers(0, 40), k=st.integers(0, 40), c_kind=st.sampled_from(C_KINDS),
    dtype=st.sampled_from((*DTYPES, torch.float64)), activation=st.sampled_from(ACTIVATIONS),
)  # fmt: skip
def test_auto_on_a_cpu_is_torch_for_any_size(m, n, k, c_kind, dtype, activation):
    a, b, c = inputs(m, n, k, dtype, c_kind)
    assert_close(fused(a, b, c, activation=activation), a, b, c, activation)


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)])
@pytest.mark.parametrize("config", [None, *FAMILY[::3]], ids=lambda c: "auto" if c is None else c.label)
def test_empty_sizes(shape, config):
    a, b, c = inputs(*shape)
    implementation = "auto" if config is None else "interpret"
    assert torch.equal(fused(a, b, c, implementation=implementation, config=config), torch.relu(c))


@pytest.mark.parametrize("config", FAMILY[::2], ids=lambda c: c.label)
def test_nan_and_infinity_behave_as_in_torch(config):
    a, b, c = inputs(70, 72, 40, torch.float32)
    a[3, 5], a[60, 2], c[9, 9], c[10, 10] = float("inf"), float("nan"), float("-inf"), float("nan")
    for activation in ("none", "relu", "squared_relu"):
        d = fused(a, b, c, activation=activation, implementation="interpret", config=config)
        want = reference.fused_matmul(a, b, c, activation)
        assert torch.equal(d.isnan(), want.isnan())
        assert torch.equal(d.isinf(), want.isinf())


def test_tf32_rounds_to_nearest_and_keeps_what_is_not_finite():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        a = torch.tensor([[1 + 2**-11, 1 + 2**-12, float("inf"), -1 - 2**-11]], dtype=torch.float32).t().contiguous()
        d = fused(a, torch.ones(1, 1), None, activation="none", implementation="interpret")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert d.flatten().tolist() == [1 + 2**-10, 1.0, float("inf"), -1 - 2**-10]


def test_out_is_written_in_place_and_nowhere_else():
    a, b, c = inputs(60, 50, 30)
    for config in (None, *FAMILY[::4]):
        held = torch.full((64, 60), float("nan"), dtype=torch.float16)
        out = held[2:62, 5:55]
        assert fused(a, b, c, out=out, implementation="interpret" if config else "auto", config=config) is out
        assert_close(out.clone(), a, b, c, "relu")
        out.fill_(float("nan"))
        assert held.isnan().all()


@pytest.mark.parametrize(
    "config", [None, FAMILY[0], FAMILY[8], FAMILY[-1]], ids=lambda c: "auto" if c is None else c.label
)
def test_out_may_share_memory_with_an_input(config):
    for shared in range(3):
        tensors = [draw((70, 70), torch.float32, seed) for seed in range(3)]
        given = [tensor.clone() for tensor in tensors]
        fused(*tensors, out=tensors[shared], implementation="interpret" if config else "auto", config=config)
        assert_close(tensors[shared], *given, "relu")


def test_lazily_negated_views_are_read_negated():
    negated = torch.conj(torch.complex(torch.zeros(4, 4), torch.ones(4, 4))).imag
    assert negated.is_neg()
    assert torch.equal(fused(negated, torch.eye(4), activation="none"), -torch.ones(4, 4))


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 5, 7), (5, 1), (2, 3, 5, 1), (1,), (1, 1), (3, 1, 1)])
@pytest.mark.parametrize("implementation", ["auto", "interpret"])
def test_batched_a_and_every_c_that_broadcasts(shape, implementation):
    a, b, c = draw((2, 3, 5, 8), torch.float32, 0), draw((8, 7), torch.float32, 1), draw(shape, torch.float32, 2)
    assert_close(fused(a, b, c, implementation=implementation), a, b, c, "relu")
    swapped = a.transpose(0, 2)
    assert_close(fused(swapped, b, implementation=implementation), swapped, b, None, "relu")


a44, h44 = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.float16)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fused(a44, torch.ones(5, 4)), r"a \(4, 4\), b \(5, 4\); expected a \(…, M, K\)"),
        (lambda: fused(torch.ones(4), a44), "do not multiply"),
        (lambda: fused(a44, torch.ones(2, 4, 4)), "do not multiply"),
        (lambda: fused(a44, a44, torch.ones(3)), "does not broadcast"),
        (lambda: fused(a44, a44, torch.ones(2, 4, 4)), "does not broadcast"),
        (lambda: fused(a44, h44), "b float16: expected one dtype"),
        (lambda: fused(a44.int(), a44.int()), "a int32"),
        (lambda: fused(a44, a44, a44.to("meta")), "c on meta"),
        (lambda: fused(a44, a44, activation="rellu"), "did you mean 'relu'"),
        (lambda: fused(a44, a44, implementation="trition"), "unknown implementation"),
        (lambda: fused(a44, a44, implementation="tma"), "needs CUDA tensors"),
        (lambda: fused(a44, a44, implementation="pointer", config=Config("tma")), "give one of the two"),
        (lambda: fused(h44, h44, implementation="interpret", config=Config("tma", 256, 256, 64)), "registers"),
        (lambda: fused(a44, a44, config=Config("torch", padded=True)), "padded needs kind library"),
        (lambda: fused(a44, a44, out=torch.ones(4, 5)), r"out is \(4, 5\)"),
        (lambda: fused(a44, a44, out=h44.clone()), "out is"),
        (lambda: fused(a44, a44, out=torch.ones(1, 4).expand(4, 4)), "expanded"),
        (lambda: fused(torch.ones(4, 4, requires_grad=True), a44, out=torch.ones(4, 4)), "out="),
        (lambda: tm.kernels.FusedLinear(4, 4, activation="tanh"), "unknown activation"),
    ],
)
def test_bad_input_is_refused_with_what_was_given(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_a_signature_seen_before_is_still_told_apart_by_everything_that_matters():
    a, b, c = inputs(8, 8, 8, torch.float32)
    first = fused(a, b, c, activation="relu")
    assert not torch.equal(first, fused(a, b, c, activation="none"))
    assert torch.equal(fused(a, b, c.t(), activation="relu"), torch.relu(torch.addmm(c.t(), a, b)))
    with pytest.raises(UsageError):
        fused(a, b, c.half())


def test_kernels_load_late():
    code = (
        "import sys, tilemesh, tilemesh.kernels, tilemesh.kernels.matmul.cost, tilemesh.kernels.matmul.select; "
        "assert 'torch' not in sys.modules and 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- C that could be mistaken for another, and sizes of zero ---------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 1), (10, 5, 1), (5, 1, 1), (5, 5, 1), (1, 5, 1), (5,), (5, 5)])
@pytest.mark.parametrize("implementation", ["auto", "interpret"])
def test_a_column_as_long_as_d_is_wide_is_still_a_column(shape, implementation):
    batch = shape[0] if len(shape) == 3 and shape[0] > 1 else 2
    a, b, c = draw((batch, 5, 3), torch.float32, 0), draw((3, 5), torch.float32, 1), draw(shape, torch.float32, 2)
    assert_close(fused(a, b, c, implementation=implementation), a, b, c, "relu")


def test_a_batched_column_with_as_many_elements_as_a_row():
    a, b, c = draw((2, 3, 4), torch.float32, 0), draw((4, 6), torch.float32, 1), draw((2, 3, 1), torch.float32, 2)
    for implementation in ("auto", "interpret"):
        assert_close(fused(a, b, c, implementation=implementation), a, b, c, "relu")


@pytest.mark.parametrize("shape", [(2, 3), (2, 2, 3)])
@pytest.mark.parametrize("columns", [1, 4])
def test_c_without_dims(shape, columns):
    a, b, c = draw(shape, torch.float32, 0), draw((3, columns), torch.float32, 1), torch.tensor(0.5)
    for implementation in ("auto", "interpret"):
        assert_close(fused(a, b, c, implementation=implementation), a, b, c, "relu")


@pytest.mark.parametrize(
    ("shape", "columns"), [((2, 3, 0), 4), ((2, 3, 4), 0), ((0, 3, 4), 5), ((2, 0, 4), 5), ((0, 0, 0), 0)]
)
@pytest.mark.parametrize("implementation", ["auto", "interpret"])
def test_batched_empty_sizes_with_and_without_out(shape, columns, implementation):
    a, b = torch.ones(shape), torch.ones(shape[-1], columns)
    for c in (None, torch.ones(columns), torch.ones(shape[1], 1), torch.ones(())):
        want = reference.fused_matmul(a, b, c, "relu")
        assert torch.equal(fused(a, b, c, implementation=implementation), want)
        out = torch.empty(want.shape)
        assert torch.equal(fused(a, b, c, implementation=implementation, out=out), want)


# ---- out= and who is watching it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["auto", "interpret"])
def test_writing_out_is_seen_by_autograd(implementation):
    x, w = torch.ones(4, 4), torch.ones(4, 4, requires_grad=True)
    y = w * x
    fused(a44, a44, out=x, implementation=implementation)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        assert fused(a44, a44, out=torch.empty(4, 4), implementation=implementation)[0, 0] == 4


def test_out_that_is_negated_lazily_is_written_as_it_reads():
    out = torch.conj(torch.complex(torch.zeros(4, 4), torch.ones(4, 4))).imag
    assert out.is_neg()
    assert torch.equal(fused(a44, a44, out=out), 4 * a44)


# ---- settings and devices --------------------------------------------------------------------------------------------


NEWER_PRECISION = """
import os, torch
from tilemesh.kernels import fused_matmul
from tilemesh.kernels.matmul import arguments

for owner in (torch.backends.cuda.matmul, torch.backends):
    if os.fork() == 0:
        try:
            assert not arguments.allows_tf32()
            owner.fp32_precision = "tf32"
            assert arguments.allows_tf32()
            for dtype in (torch.float32, torch.float64):
                fused_matmul(torch.ones(2, 2, dtype=dtype), torch.ones(2, 2, dtype=dtype))
            owner.fp32_precision = "ieee"
            assert not arguments.allows_tf32()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.wait()[1] == 0, owner
"""


@pytest.mark.usefixtures("warm")
def test_torchs_newer_precision_setting_is_read():
    """Each in a process of its own: the setting cannot be taken back once the two ways were mixed."""
    subprocess.run([sys.executable, "-c", NEWER_PRECISION], check=True, timeout=60)


def test_meta_tensors_have_a_shape_and_are_told_from_real_ones():
    meta = torch.empty(2, 3, 4, device="meta")
    assert fused(meta, torch.empty(4, 5, device="meta"), torch.empty(5, device="meta")).shape == (2, 3, 5)
    assert tm.kernels.FusedLinear(4, 5, activation="gelu", device="meta")(meta).shape == (2, 3, 5)
    fused(a44, a44)
    for tensors in ((a44, a44.to("meta")), (a44.to("meta"), a44), (a44, a44, a44.to("meta"))):
        with pytest.raises(UsageError, match="different devices"):
            fused(*tensors)


def test_runners_are_bounded_and_those_in_use_stay(monkeypatch):
    b, prepared = torch.ones(2, 2), []
    real = op._prepare
    monkeypatch.setattr(op, "_prepare", lambda a, *rest: prepared.append(a.shape[0]) or real(a, *rest))
    with use(Context(most_runners=8)) as context:
        for m in range(1, 60):
            fused(torch.ones(m, 2), b)
            fused(torch.ones(1000, 2), b)
            assert len(context.runners.recent) + len(context.runners.older) <= 16
        assert prepared.count(1000) == 1
        assert len(prepared) == 60
        context.forget()
        assert not context.runners.recent
        assert not context.runners.older


def test_contexts_share_nothing_and_the_one_before_comes_back():
    a, b = torch.ones(3, 7), torch.ones(7, 2)
    outer = default_context()
    with use(Context()) as context:
        assert default_context() is context
        fused(a, b)
        assert len(context.runners.recent) == 1
        with pytest.raises(UsageError), use(Context()):
            fused(a, a)
        assert default_context() is context
        assert list(context.picks("matmul").values()) == ["kind=torch"]
        assert not Context().picks("matmul")
    assert default_context() is outer


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fused(a44.numpy(), a44), "a is a ndarray: expected a torch.Tensor"),
        (lambda: fused(a44, [[1.0]]), "b is a list"),
        (lambda: fused(a44, a44, 1.0), "c is a float"),
        (lambda: fused(a44, a44, out=[1.0]), "out is a list"),
        (lambda: fused(a44, a44, config={"kind": "tma"}), "config is a dict: expected a tilemesh.kernels.Config"),
        (lambda: fused(a44, a44, activation=["relu"]), "unknown activation"),
        (lambda: fused(a44, a44, implementation=["auto"]), "unknown implementation"),
        (lambda: fused(a44.to_sparse(), a44), "a has layout torch.sparse_coo"),
        (lambda: fused(a44, a44.to_mkldnn()), "b has layout torch._mkldnn"),
        (lambda: fused(a44, a44, a44.to_sparse()), "c has layout"),
        (lambda: fused(a44, a44, out=a44.to_sparse()), "out has layout"),
        (lambda: fused(a44, a44, out=torch.empty(16).as_strided((4, 4), (2, 1))), "share memory"),
        (lambda: fused(a44, a44, out=torch.empty(4, 4, requires_grad=True)), "out= requires gradients"),
        (lambda: fused(torch.ones(2, 3, 4), a44, out=torch.empty(3, 2, 4).transpose(0, 1)), "leading dims"),
        (lambda: tm.kernels.FusedLinear(4, 4, implementation="trition"), "unknown implementation"),
        (lambda: fused(torch.nested.nested_tensor([a44, a44], layout=torch.jagged), a44), "a is a nested tensor"),
        (lambda: fused(a44, a44, activation=""), "unknown activation ''"),
        (lambda: tm.kernels.FusedLinear(4, 4, activation=""), "unknown activation ''"),
        (lambda: tm.kernels.FusedLinear(4, 4)(a44.numpy()), "a is a ndarray"),
        (lambda: fused(a44[:0], a44, implementation="library"), "needs CUDA tensors"),
        (lambda: fused(a44[:, :0], a44[:0], config=Config("tma")), "needs CUDA tensors"),
        (lambda: fused(a44, a44, implementation="interpret", config=Config("pointer", group=2**31)), "32 bits"),
    ],
)
def test_what_is_no_tensor_or_name_is_refused_too(call, words):
    with pytest.raises(UsageError, match=words):
        call()


def test_a_wrong_tune_mode_is_refused_on_a_cpu(monkeypatch):
    monkeypatch.setenv("TILEMESH_TUNE", "sometimes")
    with pytest.raises(UsageError, match="TILEMESH_TUNE"):
        fused(torch.ones(3, 19), torch.ones(19, 3))


@pytest.mark.parametrize(("first", "second", "shared"), [(0, 64, False), (64, 0, False), (0, 63, True), (8, 8, True)])
def test_only_an_input_that_shares_memory_with_out_is_copied(first, second, shared):
    memory = torch.randn(200)
    given, out = (memory[start : start + 64].view(8, 8) for start in (first, second))
    assert (apart(given, out) is not given) == shared
    assert apart(given[:0], out).shape == (0, 8)


def test_what_auto_picked_is_kept_and_kept_to(monkeypatch):
    """A process that goes on with another's work uses the kernels that the other used, where it can run them."""
    a, b = torch.ones(3, 5), torch.ones(5, 2)
    with use(Context()) as context:
        fused(a, b, activation="none")
        (name,) = context.picks("matmul")
        assert context.picks("matmul") == {name: "kind=torch"}
    asked = []
    real = op.prepare
    monkeypatch.setattr(op, "prepare", lambda problem, config, *rest, **more: asked.append(config.kind) or real(
        problem, config, *rest, **more))  # fmt: skip
    with use(Context()) as context:
        context.keep_to("matmul", {name: "kind=pointer,block_m=64"})
        assert torch.equal(fused(a, b, activation="none"), a @ b)
        assert asked == ["pointer", "torch"]  # asked for first; a CPU cannot, and says what it took instead
        assert context.picks("matmul") == {name: "kind=torch"}


def test_loops_run_where_numpy_makes_no_number_of_an_array(monkeypatch):
    """As numpy 2.5 with Triton 3.6: `int` of an array of one element is refused, and loops count by such."""
    from triton.runtime import interpreter

    from tilemesh.kernels.launch import interpret

    patch = interpreter._patch_lang_tensor

    def refuse(scalar):
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    def strict(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", refuse)

    a, b, c = inputs(70, 66, 100, torch.float32)
    interpret._converts_scalars.cache_clear()
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", strict)
    try:
        assert not interpret._converts_scalars()
        for config in (FAMILY[0], FAMILY[3], FAMILY[9], FAMILY[11]):
            assert_close(fused(a, b, c, implementation="interpret", config=config), a, b, c, "relu")
        assert interpreter._patch_lang_tensor is strict
    finally:
        interpret._converts_scalars.cache_clear()
