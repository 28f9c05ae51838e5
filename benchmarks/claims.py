"""Sentences of documents and the rows their figures come from; `scripts/results.py` gives the names used here.

A sentence stands in its document letter by letter, with each `{}` filled in. To correct a document, correct it to what this says.
"""
# ruff: noqa: E501, F821

KERNELS, MATMUL = "kernels_h200.jsonl", "matmul_rows_h200_{}.jsonl"
COMPILE, TRL_PEER = "PyTorch + torch.compile", "align_trl_xeon_2c.jsonl"


def times(line, peer, form="{:.2f}"):
    return figure(form, lambda row: row.times(peer), line)


def share(*lines, pick=min, form="{:.2f}"):
    return figure(form, lambda *rows: pick(row.of_limit for row in rows), *lines)


def micro(line, peer=None, form="{:.0f}"):
    value = (lambda row: row.body["peers"][peer]["median"]) if peer else (lambda row: row.measured)
    return figure(form, lambda row: value(row) * 1e6, line)


def kernel(name, shape=None, passes=None, **case):
    found = select(KERNELS, name=name, time="kernel", passes=passes, **({"shape": shape} if shape else {}), **case)
    return found if shape is None else found[0]


def value(form, read, *lines):
    return figure(form, lambda *rows: read([row.body for row in rows]), *lines)


def predicted_time(body):
    """(predicted - measured) / measured of a step's time, from a row or a reading of `steps-h200.jsonl`."""
    if "step_time_s" in body:
        stated = body["predicted"]
        return (
            stated.get("step_s", stated.get("times", {}).get("step_s", stated.get("step_time_s")))
            / body["step_time_s"]["median"]
            - 1
        )
    return body["measured"]["median"] / body["predicted"] - 1


def best_shapes(dtype):
    lines = [line for line in lines_of(MATMUL.format(dtype)) if line.body["case"]["time"] == "kernel"]
    slowest = [min(line.times(peer) for peer in line.body["peers"] if peer != "a @ b alone") for line in lines]
    return Figure(f"{sum(ratio >= 0.98 for ratio in slowest)} of {len(slowest)}", tuple(lines))


def untuned_calls():
    """The 60 shapes by call time, nine of them measured again."""
    lines = {line.body["problem"]: line for line in select("matmul_untuned_h200.jsonl", clock="call")}
    lines |= {line.body["problem"]: line for line in select("matmul_untuned_calls_h200.jsonl", clock="call")}
    ratios = [line.body["ratio"] for line in lines.values()]
    counts = [f"{sum(r >= 0.98 for r in ratios)} of {len(ratios)}", str(sum(r >= 0.95 for r in ratios))]
    return [
        Figure(text, tuple(lines.values())) for text in (*counts, f"{min(ratios):.2f}", f"{geometric_mean(ratios):.2f}")
    ]


def trl(tokens):
    """Processor time of TRL's step over ours, round by round: its least and its greatest if they differ."""
    lines = select(TRL_PEER, prompt_tokens=tokens)
    sides = ([line.body["cpu_s"] for line in lines if line.body["side"] == side] for side in ("trl", "tilemesh"))
    ratios = [f"{theirs / ours:.1f}" for theirs, ours in zip(*sides, strict=True)]
    return Figure(" to ".join(sorted({*ratios})), tuple(lines))


def decode(shape, key, form="{:.1f}"):
    (line,) = (
        line
        for line in select("serve_decode_h200.jsonl", shape=shape, rows=1)
        if (line.body.get("commit") or "").startswith("a139cb08")
    )
    return value(form, lambda bodies: bodies[0][key], line)


STEPS = [line for line in lines_of("steps-h200.jsonl") if "predicted" in line.body]
COMPILED = [line for line in STEPS if line.body["code"] == "compiled" and line.body["step_time_s"]["median"] < 0.022 * line.body["batch"]
            and not (line.body["model"] == "gpt2-124m" and line.body["batch"] == 8 and line.body["step_time_s"]["median"] > 0.02)]  # fmt: skip
TRAINED = [line for file in ("train_h200.jsonl", "train_h200_3b.jsonl", "train_h200_gpt2_mlp.jsonl", "train_h200_tinyllama.jsonl")
           for line in lines_of(file) if line.body["name"] == "train"]  # fmt: skip
