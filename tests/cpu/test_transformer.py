"""The Transformer: counts, names, initialisation, the forward pass against one written out, cache, loss, dropout."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_cache import Model, through_pages, through_rows
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tilemesh.core.errors import UsageError
from tilemesh.kernels.accuracy import norm_error
from tilemesh.model.cache import DenseCache
from tilemesh.model.config import PRESETS, ModelConfig, preset
from tilemesh.model.dropout import DropoutPlace, Site, dropout, fold_seed, keep_mask
from tilemesh.model.fresh import draw, drawn_ahead, initialize
from tilemesh.model.loss import IGNORED, loss, loss_sum
from tilemesh.model.transformer import Layer, ResidualStream, Transformer
from tilemesh.model.work.weights import count_parameters

SMALL = {"layers": 2, "width": 24, "heads": 4, "vocabulary": 19, "context": 12}
LLAMA = {"norm": "rmsnorm", "positions": "rotary", "activation": "swiglu", "biases": False, "tied": False}
GPT2 = ModelConfig(**SMALL)
GROUPED = ModelConfig(**SMALL, **LLAMA, kv_heads=2, mlp_width=40)
DROPPING = GROUPED.replace(dropout=0.2)


FAMILIES = {
    "qwen2": GROUPED.replace(biases="qkv", window=3),
    "qwen3": GROUPED.replace(qk_norm="head", head_width=10),
    "gemma3": GROUPED.replace(
        qk_norm="head", head_width=8, norm_place="sandwich", norm_offset=True, scaled_embedding=True, window=4,
        full_layers=(0,), rotary_local_base=50.0, score_width=5, activation="geglu", rotary_scaling="linear",
        rotary_factor=8.0,
    ),
    "gemma2": GROUPED.replace(
        norm_place="sandwich", norm_offset=True, scaled_embedding=True, window=4, full_layers=(0,), score_width=5,
        activation="geglu", score_cap=0.7, logit_cap=1.5,
    ),
    "gpt_oss": GROUPED.replace(
        activation="swiglu-clipped", biases=True, experts=4, router_bias="scores", score_sink=True, window=4,
        full_layers=(1,), rotary_scaling="yarn", rotary_factor=4.0, rotary_trained=12, rotary_rounded=False,
    ),
    "neox": GPT2.replace(positions="rotary", rotary_fraction=0.34, parallel_residual=True, activation="gelu-erf"),
    "olmo2": GROUPED.replace(qk_norm="full", norm_place="branch", biases="attention"),
    "llama3.1": GROUPED.replace(rotary_scaling="llama3", rotary_factor=8.0, rotary_trained=12, rotary_high=3.0),
}  # fmt: skip


def variants() -> list[ModelConfig]:
    """Every choice met with every other choice of each other field, in sixteen models."""
    made = []
    for norm, place, positions, activation in itertools.product(
        ("layernorm", "rmsnorm"), ("pre", "post"), ("learned", "rotary"), ("relu", "swiglu")
    ):
        number = len(made)
        if activation == "relu" and number % 3 == 0:
            activation = "gelu"
        made.append(
            ModelConfig(
                **SMALL,
                norm=norm,
                norm_place=place,
                positions=positions,
                activation=activation,
                mlp_width=40,
                kv_heads=(4, 2, 1)[number % 3],
                biases=number // 2 % 2 == 0,
                tied=number % 5 < 2,
            )
        )
    return made


def name(config: ModelConfig) -> str:
    found = next((name for name, known in FAMILIES.items() if known == config), None)
    return found or f"{config.norm}-{config.norm_place}-{config.positions}-{config.activation}-kv{config.kv_heads}"


def some_tokens(config: ModelConfig, rows: int = 2, tokens: int = 9) -> Tensor:
    return torch.randint(config.vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1))


def lively(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Transformer:
    """A model whose every parameter matters: biases are not 0, norms not 1, attention not flat."""
    model = Transformer(config, seed=3, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return model.eval()


# ---- shape -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.slow if name == "qwen3-235b-a22b" else ()) for name in PRESETS]
)
def test_presets_have_the_predicted_parameters_exactly(model: str) -> None:
    made = Transformer(preset(model), device="meta")
    assert sum(parameter.numel() for parameter in made.parameters()) == count_parameters(preset(model)).total


@pytest.mark.parametrize("config", [*variants(), *FAMILIES.values()], ids=name)
def test_every_part_has_the_predicted_parameters(config: ModelConfig) -> None:
    model, counts = Transformer(config), count_parameters(config)

    def size(module: nn.Module | None) -> int:
        return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())

    layer = model.layers[1]
    assert isinstance(layer, Layer)
    assert size(model) == counts.total
    assert (size(layer.attention), size(layer.mlp), size(layer)) == (counts.attention, counts.mlp, counts.layer)
    assert (size(model.position_embedding), size(model.output)) == (counts.position_embedding, counts.output)


def test_names_follow_the_convention_that_layouts_are_mapped_by() -> None:
    layer = ["attention_norm", "attention.fc_q", "attention.fc_k", "attention.fc_v", "attention.fc_o", "mlp_norm"]
    llama = [f"layers.{index}.{part}.weight" for index in (0, 1) for part in
             (*layer, "mlp.fc_gate", "mlp.fc_in", "mlp.fc_out")]  # fmt: skip
    expected = ["token_embedding.weight", *llama, "final_norm.weight", "output.weight"]
    assert [name for name, _ in Transformer(GROUPED, device="meta").named_parameters()] == expected
    gpt2 = {name for name, _ in Transformer(GPT2, device="meta").named_parameters()}
    assert {"position_embedding.weight", "layers.1.mlp.fc_in.bias", "final_norm.bias"} < gpt2
    assert not {name for name in gpt2 if "output" in name or "gate" in name}
    assert set(Transformer(GPT2).state_dict()) == gpt2


# ---- initialisation --------------------------------------------------------------------------------------------


def test_weights_follow_from_the_seed_alone() -> None:
    one, same, other = Transformer(GPT2, seed=1), Transformer(GPT2, seed=1), Transformer(GPT2, seed=2)
    wide = Transformer(GPT2, seed=1, dtype=torch.float64)
    torch.manual_seed(99)
    for key, value in one.state_dict().items():
        assert torch.equal(value, same.state_dict()[key])
        assert torch.equal(value.double(), wide.state_dict()[key])
        assert torch.equal(value, other.state_dict()[key]) == ("norm" in key or "bias" in key)


def test_a_part_is_initialised_as_in_the_whole() -> None:
    layer = Layer(GPT2, 1).to_empty(device="cpu")
    initialize(layer, 1, prefix="layers.1.", layers=GPT2.layers)
    whole = Transformer(GPT2, seed=1)
    assert all(torch.equal(value, whole.state_dict()[f"layers.1.{key}"]) for key, value in layer.state_dict().items())
    with pytest.raises(UsageError, match="layers="):
        initialize(layer.mlp, 1)


def test_weights_have_the_published_spread() -> None:
    config = ModelConfig(layers=8, width=64, heads=4, vocabulary=256, context=64)
    weights = Transformer(config).state_dict()
    for key, value in weights.items():
        if "norm" in key or "bias" in key:
            assert torch.equal(value, torch.full_like(value, float("norm.weight" in key)))
            continue
        expected = 0.02 / 4 if "fc_o" in key else 0.02  # 4 = sqrt(2 x 8 layers); fc_out begins the same
        # The spread of a spread over n values is 1/sqrt(2n); six of them.
        assert value.std().item() == pytest.approx(expected, rel=6 / (2 * value.numel()) ** 0.5), key
        assert abs(value.mean().item()) < 6 * expected / value.numel() ** 0.5


# ---- forward ---------------------------------------------------------------------------------------------------


def written_out(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """The same model one head and one token at a time: attention as a sum, rotation as complex numbers."""
    config, weight = model.config, dict(model.named_parameters())

    def linear(x: Tensor, key: str) -> Tensor:
        y = torch.einsum("btd,fd->btf", x, weight[f"{key}.weight"])
        return y + weight[f"{key}.bias"] if f"{key}.bias" in weight else y

    def norm(x: Tensor, key: str) -> Tensor:
        if config.norm == "layernorm":
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt() * weight[f"{key}.weight"]
        return x + weight[f"{key}.bias"] if config.norm == "layernorm" else x

    def turned(x: Tensor) -> Tensor:  # (T, E) of one head
        half = config.head_width // 2
        speed = torch.tensor([config.rotary_base ** (-i / half) for i in range(half)], dtype=torch.float64)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None] * speed
        z = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat((z.real, z.imag), dim=-1)

    def attention(x: Tensor, key: str) -> Tensor:
        q, k, v = (linear(x, f"{key}.fc_{letter}") for letter in "qkv")
        y, wide = torch.empty_like(q), config.head_width
        for row, head in itertools.product(range(len(x)), range(config.heads)):
            shared = head // (config.heads // config.kv_heads)
            ours, theirs = slice(head * wide, (head + 1) * wide), slice(shared * wide, (shared + 1) * wide)
            q_TE, k_TE, v_TE = q[row, :, ours], k[row, :, theirs], v[row, :, theirs]
            if config.positions == "rotary":
                q_TE, k_TE = turned(q_TE), turned(k_TE)
            for token in range(x.shape[1]):
                odds = torch.exp(k_TE[: token + 1] @ q_TE[token] / wide**0.5)
                y[row, token, ours] = (odds / odds.sum()) @ v_TE[: token + 1]
        return linear(y, f"{key}.fc_o")

    def mlp(x: Tensor, key: str) -> Tensor:
        h = linear(x, f"{key}.fc_in")
        if config.activation == "swiglu":
            gate = linear(x, f"{key}.fc_gate")
            h = gate / (1 + torch.exp(-gate)) * h
        elif config.activation == "gelu":
            h = 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)))
        else:
            h = h.clamp(min=0)
        return linear(h, f"{key}.fc_out")

    x = weight["token_embedding.weight"][tokens_BT]
    if config.positions == "learned":
        x = x + weight["position_embedding.weight"][: tokens_BT.shape[1]]
    for index in range(config.layers):
        key = f"layers.{index}"
        if config.norm_place == "pre":
            x = x + attention(norm(x, f"{key}.attention_norm"), f"{key}.attention")
            x = x + mlp(norm(x, f"{key}.mlp_norm"), f"{key}.mlp")
        else:
            x = norm(x + attention(x, f"{key}.attention"), f"{key}.attention_norm")
            x = norm(x + mlp(x, f"{key}.mlp"), f"{key}.mlp_norm")
    if config.norm_place == "pre":
        x = norm(x, "final_norm")
    return x @ weight["token_embedding.weight" if config.tied else "output.weight"].T


@pytest.mark.parametrize("config", variants(), ids=name)
def test_forward_equals_the_model_written_out(config: ModelConfig) -> None:
    model, tokens_BT = lively(config), some_tokens(config)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens_BT), written_out(model, tokens_BT), rtol=1e-11, atol=1e-11)


def test_a_token_never_sees_a_later_one() -> None:
    model, tokens_BT = lively(GROUPED), some_tokens(GROUPED)
    changed_BT = tokens_BT.clone()
    changed_BT[:, 5] = (changed_BT[:, 5] + 1) % GROUPED.vocabulary
    with torch.no_grad():
        before, after = model(tokens_BT), model(changed_BT)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-13)
    assert (before[:, 5:] - after[:, 5:]).abs().amax(dim=(0, 2)).min() > 1e-3


@pytest.mark.parametrize("config", [GPT2, GROUPED], ids=["gpt2", "llama"])
def test_every_parameter_gets_the_gradient_of_the_loss(config: ModelConfig) -> None:
    model, tokens_BT = lively(config), some_tokens(config)
    loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:]).backward()
    generator, step = torch.Generator().manual_seed(2), 1e-6
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        ends = []
        with torch.no_grad():
            for sign in (1, -2):  # one step forward, then two back
                parameter += sign * step * direction
                ends.append(loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:]).item())
            parameter += step * direction
        slope = (ends[0] - ends[1]) / (2 * step)
        # The loss is about 3 and rounds at 1e-15; over a step of 1e-6 that is 1e-9, the curvature's share far less.
        assert (parameter.grad * direction).sum().item() == pytest.approx(slope, rel=1e-6, abs=1e-8), key


def test_it_learns() -> None:
    model = Transformer(GROUPED.replace(layers=1))
    tokens_BT = some_tokens(GROUPED, rows=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = last = loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])
    for _ in range(60):
        optimizer.zero_grad()
        last = loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])
        last.backward()
        optimizer.step()
    assert first.item() == pytest.approx(torch.tensor(19.0).log().item(), abs=0.1)
    assert last.item() < 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_narrow_model_is_as_exact_as_the_model_written_out(dtype: torch.dtype) -> None:
    model, tokens_BT = lively(GPT2), some_tokens(GPT2, rows=1, tokens=4)
    with torch.no_grad():
        model.to(dtype).double()  # weights that the narrow dtype holds: what differs is the arithmetic
        exact = model(tokens_BT)
        model.to(dtype)
        ours, plain = model(tokens_BT), written_out(model, tokens_BT)
    assert ours.dtype == dtype
    # Ten operations of a layer round, and the logits: by luck the one written out may be nearer than that.
    least = norm_error(10 * GPT2.layers + 1, dtype) * exact.norm()
    assert (ours.double() - exact).norm() <= 2 * max((plain.double() - exact).norm(), least)


def test_autocast_keeps_weights_and_residuals_wide() -> None:
    model, tokens_BT = Transformer(GROUPED), some_tokens(GROUPED, rows=1, tokens=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits_BTV = model(tokens_BT)
        value = loss(logits_BTV, tokens_BT)
    value.backward()
    assert (logits_BTV.dtype, value.dtype) == (torch.bfloat16, torch.float32)
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float32}


def test_it_compiles_to_one_graph_for_every_seed() -> None:
    model, tokens_BT = Transformer(DROPPING), some_tokens(DROPPING)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)

    def check(seed: Tensor) -> None:
        ours, traced = model(tokens_BT, dropout_seed=seed), compiled(tokens_BT, dropout_seed=seed)
        torch.testing.assert_close(traced, ours, rtol=1e-5, atol=1e-6)

    check(torch.tensor(fold_seed(7, 0)))
    with torch.compiler.set_stance("fail_on_recompile"):
        check(torch.tensor(fold_seed(7, 1)))
        check(torch.tensor(fold_seed(7, 2)))
    torch.compiler.reset()


# ---- cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GPT2, GROUPED], ids=["learned", "rotary-grouped"])
@pytest.mark.parametrize("pieces", [(9,), (1,) * 9, (5, 1, 1, 1, 1), (3, 4, 2)], ids=str)
def test_tokens_piece_by_piece_give_the_logits_of_the_whole(config: ModelConfig, pieces: tuple[int, ...]) -> None:
    model, tokens_BT = lively(config), some_tokens(config)
    cache = DenseCache(rows=2, capacity=10)
    with torch.no_grad():
        made = [model(piece, cache=cache.extend(piece.shape[1])) for piece in tokens_BT.split(pieces, dim=1)]
        torch.testing.assert_close(torch.cat(made, dim=1), model(tokens_BT), rtol=1e-12, atol=1e-12)
    assert cache.lengths == [9, 9]


# Sequences of other lengths, one of them as long as the context, one shorter than a page.
LENGTHS = (7, 12, 1, 10, 4)
CACHED = {
    "learned": GPT2,
    "rotary-grouped": GROUPED,
    "learned-one-key-head": GPT2.replace(kv_heads=1),
    "rotary": GROUPED.replace(kv_heads=4),
    "window": FAMILIES["qwen2"],
    "some-windows": FAMILIES["gemma3"],
}


def check_sequences(config: ModelConfig, through: Callable[[Model, list[Tensor]], list[Tensor]]) -> None:
    """What a cached way makes of several sequences at once is what the model makes of each alone."""
    model, tokens_BT = lively(config), some_tokens(config, len(LENGTHS), config.context)
    sequences = [tokens_T[:length] for tokens_T, length in zip(tokens_BT, LENGTHS, strict=True)]
    with torch.no_grad():
        made = through(lambda tokens_BT, cache: model(tokens_BT, cache=cache), sequences)
        for tokens_T, logits_TV in zip(sequences, made, strict=True):
            torch.testing.assert_close(logits_TV, model(tokens_T[None])[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", CACHED.values(), ids=CACHED)
@pytest.mark.parametrize("how", ["left", "right", "packed"])
@pytest.mark.parametrize("seed", range(3))
def test_a_paged_cache_from_outside_gives_the_logits_of_each_sequence(config: ModelConfig, how: str, seed: int) -> None:
    check_sequences(config, lambda model, sequences: through_pages(model, sequences, config.context, how, seed))


@pytest.mark.parametrize("config", CACHED.values(), ids=CACHED)
@pytest.mark.parametrize("seed", range(5))
def test_rows_of_different_lengths_in_a_dense_cache(config: ModelConfig, seed: int) -> None:
    check_sequences(config, lambda model, sequences: through_rows(model, sequences, config.context, seed))


def test_a_cache_gets_tokens_before_heads_and_no_more_than_the_new_ones() -> None:
    seen: list[tuple[Any, ...]] = []

    class Watching(DenseCache):
        def attend(self, layer: int, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, *, window: int = 0) -> Tensor:
            assert q_BTHE.is_contiguous()  # a packed pass is (tokens, heads, width) without a copy
            assert k_BTKE.is_contiguous()
            seen.append((layer, *(tuple(x.shape) for x in (q_BTHE, k_BTKE, v_BTKE))))
            return super().attend(layer, q_BTHE, k_BTKE, v_BTKE, window=window)

    cache = Watching(2, 12)
    with torch.no_grad():
        lively(GROUPED)(some_tokens(GROUPED, tokens=3), cache=cache.extend(3))
    assert seen == [(layer, (2, 3, 4, 6), (2, 3, 2, 6), (2, 3, 2, 6)) for layer in (0, 1)]


def test_a_cache_too_small_too_large_or_not_prepared_is_refused() -> None:
    model, tokens_BT = lively(GROUPED), some_tokens(GROUPED)
    cache = DenseCache(2, 9)
    with torch.no_grad():
        model(tokens_BT, cache=cache.extend(9))
        with pytest.raises(UsageError, match="10 tokens: the cache has room for 9"):
            cache.extend([0, 1])
        with pytest.raises(UsageError, match="layer 0 came twice"):
            model(tokens_BT, cache=cache)
        with pytest.raises(UsageError, match=r"tokens are \(1, 9\) and the cache is prepared for \(2, 9\)"):
            model(tokens_BT[:1], cache=cache)
        with pytest.raises(UsageError, match="for 13 tokens per sequence: the model's context is 12"):
            model(tokens_BT, cache=DenseCache(2, 13).extend(9))
    for counts in ([1], [1, -1], -1):
        with pytest.raises(UsageError, match="expected a number of at least 0 for each of the cache's 2 rows"):
            DenseCache(2, 9).extend(counts)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (torch.zeros(2, 13, dtype=torch.int64), "13 tokens: the model's context is 12"),
        (torch.zeros(4, dtype=torch.int64), r"tokens are \(4,\)"),
        (torch.zeros(2, 4), "of torch.float32: expected"),
    ],
)
def test_tokens_that_cannot_be_are_refused(tokens: Tensor, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Transformer(GPT2)(tokens)


# ---- loss ------------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_over_what_counts() -> None:
    logits_BTV = torch.randn(2, 5, 19, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets_BT = some_tokens(GPT2, tokens=5)
    targets_BT[0, 2] = targets_BT[1, 4] = IGNORED
    log_odds = logits_BTV - logits_BTV.exp().sum(-1, keepdim=True).log()
    by_hand = [-log_odds[b, t, targets_BT[b, t]] for b in range(2) for t in range(5) if targets_BT[b, t] != IGNORED]
    total, count = loss_sum(logits_BTV, targets_BT)
    assert (count.item(), total.dtype) == (8, torch.float64)
    torch.testing.assert_close(loss(logits_BTV, targets_BT), torch.stack(by_hand).mean())
    assert loss(logits_BTV.bfloat16(), targets_BT).dtype == torch.float32
    assert loss(logits_BTV, torch.full_like(targets_BT, IGNORED)).item() == 0
    with pytest.raises(UsageError, match="a target a token"):
        loss(logits_BTV, targets_BT[:, 1:])


# ---- dropout ---------------------------------------------------------------------------------------------------

HERE: dict[str, Any] = {"seed": 11, "layer": 3, "site": Site.MLP}
SHAPE = (8, 32, 129)


def test_seeds_are_folded_by_splitmix64() -> None:
    """Against the sequence that the reference generator makes from the state 1234567."""
    words = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [fold_seed(1234567, turn) for turn in range(3)] == [word % 2**63 for word in words]


def test_a_draw_is_the_hash_written_out() -> None:
    """Python's own integers, modulo 2**32, for elements at both ends of what can occur."""

    def mix(word: int, key: int = 0) -> int:
        word = (word ^ word >> 16) * 0x7FEB352D % 2**32
        word = (word ^ word >> 15 ^ key) * 0x846CA68B % 2**32
        return word ^ word >> 16

    step = 0x9E3779B9
    for seed, row, token, feature in ((0, 0, 0, 0), (2**63 - 1, 2**31 - 2, 2**30, 16383), (11, 5, 1023, 767)):
        place = fold_seed(3, int(Site.MLP))
        low = mix((seed + place) % 2**32)
        high = mix(((seed >> 32) + low + (place >> 32)) % 2**32)
        key = mix((mix((low + row * step) % 2**32) + high + token * step) % 2**32)
        draw = mix((key + feature * step) % 2**32, key)
        for rate in (0.1, 0.5, 0.9):
            kept = keep_mask(
                (1, 1, 1), rate, seed=seed, layer=3, site=Site.MLP, place=DropoutPlace(row, token, feature)
            )
            assert bool(kept) is ((draw + 2**31) % 2**32 >= round(rate * 2**32)), (seed, row, rate)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_the_rate_is_kept(rate: float) -> None:
    mask = keep_mask(SHAPE, rate, **HERE)
    spread = (rate * (1 - rate) / mask.numel()) ** 0.5
    assert abs(1 - mask.double().mean().item() - rate) <= 4 * spread
    # Nor is a row, a token or a feature special.
    for dims in ((1, 2), (0, 2), (0, 1)):
        means = 1 - mask.double().mean(dim=dims)
        assert (means - rate).abs().max() <= 5 * (rate * (1 - rate) * len(means) / mask.numel()) ** 0.5


