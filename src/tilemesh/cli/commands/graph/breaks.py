"""List where torch.compile cuts a model into pieces. With the line that causes it, and what guards each piece."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tilemesh.core.errors import RunError
from tilemesh.core.options import argument
from tilemesh.train.programs import load_program


@dataclass(frozen=True, kw_only=True)
class BreaksOptions:
    program: str = argument(..., "A function of yours that returns a torch module and its inputs.", "FILE.py:FUNCTION")


def breaks(options: BreaksOptions) -> None:
    import torch

    from tilemesh.graph.tracing import quiet, tracing_failure

    model, inputs = load_program(options.program)
    torch._dynamo.reset()
    try:
        with quiet():
            explained = torch._dynamo.explain(model)(*inputs)
    except Exception as error:
        raise RunError(f"the model fails with these inputs: {tracing_failure(error)}") from error
    # torch's own count of operators leaves out methods, as `x.sum()`.
    calls = sum(node.op.startswith("call_") for piece in explained.graphs for node in piece.graph.nodes)
    counts = {"piece": len(explained.graphs), "break": len(explained.break_reasons), "operator": calls}
    print(", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items()))
    for number, cut in enumerate(explained.break_reasons):
        where = cut.user_stack[-1] if cut.user_stack else None
        line = f"{Path(where.filename).name}:{where.lineno}" if where else "unknown line"
        reason = str(cut.reason).strip().splitlines()
        print(f"{number}: {line}: {reason[0] if reason else 'no reason given'}")
        if where is not None and where.line:
            print(f"   {where.line.strip()}")
    kinds = Counter(str(guard.create_fn_name()) for guard in explained.out_guards or ())
    if kinds:
        words = ", ".join(f"{count} {kind.lower().replace('_', ' ')}" for kind, count in sorted(kinds.items()))
        print(f"before each call torch checks: {words}")
