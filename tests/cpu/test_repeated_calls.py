"""Calls that are repeated by address, as on a GPU: the launch is left out, and what it is given is looked at."""

from __future__ import annotations

import contextlib

import pytest
import torch

import tilemesh as tm
from tilemesh.kernels.context import Context, use
from tilemesh.kernels.launch import call, operator
from tilemesh.kernels.launch.replay import CallRecorder, RepeatedCall, signature
from tilemesh.kernels.launch.steps import Buffer, Descriptor, LaunchPlan, Pointer, Step

pytest.importorskip("triton")

from tilemesh.kernels.launch import program


class Program(call.Launched):
    """Stands for a compiled plan: keeps the addresses of each launch."""

    def __init__(self):
        self.launched = []

    def launch(self, addresses):
        self.launched.append(tuple(addresses))


def recorded(function, *given):
    """The recording of a call on these tensors, and the programs it launches."""
    programs = []

    def launch(plan, tensors, written, **constants):
        programs.append(Program())
        return programs[-1]

    recorder = CallRecorder(launch, given)
    with recorder:
        made = function(recorder.launch, *recorder.tensors)
    recording = recorder.recording(made)
    assert recording is not None
    return recording, programs


def repeat(recording, *given):
    return recording(given, signature(given)[1])


def test_one_tensor_like_a_given_one_and_one_launch():
    """The shortest way: the result is new memory each time, and the launch has the addresses of this call."""

    def forward(launch, x, weight):
        y = torch.empty(x.shape)
        launch(None, {"y": y, "w": weight, "x": x}, written=("y",))
        return (y,)

    recording, (program,) = recorded(forward, torch.randn(3, 5), torch.randn(5))
    assert recording.like == 0
    for _ in range(2):
        x, weight = torch.randn(3, 5), torch.randn(5)
        (y,) = repeat(recording, x, weight)
        assert y.shape == x.shape
        assert y.data_ptr() not in (x.data_ptr(), weight.data_ptr())
        assert program.launched[-1] == (y.data_ptr(), weight.data_ptr(), x.data_ptr())
    assert len(program.launched) == 2


@pytest.mark.parametrize(
    "kind", ["another shape", "two launches", "two tensors", "a part of one", "a part is given", "it is written to"]
)
def test_whatever_is_not_that_simple_goes_the_long_way(kind):
    x, more = torch.randn(4, 6), torch.randn(6)

    def forward(launch, x, more):
        y = torch.empty(4) if kind == "another shape" else torch.empty(x.shape)
        other = torch.empty(x.shape) if kind == "two tensors" else y
        given = {"x": x[1:] if kind == "a part is given" else x, "y": y, "other": other}
        launch(None, given, written=("x", "y") if kind == "it is written to" else ("y",))
        if kind == "two launches":
            launch(None, {"y": y, "more": more}, written=("y",))
        return (y[1:] if kind == "a part of one" else y,)

    recording, programs = recorded(forward, x, more)
    assert recording.like is None
    version = x._version
    (y,) = repeat(recording, x, more)
    begin = x.data_ptr() + (x.stride(0) * 4 if kind == "a part is given" else 0)
    first = programs[0].launched[-1]
    assert first[0] == begin
    assert first[1] == y.data_ptr() - (x.stride(0) * 4 if kind == "a part of one" else 0)
    assert (first[2] != first[1]) == (kind == "two tensors")
    assert (x._version > version) == (kind == "it is written to")
    if kind == "two launches":
        assert programs[1].launched[-1] == (first[1], more.data_ptr())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_product_of_torchs_is_a_launch_where_its_result_is_given(mode):
    """With a launch before it, on parts, and on bytes that are numbers of another kind."""

    def forward(launch, x, weight):
        codes, y = torch.empty(6, 3, dtype=torch.int16), torch.empty(4, 6)
        launch(None, {"codes": codes.view(torch.float16)[2:], "w": weight}, written=("codes",))
        torch.mm(x[1:], weight.t(), out=y)
        return (y.view(2, 2, 6),)

    with mode():
        recording, (program,) = recorded(forward, torch.randn(5, 3), torch.randn(6, 3))
        for _ in range(2):
            x, weight = torch.randn(5, 3), torch.randn(6, 3)
            (y,) = repeat(recording, x, weight)
            assert torch.equal(y, (x[1:] @ weight.t()).view(2, 2, 6))
            assert program.launched[-1][1] == weight.data_ptr()
        recording.launch_on((x, weight, torch.empty(6, 3, dtype=torch.int16), y.flatten(0, 1).zero_()))
        assert torch.equal(y, (x[1:] @ weight.t()).view(2, 2, 6))
        assert len(program.launched) == 3
    assert recorded_or_not(lambda launch, x: (launch(None, {"x": x}, written=()), x.view(torch.int32))[1:]) is None


