"""`tilemesh compress` and `tilemesh bench compress` on a small model: folders, rows, the page, what is refused."""

import json
import os
import re
import signal

import pytest
import torch

from tilemesh.bench.compress import run as compress_run
from tilemesh.bench.compress.layers import LayerClock
from tilemesh.bench.compress.measure import layer_errors
from tilemesh.bench.compress.peers import peer_model, torchao_codes, why_not
from tilemesh.bench.compress.predict import CompressClocks, PassChange, ProductClock
from tilemesh.bench.compress.text import CompressSource, random_source
from tilemesh.cli.commands.bench.compress import _that_fit
from tilemesh.cli.main import main
from tilemesh.compress.factorize import factorize
from tilemesh.compress.prune import prune
from tilemesh.compress.quantize import quantize
from tilemesh.compress.recipe import read_recipe
from tilemesh.compress.shrink import shrink
from tilemesh.core.units import format_bytes
from tilemesh.data.config import DataConfig
from tilemesh.data.corpus import open_corpus
from tilemesh.data.samples import held_out_samples
from tilemesh.kernels.launch.steps import FitError
from tilemesh.kernels.lowbit import codes
from tilemesh.kernels.lowbit.formats import Scheme, parse_scheme
from tilemesh.measure.row import read_rows
from tilemesh.model import huggingface
from tilemesh.model.config import preset
from tilemesh.model.kinds import FewBits, model_bytes, projections
from tilemesh.model.transformer import Transformer
from tilemesh.report.compressing import _facts, _scatter, _trade, together
from tilemesh.report.draw import frontier
from tilemesh.report.run import Run
from tilemesh.serve import Engine, Sampling


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    model = Transformer(preset("tiny").replace(layers=1, width=64, mlp_width=128, context=64), seed=1)
    huggingface.save(model, folder / "model")
    (folder / "text.txt").write_text("def f(x):\n    return x + 1\n" * 2000)
    return folder


def test_calibration_is_on_text_that_is_neither_learnt_nor_judged(source, tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"line {number} of many\n" for number in range(40_000)))
    model = huggingface.load(source / "model")
    data = DataConfig(source=str(tmp_path / "text.txt"))
    given = CompressSource("model", source / "model", model, data)
    held = [tuple(inputs) for inputs, _ in held_out_samples(open_corpus(data), 64, "stream", 10_000)]
    chosen = []
    for seed in (0, 1):
        calibration, judged, _ = given.text(16, 4, seed)
        assert [tuple(row) for row in judged.tolist()] == held[:4]
        chosen.append({tuple(row) for row in calibration[:, :-1].tolist()})
        assert len(chosen[-1]) == 16
        assert chosen[-1] <= set(held[4:])
    assert chosen[0] != chosen[1]
    learnt, judged, _ = given.text(16, len(held) - 8, 0)  # too little is left
    assert len(judged) == len(held) - 8
    assert not {tuple(row) for row in learnt[:, :-1].tolist()} & set(held)


def test_compress_writes_a_folder_that_generates_and_serves(source, tmp_path, capsys):
    out, rows = tmp_path / "small", tmp_path / "rows.jsonl"
    asked = [str(source / "model"), "--recipe", "int4-g32-gptq", "--out", str(out), "--data", str(source / "text.txt")]
    assert main(["compress", *asked, "--calibrate", "16", "--sequences", "4", "--json", str(rows)]) == 0
    assert "int4-g32-gptq" in capsys.readouterr().out
    found = {row.name: row for row in read_rows(rows)}
    assert set(found) == {"held-out loss", "size", "forward pass", "decoded token"}
    assert found["size"].predicted == found["size"].measured.median == model_bytes(huggingface.load(out))
    told = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (told["quant_method"], told["format"]) == ("compressed-tensors", "pack-quantized")
    assert main(["report", str(out)]) == 0
    assert "Loss against bytes" in (out / "report.html").read_text()
    capsys.readouterr()
    with Engine(out, pages=16) as engine:
        (answer,) = engine.generate([[1, 2, 3]], Sampling(max_tokens=4, temperature=0))
    assert len(answer.answers[0].tokens) == 4
    assert main(["compress", str(out), "--recipe", "int8", "--out", str(tmp_path / "again"), "--data",
                 str(source / "text.txt"), "--calibrate", "16", "--sequences", "4"]) == 2  # fmt: skip
    assert "compressed already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--recipe", "int4-g48"], "groups of 48 do not divide 64 inputs"),
        (["--recipe", "int9"], "neither a TOML file nor a name"),
        (["--recipe", "int8", "--calibrate", "2"], "expected at least 512 tokens"),
        (["--recipe", "int8", "--calibrate", "2"], "set --calibrate from 8 to "),
        (["--recipe", "int8", "--step", "3"], "has no steps"),
        (["--recipe", "int8", "--out", "/proc/x"], "--out /proc/x cannot be made"),
    ],
)
def test_wrong_use_is_one_line(source, options, words, tmp_path, capsys):
    asked = ["compress", str(source / "model"), "--out", str(tmp_path / "out"), "--data", str(source / "text.txt")]
    assert main([*asked, *options]) == 2
    said = capsys.readouterr().err.strip()
    assert words in said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()


