"""Training for compression: rounding and masks in every pass, a teacher, and what is refused."""

import copy
import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from test_train_run import state
from test_train_run import trained as trained_on_threads
from torch.nn import functional

from tilemesh.cli.commands.train import summary_text
from tilemesh.cli.output import print_block
from tilemesh.comm import run_threads
from tilemesh.compress.config import DistillConfig
from tilemesh.compress.factorize import factorize
from tilemesh.compress.prepare import prepare
from tilemesh.compress.quantize import quantize
from tilemesh.compress.recipe import RankRecipe, Recipe, WeightsRecipe, read_recipe
from tilemesh.core.errors import UsageError
from tilemesh.core.plan import ParallelPlan
from tilemesh.kernels.lowbit.codes import rounded
from tilemesh.kernels.lowbit.formats import parse_scheme
from tilemesh.model import huggingface
from tilemesh.model.config import preset
from tilemesh.model.loss import IGNORED
from tilemesh.model.transformer import Transformer
from tilemesh.parallel import Mesh, lay
from tilemesh.parallel.apply import lay_beside
from tilemesh.runs.folder import read_small
from tilemesh.runs.names import SUMMARY
from tilemesh.train import fit, load_config
from tilemesh.train.export import export
from tilemesh.train.preview import preview
from tilemesh.train.teach import TeacherLesson

SMALL = (
    "model.layers=1,model.width=32,model.heads=2,model.kv_heads=1,model.context=32,train.steps=4,train.batch=4,"
    "evaluate.sequences=4,evaluate.every=4,sample.tokens=0,checkpoint.every=0,train.trace_steps=0,train.device=cpu,"
    "optimizer.warmup=1"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("def f(x):\n    return x + 1\n" * 400)
    return path


def config(text, *sets, **more):
    return load_config(sets=[SMALL, f"data.source={text}", *sets], mesh="dp=1", **more)


def trained(run, folder):
    export(run, folder)
    return huggingface.load(folder).eval().requires_grad_(False)


def test_training_with_a_recipe_sees_the_loss_of_the_rounded_model(text, tmp_path):
    """What is judged while training is what `quantize` then makes."""
    result = fit(config(text, recipe="int4-g16"), run=tmp_path / "run")
    model = trained(tmp_path / "run", tmp_path / "folder")
    weight = model.layers[0].mlp.fc_in.weight
    assert not torch.equal(rounded(weight, parse_scheme("int4-g16")), weight)  # trained in full
    again = fit(None, resume=tmp_path / "run")
    assert again.held_out == result.held_out
    small = quantize(model, "int4-g16")
    for layer in small.layers:
        torch.testing.assert_close(layer.mlp.fc_in.weight, rounded(weight, parse_scheme("int4-g16")))


SAMPLE = ("int4-affine", "int8-tensor", "int3-g16-2level", "int4-g16-affine-2level")
OTHERS = (
    "int8", "int4-g16", "int4-g16-affine", "int4-tensor-affine", "int8-g8-2level", "nf4-g16-2level", "fp8",
    "fp8-g16-2level", "fixed16",
)  # fmt: skip


@pytest.mark.parametrize("scheme", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_rounding_while_training_is_the_same_on_ranks_that_cut_a_matrix(scheme, text):
    """Rows that are cut share one scale, and with two levels what the scales of their groups are multiples of; in
    float64, so that only the order of sums differs."""
    model = Transformer(config(text, "model.width=64,model.tied=false").model, seed=3).double()
    prepare(model, Recipe(weights=WeightsRecipe(scheme=scheme)))
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))

    def main(comm):
        plan = ParallelPlan(tp=comm.size, precision="fp64")
        laid = lay(copy.deepcopy(model), Mesh(comm, tp=comm.size), plan)
        with torch.no_grad():
            return float(laid.loss(tokens[:, :-1], tokens[:, 1:])[0])

    alone, *halves = [loss for ranks in (1, 2) for loss in run_threads(ranks, main)]
    assert halves == pytest.approx([alone] * 2, rel=1e-13)


