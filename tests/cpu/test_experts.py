"""Experts: the router's choice, tokens that nobody picked, ranks, serving, and what is not done with them yet.

Logits beside transformers are in `test_huggingface.py`, layouts beside one process in the gate (its model "experts").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tilemesh.comm import connect, run_threads
from tilemesh.comm.runtime.communicator import Communicator
from tilemesh.compress.quantize import quantize
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan, Precision
from tilemesh.data.config import DataConfig
from tilemesh.data.corpus import encoded_documents, equal_tokens, tokenizer_of
from tilemesh.kernels.routing.reference import route_tokens
from tilemesh.model import huggingface
from tilemesh.model.adapter import LoraConfig, adapted_modules, adapter_parameters, peft_config, peft_names
from tilemesh.model.config import ModelConfig, preset
from tilemesh.model.experts import Experts, Router, Routing
from tilemesh.model.linear import CodedLinear
from tilemesh.model.loss import IGNORED, loss
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.decoding import SequencePart, least_cost, serving_task
from tilemesh.model.work.operations import forward_flops, layer_products, published_flops
from tilemesh.model.work.routing import imbalance
from tilemesh.model.work.task import Task
from tilemesh.model.work.weights import count_parameters, parameter_shapes, touched_experts
from tilemesh.parallel.apply import lay
from tilemesh.parallel.gate.alone import batch as gate_batch
from tilemesh.parallel.gate.alone import start as gate_start
from tilemesh.parallel.gate.cases import MODELS
from tilemesh.parallel.laid import StepPiece
from tilemesh.parallel.mesh import Mesh
from tilemesh.plan.choose import search
from tilemesh.runs.folder import new_run
from tilemesh.runs.kind import TRAIN
from tilemesh.runs.metrics import latest
from tilemesh.serve import Engine, Sampling
from tilemesh.serve.load import load_served
from tilemesh.train.check import check_init
from tilemesh.train.config import LoopConfig, OptimizerConfig, TrainConfig
from tilemesh.train.load import load
from tilemesh.train.optimizer import Optimizer, stored_dtype
from tilemesh.train.rank import train_here
from tilemesh.train.source import next_token

SETTINGS: dict[str, Any] = {
    "layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "vocabulary": 40, "context": 32, "norm": "rmsnorm",
    "positions": "rotary", "activation": "swiglu", "biases": False, "tied": False, "mlp_width": 24,
}  # fmt: skip
CONFIG = ModelConfig(**SETTINGS, experts=4, experts_per_token=2)


def router_of(scores: list[list[float]], **settings: Any) -> tuple[Router, torch.Tensor]:
    """A router whose scores of token n are those, and the tokens."""
    count = len(scores[0])
    config = ModelConfig(**SETTINGS | {"width": 8, "heads": 2}, experts=count, **settings)
    router, tokens = Router(config), torch.zeros(len(scores), 8)
    weight = torch.zeros(count, 8)
    for number, row in enumerate(scores):
        tokens[number, number] = 1.0
        weight[:, number] = torch.tensor(row)
    router.weight = torch.nn.Parameter(weight)
    return router, tokens


def test_the_router_picks_the_likeliest_and_weighs_them() -> None:
    rows = [[0.0, 2.0, 1.0], [3.0, 0.0, 3.5]]
    for renormalized in (True, False):
        router, tokens = router_of(rows, experts_per_token=2, router_renormalized=renormalized)
        experts, weights, *_ = router(tokens)
        assert experts.tolist() == [[1, 2], [2, 0]]
        probabilities = torch.tensor(rows).double().softmax(-1).gather(1, experts)
        wanted = probabilities / probabilities.sum(-1, keepdim=True) if renormalized else probabilities
        torch.testing.assert_close(weights.double(), wanted, rtol=1e-6, atol=0)


def test_sigmoids_are_weighed_without_the_bias_that_picks() -> None:
    """Of four groups of two a token takes the two of largest sums, in them those of largest score and bias."""
    rows = [[2.0, -1.0, 0.5, 0.4, -2.0, -3.0, 1.0, -4.0]]
    options: dict[str, Any] = {"experts_per_token": 3, "router_scores": "sigmoid", "router_groups": 4}
    options |= {"router_groups_per_token": 2, "router_scale": 2.5, "router_bias": True}
    for renormalized in (True, False):
        router, tokens = router_of(rows, **options, router_renormalized=renormalized)
        router.bias = torch.nn.Parameter(torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1]))
        experts, weights, *_ = router(tokens)
        # Sums of scores and biases: .88 + .77, .62 + .6, .12 + .05, .73 + .12: the first two groups.
        assert experts.tolist() == [[0, 1, 2]]
        p = torch.tensor([2.0, -1.0, 0.5]).double().sigmoid()
        wanted = 2.5 * (p / p.sum() if renormalized else p)
        torch.testing.assert_close(weights[0].double(), wanted, rtol=1e-6, atol=0)


def test_a_step_moves_a_bias_by_the_load_of_the_whole_batch() -> None:
    """Over microbatches and replicas, in 16 bits too; neither evaluation nor a layer computed again counts, no norm of
    gradients knows of it, and frozen it stays."""
    config = CONFIG.replace(router_scores="sigmoid", router_bias=True)
    text = torch.randint(40, (8, 13), generator=torch.Generator().manual_seed(5))
    model = Transformer(config, seed=1, dtype=torch.float64)
    counts: list[torch.Tensor] = []
    blocks = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Experts)]
    for block in blocks:
        block.router.register_forward_hook(lambda module, args, routing: counts.append(routing.counts_X))
    loss(model(text[:, :-1]), text[:, 1:]).backward()
    wanted = [(0.25 * (count.double().mean() - count)).sign() for count in counts]
    assert any(len(set(each.tolist())) > 1 for each in wanted)
    squares = [p.grad.square().sum() for n, p in model.named_parameters() if p.grad is not None and "bias" not in n]
    norm = float(torch.stack(squares).sum().sqrt())

    def stepped(comm: Communicator, precision: Precision, frozen: bool = False, **plan: Any) -> list[Any]:
        layout = ParallelPlan(precision=precision, **plan)
        here = Transformer(config, seed=1, dtype=stored_dtype(precision))
        if frozen:
            for name, parameter in here.named_parameters():
                parameter.requires_grad_("bias" not in name)
        laid = lay(here, Mesh(comm, **layout.axes), layout)
        optimizer = Optimizer(OptimizerConfig(balance_rate=0.25), laid.gradients.stepped, precision)
        mine = text.chunk(layout.dp)[laid.mesh.dp.index].chunk(2)
        laid.module.eval()
        laid.loss(mine[0][:, :-1], mine[0][:, 1:])
        laid.module.train()
        laid.passes([StepPiece(part[:, :-1], part[:, 1:], 0) for part in mine])
        done = laid.gradients.finish(0.5)
        optimizer.step(0.01)
        laid.gradients.updated()
        biases = {name: value for name, value in laid.module.named_parameters() if name.endswith("router.bias")}
        return [float(done.norm), *biases.values()]

    for precision, plan in (
        ("fp64", {}), ("fp64", {"dp": 2, "ep": 2, "recompute": "full"}), ("fp64", {"dp": 2, "zero": 2}),
        ("fp64", {"tp": 2}), ("bf16-master", {"dp": 2, "zero": 1}), ("bf16-master", {}),
    ):  # fmt: skip
        ranks = plan.get("dp", 1) * plan.get("tp", 1)
        for done, *biases in run_threads(ranks, lambda comm, how=precision, plan=plan: stepped(comm, how, **plan)):
            assert done == pytest.approx(norm, rel=1e-10 if precision == "fp64" else 0.1)
            for bias, sign in zip(biases, wanted, strict=True):
                assert bias.dtype is (torch.float64 if precision == "fp64" else torch.float32)
                if precision == "fp64":  # in 16 bits some tokens pick another expert
                    assert torch.equal(bias.double(), 0.25 * sign)
                assert set(bias.abs().tolist()) <= {0.0, 0.25}
    assert not any(bias.any() for bias in run_threads(1, lambda comm: stepped(comm, "fp64", frozen=True))[0][1:])


def test_padding_moves_no_bias() -> None:
    config = CONFIG.replace(router_scores="sigmoid", router_bias=True)
    text = torch.randint(40, (2, 13), generator=torch.Generator().manual_seed(5))

    def gradients(tokens: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
        model = Transformer(config, seed=1, dtype=torch.float64)
        laid = lay(model, Mesh(connect("alone")), ParallelPlan(precision="fp64"))
        laid.passes([StepPiece(tokens, targets, 0)])
        laid.gradients.finish()
        return [value.grad for name, value in laid.module.named_parameters() if name.endswith("router.bias")]

    padded = torch.nn.functional.pad(text[:, :-1], (0, 4)), torch.nn.functional.pad(text[:, 1:], (0, 4), value=IGNORED)
    for wanted, found in zip(gradients(text[:, :-1], text[:, 1:]), gradients(*padded), strict=True):
        assert torch.equal(wanted, found)
        assert wanted.any()


def test_close_scores_are_told_apart_under_autocast() -> None:
    """1 and 1 + 2^-12 are one number in bf16."""
    router, tokens = router_of([[1.0, 1.0 + 2**-12]], experts_per_token=1)
    with torch.autocast("cpu", torch.bfloat16):
        experts, weights, *_ = router(tokens)
    assert (experts.item(), weights.dtype) == (1, torch.float32)


@pytest.mark.parametrize("picked", [1, 3])
def test_an_expert_that_nobody_picks_has_a_gradient_of_zeros(picked: int) -> None:
    """One that is None would be stepped on some ranks and not on others."""
    model = Transformer(CONFIG.replace(experts=8, experts_per_token=picked), seed=1, dtype=torch.float64)
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.router.weight[5:] = -10 * layer.mlp.router.weight[:1].abs()  # type: ignore[union-attr, operator]
    tokens = torch.randint(40, (1, 4), generator=torch.Generator().manual_seed(2))
    loss(model(tokens), tokens.roll(-1, 1)).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    idle = [name for name, gradient in gradients.items() if ".experts." in name and not gradient.abs().sum()]
    assert 0 < len(idle) < sum(".experts." in name for name in gradients)


@pytest.mark.parametrize("name", ["spread", "experts", "dropped"])
def test_a_microbatch_without_sequences_adds_nothing(name: str) -> None:
    """Groups of experts, a shared one, and a capacity: each looks at tokens by sequence."""
    model, plan = Transformer(MODELS[name].replace(dropout=0.0), seed=1), ParallelPlan(precision="fp32")
    laid = lay(model, Mesh(connect("alone")), plan)
    tokens_BT = torch.zeros(0, 10, dtype=torch.long)
    laid.passes([StepPiece(tokens_BT, tokens_BT, 0)])
    for parameter in laid.model.parameters():
        assert parameter.grad is None or not parameter.grad.any()


def scored(rows: int, tokens: int) -> tuple[Router, Routing]:
    """A router of 6 experts, 2 of them for a token, and its choice."""
    config = CONFIG.replace(experts=6, balance_loss=1.0)
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(rows * tokens, 6, generator=generator, dtype=torch.float64)
    weights, experts, *places = route_tokens(scores, picked=2)
    return Router(config), Routing(experts, weights, scores, *places)


def test_the_balance_of_a_sequence_is_that_of_transformers() -> None:
    """Of one layer and one sequence. Of more, theirs mixes the layers and the sequences into one statistic; and theirs
    is experts_per_token where all is even, ours 1."""
    theirs = pytest.importorskip("transformers.models.mixtral.modeling_mixtral").load_balancing_loss_func
    router, routing = scored(1, 40)
    counted = torch.rand(1, 40, generator=torch.Generator().manual_seed(8)) < 0.7
    expected = theirs((routing.scores_NX,), 6, 2, counted.to(torch.float32))
    torch.testing.assert_close(router.loss(routing, counted) / counted.sum(), expected / 2, check_dtype=False)


def test_losses_of_routers_are_sums_over_sequences() -> None:
    router, routing = scored(5, 8)
    counted = torch.rand(5, 8, generator=torch.Generator().manual_seed(9)) < 0.6
    counted[3] = False
    parts = [Routing(*(values[8 * row : 8 * row + 8] for values in routing)) for row in range(5)]
    apart = [router.loss(part, counted[row : row + 1]) for row, part in enumerate(parts)]
    torch.testing.assert_close(torch.stack(apart).sum(), router.loss(routing, counted), rtol=1e-14, atol=0)
    assert apart[3] == 0
    even = routing._replace(experts_NC=torch.arange(40).view(20, 2) % 6, scores_NX=torch.zeros(20, 6))
    assert router.loss(even, torch.ones(1, 20)) == pytest.approx(20)  # 1 per token


def test_held_out_text_is_judged_without_the_losses_of_routers() -> None:
    model = Transformer(CONFIG.replace(balance_loss=1.0, router_z_loss=1.0), seed=1, dtype=torch.float64)
    tokens = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(4))
    laid = lay(model, Mesh(connect("alone")), ParallelPlan(precision="fp64"))
    trained, _ = laid.loss(tokens, tokens)
    model.eval()
    held_out, count = laid.loss(tokens, tokens)
    torch.testing.assert_close(held_out / count, loss(model(tokens), tokens))
    assert trained > held_out + 14  # 1 per token at least


def test_one_expert_that_takes_all_is_an_mlp() -> None:
    alone = Transformer(CONFIG.replace(experts=1, experts_per_token=1), seed=3, dtype=torch.float64)
    plain = Transformer(ModelConfig(**SETTINGS), seed=3, dtype=torch.float64)
    names = {name.replace("mlp.experts.0.", "mlp."): value for name, value in alone.state_dict().items()}
    plain.load_state_dict({name: value for name, value in names.items() if "router" not in name})
    tokens = torch.randint(40, (2, 7), generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(alone(tokens), plain(tokens), rtol=1e-13, atol=1e-13)


MIXED = CONFIG.replace(layers=3, shared_width=20, shared_gate=True, dense_layers=(0, 2), dense_width=40)


@pytest.mark.parametrize("config", [CONFIG, MIXED, MIXED.replace(dense_width=0, shared_gate=False)])
def test_the_list_of_weights_is_the_model(config: ModelConfig) -> None:
    model = Transformer(config, device="meta")
    assert {name: tuple(value.shape) for name, value in model.named_parameters()} == parameter_shapes(config)
    assert count_parameters(config).total == sum(value.numel() for value in model.parameters())


def test_a_shared_expert_of_all_tokens_is_added_to_the_others() -> None:
    """One picked expert and a shared one of the same weights: twice the MLP."""
    experts = Transformer(CONFIG.replace(experts=1, experts_per_token=1, shared_width=24), seed=3).layers[0].mlp
    assert isinstance(experts, Experts)
    assert experts.shared is not None
    experts.shared.load_state_dict(experts.experts[0].state_dict())
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(experts(x), 2 * experts.shared(x))


def test_16_bits_stay_16_bits_behind_the_gate_of_a_shared_expert() -> None:
    block = Transformer(MIXED, seed=1, dtype=torch.bfloat16).layers[1].mlp
    assert block(torch.randn(1, 3, 16).bfloat16()).dtype == torch.bfloat16


def test_adapters_of_a_matrix_are_of_every_expert() -> None:
    lora = LoraConfig(rank=2, targets=("fc_in",))
    names = adapted_modules(MIXED, lora)
    picked = [f"layers.1.mlp.experts.{expert}.fc_in" for expert in range(4)]
    assert names == ["layers.0.mlp.fc_in", *picked, "layers.1.mlp.shared.fc_in", "layers.2.mlp.fc_in"]
    theirs = peft_names(MIXED.replace(shared_gate=True, biases="qkv", family="qwen2_moe"), lora)
    assert theirs["layers.1.mlp.experts.3.fc_in"] == "model.layers.1.mlp.experts.3.up_proj"
    assert theirs["layers.1.mlp.shared.fc_in"] == "model.layers.1.mlp.shared_expert.up_proj"
    assert adapter_parameters(MIXED, lora) == 2 * (2 * (40 + 16) + 4 * (24 + 16) + 20 + 16)


def test_flops_are_of_the_experts_that_a_token_passes() -> None:
    two = ModelConfig(**SETTINGS | {"mlp_width": 48})  # one MLP of both experts' width
    assert forward_flops(CONFIG, 2, 8).mlp == forward_flops(two, 2, 8).mlp
    assert forward_flops(CONFIG.replace(experts=64), 2, 8).mlp == forward_flops(CONFIG, 2, 8).mlp


@pytest.mark.parametrize(
    ("name", "context", "published"),
    [
        ("llama-3-8b", 8192, 51.48),
        ("llama-3-70b", 8192, 449.1),
        ("qwen3-30b-a3b", 4096, 23.01),
        ("qwen3-235b-a22b", 4096, 148.0),
        ("deepseek-v3", 4096, 249.7),
    ],
)
def test_flops_per_token_are_those_that_published_tables_imply(name: str, context: int, published: float) -> None:
    """GFLOP: tokens per second and TFLOP/s of Megatron-Bridge's tables."""
    assert published_flops(preset(name), context) / 1e9 == pytest.approx(published, rel=0.002)


