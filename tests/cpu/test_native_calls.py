"""Calls with gradients by the compiled node: the same results as by Python's autograd function, and the same rules."""

from __future__ import annotations

import ctypes

import pytest
import torch

import tilemesh as tm
from tilemesh.core.c_library import compiler
from tilemesh.kernels import context
from tilemesh.kernels.launch import native

kernels = tm.kernels


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Built once for this torch, and kept in the user's cache folder."""
    if compiler(("CXX", "c++", "g++", "clang++")) is None:
        pytest.skip("no C++ compiler here")
    native.NATIVE.load()
    assert native.NATIVE.functions is not None, native.NATIVE.why_not
    yield
    native.NATIVE.functions = None


@pytest.fixture(autouse=True)
def fresh():
    with context.use(context.Context()):
        yield


def leaf(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


CALLS = {
    "softmax": lambda x, r, w, b, how: kernels.softmax(x, implementation=how),
    "rms_norm": lambda x, r, w, b, how: kernels.rms_norm(x, w, implementation=how),
    "layer_norm": lambda x, r, w, b, how: kernels.layer_norm(x, w, b, implementation=how),
    "no_weight": lambda x, r, w, b, how: kernels.layer_norm(x, None, b, implementation=how),
    "add_layer_norm": lambda x, r, w, b, how: kernels.add_layer_norm(x, r, w, b, implementation=how),
    "swiglu": lambda x, r, w, b, how: kernels.swiglu(x, r, implementation=how),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_as_by_python(name, monkeypatch):
    given = [leaf(6, 40), leaf(6, 40, seed=1), leaf(40, seed=2), leaf(40, seed=3)]

    def gradients():
        made = CALLS[name](*given, "interpret")
        made = made if isinstance(made, tuple) else (made,)
        wanted = sum(part.square().sum() for part in made)
        return made, torch.autograd.grad(wanted, given, allow_unused=True)

    monkeypatch.setattr(native.NATIVE, "functions", None)
    exact = gradients()
    monkeypatch.undo()
    for turn in range(4):  # by Python, recorded, then by the node with a backward pass by Python, then without
        made, found = gradients()
        assert turn == 0 or "CppFunction" in type(made[0].grad_fn).__name__
        for left, right in zip((*made, *found), (*exact[0], *exact[1]), strict=True):
            assert (left is None) == (right is None)
            assert left is None or torch.equal(left, right)


def ready(function, *given):
    """A result by the node, whose backward pass is known to it."""
    for _ in range(3):
        made = function(*given)
        torch.autograd.grad(made, given, torch.ones_like(made))
    made = function(*given)
    assert made.grad_fn.name() == "rms_normBackward"
    return made


def by_node(x, w):
    return kernels.rms_norm(x, w, implementation="interpret")


def test_what_was_not_recorded_is_computed_by_python():
    x, w = leaf(6, 40), leaf(40, seed=2)
    exact = kernels.rms_norm(x, w, implementation="torch")
    for upstream in (torch.ones(()).expand(6, 40), leaf(40, 6, seed=4).detach().t()):
        found = torch.autograd.grad(ready(by_node, x, w), (x, w), upstream)
        wanted = torch.autograd.grad(exact, (x, w), upstream, retain_graph=True)
        torch.testing.assert_close(found, wanted)
    (first,) = torch.autograd.grad(ready(by_node, x, w).square().sum(), x, create_graph=True)
    (true,) = torch.autograd.grad(exact.square().sum(), x, create_graph=True)
    torch.testing.assert_close(
        torch.autograd.grad(first.square().sum(), x), torch.autograd.grad(true.square().sum(), x)
    )


def test_autograds_rules():
    x, w = leaf(6, 40), leaf(40, seed=2)
    made = ready(by_node, x, w)
    made.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        made.sum().backward()
    made = ready(by_node, x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.sum().backward()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        made = by_node(x, w)
    assert len(packed) >= 2
    torch.testing.assert_close(
        torch.autograd.grad(made.sum(), (x, w)),
        torch.autograd.grad(kernels.rms_norm(x, w, implementation="torch").sum(), (x, w)),
    )


def test_an_error_of_the_kernels_reaches_who_asked_for_gradients(monkeypatch):
    x, w = leaf(6, 40), leaf(40, seed=2)
    made = by_node(x, w)
    made = by_node(x, w)

    def refuse(*_):
        raise ValueError("no such kernel")

    monkeypatch.setattr("tilemesh.kernels.launch.computation.Computation.recall", refuse)
    with pytest.raises(ValueError, match="no such kernel"):
        made.square().sum().backward()


def test_the_driver_is_given_addresses_numbers_and_the_grid():
    """On a CPU, where a function of ours stands for the driver's: it adds a number to what lies at an address."""
    seen = []
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
    )

    @prototype
    def launch(config, function, parameters, extra):
        source, target, number = (ctypes.cast(parameters[at], ctypes.POINTER(ctypes.c_int64))[0] for at in range(3))
        seen.append((config[0], config[1], config[2], config[3], config[6], function))
        for at in range(4):
            value = ctypes.c_float.from_address(source + 4 * at).value
            ctypes.c_float.from_address(target + 4 * at).value = value + number
        return 0

    functions, example = native.NATIVE.functions, torch.empty(0)
    functions.set_driver(ctypes.cast(launch, ctypes.c_void_p).value)
    try:
        kernel = (77, (5, 1, 1), 128, 64, True, False, ((0, 8), (1, 0), (-1, 3)))
        forward = ((((4,), example),), (kernel,), (1,), (), None)
        call = functions.new_call("shifted", lambda *_: [], 1, (None,), (), forward)
        x = torch.arange(6.0, requires_grad=True)
        made = functions.call(call, x)
        assert made.tolist() == [5, 6, 7, 8]
        assert made.grad_fn.name() == "shifted"
        assert seen == [(5, 1, 1, 128, 64, 77)]
    finally:
        functions.set_driver(0)


def test_a_call_of_a_signature_is_made_once(monkeypatch):
    """Under autocast, and when the runners that were used are set aside."""
    functions, calls = native.NATIVE.functions, []

    class Counted:
        def new_call(self, *given):
            calls.append(functions.new_call(*given))
            return calls[-1]

        def __getattr__(self, name):
            return getattr(functions, name)

    monkeypatch.setattr(native.NATIVE, "functions", Counted())
    x, w = leaf(1, 16), leaf(16, 16, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(3):
            kernels.row_linear(x, w, implementation="interpret")
    assert len(calls) == 1
    for _ in range(3):
        runners = context.current.runners
        runners.recent, runners.older = {}, runners.recent
        kernels.rms_norm(x, leaf(16, seed=2), implementation="interpret")
    assert len(calls) == 2
