"""Low-rank adapters: nothing at first, frozen weights stay, replicas agree with one process, PEFT reads them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train_run import losses, state
from test_train_run import trained as trained_on_threads
from torch.utils._python_dispatch import TorchDispatchMode

import tilemesh as tm
from tilemesh.comm import connect
from tilemesh.compress.quantize import quantize
from tilemesh.core.errors import UsageError
from tilemesh.core.units import format_bytes
from tilemesh.kernels.lowbit.formats import parse_scheme
from tilemesh.model import huggingface
from tilemesh.model.adapter import LoraConfig, adapted_modules, adapter_parameters, peft_config, peft_names
from tilemesh.model.config import ModelConfig
from tilemesh.model.kinds import Adapted, FewBits
from tilemesh.model.lora import attach, read_adapter, save_adapter
from tilemesh.model.programs.explain import explain
from tilemesh.model.transformer import Transformer
from tilemesh.model.work.weights import count_parameters
from tilemesh.parallel import Mesh
from tilemesh.runs import base
from tilemesh.runs.names import BASE
from tilemesh.serve.load import load_served
from tilemesh.serve.write import generate
from tilemesh.train.check import check_resumed
from tilemesh.train.config import TrainConfig, of_run
from tilemesh.train.export import export
from tilemesh.train.plain import planned_programs
from tilemesh.train.preview import preview
from tilemesh.train.rank import lay_model

LLAMA = ModelConfig(layers=2, width=16, heads=4, kv_heads=2, vocabulary=256, context=24, norm="rmsnorm", mlp_width=32,
                    positions="rotary", activation="swiglu", biases=False, tied=False)  # fmt: skip
LATENT = ModelConfig(
    layers=2, width=32, heads=2, vocabulary=64, context=24, norm="rmsnorm", positions="rotary", activation="swiglu",
    biases=False, tied=False, head_width=24, rotary_fraction=1 / 3, latent_width=16, value_width=16, mlp_width=32,
    experts=4, router_renormalized=False, shared_width=32,
)  # fmt: skip
GPT2 = ModelConfig(layers=1, width=16, heads=2, vocabulary=256, context=24)
ALL = ("fc_q", "fc_k", "fc_v", "fc_o", "fc_in", "fc_gate", "fc_out")
SHORT = (
    "train.steps=4,train.batch=4,train.device=cpu,evaluate.every=0,sample.tokens=0,train.context=16,checkpoint.every=2,"
    "optimizer.lr=0.05,optimizer.warmup=0,plan.precision=fp64"
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hub")
    huggingface.save(Transformer(LLAMA, seed=1, dtype=torch.float64), place / "model")
    (place / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 60)
    return place


def asked(hub: Path, *sets: str, mesh: str = "dp=1,tp=1") -> TrainConfig:
    base = ["lora.rank=3,lora.alpha=6", SHORT, f"data.source={hub / 'text.txt'}"]
    return tm.train.load_config(mesh=mesh, sets=[*base, *sets], init=hub / "model")


@pytest.fixture(scope="module")
def run(hub: Path) -> Path:
    config = asked(hub, f"lora.targets=[{','.join(ALL)}]")
    return tm.train.fit(config, run=hub / "run", init=hub / "model").folder


def tokens() -> torch.Tensor:
    return torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("config", [LLAMA, GPT2])
def test_adapters_change_nothing_until_b_is_trained_and_then_what_a_merged_matrix_would(config: ModelConfig) -> None:
    lora = LoraConfig(rank=3, alpha=6.0, targets=tuple(name for name in ALL if config is LLAMA or name != "fc_gate"))
    whole, adapted = (Transformer(config, seed=1, dtype=torch.float64) for _ in range(2))
    attach(adapted, lora, seed=5)
    assert torch.equal(adapted(tokens()), whole(tokens()))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert {name.rpartition(".")[2] for name in trained} == {"lora_a", "lora_b"}
    assert sum(p.numel() for p in adapted.parameters() if p.requires_grad) == adapter_parameters(config, lora)
    for name in adapted_modules(config, lora):
        module = adapted.get_submodule(name)
        assert isinstance(module.kind, Adapted)
        torch.nn.init.normal_(module.lora_b, std=0.1)
        merged = module.weight + 2.0 * module.lora_b @ module.lora_a  # 6 / 3
        whole.get_submodule(name).weight.data.copy_(merged)
    torch.testing.assert_close(adapted(tokens()), whole(tokens()), rtol=1e-11, atol=1e-12)


def test_a_is_drawn_as_a_linear_layer_is() -> None:
    model = Transformer(dataclasses.replace(LLAMA, width=64), seed=1)
    attach(model, LoraConfig(rank=32, targets=("fc_q",)), seed=5)
    module = model.get_submodule("layers.1.attention.fc_q")
    assert isinstance(module.kind, Adapted)
    # The standard deviation of U(-1/sqrt(64), 1/sqrt(64)), by construction of 2,048 numbers.
    assert float(module.lora_a.detach().std()) == pytest.approx(1 / (64 * 3) ** 0.5, rel=1e-3)


def test_a_checkpoint_has_the_adapters_alone_and_the_base_stays(hub: Path, run: Path) -> None:
    kept = state(run, 4)
    assert {name.split(":")[0] for name in kept} == {"weight", "exp_avg", "exp_avg_sq"}
    assert {name.rpartition(".")[2] for name in kept} == {"lora_a", "lora_b"}
    assert losses(run)[4] < losses(run)[1]
    merged = hub / "merged"
    export(run, merged)
    before, after = (dict(huggingface.read_parameters(folder)) for folder in (hub / "model", merged))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{name}.weight" for name in adapted_modules(LLAMA, LoraConfig(rank=3, targets=ALL))}
    with torch.no_grad():
        assert torch.equal(load_served(run).model(tokens()), huggingface.load(merged)(tokens()))
    assert len(generate(run, "the ", tokens=5)) == 5


@pytest.mark.parametrize(("mesh", "zero"), [("dp=1,tp=1", 0), ("dp=2,tp=1", 1), ("dp=2,tp=1", 3)])
def test_a_preview_counts_gradients_and_states_of_adapters_alone(hub: Path, mesh: str, zero: int) -> None:
    """In float64, with AdamW: 8 bytes of every weight, and 8 + 8 + 16 of those that are trained."""
    config = asked(hub, f"plan.zero={zero}", mesh=mesh)
    weights, adapters = count_parameters(LLAMA).total, adapter_parameters(LLAMA, config.lora)
    wanted = 8 * (weights // 2 if zero == 3 else weights)
    wanted += {0: 32 * adapters, 1: 16 * adapters + 16 * adapters // 2, 3: 32 * adapters // 2}[zero]
    lines = dict(preview(config, init=hub / "model").lines())
    assert lines["memory"].startswith(f"{format_bytes(wanted)} per rank for weights, gradients and optimizer states")


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("dp=2,tp=1", ""),
        ("dp=2,tp=1", "plan.zero=2"),
        ("dp=2,tp=1", "plan.zero=3"),
        ("dp=1,tp=2", "plan.sequence_parallel=true"),
        ("dp=1,tp=1,pp=2", "plan.schedule=zb-h1"),
        ("dp=1,tp=2,pp=2", "plan.schedule=1f1b"),
        ("dp=2,tp=1", "plan.offload=weights+optimizer"),
        ("dp=1,tp=1,pp=2", "plan.schedule=terapipe,plan.slices=2"),  # keys of the first layer have no gradient
    ],
)
def test_replicas_train_what_one_process_trains(hub: Path, tmp_path: Path, mesh: str, more: str) -> None:
    targets = "lora.targets=[fc_q,fc_v]" if "slices" in more else "lora.rank=3"
    trained_on_threads(asked(hub, targets), tmp_path / "alone")
    trained_on_threads(asked(hub, targets, *([more] if more else []), mesh=mesh), tmp_path / "ours")
    alone, ours = state(tmp_path / "alone", 4), state(tmp_path / "ours", 4)
    assert ours.keys() == alone.keys()
    for name, value in alone.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-8, atol=1e-10, msg=name)


class Sizes(TorchDispatchMode):
    """How many floating-point values the largest matrix that is made on a device has."""

    largest = 0

    def __torch_dispatch__(self, operator, types, args=(), options=None):
        made = operator(*args, **(options or {}))
        if (
            isinstance(made, torch.Tensor)
            and made.is_floating_point()
            and made.device.type != "meta"
            and made.dim() > 1
        ):
            self.largest = max(self.largest, made.numel())
        return made


def test_codes_below_adapters_are_predicted_and_laid_as_codes(hub: Path, tmp_path: Path) -> None:
    """Nobody makes the dense weights first: a base that only fits in few bits can be trained on."""
    small = tmp_path / "small"
    wide = LLAMA.replace(mlp_width=16 * LLAMA.mlp_width)
    huggingface.save(quantize(Transformer(wide, seed=1), "int4-g4"), small)
    sets = ["lora.rank=3,lora.alpha=6", SHORT, f"data.source={hub / 'text.txt'}"]
    config = tm.train.load_config(mesh="dp=1,tp=1", sets=sets, init=small)
    with Sizes() as sizes:
        laid = lay_model(config, Mesh(connect("alone")), torch.device("cpu"))
    scales = wide.mlp_width * wide.width // 4
    assert sizes.largest <= max(scales, wide.vocabulary * wide.width)
    held = sum(parameter.nbytes for parameter in laid.module.parameters())
    trained = sum(parameter.nbytes for parameter in laid.module.parameters() if parameter.requires_grad)
    words = dict(preview(config, init=small).lines())["memory"]
    assert words.startswith(f"{format_bytes(held + 3 * trained)} per rank for weights, gradients and optimizer states")


def test_programs_over_codes_are_told_as_they_run(hub: Path, tmp_path: Path) -> None:
    huggingface.save(quantize(Transformer(GPT2, seed=1), "int4-g4"), tmp_path / "small")
    sets = ["lora.rank=3", SHORT, f"data.source={hub / 'text.txt'}", "train.kernels=tilemesh"]
    config, cpu = tm.train.load_config(mesh="dp=1,tp=1", sets=sets, init=tmp_path / "small"), torch.device("cpu")
    lines = explain(planned_programs(config, cpu))
    assert "    not MLP as one operator: matrices are not dense" in lines
    assert "definition: 1 layer" in lines[1]
    assert isinstance(lay_model(config, Mesh(connect("alone")), cpu).model.layers[0].mlp.fc_in.kind, FewBits)


def test_codes_whose_groups_ranks_would_share_are_refused_before_ranks_start(hub: Path, tmp_path: Path) -> None:
    huggingface.save(quantize(huggingface.load(hub / "model"), "int4-g16"), tmp_path / "small")
    sets = ["lora.rank=3,lora.alpha=6", SHORT, f"data.source={hub / 'text.txt'}"]
    config = tm.train.load_config(mesh="dp=1,tp=2", sets=sets, init=tmp_path / "small")
    with pytest.raises(
        UsageError, match=r"plan\.tp is 2: layers\.0\.attention\.fc_o: groups of 16 do not divide the 8"
    ):
        tm.train.fit(config, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("mesh", "more"), [("dp=2,tp=1", "plan.zero=3"), ("dp=1,tp=2", ""), ("dp=1,tp=1,pp=2", "plan.schedule=1f1b")]
)
def test_adapters_over_codes_of_four_bits_are_trained_on_any_layout(
    hub: Path, tmp_path: Path, mesh: str, more: str
) -> None:
    small = tmp_path / "small"
    huggingface.save(quantize(huggingface.load(hub / "model"), "int4-g4"), small)

    def config(mesh: str, *more: str) -> TrainConfig:
        sets = ["lora.rank=3,lora.alpha=6", SHORT, f"data.source={hub / 'text.txt'}", *more]
        return tm.train.load_config(mesh=mesh, sets=sets, init=small)

    laid = lay_model(config("dp=1,tp=1"), Mesh(connect("alone")), torch.device("cpu"))
    layer = laid.module.get_submodule("layers.0.attention.fc_q")
    assert layer.kind == Adapted(FewBits(parse_scheme("int4-g4")), 3, 2.0)
    assert layer.codes.dtype == torch.uint8
    trained_on_threads(config("dp=1,tp=1"), tmp_path / "alone")
    trained_on_threads(config(mesh, *([more] if more else [])), tmp_path / "ours")
    alone, ours = state(tmp_path / "alone", 4), state(tmp_path / "ours", 4)
    assert losses(tmp_path / "alone")[4] < losses(tmp_path / "alone")[1]
    for name, value in alone.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-8, atol=1e-10, msg=name)
    export(tmp_path / "ours", tmp_path / "merged")
    merged = dict(huggingface.read_parameters(tmp_path / "merged"))
    meant = dict(huggingface.read_parameters(small))
    low, high = (alone[f"weight:layers.0.attention.fc_q.{part}"] for part in ("lora_a", "lora_b"))
    want = meant["layers.0.attention.fc_q.weight"].double() + 2.0 * high.double() @ low.double()
    torch.testing.assert_close(merged["layers.0.attention.fc_q.weight"].double(), want, rtol=1e-5, atol=1e-6)


def test_it_resumes_bit_for_bit_without_the_init_folder_being_named_again(hub: Path, tmp_path: Path) -> None:
    config = asked(hub)
    trained_on_threads(config, tmp_path / "whole")
    trained_on_threads(config, tmp_path / "run", stop_after=2)
    trained_on_threads(of_run(tmp_path / "run"), tmp_path / "run", resume=True)
    ours, theirs = state(tmp_path / "run", 4), state(tmp_path / "whole", 4)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


class TestPeft:
    def test_names(self) -> None:
        found = peft_names(LLAMA, LoraConfig(rank=2, targets=("fc_q", "fc_gate")))
        assert found["layers.1.attention.fc_q"] == "model.layers.1.self_attn.q_proj"
        assert found["layers.0.mlp.fc_gate"] == "model.layers.0.mlp.gate_proj"
        told = peft_config(GPT2, LoraConfig(rank=2, targets=("fc_o",)))
        assert (told["target_modules"], told["fan_in_fan_out"]) == (["attn.c_proj"], True)

    def test_a_matrix_of_several_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"GPT2LMHeadModel has it inside attn.c_attn"):
            peft_names(GPT2, LoraConfig(rank=2, targets=("fc_q",)))

    def test_the_folder(self, run: Path, hub: Path, tmp_path: Path) -> None:
        assert export(run, tmp_path / "adapter", adapter=True) == 4
        stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        assert len(stored) == 2 * 2 * len(ALL)
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
        assert torch.equal(stored[name], state(run, 4)["weight:layers.0.attention.fc_q.lora_a"])
        told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert (told["r"], told["lora_alpha"], told["base_model_name_or_path"]) == (3, 6.0, str(hub / "model"))

    @pytest.mark.parametrize("query_latent", [0, 12])
    def test_names_and_rows_are_those_of_a_family_that_orders_them_otherwise(
        self, query_latent: int, tmp_path: Path
    ) -> None:
        """DeepSeek: a head's turned part stands last and in pairs of neighbours, and q_proj may be q_b_proj."""
        config, lora = (
            LATENT.replace(query_latent_width=query_latent),
            LoraConfig(rank=2, targets=("fc_q", "fc_latent")),
        )
        plain, adapted = Transformer(config, seed=1), Transformer(config, seed=1)
        attach(adapted, lora, seed=2)
        generator, held = torch.Generator().manual_seed(3), dict(adapted.named_parameters())
        adapters = {name: value.detach() for name, value in held.items() if "lora_" in name}
        for name, value in adapters.items():
            value.normal_(generator=generator)
            module, _, part = name.rpartition(".")
            if part == "lora_b":
                plain.get_submodule(module).weight.data += lora.scale * value @ adapters[f"{module}.lora_a"]
        huggingface.save(Transformer(config, seed=1), tmp_path / "base")
        huggingface.save(plain, tmp_path / "merged")
        save_adapter(adapters, config, lora, tmp_path / "adapter")
        base, merged = (load_file(tmp_path / name / "model.safetensors") for name in ("base", "merged"))
        stored, prefix = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), "base_model.model."
        changed = [name for name in base if not torch.equal(base[name], merged[name])]
        assert len(stored) == 2 * len(changed)
        for name in changed:
            low, high = (stored[f"{prefix}{name.removesuffix('weight')}lora_{part}.weight"] for part in "AB")
            torch.testing.assert_close(base[name] + lora.scale * high @ low, merged[name])
        for module, (low, high) in read_adapter(tmp_path / "adapter", config).tensors.items():
            assert torch.equal(low, adapters[f"{module}.lora_a"])
            torch.testing.assert_close(high, lora.scale * adapters[f"{module}.lora_b"])

    def test_peft_computes_the_same_logits(self, run: Path, hub: Path, tmp_path: Path) -> None:
        peft: Any = pytest.importorskip("peft")
        transformers: Any = pytest.importorskip("transformers")
        export(run, tmp_path / "adapter", adapter=True)
        export(run, tmp_path / "merged")
        base = transformers.AutoModelForCausalLM.from_pretrained(hub / "model", dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        ours = huggingface.load(tmp_path / "merged", dtype=torch.float32).eval()
        with torch.no_grad():
            torch.testing.assert_close(ours(tokens()), theirs(tokens()).logits, rtol=1e-4, atol=1e-5)


class TestRefused:
    @pytest.mark.parametrize(
        ("mesh", "sets", "words"),
        [
            ("dp=1,tp=1", "lora.targets=[fc_z]", "fc_z"),
            ("dp=1,tp=1", "lora.targets=[]", "lora.targets is empty"),
        ],
    )
    def test_what_cannot_be(self, hub: Path, mesh: str, sets: str, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            asked(hub, *([sets] if sets else []), mesh=mesh)

    def test_without_weights_to_add_to(self) -> None:
        with pytest.raises(UsageError, match="there are no weights to add adapters to"):
            tm.train.load_config(sets=["lora.rank=4"], mesh="dp=1,tp=1")

    def test_another_rank_on_resume(self, hub: Path) -> None:
        with pytest.raises(UsageError, match=r"lora.rank is 3 there and 4 here"):
            check_resumed(asked(hub), asked(hub, "lora.rank=4"))

    def test_an_adapter_of_a_run_without_one(self, hub: Path, tmp_path: Path) -> None:
        config = tm.train.load_config(
            mesh="dp=1,tp=1", sets=[SHORT, f"data.source={hub / 'text.txt'}"], init=hub / "model"
        )
        run = tm.train.fit(config, run=tmp_path / "run", init=hub / "model").folder
        with pytest.raises(UsageError, match="has no adapter"):
            export(run, tmp_path / "adapter", adapter=True)

    def test_a_base_that_is_gone(self, hub: Path, run: Path, tmp_path: Path) -> None:
        text = (run / "config.toml").read_text()
        moved = shutil.copytree(run, tmp_path / "run")
        (moved / "config.toml").write_text(text.replace(str(hub / "model"), str(tmp_path / "gone")))
        with pytest.raises(UsageError, match=r"has no config.json"):
            export(moved, tmp_path / "out")

    def test_a_base_that_changed(self, hub: Path, run: Path, tmp_path: Path) -> None:
        folder = shutil.copytree(hub / "model", tmp_path / "base")
        moved = shutil.copytree(run, tmp_path / "run")
        text = (
            (run / "config.toml").read_text().replace(str(hub / "model"), str(folder)).replace("steps = 4", "steps = 6")
        )
        (moved / "config.toml").write_text(text)
        export(moved, tmp_path / "same")  # where the weights lie makes no difference
        huggingface.save(Transformer(LLAMA, seed=2, dtype=torch.float64), folder)
        words = r"were trained on other weights than .*base holds now \(model.safetensors changed since the run began\)"
        with pytest.raises(UsageError, match=words):
            export(moved, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
        with pytest.raises(UsageError, match=words):
            load_served(moved)
        with pytest.raises(UsageError, match=words):
            tm.train.fit(of_run(moved), resume=moved)
        export(moved, tmp_path / "adapter", adapter=True)  # the adapter alone is what it was
        (moved / BASE).unlink()  # a run of a version that wrote none
        export(moved, tmp_path / "merged")


def test_one_changed_piece_of_a_long_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "PIECE", 8)
    monkeypatch.setattr(base, "PIECES", 4)
    monkeypatch.setattr(base, "WHOLE", 32)
    path = tmp_path / "model.safetensors"
    before = bytes(100)
    path.write_bytes(before)
    first = base.digests(tmp_path)
    seen = []
    for place in range(100):
        path.write_bytes(before[:place] + b"1" + before[place + 1 :])
        if base.digests(tmp_path) != first:
            seen.append(place)
    assert seen == [place + at for place in (0, 30, 61, 92) for at in range(8)]
    path.write_bytes(before + b"0")
    assert base.digests(tmp_path) != first
