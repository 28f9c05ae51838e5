"""The gate's second oracle: a decoder as its papers write it, which shares no line with `model/`.

Layouts are compared with one process of the same model, so a fault that both have would show nowhere. Here is the whole
model once more, written from the sources named below and nothing else: heads one by one, scores as a matrix, rotations
as complex numbers, frequencies one by one. Slow, plain, and float64. Weights come by name, shapes from a `ModelConfig`.

    attention, residual stream          Vaswani et al. 2017 (1706.03762); before the blocks: Radford et al. 2019
    LayerNorm, RMSNorm                  Ba et al. 2016 (1607.06450); Zhang and Sennrich 2019 (1910.07467)
    GELU; gates                         Hendrycks and Gimpel 2016 (1606.08415); Shazeer 2020 (2002.05202)
    rotary positions; scaled            Su et al. 2021 (2104.09864); Chen et al. 2023 (2306.15595), Llama 3.1's code
    shared keys and values              Shazeer 2019 (1911.02150), Ainslie et al. 2023 (2305.13245)
    windows                             Beltagy et al. 2020 (2004.05150), Jiang et al. 2023 (2310.06825)
    blocks added at once                Black et al. 2022 (2204.06745)
    experts                             Shazeer et al. 2017 (1701.06538), Jiang et al. 2024 (2401.04088)
    sinks, clipped gates                gpt-oss (2508.10925) and its published code, gpt_oss/torch/model.py
    sigmoid, groups, bias of experts    DeepSeek-V3 (2412.19437), 12 to 16 and its published code
    experts that take so many           Fedus et al. 2021 (2101.03961), equation 3; by sequence, earlier tokens first
    losses of routers                   Zoph et al. 2022 (2202.08906), equation 5; DeepSeek-V3 (2412.19437), 17 to 20
    norms of q and k, after blocks      OLMo 2 (2501.00656), Qwen 3 (2505.09388), Gemma 3 (2503.19786)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tilemesh.model.config import ModelConfig

Weights = Mapping[str, Tensor]
Sites = dict[str, Tensor]


def mean_loss(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """Minus the mean log-likelihood of the targets, but for those that are `ignored`."""
    counts = targets != ignored
    chosen = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return ((torch.logsumexp(logits, -1) - chosen) * counts).sum() / counts.sum()


def router_loss(
    config: ModelConfig, scores: Tensor, targets: Tensor, ignored: int, bias: Tensor | None = None
) -> Tensor:
    """Of one layer: of each token whose target counts the squared log of Σ s, and of each sequence, for each of its
    tokens that count, Σ f_e P_e; f_e: experts / experts per token · the part of the tokens that picked e."""
    total = scores.new_zeros(())
    for row, counts in zip(scores, targets != ignored, strict=True):
        if not counts.any():
            continue
        powers = _affinity(config, row[counts])
        p = powers / powers.sum(-1, keepdim=True)
        best = _picked(config, powers, bias)
        f = [float(best[:, e].sum()) / float(best.sum()) * config.experts for e in range(config.experts)]
        even = sum(f[e] * p[:, e].mean() for e in range(config.experts))
        total = total + config.balance_loss * len(p) * even
        total = total + config.router_z_loss * (torch.log(powers.sum(-1)) ** 2).sum()
    return total


def excess(config: ModelConfig, scores: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """By expert: how many tokens whose targets count picked it, times the experts, less the picks of all."""
    tally = _picked(config, _affinity(config, scores[counts]), bias).to(bias.dtype).sum(0)
    return tally * config.experts - tally.sum()


def logits(config: ModelConfig, weights: Weights, tokens: Tensor, sites: Sites | None = None) -> Tensor:
    """Of every token (rows, tokens, vocabulary). `sites`: takes what attention, MLP and layers give, by their names."""
    table = weights["token_embedding.weight"]
    x = table[tokens]
    if config.scaled_embedding:
        x = x * math.sqrt(config.width)
    if config.positions == "learned":
        x = x + weights["position_embedding.weight"][torch.arange(tokens.shape[1], device=tokens.device)]
    kept = {} if sites is None else sites
    for number in range(config.layers):
        x = _layer(config, weights, number, x, kept)
        kept[f"layers.{number}"] = x
    if config.norm_place != "post":
        x = _norm(config, weights, "final_norm", x)
    z = x @ (table if config.tied else weights["output.weight"]).T
    return config.logit_cap * torch.tanh(z / config.logit_cap) if config.logit_cap else z


def _layer(config: ModelConfig, weights: Weights, number: int, x: Tensor, sites: Sites) -> Tensor:
    """Attention, then the MLP, each added to what it read, with norms where `norm_place` has them."""
    prefix = f"layers.{number}."

    def norm(name: str) -> Callable[[Tensor], Tensor]:
        return lambda value: _norm(config, weights, prefix + name, value)

    def attention(value: Tensor) -> Tensor:
        sites[prefix + "attention"] = _attention(config, weights, number, value)
        return sites[prefix + "attention"]

    def mlp(value: Tensor) -> Tensor:
        is_routed = config.experts and number not in config.dense_layers
        if is_routed:
            sites[prefix + "mlp.router"] = _router_scores(weights, prefix + "mlp.router", value)
        sites[prefix + "mlp"] = (_experts if is_routed else _mlp)(config, weights, prefix + "mlp.", value)
        return sites[prefix + "mlp"]

    if config.parallel_residual:
        return x + attention(norm("attention_norm")(x)) + mlp(norm("mlp_norm")(x))
    for name, block in (("attention", attention), ("mlp", mlp)):
        match config.norm_place:
            case "pre":
                x = x + block(norm(f"{name}_norm")(x))
            case "post":
                x = norm(f"{name}_norm")(x + block(x))
            case "branch":
                x = x + norm(f"{name}_norm")(block(x))
            case "sandwich":
                x = x + norm(f"{name}_out_norm")(block(norm(f"{name}_norm")(x)))
    return x


def _norm(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    """y = gain (x − mean) / sqrt(variance + ε) + bias, or y = gain x / sqrt(mean of squares + ε)."""
    if config.norm == "rmsnorm":
        return _rms(config, weights, name, x)
    centred = x - x.mean(-1, keepdim=True)
    spread = torch.sqrt((centred**2).mean(-1, keepdim=True) + config.norm_epsilon)
    return weights[f"{name}.weight"] * centred / spread + weights[f"{name}.bias"]


def _rms(config: ModelConfig, weights: Weights, name: str, x: Tensor) -> Tensor:
    gain = 1 + weights[f"{name}.offset"] if config.norm_offset else weights[f"{name}.weight"]
    return gain * x / torch.sqrt((x**2).mean(-1, keepdim=True) + config.norm_epsilon)


def _project(weights: Weights, name: str, x: Tensor) -> Tensor:
    """y = W x + b, where there is a b."""
    y = torch.einsum("oi,bti->bto", weights[f"{name}.weight"], x)
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _attention(config: ModelConfig, weights: Weights, number: int, x: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(width)) v of each head, over what the head may see."""
    prefix, count, width = f"layers.{number}.attention.", x.shape[1], config.head_width
    asking, source, shared_key = x, x, x[..., :0]
    if config.query_latent_width:
        made = _project(weights, prefix + "fc_query_latent", x)
        gain = weights[f"{prefix}query_latent_norm.weight"]
        asking = gain * made / torch.sqrt((made**2).mean(-1, keepdim=True) + 1e-6)
    q = _project(weights, prefix + "fc_q", asking)
    if rank := config.latent_width:
        joint = _project(weights, prefix + "fc_latent", x)
        norm = torch.sqrt((joint[..., :rank] ** 2).mean(-1, keepdim=True) + 1e-6)
        source, shared_key = weights[f"{prefix}latent_norm.weight"] * joint[..., :rank] / norm, joint[..., rank:]
    k, v = (_project(weights, prefix + name, source) for name in ("fc_k", "fc_v"))
    if config.qk_norm == "full":
        q, k = (_rms(config, weights, f"{prefix}{name}_norm", value) for name, value in (("q", q), ("k", k)))
    is_local = bool(config.window) and number not in config.full_layers
    distance = torch.arange(count)[:, None] - torch.arange(count)[None, :]
    may_see = (distance >= 0) & (distance < (config.window if is_local else count))
    heads = []
    for head in range(config.heads):
        shared = head // (config.heads // config.kv_heads)
        mine = q[..., head * width : (head + 1) * width]
        keys, values = (
            value[..., shared * each : (shared + 1) * each]
            for value in (k, v) for each in (value.shape[-1] // config.kv_heads,)
        )  # fmt: skip
        keys = torch.cat([shared_key, keys], -1)
        if config.qk_norm == "head":
            mine, keys = _rms(config, weights, f"{prefix}q_norm", mine), _rms(config, weights, f"{prefix}k_norm", keys)
        if config.positions != "learned":
            mine, keys = (_turned(config, value, is_local) for value in (mine, keys))
        scores = torch.einsum("bqe,bke->bqk", mine, keys) / math.sqrt(config.score_width or width)
        scores = config.score_gain * scores
        if c := config.score_cap:
            scores = c * (1 - torch.exp(-2 * scores / c)) / (1 + torch.exp(-2 * scores / c))
        scores = torch.where(may_see.to(scores.device), scores, torch.full_like(scores, -math.inf))
        largest = scores.max(-1, keepdim=True).values.detach()
        powers = torch.exp(scores - largest)
        total = powers.sum(-1, keepdim=True)
        if config.score_sink:
            total = total + torch.exp(weights[f"{prefix}sinks.weight"][head] - largest)
        heads.append(torch.einsum("bqk,bke->bqe", powers / total, values))
    return _project(weights, prefix + "fc_o", torch.cat(heads, -1))


def _turned(config: ModelConfig, x: Tensor, is_local: bool) -> Tensor:
    """Token t of a head, as complex numbers x_i + j x_(i + R/2), times exp(j t θ_i); beyond R elements as it was."""
    size = int(config.head_width * config.rotary_fraction)
    angles = torch.tensor(
        [[token * frequency for frequency in _frequencies(config, size, is_local)] for token in range(x.shape[1])],
        dtype=torch.float64,
        device=x.device,
    )
    long = config.rotary_scaling == "yarn" and not (is_local and config.rotary_local_base)
    length = (config.rotary_gain or 0.1 * math.log(config.rotary_factor) + 1) if long else 1.0
    turns = torch.polar(torch.full_like(angles, length), angles)
    turned = torch.complex(x[..., : size // 2], x[..., size // 2 : size]) * turns
    return torch.cat([turned.real, turned.imag, x[..., size:]], -1)


def _frequencies(config: ModelConfig, size: int, is_local: bool) -> list[float]:
    """θ_i = base^(−2i/R); divided by a factor where the context was stretched, all of them or those of long waves."""
    if is_local and config.rotary_local_base:
        return [config.rotary_local_base ** (-2 * i / size) for i in range(size // 2)]
    frequencies = [config.rotary_base ** (-2 * i / size) for i in range(size // 2)]
    match config.rotary_scaling:
        case "linear":
            return [frequency / config.rotary_factor for frequency in frequencies]
        case "llama3":
            return [_by_wave(config, frequency) for frequency in frequencies]
        case "yarn":
            place = [math.log(config.rotary_trained / turns / 2 / math.pi, config.rotary_base) * size / 2
                     for turns in (config.rotary_high, config.rotary_low)]  # fmt: skip
            if config.rotary_rounded:
                place = [math.floor(place[0]), math.ceil(place[1])]
            begin, end = max(0, place[0]), min(place[1], size - 1)
            parts = [min(1.0, max(0.0, (i - begin) / (end - begin))) for i in range(size // 2)]
            return [f * (1 - p) + f / config.rotary_factor * p for f, p in zip(frequencies, parts, strict=True)]
    return frequencies


def _by_wave(config: ModelConfig, frequency: float) -> float:
    """Llama 3.1: short waves stay, long ones are stretched, in between both have a part."""
    wave, factor = 2 * math.pi / frequency, config.rotary_factor
    if wave < config.rotary_trained / config.rotary_high:
        return frequency
    if wave > config.rotary_trained / config.rotary_low:
        return frequency / factor
    smooth = (config.rotary_trained / wave - config.rotary_low) / (config.rotary_high - config.rotary_low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def _router_scores(weights: Weights, name: str, x: Tensor) -> Tensor:
    scores = torch.einsum("ei,bti->bte", weights[f"{name}.weight"], x)
    return scores + weights[f"{name}.shift.weight"] if f"{name}.shift.weight" in weights else scores


def _affinity(config: ModelConfig, scores: Tensor) -> Tensor:
    """How well a token fits each expert: exp, of a softmax yet to be divided by its sum; or the sigmoid."""
    return 1 / (1 + torch.exp(-scores)) if config.router_scores == "sigmoid" else torch.exp(scores)


def _picked(config: ModelConfig, powers: Tensor, bias: Tensor | None) -> Tensor:
    """Which experts are among a token's best, by s + b, in those of its best groups."""
    s = powers if config.router_scores == "sigmoid" else powers / powers.sum(-1, keepdim=True)
    s = s if bias is None else s + bias
    groups, size = config.router_groups, config.experts // config.router_groups
    if (kept := config.router_groups_per_token) < groups:
        best = 2 if config.router_scores == "sigmoid" else 1
        each = [s[..., g * size : (g + 1) * size].sort(-1, descending=True).values[..., :best] for g in range(groups)]
        strength = torch.stack([group.sum(-1) for group in each], -1)
        least = strength.sort(-1, descending=True).values[..., kept - 1]
        inside = torch.stack([strength[..., e // size] >= least for e in range(config.experts)], -1)
        s = torch.where(inside, s, torch.full_like(s, -math.inf))
    return s >= s.sort(-1, descending=True).values[..., config.experts_per_token - 1].unsqueeze(-1)


def _experts(config: ModelConfig, weights: Weights, prefix: str, x: Tensor) -> Tensor:
    """Σ p_e MLP_e(x) over the experts of largest p = softmax(W x); all of them compute, and the others count 0. Or p is
    the sigmoid, and a bias has a say in which are largest."""
    powers = _affinity(config, _router_scores(weights, f"{prefix}router", x))
    p = powers if config.router_scores == "sigmoid" else powers / powers.sum(-1, keepdim=True)
    picked = _picked(config, powers, weights.get(f"{prefix}router.bias"))
    p = torch.where(picked, p, torch.zeros_like(p))
    if config.router_renormalized:
        p = p / p.sum(-1, keepdim=True)
    if config.expert_capacity:
        p = torch.where(_taken(config, picked), p, torch.zeros_like(p))
    p = config.router_scale * p
    each = [_mlp(config, weights, f"{prefix}experts.{e}.", x) for e in range(config.experts)]
    y = torch.stack([p[..., e : e + 1] * each[e] for e in range(config.experts)]).sum(0)
    if not config.shared_width:
        return y
    opened = 1 / (1 + torch.exp(-_project(weights, prefix + "shared_gate", x))) if config.shared_gate else 1
    return y + opened * _mlp(config, weights, prefix + "shared.", x)


def _taken(config: ModelConfig, picked: Tensor) -> Tensor:
    """Of the picks of each sequence those that its experts have room for, token after token."""
    room = math.ceil(config.expert_capacity * picked.shape[1] * config.experts_per_token / config.experts - 1e-9)
    taken = torch.zeros_like(picked)
    for row, token, e in picked.nonzero().tolist():
        taken[row, token, e] = taken[row, :token, e].sum() < room
    return taken


def _mlp(config: ModelConfig, weights: Weights, prefix: str, x: Tensor) -> Tensor:
    hidden = _project(weights, prefix + "fc_in", x)
    match config.activation:
        case "swiglu":
            gate = _project(weights, prefix + "fc_gate", x)
            hidden = hidden * gate / (1 + torch.exp(-gate))
        case "swiglu-clipped":
            gate = torch.minimum(_project(weights, prefix + "fc_gate", x), x.new_tensor(7.0))
            hidden = torch.maximum(torch.minimum(hidden, x.new_tensor(7.0)), x.new_tensor(-7.0))
            hidden = (hidden + 1) * gate / (1 + torch.exp(-1.702 * gate))
        case "geglu":
            hidden = hidden * _gelu(_project(weights, prefix + "fc_gate", x))
        case "relu":
            hidden = torch.where(hidden > 0, hidden, torch.zeros_like(hidden))
        case "gelu":
            hidden = _gelu(hidden)
        case "gelu-erf":
            hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    return _project(weights, prefix + "fc_out", hidden)


def _gelu(x: Tensor) -> Tensor:
    """By the hyperbolic tangent."""
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
