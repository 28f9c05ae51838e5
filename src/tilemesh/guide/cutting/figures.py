"""Drawings of chapter 16: who has what is asked of the placements, times of the stages of their cut."""

from __future__ import annotations

from tilemesh.core.scene import LaneBlock, Scene, files_of, lanes
from tilemesh.core.step.book import build
from tilemesh.core.step.simulate import StepTimes, simulate
from tilemesh.core.tensor_placement import P, R, S, TensorPlacement, exchange_of, parse
from tilemesh.guide.cutting.work import CUTS, LINE, cut_product, product_bytes
from tilemesh.parallel.choose.stages import cut_stages
from tilemesh.plan.place.propagate import sent_bytes

SHAPE = (256, 320, 192)  # M, K, N of the product
SIDE = 4  # cells of a matrix that are drawn, each way


def figures() -> dict[str, str]:
    return files_of(cuts, edges, stages)


def cuts() -> str:
    """A product cut in four ways, each cell with the ranks that have it."""
    scene = Scene(860, 700, "C = A·B on four ranks, cut in four ways: the ranks that have each part")
    for row, (name, cut) in enumerate(CUTS.items()):
        placed = cut_product(name, *SHAPE)
        output, top = placed.graph.outputs[0], 52 + row * 160
        scene.text(24, top + 52, name, bold=True)
        scene.text(24, top + 70, " × ".join(f"{axis} {size}" for axis, size in cut.axes), size=11, quiet=True)
        tables = (("A", parse(cut.a)), ("B", parse(cut.b)), ("C", placed.given[output]))
        for column, (tensor, placement) in enumerate(tables):
            scene.text(170 + column * 190, top + 62, tensor, bold=True)
            _owners(scene, 190 + column * 190, top, placement, cut.axes)
        sent = product_bytes(placed) / 8 / (SHAPE[0] * SHAPE[2])
        is_sum = any(mark == P for _, mark in placed.given[output])
        words = [f"each sends {sent:g} C" if sent else "nothing is sent"]
        words = ["Σ: parts of a sum", *words] if is_sum else words
        for line, said in enumerate(words):
            scene.text(734, top + 52 + 16 * line, said, size=11)
    return scene.svg()


def _owners(
    scene: Scene, left: float, top: float, placement: TensorPlacement, axes: tuple[tuple[str, int], ...]
) -> None:
    owners: dict[tuple[int, int], list[int]] = {}
    for rank in range(4):
        for _, box in placement.shard((SIDE, SIDE), axes, rank).boxes:
            for place in ((i, j) for i in range(SIDE) for j in range(SIDE)):
                if all(begin <= at < begin + size for at, begin, size in zip(place, box.begin, box.shape, strict=True)):
                    owners.setdefault(place, []).append(rank)
    is_sum = any(mark == P for _, mark in placement)
    table = []
    for i in range(SIDE):
        row = []
        for who in (owners[i, j] for j in range(SIDE)):
            words = "all" if len(who) == 4 else ("+" if is_sum else " ").join(map(str, who))
            row.append(
                (f"Σ {words}" if is_sum and len(who) == 4 else words, who[0] if len(who) < 4 else 6, len(who) > 1)
            )
        table.append(row)
    scene.cells(left, top, (36, 32), table, gap=2, size=10)


def edges() -> str:
    """What lies between two operators, along an axis of four ranks."""
    marks = (P, S(0), S(1), R)
    scene = Scene(860, 300, "Between two operators: what ranks exchange, and what each sends of a 16 MiB array")
    for column, after in enumerate(marks[1:]):
        scene.text(290 + column * 190, 58, f"wanted as {after}", align="mid", bold=True)
    for row, before in enumerate(marks):
        scene.text(180, 92 + row * 50, f"lies as {before}", align="end", bold=True)
        for column, after in enumerate(marks[1:]):
            what = exchange_of(before, after)
            sent = sent_bytes(before, after, LINE[0][1], 16.0)
            words = f"{what or 'nothing to do'}\n{sent:g} MiB"
            scene.box(200 + column * 190, 68 + row * 50, 180, 42, words,
                      colour=1 if sent else 2, pale=not sent, size=11)  # fmt: skip
    scene.note(24, 288, "four ranks, rings: all_gather and reduce_scatter send 3/4 of the array, all_reduce twice that")
    return scene.svg()


def stages() -> str:
    """Four ranks, the last half as fast: layers cut by the dynamic program, on the pipeline's clock."""
    speed = (2.0, 2.0, 2.0, 1.0)
    cut = cut_stages(14, 4, 4, lambda layers, ranks: len(layers) / speed[ranks[0]], sizes=(1,))
    forward = [seconds / 3 for seconds in cut.stage_s]
    program = build("gpipe", len(cut.layers), cut.microbatches)
    timeline = simulate(program, StepTimes(forward, forward, forward), keep_slots=True)
    blocks = [
        LaneBlock(slot.rank, slot.start_s, slot.end_s, f"{slot.action.microbatch}", 0 if slot.action.kind == "F" else 1)
        for slot in timeline.slots if slot.end_s > slot.start_s
    ]  # fmt: skip
    names = [f"{layers} layers" for layers in cut.layers]
    note = (
        f"{cut.seconds:g} in all, as predicted; rank 3 is half as fast; blue: forward, orange: backward, by microbatch"
    )
    return lanes("14 layers on ranks that differ, cut for the least time of a step", names, blocks, note=note)