@pytest.mark.parametrize(
    ("recipe", "mesh", "more"),
    [
        ("int4-g16", "pp=2", "plan.schedule=1f1b"),
        ("2:4", "pp=2", "plan.schedule=zb-h1"),
        ("2:4", "dp=2", "plan.zero=3"),
        ("int8-a8", "dp=2", "plan.offload=weights+activations"),
    ],
)
def test_layers_that_are_made_anew_round_and_mask_as_one_process_does(recipe, mesh, more, text, tmp_path):
    sets = [SMALL, f"data.source={text}", "plan.precision=fp64,model.layers=2,checkpoint.every=4"]
    alone = load_config(sets=sets, mesh="dp=1", recipe=recipe)
    trained_on_threads(alone, tmp_path / "alone")
    trained_on_threads(load_config(sets=[*sets, more], mesh=mesh, recipe=recipe), tmp_path / "ours")
    want, found = (state(tmp_path / name, alone.train.steps) for name in ("alone", "ours"))
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("recipe", ["int8-a8", "int4-g16-a8", "fp8-a8"])
def test_training_rounds_the_activations_that_quantize_does(recipe, text):
    """Those of the layers, not what enters the output projection, though that is rounded too."""
    whole = replace(read_recipe(recipe), weights=replace(read_recipe(recipe).weights, layers=("layers.*", "output")))
    plain = Transformer(config(text, "model.tied=false").model, seed=3).double().eval()
    small, trained = quantize(plain, whole), copy.deepcopy(plain)
    prepare(trained, whole)
    tokens = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(trained(tokens), small(tokens), rtol=0, atol=1e-9)


def test_factors_of_a_folder_without_biases_are_trained(text, tmp_path):
    model = Transformer(config(text, "model.biases=false,model.activation=swiglu").model, seed=3)
    huggingface.save(factorize(model, Recipe(rank=RankRecipe(keep=0.5, aware=False))), tmp_path / "folder")
    loaded = huggingface.load(tmp_path / "folder")
    tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(1))
    loaded(tokens).sum().backward()
    factors = [name for name, _ in loaded.named_parameters() if name.endswith((".left", ".right"))]
    assert len(factors) == 14
    assert [name for name, parameter in loaded.named_parameters() if parameter.grad is None] == []