EAGER = [line for line in STEPS if line.body["code"] == "eager"]
GPT2_TRAINED = [line for line in TRAINED if line.body["case"]["layers"] == 12]
LLAMA_TRAINED = [line for line in TRAINED if line.body["case"]["layers"] == 22]


def error(pick, *lines):
    return figure("{:.1f}", lambda *rows: abs(pick(predicted_time(row.body) for row in rows)) * 100, *lines)


def memory(pick, *lines):
    return figure(
        "{:.1f}",
        lambda *rows: pick(abs(row.body["predicted_bytes"] / row.body["peak_bytes"] - 1) for row in rows) * 100,
        *lines,
    )


def resident(case, key="step_ms"):
    (line,) = (line for line in lines_of("resident_memory_xeon.jsonl") if line.body["case"] == case)
    return line


def grown(case):
    return value("{:.0f}", lambda bodies: max(bodies[0]["grown_mib"]), resident(case))


def longer(first, second):
    return value(
        "{:.2f}", lambda b: b[0]["step_ms"]["median"] / b[1]["step_ms"]["median"], resident(first), resident(second)
    )


def few_bits(weights, key, form, file="readings_compress_products_h200.jsonl"):
    line = [
        line
        for line in select(file, shape="llama-3-8b", weights=weights)
        if "step_ms" in line.body and "how" not in line.body
    ][-1]
    return value(form, lambda bodies: bodies[0][key], line)


def decoded(rows, form, read):
    (line,) = (
        line
        for line in select("readings_compress_h200.jsonl", shape="llama-3-8b", weights="bf16", rows=rows, design=1)
        if line.body.get("kv", "bf16") == "bf16"
    )
    return value(form, lambda bodies: read(1e3 * rows / bodies[0]["step_ms"]), line)


def changed(recipe, seed, peer=None):
    line = one("compress_make_train_2bits_neoverse_n1_2c.jsonl", recipe=recipe, seed=seed)

    def change(bodies):
        peers = bodies[0]["peers"]
        return (peers[peer] if peer else bodies[0]["measured"])["median"] - peers["plain"]["median"]

    return value("{:.4f}", change, line)


SOFTMAX = [kernel("softmax", shape) for shape in ("16384x1024", "8192x8192", "4096x32768", "512x262144")]
NORMS = [
    line for name in ("rms_norm", "layer_norm") for passes in (None, "both") for line in kernel(name, passes=passes)
]
JOINED = [kernel("linear_cross_entropy", shape, "both") for shape in ("8192x768x50304", "8192x4096x128256")]
PRUNED = lines_of("compress_pruned_h200.jsonl")

GRADES = select("plan_grades_quiet_neoverse_n1_2c.jsonl", name="grade")


def step_of(line, key):
    (found,) = (figure for figure in line.body["figures"] if figure["name"] == "step time")
    return found[key]


def choice_and_runner_up():
    first, second = sorted(GRADES, key=lambda line: step_of(line, "predicted"))[:2]
    apart = step_of(second, "predicted") / step_of(first, "predicted") - 1
    quicker = 1 - step_of(second, "measured") / step_of(first, "measured")
    return [Figure(f"{100 * part:.1f}", (first, second)) for part in (apart, quicker)]


def within():
    return Figure(
        f"{100 * max(abs(step_of(line, 'predicted') / step_of(line, 'measured') - 1) for line in GRADES):.1f}",
        tuple(GRADES),
    )


def between(lines, peer, form="{:.2f}"):
    """The least and the most times as fast as a peer."""
    return [figure(form, lambda *rows, pick=pick: pick(row.times(peer) for row in rows), *lines) for pick in (min, max)]


SHARDED = [
    line
    for line in select("train_zero_neoverse_n1_2c.jsonl", name="train")
    if "fully_shard over gloo" in line.body["peers"]
]
OPENVINO = [line for line in lines_of("serve_xeon_2c.jsonl") if "openvino-genai" in (line.body.get("peers") or {})]
OPENVINO_IN_32 = [line for line in OPENVINO if line.body["case"]["dtype"] == "fp32"]
CUDNN = kernel("attention", passes="both", mask="causal")
PUBLISHED = [line for line in TRAINED if COMPILE in line.body["peers"]]

