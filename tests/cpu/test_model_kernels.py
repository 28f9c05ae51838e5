"""A Transformer of tilemesh's kernels, interpreted, computes what one of torch's operations does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tilemesh.comm.connection import connect
from tilemesh.core.plan import ParallelPlan
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.dropout import DropoutPlace
from tilemesh.model.kernels import OURS, PLAIN, STANDARD, TORCH, ModelKernels
from tilemesh.model.loss import IGNORED
from tilemesh.model.norm import ResidualNorm
from tilemesh.model.row_blocks import BLOCKS
from tilemesh.model.transformer import Transformer
from tilemesh.parallel.apply import lay
from tilemesh.parallel.laid import Laid
from tilemesh.parallel.mesh import Mesh
from tilemesh.train.config import LoopConfig, TrainConfig

INTERPRETED = ModelKernels(
    projections="auto", embedding="interpret", norms="interpret", loss="interpret", mlp="interpret"
)
SMALL = {"layers": 2, "width": 16, "heads": 4, "mlp_width": 24, "vocabulary": 37, "context": 4}
GPT2 = preset("gpt2-124m").replace(**SMALL, kv_heads=4, dropout=0.0)
LLAMA = preset("tinyllama-1.1b").replace(**SMALL, kv_heads=2)
CASES = {
    "gpt2": GPT2,
    "gpt2 with dropout": GPT2.replace(dropout=0.2),
    "gpt2 post-norm": GPT2.replace(norm_place="post", dropout=0.2),
    "llama": LLAMA,
}
ROWS, HALF = 2, 1


def make(config: ModelConfig, kernels: ModelKernels, dtype: torch.dtype = torch.float64, **plan: Any) -> Laid:
    model = Transformer(config, seed=3, dtype=dtype, kernels=kernels).train()
    chosen = ParallelPlan(**{"precision": "fp64", **plan})
    return lay(model, Mesh(connect("alone")), chosen, gradients="local", tokens=ROWS * config.context)


def texts(config: ModelConfig) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(config.vocabulary, (ROWS, config.context + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, :2] = targets[1, 3] = IGNORED
    return tokens[:, :-1].contiguous(), targets


def step(laid: Laid, config: ModelConfig, loss: Any = None) -> dict[str, Tensor]:
    """Loss, targets counted and all gradients of two accumulated microbatches."""
    tokens, targets = texts(config)
    run, total, count = loss or laid.loss, torch.zeros((), dtype=torch.float64), 0
    for begin in range(0, ROWS, HALF):
        rows = slice(begin, begin + HALF)
        dropping = {"dropout_seed": torch.tensor(5), "place": DropoutPlace(row=begin)} if config.dropout else {}
        part, counted = run(tokens[rows], targets[rows], **dropping)
        laid.gradients.backward(part, counted, last=begin + HALF == ROWS)
        total, count = total + part.detach(), count + int(counted)
    found = {name: one.grad for name, one in laid.module.named_parameters() if one.grad is not None}
    assert len(found) == len(list(laid.module.parameters()))
    return {"loss": total, "targets": torch.tensor(float(count)), **found}


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor], bound: float) -> None:
    assert mine.keys() == theirs.keys()
    largest = max(float(value.norm()) for value in theirs.values())
    for name, value in theirs.items():
        # Of whole tensors: a key's bias has a gradient that is zero but for rounding.
        assert (mine[name] - value).norm() <= bound * value.norm() + 1e-3 * bound * largest, name


@pytest.mark.parametrize(
    ("case", "recompute"),
    [
        *((case, "none") for case in CASES),
        ("gpt2 with dropout", "full"),
        pytest.param("llama", "full", marks=pytest.mark.slow),
    ],
)
def test_a_step_has_the_same_loss_and_gradients(case: str, recompute: str) -> None:
    config = CASES[case]
    plain, ours = (step(make(config, kernels, recompute=recompute), config) for kernels in (PLAIN, INTERPRETED))
    assert plain["targets"] == ROWS * config.context - 3
    assert_equal(ours, plain, 1e-10)


@pytest.mark.parametrize("case", [pytest.param("gpt2 with dropout", marks=pytest.mark.slow), "llama"])
def test_compiled_as_one_graph(case: str) -> None:
    config = CASES[case].replace(layers=1)
    laid = make(config, INTERPRETED)
    compiled = torch.compile(laid.loss, backend="aot_eager", fullgraph=True)
    assert_equal(step(laid, config, compiled), step(make(config, PLAIN), config), 1e-10)


@pytest.mark.parametrize("case", ["gpt2", "gpt2 post-norm", "llama"])
def test_autocast_is_no_less_exact(case: str) -> None:
    """Against float64, over the whole gradient: half as much again as torch's own error, which is one draw."""
    config = CASES[case].replace(dropout=0.0)
    exact = step(make(config, PLAIN), config)
    errors = []
    for kernels in (PLAIN, INTERPRETED):
        found = step(make(config, kernels, torch.float32, precision="bf16"), config)
        errors.append(sum(float((found[name] - value).norm() ** 2) for name, value in exact.items() if name != "loss"))
        assert found["layers.0.attention_norm.weight"].dtype == torch.float32
    plain, ours = errors
    assert ours <= 1.5**2 * plain