def test_a_recipe_file_is_kept_in_the_configuration(text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[prune]\nstructure = "2:4"\n')
    made = config(text, recipe=path)
    path.unlink()
    fit(made, run=tmp_path / "run")
    model = trained(tmp_path / "run", tmp_path / "folder")
    assert model.layers[0].mlp.fc_in.weight.count_nonzero() > 0


def test_resuming_a_finished_pruned_run_writes_the_same_sample(text, tmp_path):
    """With the weights left out that the last step left out."""
    sets = ("train.steps=8", "optimizer.lr=0.02", "sample.tokens=100", "sample.temperature=1")
    fit(config(text, *sets, recipe="2:4"), run=tmp_path / "run")
    before = (tmp_path / "run" / "sample.txt").read_text()
    (tmp_path / "run" / "sample.txt").unlink()
    fit(None, resume=tmp_path / "run")
    assert (tmp_path / "run" / "sample.txt").read_text() == before


def test_a_student_is_trained_by_the_loop(text, tmp_path):
    teacher = Transformer(config(text).model.replace(layers=2), seed=5)
    huggingface.save(teacher, tmp_path / "teacher")
    plain = fit(config(text), run=tmp_path / "plain")
    taught = fit(config(text, f"distill.teacher={tmp_path / 'teacher'}", "distill.share=1.0"), run=tmp_path / "taught")
    assert taught.loss != plain.loss
    assert taught.held_out != plain.held_out


LAYOUTS = (
    ("tp=2", "plan.sequence_parallel=true,distill.hidden=0.5,plan.recompute=operators"),
    ("tp=2,pp=2", "plan.schedule=zb-h1,distill.hidden=0.5,model.tied=true"),
    ("pp=2", "plan.schedule=terapipe,plan.slices=2,distill.hidden=0.5,data.packing=documents"),
    ("dp=2", "plan.zero=3,plan.recompute=full"),
)
OTHER_LAYOUTS = (
    ("dp=2", "plan.offload=weights+activations"),
    ("tp=2", "distill.hidden=0.5,model.tied=true"),
    ("pp=2,tp=2", "plan.schedule=terapipe,plan.slices=3,plan.sequence_parallel=true,distill.hidden=0.5"),
    ("pp=2,dp=2", "plan.schedule=1f1b,plan.zero=3,plan.recompute=full"),
    ("pp=2", "plan.schedule=dualpipe,plan.microbatch=1,distill.hidden=0.5"),
    ("pp=2", "plan.schedule=chimera,plan.offload=activations"),
    ("dp=1", "plan.recompute=operators"),
    # One microbatch a step: nothing is delayed.
    ("pp=2", "plan.schedule=pipedream,plan.microbatch=4,optimizer.clip=0,model.tied=false"),
)


@pytest.mark.parametrize(
    ("mesh", "more"), [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.slow) for layout in OTHER_LAYOUTS)]
)
def test_a_teacher_teaches_on_every_layout_what_it_does_in_one_process(mesh, more, tmp_path):
    text = tmp_path / "documents.jsonl"
    text.write_text("".join(f'{{"text": "{number} fox"}}\n' for number in range(2000)))
    shape = [part for part in more.split(",") if not part.startswith("plan.")]
    sets = [SMALL, f"data.source={text}", "plan.precision=fp64,model.layers=4,checkpoint.every=4", *shape]
    sets.append(f"distill.teacher={tmp_path / 'teacher'},distill.share=0.75")
    made = load_config(sets=[*sets, "distill.teacher=none"], mesh="dp=1").model
    huggingface.save(Transformer(made.replace(layers=2, heads=4, tied=False), seed=5).double(), tmp_path / "teacher")
    alone = load_config(sets=sets, mesh="dp=1")
    one, _ = trained_on_threads(alone, tmp_path / "alone")
    several, _ = trained_on_threads(load_config(sets=[*sets, more], mesh=mesh), tmp_path / "ours")
    assert (several.loss, several.held_out) == pytest.approx((one.loss, one.held_out), rel=1e-9)
    want, found = (state(tmp_path / name, alone.train.steps) for name in ("alone", "ours"))
    assert found.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_students_loss_and_gradients_are_those_of_torchs_divergence(tied, sequence):
    """On three ranks, none of which has as many classes as another; float64, so that only the order of sums differs."""
    shape = preset("tiny").replace(
        vocabulary=61, width=24, heads=6, kv_heads=3, mlp_width=48, context=16, layers=1, tied=tied
    )
    model, teacher = (Transformer(shape, seed=seed).double() for seed in (3, 5))
    asked = DistillConfig(None, share=0.75, temperature=1.5, hidden=0.3)
    tokens = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(1))
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 3:6] = IGNORED
    counted = (targets != IGNORED).double()

    whole, seen = copy.deepcopy(model), {}
    for name, one in (("ours", whole), ("theirs", teacher)):
        one.final_norm.register_forward_hook(lambda _, __, y, name=name: seen.update({name: y[0]}))
    logits = whole(inputs)
    with torch.no_grad():
        theirs = (teacher(inputs) / 1.5).log_softmax(-1)
    text_loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    apart = functional.kl_div((logits / 1.5).log_softmax(-1), theirs, reduction="none", log_target=True).sum(-1)
    near = ((seen["ours"] - seen["theirs"]) ** 2).sum(-1) / 24
    expected = 0.25 * text_loss + 0.75 * 2.25 * (apart * counted).sum() + 0.3 * (near * counted).sum()
    expected.backward()
    gradients = {name: parameter.grad / counted.sum() for name, parameter in whole.named_parameters()}

    def main(comm):
        plan = ParallelPlan(tp=3, sequence_parallel=sequence, precision="fp64")
        laid = lay(copy.deepcopy(model), Mesh(comm, tp=3), plan, gradients="naive")
        beside = lay_beside(Transformer(shape, device="meta", dtype=torch.float64), laid)
        beside.load(teacher.state_dict())
        lesson = TeacherLesson(beside.predictions(inputs, 11), asked)
        total, count = laid.loss(inputs, targets, lesson=lesson)
        laid.gradients.backward(total, count)
        laid.gradients.finish()
        return total.item(), laid.gather_gradients()

    losses, (found, *_) = zip(*run_threads(3, main), strict=True)
    assert losses == pytest.approx([expected.item()] * 3, rel=1e-12)
    assert found.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12, msg=name)


def test_a_teacher_in_few_bits_is_cut_over_ranks(text, tmp_path):
    sets = [SMALL, f"data.source={text}", "plan.precision=fp64,train.steps=2,checkpoint.every=2"]
    plain = Transformer(load_config(sets=sets).model, seed=5)
    huggingface.save(quantize(plain, "int4-g16"), tmp_path / "teacher")
    sets.append(f"distill.teacher={tmp_path / 'teacher'},distill.share=1")
    for mesh in ("dp=1", "tp=2"):
        trained_on_threads(load_config(sets=sets, mesh=mesh), tmp_path / mesh)
    want, found = (state(tmp_path / mesh, 2) for mesh in ("dp=1", "tp=2"))
    for name, value in want.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-10, msg=name)