@pytest.mark.parametrize(
    ("place", "shape"),
    [((0, 0, 0), (8, 32, 64)), ((0, 0, 64), (8, 32, 65)), ((4, 0, 0), (4, 32, 129)), ((0, 16, 0), (8, 16, 129)),
     ((3, 7, 33), (2, 5, 50)), ((7, 31, 128), (1, 1, 1)), ((1, 2, 3), (2, 0, 4))],
)  # fmt: skip
def test_the_mask_of_a_slice_is_the_slice_of_the_mask(place: tuple[int, int, int], shape: tuple[int, int, int]) -> None:
    cut = tuple(slice(start, start + size) for start, size in zip(place, shape, strict=True))
    assert torch.equal(keep_mask(shape, 0.3, **HERE, place=DropoutPlace(*place)), keep_mask(SHAPE, 0.3, **HERE)[cut])


def test_masks_of_other_seeds_layers_sites_and_neighbours_have_nothing_in_common() -> None:
    mask = keep_mask(SHAPE, 0.5, **HERE).double()
    others = [keep_mask(SHAPE, 0.5, **(HERE | change)).double() for change in
              ({"seed": 12}, {"layer": 4}, {"layer": 2}, {"site": Site.ATTENTION}, {"seed": -11})]  # fmt: skip
    pairs = [(mask, other) for other in others]
    pairs += [(mask[1:], mask[:-1]), (mask[:, 1:], mask[:, :-1]), (mask[..., 1:], mask[..., :-1])]
    pairs += [(mask[..., 2:], mask[..., :-2]), (mask[1:, :-1], mask[:-1, 1:])]
    for one, other in pairs:
        agreement = (2 * one - 1).mul(2 * other - 1).mean().item()
        assert abs(agreement) <= 5 / one.numel() ** 0.5


