"""Calls with gradients as one function in C++ (node.cpp), compiled once for this torch where there is a compiler.

A call through an autograd function in Python is 30 to 60 µs of frames. What an operator's call allocates and launches
is recorded anyway (replay.py), so node.cpp repeats it, forward and backward. It is compiled beside the work, which goes
on in Python until it is there; without a compiler or torch's headers it stays there. Both launch the same kernels.
"""

from __future__ import annotations

import fcntl
import sysconfig
import threading
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import torch

from tilemesh.core.c_library import build_library
from tilemesh.core.errors import RunError
from tilemesh.core.files import cache_folder
from tilemesh.kernels.launch.call import Launched
from tilemesh.kernels.launch.replay import CallRecording, SlotView, Tensors

_NAME = "tilemesh_node"
_OPTIONS, _LIBRARIES = ("-O1", "-w", "-std=c++20"), ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
MOST_BACKWARD = 8  # layouts of gradients that one signature of calls remembers


class NativeCalls:
    """The compiled functions: none until they are asked for and built."""

    def __init__(self) -> None:
        self.functions: Any = None
        self.why_not = ""
        self._started = False

    def ask(self) -> Any:
        """The functions, or None; the first to ask starts the compiler."""
        if self.functions is None and not self._started:
            self._started = True
            threading.Thread(target=self.load, name="tilemesh native calls", daemon=True).start()
        return self.functions

    def load(self) -> None:
        """Build where that was not done before, and load."""
        self._started = True
        try:
            self.functions = _loaded(_built())
        except (OSError, RunError, ImportError) as error:
            self.why_not = str(error)


def _built() -> Path:
    torch_folder, place = Path(torch.__file__).parent, sysconfig.get_paths()["include"]
    text = f"// torch {torch.__version__}, {sysconfig.get_config_var('SOABI')}\n"
    text += Path(__file__).with_name("node.cpp").read_text()
    folders = (torch_folder / "include", torch_folder / "include/torch/csrc/api/include", place)
    options = [*_OPTIONS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    folder = cache_folder() / _NAME
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as lock:  # of many ranks one compiles
        fcntl.flock(lock, fcntl.LOCK_EX)
        options += [f"-I{each}" for each in folders]
        return build_library(_NAME, text, options, (f"-L{torch_folder / 'lib'}", *_LIBRARIES), "cpp")


def _loaded(library: Path) -> Any:
    loader = ExtensionFileLoader(_NAME, str(library))
    module = module_from_spec(ModuleSpec(_NAME, loader, origin=str(library)))
    loader.exec_module(module)
    return module


NATIVE = NativeCalls()


def program_of(recording: CallRecording, tensors: Tensors) -> tuple[Any, ...]:
    """A recording as node.cpp reads it. Launches that take more than addresses and numbers stay Python's."""
    given = len(tensors)
    allocations = [(part.shape, torch.empty(0, dtype=part.dtype, device=part.device)) for part in recording.allocations]
    launches: list[tuple[Any, ...]] = []
    python = None
    for program, views in recording.launches:
        direct = program.program.direct() if isinstance(program, Launched) else None
        if direct is None:
            python, launches = recording.launch_on, []
            del allocations[len(recording.allocations) :]
            break
        places = [(view.slot, view.offset_bytes) for view in views]
        if program.scratch_begins:
            places += [(given + len(allocations), begin) for begin in program.scratch_begins]
            allocations.append(((program.scratch_bytes,), torch.empty(0, dtype=torch.uint8, device=program.device)))
        launches += [
            (*each[:-1], tuple((-1, value) if at < 0 else places[at] for at, value in each.arguments))
            for each in direct
        ]
    results = tuple(
        (part.slot, part.shape, part.strides, part.offset_bytes) if isinstance(part, SlotView) else part
        for part in recording.results
    )
    return tuple(allocations), tuple(launches), results, tuple(recording.changed), python


def call_of(
    name: str, fallback: Any, results: int, stand_ins: Sequence[Any], kept: Sequence[int], recording: CallRecording,
    tensors: Tensors,
) -> Any:  # fmt: skip
    """What `NATIVE.functions.call` is given before the tensors: see new_call in node.cpp."""
    return NATIVE.functions.new_call(
        name, fallback, results, tuple(stand_ins), tuple(kept), program_of(recording, tensors)
    )
