"""Programs as CUDA graphs, by torch's own recorder: a step of a small model then costs the host one launch per program.

The recorder shares memory between forward and backward and runs a program anew where its inputs moved. It would hand
out its own memory, which the next step writes over; here results are copied out, so that they are memory of their own
as in eager. Who captures a CUDA graph around a model gets the program itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext

from tilemesh.core.hardware import DEVICES
from tilemesh.graph.cost import graph_roof_seconds
from tilemesh.graph.ir import Graph
from tilemesh.graph.opaque import operator_of, overlap, repeated, unrepeated

Boxed = Callable[[list[Any]], Any]
HOST_S = 30e-6  # of a launch from Python, with what torch does around it
OWN = ("aten", "prims", "tilemesh")  # operators that are known to be safe to record: those that exchange data are not


def waits_for_host(graph: Graph) -> bool:
    """Whether launching a program takes longer than running it, on a fast GPU: such a program is worth recording."""
    return graph_roof_seconds(graph, DEVICES["h200"]) < HOST_S * graph.launches


def reason_against(graph: Graph | None, module: fx.GraphModule, inputs: Sequence[Any], held: Sequence[Any]) -> str:
    """Why a program cannot be recorded; empty where it can."""
    from torch._dynamo.backends.cudagraphs import check_for_skip

    if graph is None:  # it runs as torch traced it
        return check_for_skip(module, 0) or ""
    outputs = [node.meta.get("val") for node in module.graph.output_node().all_input_nodes]
    for value in (*inputs, *held, *outputs):
        if isinstance(value, torch.Tensor) and value.device.type != "cuda":
            return f"a tensor on {value.device}"
    for node in graph.nodes():
        if node.op == "opaque":
            if node["target"].partition(".")[0] not in OWN:
                return f"{node['target']} is not known to be safe to record"
            if any(
                isinstance(each, torch.device) and each.type != "cuda" for each in _flat((node["args"], node["kwargs"]))
            ):
                return f"{node['target']} makes a tensor on the host"
            tags = operator_of(node["target"]).tags
            if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
                return f"what {node['target']} returns depends on values"
    return ""


def recorded(run: Boxed, module: fx.GraphModule, inputs: Sequence[Any], kind: str) -> Boxed:
    """The program as a CUDA graph. kind: forward, backward or inference.

    What lies at one address in every call (weights, and what the forward program hands to the backward one) is read
    where it is; other inputs are copied first.
    """
    from torch._dynamo.backends.cudagraphs import get_stack_traces
    from torch._inductor.cudagraph_trees import cudagraphify_impl
    from torch._inductor.cudagraph_utils import get_placeholder_info
    from torch._inductor.utils import count_tangents

    context = TracingContext.try_get()
    known = context.fw_metadata if context is not None else None
    fixed = (
        range(count_tangents(module)) if kind == "backward" else (known.static_input_indices if known else None) or ()
    )
    # The last results of a forward program are for the backward one, which reads them where they are.
    copied = known.num_forward_returns if kind == "forward" and known else None
    if kind == "forward" and copied is None:
        return run
    device = next(value.device for value in inputs if isinstance(value, torch.Tensor))
    replay = cudagraphify_impl(
        run,
        list(inputs),
        tuple(fixed),
        device_index=device.index or 0,
        is_backward=kind == "backward",
        is_inference=kind == "inference",
        stack_traces=get_stack_traces(module),
        placeholders=get_placeholder_info(module.graph),
        mutated_input_idxs=(),
    )

    def call(inputs: list[Any]) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return run(inputs)
        results = list(replay(inputs))
        results[:copied] = own_memory(results[:copied])
        return results

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def own_memory(values: Sequence[Any]) -> list[Any]:
    """Tensors as copies with the same strides, by one launch for many."""
    made = list(values)
    sources, targets = [], []
    with torch.no_grad():
        for place, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                part = unrepeated(value, value.stride())
                if overlap(part.shape, part.stride()):
                    new = torch.empty_like(part)
                else:
                    new = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)
                sources.append(part)
                targets.append(new)
                made[place] = repeated(new, value.shape)
        if targets:
            torch._foreach_copy_(targets, sources)
    return made


def _flat(value: Any) -> list[Any]:
    return [inner for each in value for inner in _flat(each)] if isinstance(value, tuple) else [value]