CLAIMS = [
    Claim("README.md", "predictions were written down first and came within {} % of the measured step", (within(),)),
    Claim("README.md", "are {} % apart in prediction, which the planner calls equal;\nmeasured, the runner-up is {} % quicker", tuple(choice_and_runner_up())),
    Claim("README.md", "torch's `fully_shard`, on two CPU cores: tilemesh is {} to {} times as fast", tuple(between(SHARDED, "fully_shard over gloo"))),
    Claim("README.md", "tilemesh has {} to {} of its tokens in float32", tuple(between(OPENVINO_IN_32, "openvino-genai"))),
    Claim("README.md", "transformers' continuous batching on one H200: tilemesh is {} times as fast",
          (times(one("serve_h200_peers.jsonl", name="serve, offline"), "transformers-continuous", "{:.1f}"),)),
    Claim("README.md", "on one H200: tilemesh is {} to {} times as fast |", tuple(between(PUBLISHED, COMPILE))),
    Claim("README.md", "tilemesh is {}, {} and {} times as fast with prompts of 7, 77 and 217 tokens", (trl(7), trl(77), trl(217))),
    Claim("README.md", "tilemesh has {} to {} of cuDNN's speed", tuple(between(CUDNN, "cuDNN"))),
    Claim("README.md", "at least 0.98 of the best of cuBLAS and torch.compile in {} shapes", (best_shapes("float16"),)),
    Claim("docs/plan/README.md", "kernels not waiting for Python | from {} % too short to {} % too long (kernels got faster after the constants were set) | within {} % |",
          (error(min, *COMPILED, *TRAINED), error(max, *COMPILED, *TRAINED), memory(max, *COMPILED))),
    Claim("docs/plan/README.md", "gpt2-124m {} % too long, tinyllama-1.1b {} and {} % | {} %; {} and {} % too much (older code) |",
          (*(error(max, line) for line in EAGER), *(memory(max, line) for line in EAGER))),
    Claim("docs/train/README.md", "dp 2 of the tiny preset then takes {} MiB instead of {}, and a step {} times as long (one process {} instead of {} MiB, {} times)",
          (grown("dp2 mapped, watched"), grown("dp2, watched"), longer("dp2 mapped, watched", "dp2, watched"), grown("one mapped"), grown("one"), longer("one mapped", "one"))),
    Claim("docs/serve/how-it-works.md", "a decode step of one sequence takes {} ms instead of {} ms (1.1 B)\nand {} ms instead of {} ms (8 B)",
          (decode("tinyllama-1.1b", "step_ms", "{:.2f}"), decode("tinyllama-1.1b", "eager_ms"), decode("llama-3-8b", "step_ms"), decode("llama-3-8b", "eager_ms"))),
    Claim("docs/kernels/README.md", "`fused_matmul` is at least 0.98 of the best peer in {} shapes, in float16 and in bfloat16", (best_shapes("float16"),)),
    Claim("docs/kernels/README.md", "norms reach {} to {} of what the memory allows, softmax {} to {} (over rows of 262,144 columns {}), cross-entropy {}, AdamW {} (of a million parameters {}), and the joined projection and loss {} to {}.",
          (share(*NORMS), share(*NORMS, pick=max), share(*SOFTMAX[:3]), share(*SOFTMAX[:3], pick=max), share(SOFTMAX[3]),
           share(kernel("cross_entropy", "8192x50304", "both")), share(kernel("adamw", "148x838656")), share(kernel("adamw", "16x65536")), share(*JOINED), share(*JOINED, pick=max))),
    Claim("docs/kernels/README.md", "| call time, beside eager (nine of them again, `matmul_untuned_calls_h200.jsonl`) | {} | {} | {} | {} |", tuple(untuned_calls())),
    Claim("docs/kernels/choosing.md", "Softmax of 16384×1024 is at {} of the copy limit, 8192×8192 at {}, 4096×32768 at {} and 512×262144 at {}:", tuple(share(line) for line in SOFTMAX)),
    *(Claim("docs/kernels/choosing.md", f"| {words} | {{}} | {{}} |", (micro(line, form=form), micro(line, "compile", form)))
      for words, line, form in (
          ("RMSNorm 32768×768", kernel("rms_norm", "32768x768"), "{:.1f}"), ("LayerNorm 32768×768", kernel("layer_norm", "32768x768"), "{:.1f}"),
          ("LayerNorm, forward and backward, 32768×768", kernel("layer_norm", "32768x768", "both"), "{:.1f}"),
          ("RMSNorm, forward and backward, 8192×8192", kernel("rms_norm", "8192x8192", "both"), "{:.0f}"),
          ("softmax 8192×8192", kernel("softmax", "8192x8192"), "{:.1f}"),
          ("cross-entropy, forward and backward, 8192×50304", kernel("cross_entropy", "8192x50304", "both"), "{:.0f}"))),
    Claim("docs/kernels/choosing.md", "`linear_cross_entropy` of 8192×4096×128256 takes {} ms where torch.compile, which holds the logits, takes {}.",
          (figure("{:.1f}", lambda row: row.measured * 1e3, JOINED[1]), figure("{:.1f}", lambda row: row.body["peers"]["compile"]["median"] * 1e3, JOINED[1]))),
    Claim("docs/compress/README.md", "one sequence on an H200 | {} to {} ms per token; with the output projection in int4 too {} | {} to {} GB; {} |",
          (few_bits("bf16", "step_ms", "{:.2f}"), few_bits("int4-g128", "step_ms", "{:.2f}"), few_bits("int4-g128, output too", "step_ms", "{:.2f}"),
           *(value("{:.1f}", lambda bodies: bodies[0]["bytes"] / 1e9, *few_bits(weights, "bytes", "{}").lines) for weights in ("bf16", "int4-g128", "int4-g128, output too")))),
    Claim("docs/compress/README.md", "| {} to {} tokens/s in all; each sequence {} to {} |",
          (decoded(1, "{:.0f}", float), decoded(64, "{:,.0f}", float), decoded(1, "{:.0f}", float), decoded(64, "{:.0f}", lambda rate: rate / 64))),
    Claim("docs/compress/README.md", "yes for AWQ ({} beside {}, {} beside {}) and clipping ({} and {} beside HQQ's {})",
          (changed("int2-g64-awq", 0), changed("int2-g64-awq", 0, "torchao"), changed("int2-g64-awq", 1), changed("int2-g64-awq", 1, "torchao"),
           changed("int2-g64-clip", 0), changed("int2-g64-clip", 1), changed("int2-g64-clip", 0, "torchao"))),
]  # fmt: skip

