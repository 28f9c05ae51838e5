"""Exercises of chapter 15, with the wrong answers that have a reason."""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from tilemesh.guide.exercise import choice, code, numeric

SINE: dict[type, Callable[[Any], Any]] = {float: math.sin, complex: cmath.sin}
Program = Sequence[tuple[str, Sequence[int]]]

PASSES = numeric(
    "passes",
    "A function takes 1,000 numbers and gives 10. You need all 10,000 derivatives. How many passes does the cheaper of "
    "the two modes take?",
    10,
    wrong={
        1000: "1,000 is forward mode: one pass for each input. Backward, a pass serves all inputs of one output.",
        1: "One pass is enough for one output, such as a loss. There are 10.",
        10_000: "A pass gives a whole row or column of derivatives, not one.",
        1010: "One of the modes is enough.",
    },
    otherwise="Forward mode takes a pass for each input, reverse mode one for each output.",
    explanation="One per output. A loss is one number, whatever the number of weights: that is why training goes "
    "backward.",
)

BYTES = numeric(
    "fused_bytes",
    "y = max(a · x + b, 0), with numbers a and b and an array x of 100 MB. As three operators, each reads an array and "
    "writes one. How many MB fewer does one fused kernel move?",
    400,
    counted_in="MB",
    wrong={
        600: "600 is what the three operators move together. The fused one reads x and writes y, too.",
        200: "200 is what the fused kernel moves. The question is how many fewer.",
        300: "Each of the three operators reads 100 MB and writes 100 MB.",
        500: "The fused kernel both reads x and writes y.",
    },
    otherwise="Three times a read and a write, less one read and one write.",
    explanation="600 - 200. Arithmetic is the same; what was saved never had to leave the registers.",
)

SLOW = choice(
    "slow_cnn",
    "A CNN runs at 3 % of a GPU's peak with a batch of 1. With a batch of 64 a step takes hardly longer. What is it "
    "bound by at batch 1?",
    {
        "Launches: the device waits for the next operator.": None,
        "Arithmetic: convolutions are expensive.": "64 times the arithmetic took hardly longer: there was room.",
        "Memory bandwidth: activations are large.": "64 times the activations took hardly longer: there was room.",
        "Layout: channels should come last.": "A layout changes how bytes are read, and 64 times the bytes took hardly "
        "longer.",
    },
    explanation="Time that does not grow with the work is per operator: fuse them, record them (chapter 10), or batch.",
)


def gradients(program: Program, inputs: Sequence[float]) -> list[float]:
    """The solution: values forward, then from the last one back, adding up."""
    values = values_of(program, inputs)
    slopes = [0.0] * len(values)
    slopes[-1] = 1.0
    for place in reversed(range(len(program))):
        op, operands = program[place]
        x = [values[each] for each in operands]
        for at, operand in enumerate(operands):
            partial = 1.0 if op == "add" else x[1 - at] if op == "multiply" else math.cos(x[0])
            slopes[operand] += slopes[len(inputs) + place] * partial
    return slopes[: len(inputs)]


def values_of(program: Program, inputs: Sequence[Any]) -> list[Any]:
    values = list(inputs)
    for op, operands in program:
        x = [values[each] for each in operands]
        values.append(x[0] + x[1] if op == "add" else x[0] * x[1] if op == "multiply" else SINE[type(x[0])](x[0]))
    return values


CASES: tuple[tuple[str, Program, str], ...] = (
    ("x · y", (("multiply", (0, 1)),), "The slope of x · y with respect to x is y."),
    ("sin(x + y)", (("add", (0, 1)), ("sin", (2,))), "Go from the last operator to the first, when all that read a "
     "value are done; sin hands back cos of its operand."),
    ("x · x + y", (("multiply", (0, 0)), ("add", (2, 1))), "A value that is read several times gets the sum of what "
     "comes back from each."),
)  # fmt: skip


def why_wrong(function: Callable[[Any, Any], Any]) -> str | None:
    """Compare with a complex step: the slope of f is the imaginary part of f(x + ih) / h, without any derivative."""
    chance = random.Random(0)
    drawn = []
    for _ in range(40):
        program: list[tuple[str, tuple[int, ...]]] = []
        for place in range(chance.randint(1, 6)):
            op = chance.choice(("add", "multiply", "sin"))
            program.append((op, tuple(chance.randrange(2 + place) for _ in range(1 if op == "sin" else 2))))
        drawn.append((str(program), tuple(program), "Every operator hands its slope back to each of its operands."))
    for words, case, why in (*CASES, *drawn):
        inputs = [chance.uniform(0.3, 1.2), chance.uniform(0.3, 1.2)]
        answer = [float(slope) for slope in function([(op, list(operands)) for op, operands in case], list(inputs))]
        right = []
        for at in range(2):
            moved = [complex(value, 1e-30 if at == each else 0.0) for each, value in enumerate(inputs)]
            right.append(complex(values_of(case, moved)[-1]).imag / 1e-30)
        task = f"{words} at x = {inputs[0]:.3f}, y = {inputs[1]:.3f}"
        if len(answer) != 2:
            return f"{task}: {len(answer)} slopes: expected one for each of the 2 inputs."
        if all(math.isclose(mine, real, rel_tol=1e-9, abs_tol=1e-12) for mine, real in zip(answer, right, strict=True)):
            continue
        if all(math.isclose(mine, real, rel_tol=1e-2) for mine, real in zip(answer, right, strict=True)):
            why = "Nearly: differences of two runs are no slopes."
        if not any(answer):
            why = "All your slopes are 0: the last value moves with itself by 1, and that is where it begins."
        said, real = (", ".join(f"{each:.8g}" for each in slopes) for slopes in (answer, right))
        return f"{task}: you say {said}; it is {real}. {why}"
    return None


GRADIENTS = code(
    "gradients",
    "Write reverse mode. A program is a list of operators; each names places of the values that it reads: the inputs "
    "come first, then what each operator gave.",
    '''import math

def gradients(program, inputs):
    """How the last value moves with each input: a list as long as inputs.

    program: such as [("multiply", [0, 1]), ("sin", [2])] for sin(x * y); there
    are "add", "multiply" and "sin". The same place may be read several times.
    """
    ...''',
    returns="a list of slopes, one for each input",
    solution=gradients,
    correct=why_wrong,
    explanation="Reverse mode in ten lines. `graph/derive.py` does the same, but writes the slopes down as more of the "
    "program instead of computing them.",
)

EXERCISES = (PASSES, BYTES, SLOW, GRADIENTS)