def test_a_layers_work_is_that_of_the_experts_that_tokens_pass() -> None:
    """Of many tokens all experts, of one token as many as it picks; FLOPs are those of a dense layer as wide."""
    config = CONFIG.replace(experts=64, experts_per_token=2, mlp_width=32)
    for tokens, used in ((1, 2), (4, 8), (4096, 64)):
        products = [op for op in layer_products(config, Task(1, tokens, tokens)) if "experts" in op.name]
        assert {op.batch for op in products} == {used}
        plain = config.replace(experts=0, experts_per_token=0, mlp_width=64)
        wide = sum(op.cost.flops for op in layer_products(plain, Task(1, tokens, tokens)) if "MLP" in op.name)
        assert wide <= sum(op.cost.flops for op in products) <= 1.1 * wide
    assert touched_experts(config, 1) == pytest.approx(2)
    assert touched_experts(config, 4) == pytest.approx(64 * (1 - (31 / 32) ** 4))


def test_what_a_decoding_step_reads_grows_with_the_experts_that_it_touches() -> None:
    config = CONFIG.replace(experts=64, experts_per_token=2)
    one = 3 * 16 * 24 * 4 * config.layers  # bytes of an expert in all layers

    def read(requests: int) -> float:
        task = serving_task(requests, "fp32")
        return least_cost(config, [SequencePart(1, 8, 1)] * requests, task).bytes_read

    assert read(2) - read(1) == pytest.approx(one * (touched_experts(config, 2) - 2), rel=0.1)
    assert read(512) - read(256) < 0.7 * one * 64