def test_no_two_places_of_a_model_share_a_mask() -> None:
    places = list(itertools.product(range(6), Site))
    masks = [keep_mask((2, 8, 32), 0.5, seed=1, layer=layer, site=site).flatten() for layer, site in places]
    assert len(torch.stack(masks).unique(dim=0)) == len(places)


def test_the_model_drops_once_at_each_of_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def recorded(x_BTD: Tensor, rate: float, **where: Any) -> Tensor:
        seen.append((where["layer"], where["site"]))
        return dropout(x_BTD, rate, **where)

    monkeypatch.setattr("tilemesh.model.dropout.dropout", recorded)
    Transformer(DROPPING)(some_tokens(DROPPING), dropout_seed=1)
    layers = [(layer, site) for layer in (0, 1) for site in (Site.ATTENTION, Site.MLP)]
    assert seen == [(0, Site.EMBEDDING), *layers]


def test_what_is_kept_is_scaled_and_what_is_dropped_gets_no_gradient() -> None:
    x_BTD = torch.full(SHAPE, 3.0, requires_grad=True)
    y_BTD = dropout(x_BTD, 0.25, **HERE)
    y_BTD.sum().backward()
    mask = keep_mask(SHAPE, 0.25, **HERE)
    torch.testing.assert_close(y_BTD, mask * 4.0)
    torch.testing.assert_close(x_BTD.grad, mask / 0.75)
    assert dropout(x_BTD, 0.0, **HERE) is x_BTD
    tensor_seed = dropout(x_BTD, 0.25, **(HERE | {"seed": torch.tensor(11)}))
    assert torch.equal(tensor_seed, y_BTD)


