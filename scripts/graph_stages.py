"""One program through Dynamo, AOTAutograd, our graphs and Inductor, as text: writes docs/graph/stages.md.

python scripts/graph_stages.py docs/graph/stages.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._inductor.utils import run_and_get_code

from tilemesh.graph.backend import Backend

PROGRAM = """def f(x, w):
    return torch.relu(x @ w).sum()"""


def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w).sum()


def _inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(64, 32), torch.randn(32, 16, requires_grad=True)


def _code(module: Any) -> str:
    lines = [line.partition(";  ")[0] for line in module.code.strip().splitlines() if line.strip()]
    return "\n".join(line for line in lines if not line.startswith("import"))


def stages() -> list[tuple[str, str]]:
    """What each stage makes of the program."""
    seen: list[tuple[str, str]] = []

    def dynamo(module: Any, inputs: Any) -> Any:
        seen.append(("Dynamo: calls of torch, read from bytecode", _code(module)))
        return module.forward

    def traced(name: str) -> Any:
        def compiler(module: Any, inputs: Any) -> Any:
            seen.append((f"AOTAutograd: aten operators of the {name} pass", _code(module)))
            return make_boxed_func(module.forward)

        return compiler

    torch.compile(f, backend=dynamo)(*_inputs())
    torch._dynamo.reset()
    both = aot_autograd(fw_compiler=traced("forward"), bw_compiler=traced("backward"))
    torch.compile(f, backend=both)(*_inputs()).backward()
    torch._dynamo.reset()
    ours = Backend()
    torch.compile(f, backend=ours)(*_inputs()).backward()
    for name, piece in zip(("forward", "backward"), ours.report.pieces, strict=True):
        seen.append((f"tilemesh: the {name} graph (a `region` is one generated kernel)", str(piece.graph)))
        for node in piece.graph.nodes() if piece.graph else ():
            if node.op == "region":
                seen.append((f"what that kernel of the {name} pass computes", str(node["body"])))
    torch._dynamo.reset()
    _, sources = run_and_get_code(lambda: torch.compile(f)(*_inputs()))
    kernel = sources[0].partition('extern "C"')[2].partition("''')")[0].splitlines()
    seen.append(("Inductor: the kernel of the forward pass (C++ on a CPU)", 'extern "C"' + "\n".join(kernel[:40])))
    return seen


def main(target: Path) -> None:
    parts = [f"## {title}\n\n```text\n{text}\n```\n" for title, text in stages()]
    head = (
        "# One program through the stages of a compiler\n\n"
        f"Made by `scripts/graph_stages.py` with torch {torch.__version__.partition('+')[0]}.\n\n"
        f"```python\n{PROGRAM}\n```\n\n"
    )
    target.write_text(head + "\n".join(parts))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