def test_the_planner_predicts_a_model_with_experts() -> None:
    """The same active FLOPs as a dense model, and the memory of all experts."""
    experts = preset("qwen3-30b-a3b")
    dense = experts.replace(experts=0, experts_per_token=0, mlp_width=8 * 768)
    ours, theirs = (search(model, "16xh100", batch=256, context=4096).best for model in (experts, dense))
    assert ours.model_flops == theirs.model_flops
    assert 1 < ours.step_time_s / theirs.step_time_s < 3


def test_the_engine_writes_what_the_model_says(tmp_path: Path) -> None:
    model = Transformer(CONFIG, seed=5)
    with torch.no_grad():
        for parameter in model.parameters():  # lively: a fresh model's logits are nearly alike
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6))
    huggingface.save(model, tmp_path)
    prompts, greedy = [[3, 1, 4], [1, 5, 9, 2, 6], [5]], Sampling(max_tokens=6, temperature=0.0)
    with Engine(tmp_path, pages=32) as engine:
        assert isinstance(engine.served.model.layers[0].mlp, Experts)
        answers = [list(result.answers[0].tokens) for result in engine.generate(prompts, greedy)]
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = list(prompt)
        for _ in range(6):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        assert answer == tokens[len(prompt) :]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": 2, "experts_per_token": 3}, "3 experts_per_token of 2 experts: set model.experts"),
        ({"experts_per_token": 1}, "1 experts_per_token of 0 experts"),
        ({"router_renormalized": False}, "router_renormalized without experts"),
        ({"experts": -1}, "model.experts is -1"),
        ({"experts": 2, "shared_gate": True}, "shared_gate without a shared expert"),
        ({"experts": 2, "dense_width": 8}, "dense_width without dense_layers"),
        ({"experts": 2, "dense_layers": (0, 1)}, "dense_layers names 2 of 2 layers, up to 1"),
        ({"dense_layers": (0,)}, "dense_layers without experts"),
        ({"balance_loss": 0.1}, "balance_loss without experts: set model.experts"),
    ],
)
def test_what_is_no_mixture_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ModelConfig(**SETTINGS, **changes)