def test_bad_masks_are_refused() -> None:
    with pytest.raises(UsageError, match="below 1"):
        keep_mask(SHAPE, 1.0, **HERE)
    with pytest.raises(UsageError, match="three dims"):
        keep_mask((2, 3), 0.1, **HERE)
    with pytest.raises(UsageError, match="at least 0"):
        DropoutPlace(row=-1)


def test_seeds_fold_apart() -> None:
    seeds = {fold_seed(*numbers) for numbers in itertools.product(range(10), range(10), range(10))}
    assert len(seeds) == 1000
    assert fold_seed(5) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_half_a_batch_drops_what_the_whole_batch_drops_there() -> None:
    model, tokens_BT = Transformer(DROPPING, dtype=torch.float64), some_tokens(DROPPING, rows=4)
    with torch.no_grad():
        whole = model(tokens_BT, dropout_seed=1)
        parts = [model(tokens_BT[row : row + 2], dropout_seed=1, place=DropoutPlace(row=row)) for row in (0, 2)]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(model(tokens_BT[2:], dropout_seed=1), whole[2:])
        assert not torch.allclose(model(tokens_BT, dropout_seed=2), whole)


def test_dropout_wants_a_seed_and_rests_in_evaluation() -> None:
    model, tokens_BT = Transformer(DROPPING), some_tokens(DROPPING)
    with pytest.raises(UsageError, match="no dropout_seed"):
        model(tokens_BT)
    model.eval()
    assert torch.equal(model(tokens_BT, dropout_seed=4), Transformer(GROUPED)(tokens_BT))