ZERO = select("train_zero_neoverse_n1_2c.jsonl", name="train")
TABLES = [
    ("Training on an H200", "Tokens per second of whole training steps, bf16, beside the same model in PyTorch compiled (`tilemesh bench train`).",
     [line for line in TRAINED if "limit" in line.body]),
    ("Training on two CPU cores", "Tokens per second, fp32, every rank on the same two cores.",
     [*select("train_neoverse_n1_2c.jsonl", name="train"), *lines_of("train_pipelines_neoverse_n1_2c.jsonl"), *ZERO]),
    ("Serving", "Tokens per second of whole loads, beside other engines in turn. *h200-16c* in a CPU row: two of that machine's x86-64 cores.",
     [line for file in ("serve_h200_peers.jsonl", "serve_h200.jsonl", "serve_xeon_2of16c.jsonl", "serve_neoverse_n1_2c.jsonl")
      for line in lines_of(file) if line.body.get("name") == "serve, offline" and line.body["measured"]]),
    ("Matrix products", "`fused_matmul` with bias and ReLU, kernel time on one H200 (`tilemesh bench kernel matmul`).",
     [line for dtype in ("float16", "bfloat16") for line in lines_of(MATMUL.format(dtype)) if line.body["case"]["time"] == "kernel"]),
    ("Other operators", "Kernel time on one H200 (`tilemesh bench kernel NAME`).",
     [line for line in lines_of(KERNELS) if line.body["case"].get("time") == "kernel" and line.body["measured"]]),
    ("Compression", "Pruned shapes on one H200, and the loss of the model of `make train` at 2 bits (nats).",
     [*PRUNED, *lines_of("compress_make_train_2bits_neoverse_n1_2c.jsonl")]),
    ("Compiled graphs", "Steps of models compiled with `backend=\"tilemesh\"` on one H200.", [*select("graph_h200.jsonl", name="graph step"), *select("graph_models_h200.jsonl", name="graph step")]),
]  # fmt: skip