def recorded_or_not(function):
    recorder = CallRecorder(lambda *given, **named: Program(), (torch.randn(3),))
    with recorder:
        made = function(recorder.launch, *recorder.tensors)
    return recorder.recording(made)


def test_one_given_twice_is_told_apart():
    def forward(launch, a, b):
        y = torch.empty(a.shape)
        launch(None, {"a": a, "b": b, "y": y}, written=("y",))
        return (y,)

    same = torch.randn(2, 3)
    recording, (program,) = recorded(forward, same, same)
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    (y,) = repeat(recording, a, b)
    assert program.launched[-1] == (a.data_ptr(), b.data_ptr(), y.data_ptr())


def test_what_computes_is_not_recorded():
    repeated = RepeatedCall()
    x = torch.randn(3)
    for _ in range(2):
        (made,) = repeated(
            (x,), [x.data_ptr()], lambda *given, **named: Program(), lambda launch, tensors: [tensors[0] + 1]
        )
        assert torch.equal(made, x + 1)
    assert repeated.recording is None


COPIES = {
    "contiguous": lambda x: x.contiguous(),
    "reshape": lambda x: x.reshape(-1),
    "to": lambda x: x.to(torch.float16),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", COPIES)
def test_what_copies_is_not_recorded(name, mode):
    """In inference mode these come as views, whether they copied or not: the second call read what was freed."""
    repeated, programs = RepeatedCall(), []

    def launch(plan, tensors, written, **constants):
        programs.append(tensors["x"].float().sum())
        return Program()

    def forward(launch, tensors):
        y = torch.empty(3)
        launch(None, {"x": COPIES[name](tensors[0]), "y": y}, written=("y",))
        return [y]

    with mode():
        for _ in range(2):
            x = torch.randn(4, 3).t()
            repeated((x,), [x.data_ptr()], launch, forward)
    assert repeated.recording is None
    assert len(programs) == 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_need_not_copy_is_recorded(mode):
    def forward(launch, x):
        y = torch.empty(x.shape)
        launch(None, {"x": x.reshape(-1, 3).contiguous()[1:], "y": y}, written=("y",))
        return (y,)

    with mode():
        recording, (program,) = recorded(forward, torch.randn(2, 2, 3))
        x = torch.randn(2, 2, 3)
        (y,) = repeat(recording, x)
    assert program.launched[-1] == (x.data_ptr() + 12, y.data_ptr())


@pytest.mark.parametrize("name", ["softmax", "scale_shift"])
def test_operators_in_inference_mode_take_any_strides_again_and_again(name):
    function = getattr(tm.kernels, name)
    with torch.inference_mode():
        for _ in range(3):
            given = [torch.randn(40, 6, 2).transpose(0, 1).transpose(0, 2)]
            given += [torch.randn(6), torch.randn(6)] if name == "scale_shift" else []
            ours, plain = (function(*given, implementation=way) for way in ("interpret", "torch"))
            torch.testing.assert_close(ours, plain)


def test_the_signature_of_what_is_no_plain_tensor():
    x = torch.randn(4, 4)
    key, addresses = signature((x, None))
    assert addresses == [x.data_ptr(), 0]
    assert signature((x[:, ::2],))[0] != signature((x[:, :2],))[0]
    assert key[-1] is None
    for other in (torch._neg_view(x), x.to_sparse(), torch.nn.Buffer(x) if hasattr(torch.nn, "Buffer") else None):
        found = signature((other,)) if other is not None else None
        assert found is None or type(other) is torch.Tensor


def test_each_pattern_of_gradients_has_a_choice_of_its_own():
    """`rotary` has kernels only where its tables need no gradient: a call without one must not decide for others."""
    x, angle = torch.randn(2, 3, 4, 6), torch.randn(4, 3)
    tables = [angle.cos(), angle.sin()]
    with use(Context()):
        for wanted in ((0,), (0, 1), (0, 1, 2), (2,), (0,), (1, 2)):
            given = [tensor.clone().requires_grad_(at in wanted) for at, tensor in enumerate((x, *tables))]
            leaves = [given[at] for at in wanted]
            ours, plain = (
                torch.autograd.grad(tm.kernels.rotary(*given, implementation=how).square().sum(), leaves)
                for how in ("interpret", "torch")
            )
            torch.testing.assert_close(ours, plain)


def test_compiled_plans_are_found_by_the_names_of_their_tensors(monkeypatch):
    """A norm with a weight and no bias, then one with a bias and no weight: the same shapes, another kernel."""
    programs = []

    def compile_plan(plan, tensors, device, constants):
        programs.append(tuple(tensors))
        return Program()

    monkeypatch.setattr(call, "_compile", compile_plan)
    x, vector = torch.randn(3, 4), torch.randn(4)
    with use(Context()):
        for name in ("weight", "bias", "weight", "bias"):
            call.compiled(None, {"x": x, name: vector}, written=())
    assert programs == [("x", "weight"), ("x", "bias")]


def test_a_call_that_was_first_captured_is_checked_later(monkeypatch):
    """And the other way round: values on a GPU cannot be read while a graph is captured, whatever came before."""
    asked = []
    monkeypatch.setattr(operator, "looks_at_values", lambda tensors: asked.append(len(list(tensors))))
    logits, target = torch.randn(2, 5), torch.tensor([1, 4])
    with use(Context()):
        for _ in range(3):
            tm.kernels.cross_entropy(logits, target, implementation="interpret")
    assert len(asked) > 3  # at every call, of both tensors
    assert set(asked) == {2}


class Compiled:
    """Stands for a compiled program: what it launches on which addresses."""

    def __init__(self):
        self.known, self.launched = {}, []

    def calls(self, addresses):
        return self.known.setdefault(addresses, [(self.launched.append, (addresses,))])

    def __call__(self, *addresses):
        for launch, arguments in self.calls(addresses):
            launch(*arguments)


@pytest.mark.parametrize("several", [False, True])
def test_a_launch_has_the_stream_and_scratch_memory_of_its_own(several, monkeypatch):
    monkeypatch.setattr(call, "current_stream", lambda index: 7 + index)
    monkeypatch.setattr(call.torch.cuda, "current_device", lambda: 0)
    launched = call.Launched.__new__(call.Launched)
    launched.device, launched.index, launched.several = torch.device("cpu"), 0, several
    launched.scratch_begins, launched.program = [], Compiled()
    launched.known = launched.program.known
    for _ in range(2):
        launched.launch([16, 32])
    launched.launch([16, 48])
    assert launched.program.launched == [(7, 16, 32), (7, 16, 32), (7, 16, 48)]
    launched.scratch_begins, launched.scratch_bytes = [0, 512], 1024
    allocated, empty = [], torch.empty

    def kept(*given, **named):
        allocated.append(empty(*given, **named))
        return allocated[-1]

    monkeypatch.setattr(call.torch, "empty", kept)
    launched.launch([16, 32])
    (block,) = allocated
    assert block.nbytes == 1024
    assert launched.program.launched[-1] == (7, 16, 32, block.data_ptr(), block.data_ptr() + 512)


def test_scratch_buffers_do_not_overlap(monkeypatch):
    monkeypatch.setattr(program, "LaunchProgram", lambda plan, operands, names: Compiled())
    monkeypatch.setattr(call, "device_index", lambda device: 0)
    monkeypatch.setattr(call.torch.cuda, "device", lambda index: contextlib.nullcontext())
    step = Step("module:kernel", (1, 1), {"out": Pointer("work")}, {})
    buffers = {"copy": Buffer(300, "float16"), "work": Buffer(128, "float32"), "last": Buffer(1, "int64")}
    plan = LaunchPlan((step,), buffers)
    launched = call.Launched(plan, dict.fromkeys(buffers), [], torch.device("cpu"))
    assert launched.scratch_begins == [0, 1024, 1536]  # 600 and 512 bytes lie before
    assert launched.scratch_bytes == 2048


class Kernel:
    """Stands for a compiled kernel with a descriptor, a pointer, a number and a constant; keeps its launches."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl, function, packed_metadata = False, True, "function", "packed"
    arg_annotations, kernel_signature = "annotations", "signature"

    def __init__(self):
        self.launched = []
        self.run, self.src, self.fn, self.metadata = self, self, self, self
        self.tensordesc_meta, self.arg_names = ["meta"], ["a", "out", "columns", "BLOCK"]

    @property
    def launch(self):
        def launcher(*given):
            self.launched.append(given)

        def wrapped(*given):
            launcher(*[f"encoded anew: {value}" for value in given])

        return wrapped


@pytest.mark.parametrize("version", [(3, 6), (3, 7)])
def test_a_program_launches_on_each_memory_with_arguments_prepared_once(version, monkeypatch):
    kernel, encoded = Kernel(), []
    monkeypatch.setattr(program, "_VERSION", version)
    monkeypatch.setattr(program, "compile_step", lambda step, operands: kernel)

    def tensor_map(address, meta, shape, strides):
        encoded.append((address, meta, tuple(shape), tuple(strides)))
        return f"map of {address}"

    monkeypatch.setattr(program, "_tensor_map", tensor_map)
    described = Descriptor("x", (4, 8), (8, 1), (2, 8))
    step = Step("module:kernel", (3, 2), {"a": described, "out": Pointer("y"), "columns": 8}, {"BLOCK": 64})
    launched = program.LaunchProgram(LaunchPlan((step,)), {}, ["x", "y"])
    # As many places as a benchmark rotates through to go past the L2, and more: none is prepared a second time.
    places = [(7, 1000 * x, y) for x in range(1, 301) for y in (16, 32)]
    prepared = [launched.calls(place) for place in places]
    assert [launched.calls(place) for place in places] == prepared
    assert all(launched.calls(place) is before for place, before in zip(places, prepared, strict=True))
    assert encoded == [(1000 * x, "meta", (4, 8), (8, 1)) for x in range(1, 301)]
    launched(*places[1])
    arguments = ["map of 1000", 4, 8, 8, 1, 32, 8, None]
    head = (3, 2, 1, 7, "function", False, True)
    if version > (3, 6):
        tail = ("packed", None, None, None, None, None, "annotations", "signature", arguments)
    else:
        tail = (None, None, "packed", None, None, None, *arguments)
    assert kernel.launched == [(*head, *tail)]
    for address in range(3000):
        launched.calls((7, 16 * address, 16))
    assert len(launched.known) <= 1024


def test_a_backward_pass_in_a_graph_restores_nothing_that_it_does_not_need(monkeypatch):
    """Each of gpt2-124m's 24 norms with an addition launched a fill of one element."""
    from tilemesh.kernels.norm import reference

    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    values = (x, residual, weight, 1e-6)
    y, total, *kept = torch.ops.tilemesh.add_rms_norm(*values, "interpret")
    gradients = [torch.randn(3, 8), torch.randn(3, 8)]
    empty = (x.new_empty(0), residual.new_empty(0), weight, 1e-6)
    wanted = torch.ops.tilemesh.add_rms_norm_backward(*empty, [total, *kept], gradients, "interpret")
    made = []
    zeros = reference.torch.zeros
    monkeypatch.setattr(reference.torch, "zeros", lambda *given, **named: made.append(given) or zeros(*given, **named))
    found = torch.ops.tilemesh.add_rms_norm_backward(*empty, [total, *kept], gradients, "interpret")
    assert () not in [given[0] for given in made if given]
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)
    summed = [tensor.requires_grad_() for tensor in (x.clone(), residual.clone(), weight.clone())]
    reference.add_rms_norm.reference(*summed, eps=1e-6)[0].backward(gradients[0])
    alone = torch.ops.tilemesh.add_rms_norm_backward(*empty, [total, *kept], [gradients[0], None], "interpret")
    for one, tensor in zip(alone, summed, strict=True):
        torch.testing.assert_close(one, tensor.grad)
    assert y.shape == x.shape