def test_a_teacher_is_given_the_documents_of_its_student(text, tmp_path):
    teacher = Transformer(config(text).model.replace(layers=2), seed=5)
    huggingface.save(teacher, tmp_path / "teacher")
    source = tmp_path / "documents.jsonl"
    source.write_text("".join(f'{{"text": "{number} fox"}}\n' for number in range(2000)))
    sets = (f"data.source={source}", "data.packing=documents")
    taught = fit(config(text, *sets, f"distill.teacher={tmp_path / 'teacher'}"), run=tmp_path / "taught")
    assert 0 < taught.loss < 10


def test_a_teacher_whose_groups_ranks_would_share_is_refused_before_ranks_start(text, tmp_path):
    huggingface.save(quantize(Transformer(config(text).model, seed=5), "int4-g32"), tmp_path / "teacher")
    asked = config(text, "plan.tp=2,plan.dp=1", f"distill.teacher={tmp_path / 'teacher'}")
    with pytest.raises(UsageError, match=r"plan\.tp is 2: .*fc_o: groups of 32 do not divide the 16 inputs of a rank"):
        fit(asked, run=tmp_path / "run")


@pytest.mark.parametrize(
    ("sets", "recipe", "words"),
    [
        ((), "int4-g16-gptq", "sets weights.method, which is done after training"),
        ((), "mlp-25", "sets prune.structure"),
        ((), "int4-g48", "groups of 48 do not divide"),
        (("distill.teacher=/no/such/folder,plan.tp=1",), None, "expected a Hugging Face folder"),
        (("distill.temperature=0",), None, "distill.temperature is 0"),
        (("distill.teacher=TEACHER,plan.tp=1,model.vocabulary=300",), None, "must share a tokenizer"),
        (("distill.teacher=TEACHER,plan.tp=1,model.context=64",), None, "context is 32 and the student's 64"),
        (("distill.teacher=TEACHER,plan.tp=1,model.width=16,distill.hidden=1",), None, "set distill.hidden to 0"),
        (
            ("distill.teacher=TEACHER,plan.dp=1,plan.tp=4,model.heads=4",),
            None,
            "the teacher is cut over tp as the student is, and tp is 4: 2 heads are not divisible by it",
        ),
        (("plan.tp=2,plan.dp=1",), "unstructured-50", "set compress.recipe=2:4 or plan.tp=1"),
        (("plan.tp=2,plan.dp=1",), "int4-g32", "fc_o: groups of 32 do not divide the 16 inputs of a rank"),
        (("plan.tp=2,plan.dp=1,model.mlp_width=68",), "2:4", "of 34 inputs: expected a multiple of 4 on each of 2"),
        (("model.mlp_width=66",), "2:4", "2:4 sparsity of 66 inputs: expected a multiple of 4"),
    ],
)
def test_what_training_cannot_do_is_refused_before_there_is_a_folder(text, sets, recipe, words, tmp_path):
    if "TEACHER" in str(sets):
        huggingface.save(Transformer(config(text).model, seed=5), tmp_path / "teacher")
        sets = [part.replace("TEACHER", str(tmp_path / "teacher")) for part in sets]

    def asked():
        fit(load_config(sets=[SMALL, f"data.source={text}", *sets], recipe=recipe), run=tmp_path / "run")

    with pytest.raises(UsageError, match=words):
        asked()
    assert not (tmp_path / "run").exists()


def test_a_user_is_told_what_is_trained_for_and_how_to_shrink_the_result(text, tmp_path):
    huggingface.save(Transformer(config(text).model, seed=5), tmp_path / "teacher")
    asked = config(text, f"distill.teacher={tmp_path / 'teacher'}", recipe="int4-g16")
    told = ("int4-g16: weights are rounded in every pass", "0.5 of the loss is the divergence from its predictions")
    lines = dict(preview(asked).lines())
    assert all(words in f"{lines['recipe']} {lines['teacher']}" for words in told)
    heard: list[str] = []
    result = fit(asked, run=tmp_path / "run", on_event=lambda event: heard.append(str(event)))
    assert all(words in " ".join(heard) for words in told)
    console = Console(file=io.StringIO(), width=200)
    for block in summary_text(result, read_small(result.folder, SUMMARY)):
        print_block(block, console)
    shown = " ".join(console.file.getvalue().split())
    assert "(with the teacher's part), held-out" in shown
    assert f"compress {tmp_path / 'run'} --recipe int4-g16 --out FOLDER" in shown


def test_a_distill_config_checks_itself():
    with pytest.raises(UsageError, match=r"distill\.share is 2"):
        DistillConfig(share=2)