def test_logits_and_the_stream_under_autocast() -> None:
    """Products read 16-bit norms, the stream stays float32; logits are still to be had."""
    laid = make(GPT2, INTERPRETED, torch.float32, precision="bf16")
    seen: dict[str, list[torch.dtype]] = {}
    for name, module in laid.module.named_modules():
        if name.endswith("norm"):
            module.register_forward_hook(
                lambda module, given, made, name=name: seen.setdefault(name, [one.dtype for one in made]) and None
            )
    assert laid.logits(texts(GPT2)[0]).shape == (ROWS, GPT2.context, GPT2.vocabulary)
    assert seen.pop("layers.0.attention_norm") == [torch.float32, torch.float32]  # nothing is added before it
    assert set(map(tuple, seen.values())) == {(torch.bfloat16, torch.float32)}


def test_who_decides() -> None:
    def chosen(kernels: str, device: str, compile: bool = False) -> ModelKernels:  # noqa: A002
        config = TrainConfig(model=GPT2, train=LoopConfig(kernels=kernels, compile=compile))  # type: ignore[arg-type]
        return config.kernels_on(device)

    assert chosen("auto", "cpu") == chosen("torch", "cuda") == PLAIN
    words = "projections torch, attention tilemesh, embedding tilemesh, norms tilemesh, loss tilemesh, mlp tilemesh"
    assert chosen("auto", "cuda", compile=True).words() == words
    assert chosen("tilemesh", "cpu") == chosen("tilemesh", "cuda", compile=True) == OURS
    assert chosen("auto", "cuda") == STANDARD
    assert (PLAIN.words(), OURS.words()) == ("torch", "tilemesh")
    words = "projections tilemesh, attention torch, embedding torch, norms torch, loss torch, mlp torch"
    assert chosen("auto", "cuda").words() == words


@pytest.mark.parametrize("implementation", [TORCH, BLOCKS, "interpret"])
def test_a_norm_whose_width_ranks_share_asks_them_whatever_computes_it(implementation: str) -> None:
    """As queries and keys that are normalized over all heads, in an invariant pass on a GPU."""
    x = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    norm = ResidualNorm(8, "rmsnorm", 1e-6, TORCH, torch.float64)
    norm.weight = nn.Parameter(torch.ones(8, dtype=torch.float64))
    theirs = x[..., 8:].square().sum(-1).flatten()

    def added(own: Tensor) -> Tensor:
        """15 tokens; in blocks padded to 32."""
        return own + functional.pad(theirs, (0, own.numel() - len(theirs))).view(own.shape)

    norm.spread(added, ranks=2)
    norm.compute_by(implementation)
    torch.testing.assert_close(norm(x[..., :8])[0], functional.rms_norm(x, (16,), eps=1e-6)[..., :8])