def test_a_recomputed_layer_meets_its_mask_again() -> None:
    model, tokens_BT = Transformer(DROPPING, dtype=torch.float64), some_tokens(DROPPING)
    gradients = []
    for again in (False, True):
        model.zero_grad()
        now = model.prepare(tokens_BT, dropout_seed=9)
        stream = ResidualStream(model.embed(tokens_BT, now))
        for layer in model.layers:
            stream = checkpoint(layer, stream, now, use_reentrant=False) if again else layer(stream, now)
        logits = model.project(model.normalize(stream))
        functional.mse_loss(logits, torch.zeros(2, 9, 19, dtype=torch.float64)).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_fresh_weights_are_drawn_by_threads_into_memory_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that another thread had taken stays with an allocator as arm64's: a process held every weight twice."""
    takers = set()

    def taken(make: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Tensor:
            takers.add(threading.get_ident())
            return make(*arguments, **options)

        return counted

    shapes = {"layers.0.mlp.fc_in.weight": (8, 4), "layers.0.mlp.fc_out.weight": (4, 8), "final_norm.weight": (4,)}
    alone = {name: draw(name, shape, 5, 2) for name, shape in shapes.items()}
    for name in ("empty", "full", "zeros", "ones"):
        monkeypatch.setattr(torch, name, taken(getattr(torch, name)))
    ahead = dict(drawn_ahead(shapes, 5, 2))
    assert takers == {threading.get_ident()}
    assert [*ahead] == [*shapes]
    for name, drawn in ahead.items():
        assert torch.equal(drawn, alone[name])