def test_what_is_not_done_with_experts_yet_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot quantise a model with experts by a recipe that looks at text"):
        quantize(Transformer(CONFIG), "int4-g8-gptq")
    stacked = CONFIG.replace(
        biases=True, activation="swiglu-clipped", score_sink=True, router_bias="scores", family="gpt_oss"
    )
    with pytest.raises(UsageError, match=r"has it inside mlp\.experts\.gate_up_proj, one matrix of several"):
        peft_names(stacked, LoraConfig(rank=2, targets=("fc_in",)))
    sliced = ParallelPlan(pp=2, accumulation=2, schedule="terapipe", slices=2)
    even = Transformer(CONFIG.replace(balance_loss=0.1), device="meta")
    with pytest.raises(UsageError, match=r"slices is 2 and balance_loss 0\.1: how even a sequence is"):
        run_threads(2, lambda comm: lay(even, Mesh(comm, **sliced.axes), sliced))


@pytest.mark.parametrize("ep", [2, 4])
def test_routers_before_training_are_as_uneven_as_their_text_says(ep: int) -> None:
    """Of 24 routers, in the mean. What is expected bounds the maximum of as many normal loads, which is 0.7 of it; one
    router's excess spreads by about half of itself, the mean of 24 by a tenth, and tokens are not all unlike."""
    config = preset("tiny").replace(experts=8)
    data = DataConfig()
    text = torch.from_numpy(next(iter(encoded_documents(data, tokenizer_of(data)))).tokens.astype("int64"))
    rows = text[: len(text) // 64 * 64].view(-1, 64)[:24]
    loads: list[torch.Tensor] = []
    for seed in range(6):
        model = Transformer(config, seed=seed)
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_hook(lambda _, args, routing: loads.append(routing.counts_X.double()))
        with torch.no_grad():
            model(rows)
    busiest = torch.stack([load.view(ep, -1).sum(1).max() * ep / load.sum() for load in loads])
    counts = rows.flatten().bincount() / rows.numel()
    expected = imbalance(config, Task(len(rows), 64, 64, ep=ep), float(counts.square().sum())) - 1
    assert 0.5 < (float(busiest.mean()) - 1) / expected < 1.3
    assert equal_tokens(data) == pytest.approx(0.1, rel=0.5)


def test_the_gate_has_idle_and_overloaded_experts() -> None:
    """In some microbatch of some replica, in every layer."""
    config = MODELS["spread"]
    model = Transformer(config, dtype=torch.float64)
    model.load_state_dict(gate_start(config, "fp64"))
    loads: list[torch.Tensor] = []
    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(lambda _, args, routing: loads.append(routing.experts_NC.view(-1)))
    tokens, _ = gate_batch(config, 0)
    model.eval()(tokens)
    for picked in loads:
        parts = [part.bincount(minlength=8) for part in picked.tensor_split(8)]  # of 4 replicas, twice
        assert any((counts == 0).any() for counts in parts)
        assert max(float(counts.max() / counts.sum()) for counts in parts) > 3 / 8  # of 2/8 were all alike


def test_compiled_experts_are_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs end where a layer's experts begin, and begin behind them; other loads are no reason to compile again."""
    compiling, graphs, known = torch.compile, [], []

    def counted(graph: torch.fx.GraphModule, example: object) -> object:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda function: compiling(function, backend=counted))
    config = MODELS["experts"].replace(layers=1, dense_layers=(), dense_width=0, dropout=0.0)

    def step_figures(comm: Communicator, is_compiled: bool) -> list[float]:
        model = Transformer(config, seed=1, dtype=torch.float64)
        laid = lay(model, Mesh(comm), ParallelPlan(precision="fp64"))
        run = TrainConfig(config, train=LoopConfig(compile=is_compiled))
        loss, figures = next_token(run, laid).loss, []
        for shift in (0, 7):
            tokens = (torch.arange(20) + shift).view(2, 10)
            laid.gradients.backward(*loss(tokens, tokens))
            done = laid.gradients.finish(1.0)
            figures += [float(done.loss), float(done.norm)]
            known.append(len(graphs))
        return figures

    plain, compiled = (run_threads(1, lambda comm, way=way: step_figures(comm, way))[0] for way in (False, True))
    assert compiled == pytest.approx(plain, rel=1e-12)
    assert known[0] == known[1] == 0 < known[2] == known[3]