def test_bench_compress_makes_rows_and_a_page(source, tmp_path, capsys):
    asked = ["--recipes", "int8,nf4-g32,mlp-25", "--seconds", "0.1", "--calibrate", "16", "--sequences", "4"]
    where = ["--data", str(source / "text.txt"), "--run", str(tmp_path / "run"), "--json", str(tmp_path / "rows.jsonl")]
    assert main(["bench", "compress", str(source / "model"), *asked, *where]) == 0
    rows = read_rows(tmp_path / "rows.jsonl")
    assert len(rows) == 12
    for row in rows:
        assert "plain" in row.peers
    page = (tmp_path / "run" / "report.html").read_text()
    for words in ("Loss against bytes", "Loss against decoding speed", "Error per matrix", "frontier"):
        assert words in page


def test_a_recipe_that_fails_does_not_end_the_others(source, tmp_path, capsys, monkeypatch):
    def failing(model, recipe, *rest):
        if recipe == read_recipe("fp8"):
            raise FitError("kernel scaled_product: shared memory 327712, this GPU has 232448")
        return shrink(model, recipe, *rest)

    monkeypatch.setattr(compress_run, "shrink", failing)
    asked = ["--seconds", "0.1", "--calibrate", "16", "--sequences", "4", "--data", str(source / "text.txt")]
    where = ["--json", str(tmp_path / "rows.jsonl"), "--run", str(tmp_path / "run")]
    asked = ["bench", "compress", str(source / "model"), *asked, *where, "--recipes"]
    assert main([*asked, "int8,fp8,mlp-25"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert (
        "tilemesh: fp8 failed and has no rows: kernel scaled_product: shared memory 327712, this GPU has 232448" in said
    )
    assert "1 of 3 recipes failed: fp8" in said[-1]
    assert [row.case["recipe"] for row in read_rows(tmp_path / "rows.jsonl")] == ["int8"] * 4 + ["mlp-25"] * 4
    assert "Loss against bytes" in (tmp_path / "run" / "report.html").read_text()
    assert main([*asked, "int8"]) == 2  # before anything is measured
    assert "has a run already: name another folder" in capsys.readouterr().err
    asked[asked.index("--run") + 1] = str(tmp_path / "other")
    assert main([*asked, "fp8"]) == 1
    assert "1 of 1 recipes failed: fp8" in capsys.readouterr().err


@pytest.mark.parametrize("by", ["interrupt", "terminate"])
def test_a_bench_that_is_cut_short_keeps_its_rows_and_makes_its_page(by, source, tmp_path, capsys, monkeypatch):
    def cut(model, recipe, *rest):
        if recipe == read_recipe("mlp-25"):
            # What the folder holds now is what a bench leaves that is killed outright.
            assert [row.case["recipe"] for row in read_rows(tmp_path / "run" / "rows.jsonl")] == ["int8"] * 4
            assert main(["report", str(tmp_path / "run"), "--html", str(tmp_path / "killed.html")]) == 0
            if by == "interrupt":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)
        return shrink(model, recipe, *rest)

    monkeypatch.setattr(compress_run, "shrink", cut)
    asked = ["--seconds", "0.1", "--calibrate", "16", "--sequences", "4", "--data", str(source / "text.txt")]
    asked = ["bench", "compress", str(source / "model"), *asked, "--run", str(tmp_path / "run")]
    before = signal.getsignal(signal.SIGTERM)
    assert main([*asked, "--recipes", "int8,mlp-25,rank-50"]) == 130
    assert signal.getsignal(signal.SIGTERM) == before
    told = capsys.readouterr()
    assert "interrupted: after 1 of 3 recipes" in told.err
    assert "decoded token" in told.out
    for page in (tmp_path / "run" / "report.html", tmp_path / "killed.html"):
        assert "Ended after 1 of 3 recipes." in page.read_text()


def test_a_folder_without_a_tokenizer_is_told_that_its_text_is_bytes(source, tmp_path, capsys):
    told = {}
    for vocabulary in (256, 300):
        model = Transformer(preset("tiny").replace(layers=1, width=16, heads=2, vocabulary=vocabulary), seed=1)
        huggingface.save(model, tmp_path / f"{vocabulary}")
        asked = ["--recipe", "int8", "--data", str(source / "text.txt"), "--calibrate", "8", "--sequences", "1"]
        assert (
            main(["compress", str(tmp_path / f"{vocabulary}"), *asked, "--out", str(tmp_path / f"s{vocabulary}")]) == 0
        )
        told[vocabulary] = "has no tokenizer.json: text is read as bytes" in capsys.readouterr().err
    assert told == {256: False, 300: True}
    assert main(["generate", str(tmp_path / "s300"), "--prompt", "a"]) == 2
    assert "put its tokenizer.json into the model's folder" in capsys.readouterr().err


def test_recipes_that_do_not_fit_are_known_before_the_first_is_measured(source, capsys):
    asked = ["bench", "compress", str(source / "model"), "--data", str(source / "text.txt"), "--recipes"]
    assert main([*asked, "int8,int8"]) == 2
    assert "--recipes has int8 twice" in capsys.readouterr().err
    assert main([*asked, "int8,int4-g48"]) == 2
    told = capsys.readouterr()
    assert "int4-g48: " in told.err
    assert "int8: loss" not in told.err
    model = Transformer(preset("tiny").replace(layers=1, width=16, heads=2, mlp_width=32), seed=1)
    said: list[str] = []
    kept = _that_fit(model, ["int8", "int4-g64", "mlp-25"], True, said.append)
    assert kept == ["int8", "mlp-25"]
    assert "int4-g64 is left out" in said[0]


def test_the_page_names_the_plain_model_where_it_is_the_quickest_and_marks_differ():
    pairs = [("int4-g64", 800.0, 2.41384)]
    drawn = str(_scatter("Loss against bytes", "size of the model", pairs, (4000.0, 2.41382), format_bytes))
    marks = re.findall(r"class=\"ty\"[^>]*>(2\.41\d+)<", drawn)
    assert len(marks) == len(set(marks)) > 1
    point = {"recipe": "int4-g64", "decode_s": 7e-3, "plain_decode_s": 6e-3, "plain_loss": 2.4, "plain_bytes": 4000}
    run = Run("r", "/r", "done", summary={"points": [point]})
    assert _facts(run, None)[-1].value == "plain model"
    point["decode_s"] = 5.95e-3  # a hundredth less is no difference
    assert _facts(run, None)[-1].value == "plain model"
    point["decode_s"] = 5e-3
    assert _facts(run, None)[-1].value == "int4-g64"


def test_recipes_are_compared_by_the_plain_model_timed_in_turns_with_them():
    """The second has the smaller time, measured while the machine was twice as quick."""
    both = {"plain_loss": 2.4, "plain_bytes": 4000, "bytes": 1000}
    points = [
        {"recipe": "int8", "decode_s": 5e-3, "plain_decode_s": 6e-3, "loss": 2.40000001, **both},
        {"recipe": "rank-50", "decode_s": 4e-3, "plain_decode_s": 3e-3, "loss": 2.45, **both},
    ]
    run = Run("r", "/r", "done", summary={"points": points})
    quickest = _facts(run, None)[-1]
    assert (quickest.value, quickest.remark[:5]) == ("int8", "1.20×")
    drawn = str(_trade(run, None))
    assert "rank-50: 0.75×" in drawn
    speed = drawn[drawn.index("Loss against decoding speed") :]
    assert "frontier: none is better in both" in speed
    cells = [re.findall(r"<td[^>]*>([^<]*)", line) for line in re.findall(r"<tr.*?</tr>", speed)]
    assert ["int8", "1.20×", "5 ms", "6 ms", "2.4000", "+0.00000001", "yes"] in cells
    assert ["rank-50", "0.75×", "4 ms", "3 ms", "2.4500", "+0.0500", ""] in cells


def test_several_runs_have_their_recipes_in_the_same_charts(source, tmp_path, capsys):
    asked = ["--data", str(source / "text.txt"), "--calibrate", "16"]
    for name in ("int8", "rank-50", "mlp-25"):
        run = ["compress", str(source / "model"), "--recipe", name, "--out", str(tmp_path / name)]
        assert main([*run, *asked, "--sequences", "2"]) == 0
    page = tmp_path / "page.html"
    assert main(["report", *(str(tmp_path / name) for name in ("int8", "rank-50", "mlp-25")), "--html", str(page)]) == 0
    shown = page.read_text()
    for words in ("Loss against bytes", "Loss against decoding speed", "int8: ", "rank-50: ", "mlp-25: "):
        assert words in shown
    assert "Not shown" not in shown
    runs = [
        Run("r", "/r", "done", summary={"points": [{"recipe": "int8", "plain_loss": loss, "plain_bytes": 4}]})
        for loss in (2.4, 2.4, 2.5)
    ]
    assert "recipes of different runs cannot be compared" in str(together(runs))


@pytest.mark.parametrize(("recipe", "bound"), [("int8-a8-smooth", 0.02), ("int8-a8-smooth-clip", 0.02)])
def test_factors_that_were_moved_are_no_error_of_a_matrix(recipe, bound):
    plain = Transformer(preset("tiny").replace(layers=2, kv_heads=4), seed=1).eval().requires_grad_(False)
    with torch.no_grad():
        for norm in (part.weight for layer in plain.layers for part in (layer.attention_norm, layer.mlp_norm)):
            norm.mul_(torch.exp(torch.randn(norm.shape, generator=torch.Generator().manual_seed(2))))
        for layer in plain.layers:
            layer.attention.fc_v.weight[::3] *= 4
            layer.mlp.fc_in.weight[::3] *= 4
    tokens = torch.randint(0, 256, (8, 128), generator=torch.Generator().manual_seed(3))
    moved = {}
    small = quantize(plain, recipe, tokens, moved=moved)
    errors = layer_errors(plain, small, moved)
    assert len(errors) == 15
    assert max(errors.values()) < bound
    assert max(layer_errors(plain, small).values()) > 2 * bound
    assert any(columns is not None and rows is not None for columns, rows in moved.values())


def test_the_frontier_is_what_nothing_beats():
    points = [(3, 1), (1, 5), (2, 6), (4, 1), (2, 4)]
    assert [points[i] for i in frontier(points)] == [(1, 5), (2, 4), (3, 1)]


def test_a_pass_is_expected_to_lose_its_products_and_gain_the_new_ones(monkeypatch):
    plain = Transformer(preset("tiny").replace(layers=1), seed=1)
    clocks = CompressClocks(plain, (1, 8))
    # Seconds of a call and per weight, as if they had been timed.
    lines = {"plain": (1.0, 0.5), str(FewBits(Scheme())): (2.0, 0.25)}
    monkeypatch.setattr(ProductClock, "_line", lambda self, form, make: lines[form])
    small = quantize(plain, "int8")
    weights = sum(module.in_features * module.out_features for name, module in projections(plain) if "layers" in name)
    calls = 4  # query, key and value; attention's last; gate and first of the MLP; its last
    guess = clocks.expected(small)
    assert guess.nbytes == model_bytes(small)
    assert guess.decode.new_s - guess.decode.gone_s == pytest.approx(calls * 1.0 - 0.25 * weights)
    assert PassChange(2.0, 0.5).after(3.0) == 1.5
    assert PassChange(2.0, 0.5).after(1.0) == 0.5


def test_fewer_layers_are_expected_to_take_less_of_everything_but_what_is_around_them(monkeypatch):
    plain = Transformer(preset("tiny").replace(layers=4), seed=1)
    clocks = CompressClocks(plain, (1, 8))
    # Seconds around the layers and of one, as if they had been timed: of a forward pass, and of a token.
    monkeypatch.setattr(LayerClock, "_seconds", lambda self, *configs: [(2.0, 1.0, 1.0), (0.5, 0.25, 0.25)])
    guess = clocks.expected(prune(plain, "layers-50"))
    assert guess.forward.after(6.0) == pytest.approx(2.0 + 4.0 / 2)
    assert guess.decode.after(1.5) == pytest.approx(0.5 + 1.0 / 2)
    assert guess.decode.after(0.3) == pytest.approx(0.3)  # a plain pass that took less than what is around


def test_layers_of_another_shape_are_expected_to_take_what_one_of_them_took(monkeypatch):
    clock = LayerClock((1, 8), torch.float32, torch.device("cpu"))
    monkeypatch.setattr(LayerClock, "_seconds", lambda self, *configs: [(2.0, 1.0, 0.25), (0.5, 0.5, 1.0)])
    plain = preset("tiny").replace(layers=4)
    forward, decode = clock.change(plain, plain.replace(layers=3, mlp_width=16))
    assert forward.after(6.0) == pytest.approx(2.0 + 4.0 * (3 * 0.25) / (4 * 1.0))
    assert decode.after(2.5) == pytest.approx(0.5 + 2.0 * (3 * 1.0) / (4 * 0.5))


def test_layers_are_timed_in_the_shape_that_a_model_has():
    clock = LayerClock((2, 32), torch.float32, torch.device("cpu"))
    config = preset("tiny").replace(layers=2)
    fewer = clock.change(config, config.replace(layers=1))
    assert [change.factor for change in fewer] == [0.5, 0.5]
    narrow = clock.change(config, config.replace(mlp_width=16))
    assert all(0 <= change.around_s < 10 and 0 < change.factor < 1e6 for change in narrow)


def test_products_are_timed_in_the_form_that_a_model_has():
    plain = Transformer(preset("tiny").replace(layers=1), seed=1)
    clock = ProductClock(plain, 1)
    for model in (plain, quantize(plain, "int3-g64"), factorize(plain, "rank-50", torch.randint(0, 256, (8, 128)))):
        assert 0 < clock.seconds(model) < 10


def test_peers_say_why_they_are_not_there():
    assert "GPTQ runs on CUDA" in why_not("torchao", read_recipe("int4-g64-gptq"))
    assert "few bits" in why_not("torchao", read_recipe("mlp-25"))
    assert "no int8" in why_not("bitsandbytes", read_recipe("int8"))


@pytest.mark.parametrize("name", ["int4-g32-awq", "int4-g32-clip"])
def test_torchaos_awq_and_hqq_give_weights_that_its_codes_mean(name):
    pytest.importorskip("torchao")
    plain = Transformer(preset("tiny").replace(layers=1, width=64, mlp_width=128), seed=1).eval().requires_grad_(False)
    tokens = torch.randint(0, 256, (4, 64), generator=torch.Generator().manual_seed(1))
    assert why_not("torchao", read_recipe(name)) == ""
    theirs = dict(projections(peer_model("torchao", plain, read_recipe(name), tokens)))
    for matrix, module in projections(plain):
        off = float((theirs[matrix].weight - module.weight).norm() / module.weight.norm())
        assert (off == 0) if matrix == "output" else (0 < off < 0.15)


@pytest.mark.parametrize("name", ["int8", "int8-tensor", "int4-g32", "int3-g32", "int2-g32", "int4-g32-affine"])
def test_round_to_nearest_is_torchaos_but_for_ties(name):
    """Scales and zero points bit for bit; torchao multiplies by a scale's reciprocal, which moves a tie either way."""
    pytest.importorskip("torchao")
    scheme = parse_scheme(name)
    weight = torch.randn(48, 128, generator=torch.Generator().manual_seed(2))
    theirs, scale, zero = torchao_codes(weight, scheme)
    ours = codes.quantize(weight, scheme)
    assert torch.equal(ours.scales.flatten(), scale.flatten())
    rows = weight.reshape(1, -1) if scheme.granularity == "tensor" else weight
    quotients = (codes.by_group(rows, ours.scales.shape[1]) / ours.scales[..., None]).reshape(weight.shape)
    apart = ours.codes != theirs
    assert ((quotients.abs() % 1 - 0.5).abs()[apart] <= 2 * 2.0**-24 * 128).all()
    if ours.zeros is not None:
        assert torch.equal(ours.zeros.flatten().int(), zero.flatten().int())


def test_a_shape_has_random_weights_and_text_to_be_judged_by():
    with random_source("tiny", None, torch.device("cpu")) as source:
        calibration, tokens, targets = source.text(32, 2, 0)
    assert (source.name, source.model.config) == ("tiny, random weights", preset("tiny").replace(dropout=0.0))
    assert (len(calibration), tokens.shape) == (32, targets.shape)
