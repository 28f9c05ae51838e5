"""The loop of a model in use, once around: train, evaluate, serve, watch, train again, compare, roll back.

    python examples/loop.py            (under two minutes on two busy cores)

A byte model learns Python. Then its users begin to send prose (Python's own manual): every prompt's surprise, the mean
of -log p of its bytes, comes free with serving, and rises. The monitor compares it with what the model had on text held
out in training, and asks for another model, which goes on from these weights with both texts. It is deployed into the
running engine only if it is better on new traffic and not worse on old. A second candidate, trained at far too high a
rate, gets past a careless gate on purpose: the monitor sees it, and the engine goes back to the weights before.
"""

from __future__ import annotations

import json
import math
import pydoc_data.topics
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tilemesh.serve import Engine, Sampling
from tilemesh.train import fit, load_config
from tilemesh.train.export import export

STEPS, CONTEXT, WINDOW = 180, 128, 48
MODEL = "model.layers=2,model.width=64,model.heads=4,model.kv_heads=4,model.mlp_width=256"
LIMIT = 4.0  # standard errors above the held-out surprise: once in 30,000 windows by chance
WORSE = 1.05  # what a candidate may lose on old traffic


@dataclass(frozen=True)
class Step:
    """One line of the loop's journal."""

    what: str
    surprise: float
    words: str


def texts(folder: Path) -> tuple[Path, Path]:
    """Code, and prose: two files."""
    code, prose = folder / "code.txt", folder / "prose.txt"
    library = Path(json.__file__).parents[1]
    code.write_text("\n".join((library / f"{name}.py").read_text() for name in ("argparse", "typing", "inspect")))
    prose.write_text("\n\n".join(pydoc_data.topics.topics.values()))
    for path in (code, prose):  # a byte is a token, and a character is to be one
        path.write_text(path.read_text().encode("ascii", "ignore").decode())
    return code, prose


def prompts(text: str, count: int, seed: int) -> list[str]:
    """So many stretches of the last tenth of a text, which no model is trained on."""
    kept, draw = text[-len(text) // 10 :], random.Random(seed)
    begins = [draw.randrange(len(kept) - CONTEXT) for _ in range(count)]
    return [kept[begin : begin + CONTEXT - 2] for begin in begins]


def surprises(engine: Engine, asked: Sequence[str]) -> list[float]:
    """Of each prompt: nats per byte, as the engine that answers it finds them."""
    answers = engine.generate(list(asked), Sampling(max_tokens=1, temperature=0, prompt_logprobs=0))
    return [-sum(one.logprob for one in each.prompt_logprobs) / len(each.prompt_logprobs) for each in answers]


@dataclass(frozen=True)
class Monitor:
    """What is usual: mean and spread of the surprise of one prompt."""

    mean: float
    spread: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Monitor:
        mean = sum(values) / len(values)
        return cls(mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)))

    def excess(self, values: Sequence[float]) -> float:
        """Standard errors by which a window's mean is above what is usual."""
        return (sum(values) / len(values) - self.mean) / (self.spread / math.sqrt(len(values)))


def train(folder: Path, sources: Sequence[Path], *sets: str, init: Path | None = None) -> Path:
    """A run on these texts in equal shares, and its weights as a Hugging Face folder."""
    data = (
        f"data.source={sources[0]}" if len(sources) == 1 else f"data.mixture={json.dumps([f'{p}=1' for p in sources])}"
    )
    settings = [
        data, MODEL, f"model.context={CONTEXT}", f"train.steps={STEPS}", "train.batch=16", "data.held_out=0.1",
        "train.device=cpu", "optimizer.lr=3e-3", "sample.tokens=0", *sets,
    ]  # fmt: skip
    result = fit(load_config(mesh="dp=1", sets=settings, init=init), run=folder, init=init)
    if result.held_out is None:
        sys.exit(f"{folder.name} was stopped after {result.step} steps: begin again")
    print(f"  trained {folder.name}: {result.step} steps, held-out {result.held_out:.3f} nats per byte")
    weights = folder / "weights"
    export(folder, weights)
    return weights


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main(folder: Path) -> list[Step]:
    """Once around; what was seen and done."""
    journal: list[Step] = []

    def note(what: str, surprise: float, words: str) -> None:
        journal.append(Step(what, surprise, words))
        print(f"{what:<10} {surprise:6.3f} nats per byte  {words}")

    code, prose = texts(folder)
    old, new = code.read_text(), prose.read_text()
    first = train(folder / "first", [code])
    with Engine(first) as engine:
        usual = surprises(engine, prompts(old, 4 * WINDOW, seed=1))
        monitor = Monitor.of(usual)
        note("evaluate", monitor.mean, "held-out code: what is usual")
        for seed, (text, name) in enumerate([(old, "code"), (new, "prose")], start=2):
            window = surprises(engine, prompts(text, WINDOW, seed))
            excess = monitor.excess(window)
            verdict = "DRIFT: train again" if excess > LIMIT else "as usual"
            note("watch", mean(window), f"users send {name}: {excess:+.1f} standard errors, {verdict}")
        second = train(folder / "second", [code, prose], init=first)
        validation = {"code": prompts(old, WINDOW, 4), "prose": prompts(new, WINDOW, 5)}
        before = {name: mean(surprises(engine, asked)) for name, asked in validation.items()}
        with Engine(second) as candidate:
            after = {name: mean(surprises(candidate, asked)) for name, asked in validation.items()}
        is_better = after["prose"] < before["prose"] and after["code"] < WORSE * before["code"]
        told = ", ".join(f"{name} {before[name]:.2f} → {after[name]:.2f}" for name in validation)
        note("compare", after["prose"], f"{told}: {'deploy' if is_better else 'keep the old one'}")
        if not is_better:
            return journal
        version = engine.update_weights(second)
        monitor = Monitor.of(surprises(engine, prompts(new, 2 * WINDOW, 6)))
        note("deploy", monitor.mean, f"version {version} serves; this is usual now")
        answer = next(iter(engine.generate("The ", Sampling(max_tokens=24, temperature=0)))).text
        bad = train(folder / "bad", [prose], "train.steps=20", "optimizer.lr=0.5", "optimizer.warmup=0", init=second)
        version = engine.update_weights(bad)
        window = surprises(engine, prompts(new, WINDOW, 7))
        excess = monitor.excess(window)
        note("watch", mean(window), f"version {version} serves: {excess:+.1f} standard errors")
        if excess > LIMIT:
            version = engine.update_weights(second)
            same = next(iter(engine.generate("The ", Sampling(max_tokens=24, temperature=0)))).text == answer
            window = surprises(engine, prompts(new, WINDOW, 7))
            note(
                "roll back",
                mean(window),
                f"version {version}: the answers of before {'are' if same else 'ARE NOT'} back",
            )
    (folder / "journal.json").write_text(json.dumps([asdict(step) for step in journal], indent=1))
    return journal


if __name__ == "__main__":
    began = time.monotonic()
    place = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp(prefix="loop-"))
    place.mkdir(parents=True, exist_ok=True)
    main(place)
    print(f"{time.monotonic() - began:.0f} s; runs and journal: {place}")