def test_runs_with_experts_shared_out_go_on_in_any_layout(tmp_path: Path) -> None:
    """Weights and moments: on 4 ranks with ep and ZeRO, then on one, beside one that never stopped."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number}: jumps over {number * 7} dogs\n" for number in range(300)))
    sets = (
        "model.layers=2,model.width=16,model.heads=4,model.kv_heads=2,model.mlp_width=24,model.context=16,"
        "model.experts=4,model.balance_loss=0.1,model.dense_layers=[0],model.router_scores=sigmoid,"
        "model.router_bias=true,optimizer.balance_rate=0.02,train.steps=4,train.batch=8,checkpoint.every=2,"
        "evaluate.every=2,evaluate.sequences=5,sample.tokens=3,optimizer.lr=0.01,train.device=cpu,plan.precision=fp64,"
        f"train.trace_steps=0,data.source={text}"
    )

    def losses(folder: Path, *meshes: tuple[str, str]) -> list[float]:
        for number, (mesh, more) in enumerate(meshes):
            config = load(mesh=mesh, sets=[sets, *filter(None, [more])])
            if not number:
                new_run(TRAIN, config.to_toml(), folder)
            stop = None if number == len(meshes) - 1 else 2
            run_threads(
                config.plan.world,
                lambda comm: train_here(config, folder, comm, resume=number > 0, stop_after=stop),  # noqa: B023
            )
        steps = [line for line in latest(folder) if line["kind"] == "step"]
        block = load_served(folder).model.layers[1].mlp
        assert isinstance(block, Experts)
        assert block.router.bias is not None
        biases = block.router.bias.tolist()
        assert any(biases)
        return biases + [line[key] for line in steps for key in ("loss", "norm", "held_out") if key in line]

    alone = losses(tmp_path / "alone", ("dp=1", ""))
    spread = ("dp=4,ep=2", "plan.zero=2")
    assert losses(tmp_path / "here", spread, ("tp=2", "")) == pytest.approx(alone, rel=1e-10)
    assert losses(tmp_path / "there", ("dp=1", ""), spread) == pytest.approx(alone, rel=1e-10)
    folded = ("dp=2,cp=2,ep=4", "plan.zero=1")  # out of dp x cp
    assert losses(tmp_path / "folded", folded, ("dp=1", "")) == pytest.approx(alone, rel=1e-10)
    piped = ("dp=2,ep=2,pp=2", "plan.accumulation=2,plan.microbatch=2")
    assert losses(tmp_path / "piped", piped, ("tp=2", "")) == pytest.approx(alone, rel=1e-10)
    whole = ("dp=2,tp=2,ep=4", "plan.expert_tp=1,plan.sequence_parallel=true,plan.zero=1")
    assert losses(tmp_path / "apart", ("tp=2", ""), whole) == pytest.approx(alone, rel=1e-10)
    assert losses(tmp_path / "whole", whole, piped) == pytest.approx(alone, rel=1e-10)


def test_experts_that_begin_as_copies_of_an_mlp_have_its_first_loss(tmp_path: Path) -> None:
    """On one process and with ep, and one layer left as it was; what would change the loss is refused."""
    text, dense = tmp_path / "text.txt", tmp_path / "dense"
    text.write_text("".join(f"line {number}: jumps over {number * 7} dogs\n" for number in range(300)))
    huggingface.save(Transformer(ModelConfig(**SETTINGS | {"vocabulary": 257}), seed=2), dense)
    sets = (
        "train.steps=2,train.batch=4,checkpoint.every=0,evaluate.every=0,sample.tokens=0,train.device=cpu,"
        f"plan.precision=fp64,train.trace_steps=0,data.source={text}"
    )

    def losses(name: str, mesh: str, more: str) -> list[float]:
        config, folder = load(mesh=mesh, sets=[sets, *filter(None, [more])], init=dense), tmp_path / name
        check_init(dense, config)
        new_run(TRAIN, config.to_toml(), folder)
        run_threads(config.plan.world, lambda comm: train_here(config, folder, comm, init=dense))
        return [line["loss"] for line in latest(folder) if line["kind"] == "step"]

    plain = losses("plain", "dp=1", "")
    copies = losses("copies", "dp=1", "model.experts=4")
    spread = losses("spread", "dp=2,ep=2", "model.experts=4,model.experts_per_token=3,model.dense_layers=[1]")
    assert copies[0] == pytest.approx(plain[0], rel=1e-12)
    assert spread[0] == pytest.approx(plain[0], rel=1e-12)
    assert copies[1] != pytest.approx(plain[1], rel=1e-9)  # each has learnt from its own tokens
    for more, words in (
        ("model.shared_width=8", "set model.shared_width=0"),
        ("model.router_renormalized=false", "set model.router_renormalized=true"),
    ):
        with pytest.raises(UsageError, match=words):
            check_init(dense, load(sets=[sets, f"model.experts=4,{more}"], init=dense))


def test_an_adapter_of_experts_is_not_written_as_peft_would_not_apply_it() -> None:
    model = ModelConfig(
        layers=2, width=32, heads=4, kv_heads=2, mlp_width=48, vocabulary=64, context=32, norm="rmsnorm",
        positions="rotary", activation="swiglu", biases=False, tied=False, experts=4, experts_per_token=2,
    )  # fmt: skip
    attention = LoraConfig(rank=2)
    assert peft_config(model, attention)["target_modules"][0].startswith("self_attn.")
    with pytest.raises(UsageError, match=r"leave --adapter out, which writes the merged model"):
        peft_config(model, LoraConfig(rank=2, targets=("fc_in",)))


def test_experts_that_are_rounded_are_written_and_served(tmp_path: Path) -> None:
    """By a recipe that looks at no text: every expert's matrix rounded, as each would be alone."""
    pytest.importorskip("safetensors")
    plain = Transformer(CONFIG, seed=3)
    rounded = quantize(plain, "int8")
    assert isinstance(rounded.layers[0].mlp.experts[1].fc_in, CodedLinear)
    huggingface.save(rounded, tmp_path / "folder")
    again = huggingface.load(tmp_path / "folder")
    tokens = torch.arange(12).reshape(1, 12) % CONFIG.vocabulary
    torch.testing.assert_close(again(tokens), rounded(tokens), rtol=0, atol=1e-5)
    apart = (rounded(tokens) - plain(tokens)).abs().max()
    assert 0 < apart < 0.05 * plain(tokens).abs().max()
    prompt = tokens[0, :5].tolist()
    with Engine(tmp_path / "folder", pages=32) as engine:
        (result,) = engine.generate([prompt], Sampling(max_tokens=4, temperature=0.0))
    for token in result.answers[0].tokens:
        assert token == int(again(torch.tensor([prompt]))[0, -1].argmax())
        prompt.append(token)
