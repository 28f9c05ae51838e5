"""Batches of answers: prompts, rollouts, rewards, log-probabilities, advantages, weights; then microbatches of a step.

The one idea: all ranks know all rollouts of a batch, which are small, and compute advantages and weights alike; each
passes only its own rows through models. A batch follows from the weights before its first step and the prompts'
positions, so it can be made again; where it is good for several steps, it is also kept on disk until they are done.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilemesh.align import checks
from tilemesh.align.config import AlignConfig
from tilemesh.align.drawing import AnswerDrawing, RepeatedDrawing, StreamDrawing
from tilemesh.align.formulas import advantages
from tilemesh.align.formulas.algorithms import BASELINES
from tilemesh.align.formulas.policy import ESTIMATORS
from tilemesh.align.formulas.rollout import LENGTH, Floats, Rollout, Whole, join
from tilemesh.align.formulas.weights import WEIGHTINGS
from tilemesh.align.generate import packed_bytes, unpacked_bytes
from tilemesh.align.head import Reference, token_figures
from tilemesh.align.objective import FLOATS, SEQUENCE, WEIGHT, FeedbackObjective
from tilemesh.align.prompts import Prompt
from tilemesh.align.record import BATCH, HELD_OUT, note_begin, note_drawn, read_events
from tilemesh.align.rewards import Rewards
from tilemesh.align.shared import PassRows, padded, padded_rows, shared_rows
from tilemesh.align.turns import ENVIRONMENT
from tilemesh.core.errors import RunError, UsageError
from tilemesh.core.files import replacing
from tilemesh.core.shard import share
from tilemesh.data.order import rows_of
from tilemesh.parallel.laid import Laid
from tilemesh.runs.manifest import checkpoints
from tilemesh.runs.names import CHECKPOINTS, ROLLOUTS, SAMPLES
from tilemesh.train.record import Recorder
from tilemesh.train.source import Microbatch, Source

_SAMPLES = 4
"""Held-out answers that are written down each time."""


@dataclasses.dataclass
class RolloutBatch:
    """Rollouts of some steps, and arrays of their trained tokens (M) in the order of sequences."""

    number: int
    rollout: Rollout
    parts: dict[str, Floats]
    """What answers were paid, by part, before weights (S)."""
    failures: list[str]
    """Why answers could not be scored, and the environment not say what follows."""
    old: Floats
    reference: Floats
    value: Floats
    advantage: Floats
    returns: Floats


class RolloutSource(Source):
    """Batches that the model itself writes."""

    names: Sequence[str] = ("tokens", "targets", "floats", "places")
    is_made_of_weights = True

    def __init__(
        self,
        config: AlignConfig,
        laid: Laid,
        reference: Reference | None,
        drawing: AnswerDrawing,
        rewards: Rewards,
        objective: FeedbackObjective,
        recorder: Recorder,
        folder: Path,
    ) -> None:
        self.config, self.align, self.laid, self.reference = config, config.align, laid, reference
        self.drawing, self.prompts = drawing, drawing.answers.turns.prompts
        self.rewards, self.recorder = rewards, recorder
        self.objective, self.folder, self.mesh = objective, folder, laid.mesh
        self.device = next(laid.module.parameters()).device
        self._batch: RolloutBatch | None = None
        self._held: dict[str, Any] = {}
        self._steps_done = 0
        self._timed = drawing.answers.timed
        self._begun: tuple[int, int] | None = None
        """Which batch is being drawn, by weights of which version."""
        self._pieces: list[bytes] | None = None
        """Of that, where it was collected before it was needed."""
        self._batches = -(-config.train.steps // self.align.steps_per_batch)
        self._streams = False
        """Whether engines that draw batch after batch have begun."""
        engines = self.align.ranks_beside or self.mesh.dp.size
        self._events = {} if self.align.repeats is None else read_events(self.align.repeats, engines)
        self._held_out_at: set[int] = set()
        """Versions by which held-out prompts are answered again."""
        run = config.training
        settings = (self.align, run.model, run.data, run.optimizer, run.lora, run.context, run.train.steps)
        self._drawn_under = hashlib.sha256(repr((self.fingerprint(), *settings)).encode()).hexdigest()[:16]
        """What decides weights and answers: no batch counts that others have drawn."""
        self.notes = self._forget_strange() if self.mesh.comm.rank == 0 else ""

    def fetch(self, number: int) -> list[Microbatch]:
        align = self.align
        iteration, inner = divmod(number - 1, align.steps_per_batch)
        if self._batch is None or self._batch.number != iteration:
            self._batch = self._make_batch(iteration, number)
        self._steps_done = number
        minibatch = inner % align.minibatches
        weight, rollout = self._weights(self._batch, minibatch), self._batch.rollout
        rows = slice(minibatch * align.rows, (minibatch + 1) * align.rows)
        checks.check_weighting(weight, rollout, rows, align.row.weighting)
        weight = weight * int(rollout.trained[rows].sum())
        microbatches = self._microbatches(self._batch, minibatch, weight)
        weights = [each.tensors[2][WEIGHT] for each in microbatches]
        own = [sum(float((each**power).sum()) for each in weights) for power in (1, 2)]
        found, expected = self._summed(np.array([*own, len(weights)])), np.array([weight.sum(), (weight**2).sum()])
        checks.check_weights(found[:2], expected, int(found[2]), self.config.plan.accumulation * self.mesh.dp.size)
        return microbatches

    def tokens(self, number: int) -> int:
        return 0 if self._batch is None else int(np.diff(self._batch.rollout.starts).sum()) // self.align.minibatches

    def fingerprint(self) -> str:
        return self.prompts.fingerprint()

    def go_on(self, steps: int, position: int) -> None:
        checks.check_position(steps, position, self.align.rows)
        if steps and self.align.repeats is not None:
            raise UsageError("align.repeats: what engines did is repeated from the first step on; begin a new run")

    def held_out(self) -> Iterator[Microbatch]:
        """Held-out prompts answered by the weights of now: minus the mean reward is what is judged, the lower the
        better."""
        prompts = self.prompts.held_out()
        if not prompts:
            return
        self._finish_drawing()
        seconds = dict(self._timed.seconds)  # an evaluation is no part of a step
        version = self._steps_done + 1
        self._renew(-(-self._steps_done // self.align.steps_per_batch), version, is_batch=False)
        self.drawing.begin(self.drawing.answers.held_out(), version)
        pieces = self.drawing.finish()
        self._note_drawn(HELD_OUT, version)
        rollout, parts, _ = self._paid(pieces)
        self._timed.seconds = seconds
        paid = rollout.reward.reshape(len(prompts), -1)
        full = parts["task"].reshape(paid.shape) >= 1 if "task" in parts else paid >= 1
        self._held = {"held_out_reward": float(paid.mean()), "pass_at_k": float(full.any(1).mean()),
                      "pass_at_1": float(full.mean())}  # fmt: skip
        if self.mesh.comm.rank == 0:
            self._write_samples(prompts, rollout, parts)
        if self.mesh.dp.index == 0:  # sums over replicas then count it once
            yield Microbatch((torch.tensor(-float(paid.sum())), torch.tensor(paid.size)), 0)

    def drawing_memory(self) -> dict[str, list[int]]:
        """As `AnswerDrawing.memory`."""
        self._finish_drawing()
        return self.drawing.memory()

    def _finish_drawing(self) -> None:
        """Have what was begun, so that something else can be asked for."""
        if self._begun is not None and self._pieces is None:
            self._pieces = self.drawing.finish()

    def figures(self, number: int, loss: float) -> dict[str, Any]:
        """What there is to say of a step, its batch and the last held-out answers."""
        batch = self._batch
        assert batch is not None
        inner = (number - 1) % self.align.steps_per_batch
        begin = inner % self.align.minibatches * self.align.rows
        figures = self.objective.step_figures(loss, int(batch.rollout.trained[begin : begin + self.align.rows].sum()))
        held, self._held = self._held, {}
        seconds, self._timed.seconds = self._timed.seconds, {}
        # By the same weights: those of the engine are the trained ones until their first update.
        is_first, spread = inner == 0 or self.align.old == "trainer", figures.pop("mismatch_square") ** 0.5
        if not is_first:
            del figures["mismatch"]
        elif (batch.rollout.first_version > batch.number * self.align.steps_per_batch).all():
            checks.check_mismatch(figures["mismatch"], spread, next(self.laid.module.parameters()), self.config)
        phases = {f"seconds/{phase}": taken for phase, taken in seconds.items()}
        return {**figures, **self._batch_figures(batch, number), **phases, **held}

    def _make_batch(self, iteration: int, number: int) -> RolloutBatch:
        kept = self._kept_file(iteration)
        if (number - 1) % self.align.steps_per_batch and kept.is_file():
            return self._advantages(*_read_batch(kept), iteration)
        rollout, parts, failures = self._drawn(iteration, number)
        arrays = self._passed(rollout)
        if self.align.steps_per_batch > 1 and self.mesh.comm.rank == 0:
            notes = {"failures": failures, "parts": list(parts)}
            beside = {**arrays, **{f"part {name}": values for name, values in parts.items()}}
            _write_batch(kept, packed_bytes(rollout, beside, notes))
            self._forget_files(iteration)
        return self._advantages(rollout, parts, failures, arrays, iteration)

    def _drawn(self, iteration: int, number: int) -> tuple[Rollout, dict[str, Floats], list[str]]:
        """A batch's answers, and what they are paid; the next batch is begun where it is to be drawn ahead."""
        ahead, early = self.align.batches_ahead, self._early_file(iteration)
        oldest = version = number
        if ahead and self._begun is None and not self._streams and early.is_file():
            rollout, parts, notes = unpacked_bytes(early.read_bytes())
            assert isinstance(notes, dict)
            version, pieces = int(notes["version"]), [packed_bytes(rollout, parts, notes["failures"])]
            oldest = int(notes.get("oldest", version))
        elif self.align.streams:
            oldest, pieces = self._oldest(number), self._streamed(iteration, number)
        else:
            if self._begun is None:
                self._begin(iteration, number)
            assert self._begun is not None
            version, pieces = self._begun[1], self._collected()
            oldest = version
        if ahead and not self.align.streams and iteration + 1 < self._batches:
            self._begin(iteration + 1, number)
        rollout, parts, failures = self._paid(pieces)
        checks.check_rollout(rollout, range(oldest, version + 1), self.align.answers)
        return rollout, parts, failures

    def _renew(self, iteration: int, version: int, is_batch: bool = True) -> None:
        """Give engines that draw batch after batch the weights of now, for a batch or held-out prompts. Until a batch
        is needed that is not on disk, they are begun for the latter alone (a collective call)."""
        if not isinstance(self.drawing, StreamDrawing | RepeatedDrawing):
            return
        align, repeats = self.align, self.align.repeats is not None
        begins = iteration in self._events if repeats else not self._streams
        if begins and not self._early_file(iteration).is_file() and (is_batch or version not in self._held_out_at):
            events = self._events.pop(iteration, None)
            if self.mesh.comm.rank == 0:
                note_begin(self.folder, iteration, version)
            self.drawing.begin_batches(iteration, events)
            self._streams = True
            self._held_out_at = {each.number for own in events or () for each in own if each.kind == HELD_OUT}
        if repeats and not is_batch and version not in self._held_out_at:
            raise RunError(f"{align.repeats} answered no held-out prompts by weights of version {version}: evaluate "
                           "when it did")  # fmt: skip
        newest = (version - 1) // align.steps_per_batch + align.batches_ahead
        self.drawing.renew(version, min(self._batches, newest + 1) if self._streams else 0)

    def _streamed(self, iteration: int, number: int) -> list[bytes]:
        """A batch of engines that draw one after the other; kept, since nobody could draw it again."""
        assert isinstance(self.drawing, StreamDrawing | RepeatedDrawing)
        self._renew(iteration, number)
        pieces = self.drawing.collect(BATCH, iteration)
        self._note_drawn(BATCH, iteration)
        if self.mesh.comm.rank == 0 and self.config.training.checkpoint.every:
            self._keep_early(iteration, pieces, number, self._oldest(number))
            self._forget_files(iteration)
        return pieces

    def _oldest(self, number: int) -> int:
        """The version of weights that tokens of a batch may be of at least."""
        return max(1, number - self.align.batches_ahead * self.align.steps_per_batch)

    def _note_drawn(self, kind: str, number: int) -> None:
        if self._streams and isinstance(self.drawing, StreamDrawing):
            events = self.drawing.happened()
            if self.mesh.comm.rank == 0:
                note_drawn(self.folder, kind, number, events)

    def _begin(self, iteration: int, version: int) -> None:
        self._begun = (iteration, version)
        self.drawing.begin(self.drawing.answers.batch(iteration), version)

    def _collected(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, None
        self._begun = None
        return self.drawing.finish() if pieces is None else pieces

    def before_checkpoint(self) -> None:
        """What was drawn ahead is kept for a run that goes on from here: the weights that drew it are gone by then. The
        next step would wait for it in any case."""
        if self._begun is not None:
            self._finish_drawing()
            assert self._batch is not None
            assert self._pieces is not None
            if self.mesh.comm.rank == 0:
                iteration, version = self._begun
                self._keep_early(iteration, self._pieces, version, version)
                self._forget_files(self._batch.number)

    def _keep_early(self, iteration: int, pieces: Sequence[bytes], version: int, oldest: int) -> None:
        rollout, parts, failures = _joined(pieces)
        notes = {"version": version, "oldest": oldest, "failures": failures}
        _write_batch(self._early_file(iteration), packed_bytes(rollout, parts, notes))

    def _paid(self, pieces: Sequence[bytes]) -> tuple[Rollout, dict[str, Floats], list[str]]:
        """Answers with what they are paid."""
        rollout, joined, failures = _joined(pieces)
        if self.rewards.models:
            with self._timed("reward"):
                joined |= self._judged(rollout)
        rollout = rollout.with_reward(self.rewards.total(joined))
        checks.check_rewards(rollout.reward, joined, self.rewards.weights, failures)
        return rollout, joined, failures

    def _judged(self, rollout: Rollout) -> dict[str, Floats]:
        """What reward models give, each replica's share of rows by itself."""
        begin, count = share(len(rollout), self.mesh.dp.size, self.mesh.dp.index)
        judged = {name: np.zeros(len(rollout)) for name in self.rewards.models}
        size = max(1, self.config.plan.microbatch)
        for first in range(begin, begin + count, size):
            rows = range(first, min(first + size, begin + count))
            sequences = [rollout.tokens[rollout.row(row)] for row in rows]
            last_B = torch.tensor([len(sequence) - 1 for sequence in sequences], device=self.device)
            for name, values in self.rewards.judge(padded(sequences, self.device), last_B).items():
                judged[name][rows.start : rows.stop] = values
        return {name: self._summed(values) for name, values in judged.items()}

    @torch.no_grad()
    def _passed(self, rollout: Rollout) -> dict[str, Floats]:
        """Log-probabilities by the training program, of the reference, and values, of all trained tokens."""
        align, count = self.align, int(rollout.trainable.sum())
        arrays = {name: np.zeros(count) for name in ("old", "reference", "value")}
        needs_own = align.steps_per_batch > 1 or align.has_value_head or align.row.kl == "reward"
        if needs_own or self.reference is not None:
            with self._timed("passes"):
                for minibatch in range(align.minibatches):
                    for rows in self._own_rows(minibatch):
                        tokens_BT, targets_BT, places_S4 = self._rows(rollout, rows)
                        places = _trained_places(rollout, rows)
                        batch = (tokens_BT, targets_BT, align.temperature)
                        if needs_own:
                            own = token_figures(self.laid, *batch, places_S4=places_S4, critic=self.objective.critic)
                            arrays["old"][places] = own.logprob_N.double().cpu().numpy()
                            if own.value_N is not None:
                                arrays["value"][places] = own.value_N.double().cpu().numpy()
                        if self.reference is not None:
                            theirs = self.reference(*batch, places_S4=places_S4)
                            arrays["reference"][places] = theirs.logprob_N.double().cpu().numpy()
        arrays = {name: self._summed(values) for name, values in arrays.items()}
        if align.old == "engine":
            arrays["old"] = rollout.logprobs[rollout.trainable]
        return arrays

    def _advantages(
        self, rollout: Rollout, parts: dict[str, Floats], failures: list[str], arrays: Mapping[str, Floats], number: int
    ) -> RolloutBatch:
        row, sequence = self.align.row, rollout.sequence[rollout.trainable]
        old, reference, value = (arrays[name] for name in ("old", "reference", "value"))
        kl = returns = np.zeros(len(old))
        if row.kl == "reward" and row.has_reference:
            kl = ESTIMATORS[row.estimator](torch.tensor(old), torch.tensor(reference)).numpy()
        paid = advantages.token_rewards(rollout.reward, sequence, kl, row.kl_coefficient)
        checks.check_token_rewards(paid, row.kl_coefficient * kl, rollout.reward, sequence)
        score = rollout.reward - row.kl_coefficient * advantages.summed(kl, sequence, len(rollout))
        if row.has_critic:
            advantage, returns = advantages.gae(paid, value, sequence, row.discount, row.decay)
        elif row.baseline == "returns":
            advantage = advantages.returns_to_go(paid, sequence, row.discount)
        elif row.baseline == "group-std":
            advantage = advantages.group_normalized(score, rollout.group, row.epsilon)[sequence]
        else:
            advantage = BASELINES[row.baseline](score, rollout.group)[sequence]
        if row.whiten:
            advantage = advantages.whiten(advantage)
        return RolloutBatch(number, rollout, parts, failures, old, reference, value, advantage, returns)

    def _own_rows(self, minibatch: int) -> Iterator[range]:
        """This replica's sequences of a minibatch, microbatch by microbatch."""
        plan, rows = self.config.plan, self.align.rows
        for micro in range(plan.accumulation):
            part = rows_of(rows, plan.dp, self.mesh.dp.index, plan.accumulation, micro)
            yield range(minibatch * rows + part.start, minibatch * rows + part.stop)

    def _microbatches(self, batch: RolloutBatch, minibatch: int, weight: Floats) -> list[Microbatch]:
        sampled = batch.rollout.logprobs[batch.rollout.trainable]
        sequence = batch.rollout.sequence[batch.rollout.trainable].astype(np.float64)
        columns = (batch.old, sampled, batch.advantage, weight, batch.reference, batch.value, batch.returns, sequence)
        microbatches = []
        for rows in self._own_rows(minibatch):
            tokens_BT, targets_BT, places_S4 = self._rows(batch.rollout, rows)
            places = _trained_places(batch.rollout, rows)
            floats = np.stack([column[places] for column in columns]).reshape(FLOATS, -1)
            floats[SEQUENCE] -= rows.start
            tensors = (tokens_BT, targets_BT, torch.from_numpy(floats).to(self.device), places_S4)
            microbatches.append(Microbatch(tensors, rows.start))
        return microbatches

    def _weights(self, batch: RolloutBatch, minibatch: int) -> Floats:
        """What each trained token counts for in the step of a minibatch; 0 in the others."""
        rollout, rows = batch.rollout, self.align.rows
        sequence = rollout.sequence[rollout.trainable]
        counts = np.zeros(len(rollout), np.bool_)
        counts[minibatch * rows : (minibatch + 1) * rows] = True
        if self.align.row.filter_groups:
            _, deviation, size = advantages.group_means(rollout.reward, rollout.group)
            counts &= (deviation > 0) | (size == 1)
        weight = np.zeros(len(sequence))
        kept = counts[sequence]
        renumbered = (np.cumsum(counts) - 1)[sequence[kept]]
        weight[kept] = WEIGHTINGS[self.align.row.weighting](
            renumbered, int(counts.sum()), self.align.longest * self.align.turns
        )
        return weight

    def _rows(self, rollout: Rollout, rows: range) -> PassRows:
        """Of some sequences. Compiled layers, and those whose bits no other token may change, take one per row."""
        pads = self.config.train.compile or self.align.invariant
        return (padded_rows if pads else shared_rows)(rollout, rows, self.device)

    def _summed(self, values: Floats) -> Floats:
        """Each replica has written its own places, and zeros elsewhere."""
        return values if self.mesh.dp.size == 1 else np.asarray(self.mesh.dp.comm.all_reduce(values))

    def _batch_figures(self, batch: RolloutBatch, number: int) -> dict[str, Any]:
        rollout = batch.rollout
        _, deviation, _ = advantages.group_means(rollout.reward, rollout.group)
        parts = {f"reward/{name}": float(np.nanmean(values)) for name, values in batch.parts.items()
                 if np.isfinite(values).any()}  # fmt: skip
        unheard = [reason.removeprefix(ENVIRONMENT) for reason in batch.failures if reason.startswith(ENVIRONMENT)]
        unscored = [reason for reason in batch.failures if not reason.startswith(ENVIRONMENT)]
        truncated = sum(reason == LENGTH for reason in rollout.finish) / len(rollout)
        stretches = np.count_nonzero(np.diff(rollout.trainable.astype(np.int8)) == 1)
        if self.align.turns > 1 and truncated == 1 and stretches == len(rollout) and not unheard:  # nobody was asked
            reason = f"answers are cut at {self.align.longest} tokens, and only one that ended is heard"
            unheard = [reason] * len(rollout)
        why = {key: Counter(reasons).most_common(1)[0][0]
               for key, reasons in (("unscored_why", unscored), ("unheard_why", unheard)) if reasons}  # fmt: skip
        return {
            **why, "reward": float(rollout.reward.mean()), "reward_std": float(rollout.reward.std()), **parts,
            "answer_tokens": float(rollout.trained.mean()),
            "truncated": truncated, "groups_alike": float((deviation == 0).mean()),
            "unscored": len(unscored) / len(rollout), "unheard": len(unheard) / len(rollout),
            "age": float(number - rollout.versions[rollout.trainable].mean()),
            "oldest": float(number - rollout.first_version.min()),
        }  # fmt: skip

    def _write_samples(self, prompts: Sequence[Prompt], rollout: Rollout, parts: Mapping[str, Floats]) -> None:
        answers = len(rollout) // len(prompts)
        for place in range(min(_SAMPLES, len(prompts))):
            row = place * answers
            drawn = rollout.tokens[rollout.row(row)][rollout.trainable[rollout.row(row)]].tolist()
            line = {"step": self._steps_done, "prompt": prompts[place].text, "answer": self.prompts.text_of(drawn),
                    "reward": float(rollout.reward[row]),
                    "parts": {name: float(values[row]) for name, values in parts.items()}}  # fmt: skip
            with contextlib.suppress(OSError), (self.folder / SAMPLES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def _kept_file(self, iteration: int) -> Path:
        return self.folder / ROLLOUTS / f"batch-{iteration:08d}.safetensors"

    def _early_file(self, iteration: int) -> Path:
        return self.folder / ROLLOUTS / f"drawn-{iteration:08d}-{self._drawn_under}.safetensors"

    def _forget_strange(self) -> str:
        """Batches that were drawn under other settings than those of now; what there is to say of it."""
        files = [*(self.folder / ROLLOUTS).glob("drawn-*.safetensors")]
        strange = [file for file in files if not file.stem.endswith(f"-{self._drawn_under}")]
        for file in strange:
            file.unlink(missing_ok=True)
        return f"batches that were drawn under other settings are deleted: {len(strange)}" if strange else ""

    def _forget_files(self, iteration: int) -> None:
        """Those that no checkpoint would go on with."""
        begun = [step // self.align.steps_per_batch for step, _ in checkpoints(self.folder / CHECKPOINTS)]
        kept, first = {self._kept_file(each) for each in (*begun, iteration)}, self._early_file(min(begun, default=0))
        for file in (self.folder / ROLLOUTS).glob("*-*.safetensors"):
            if file.name < first.name if file.name.startswith("drawn") else file not in kept:
                file.unlink(missing_ok=True)


def _joined(pieces: Sequence[bytes]) -> tuple[Rollout, dict[str, Floats], list[str]]:
    """All answers, the parts of their pay, and why some could not be scored."""
    each, failures = [unpacked_bytes(piece) for piece in pieces if piece], list[str]()
    for _, _, words in each:
        assert isinstance(words, list)
        failures += words
    parts = dict[str, Floats]()
    for name in dict.fromkeys(name for _, named, _ in each for name in named):  # which an engine's share may lack
        parts[name] = np.concatenate([named.get(name, np.full(len(rollout), np.nan)) for rollout, named, _ in each])
    return join([rollout for rollout, _, _ in each]), parts, failures


def _trained_places(rollout: Rollout, rows: range) -> Whole:
    """Where the trained tokens of some sequences stand among all trained tokens."""
    ends = np.cumsum(rollout.trained)
    begin = 0 if rows.start == 0 else int(ends[rows.start - 1])
    return np.arange(begin, int(ends[rows.stop - 1]))


def _write_batch(path: Path, raw: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as part:
        part.write_bytes(raw)


def _read_batch(path: Path) -> tuple[Rollout, dict[str, Floats], list[str], dict[str, Floats]]:
    rollout, arrays, notes = unpacked_bytes(path.read_bytes())
    assert isinstance(notes, dict)
    parts = {name: arrays.pop(f"part {name}") for name in notes["parts"]}
    return rollout, parts, notes["failures"], arrays
