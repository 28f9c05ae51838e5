"""A Llama in a GGUF file, for peers that read nothing else: weights in 16 bits, and a tokenizer that is never asked.

Facts of the format: names as llama.cpp has them, rotary pairs next to each other, so rows of q and k are reordered
(`first half, second half` of each head becomes alternating).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tilemesh.core.errors import RunError
from tilemesh.model import huggingface
from tilemesh.model.families.book import read_config

_NAMES = {
    "attention_norm.weight": "attn_norm.weight", "mlp_norm.weight": "ffn_norm.weight",
    "attention.fc_q.weight": "attn_q.weight", "attention.fc_k.weight": "attn_k.weight",
    "attention.fc_v.weight": "attn_v.weight", "attention.fc_o.weight": "attn_output.weight",
    "mlp.fc_gate.weight": "ffn_gate.weight", "mlp.fc_in.weight": "ffn_up.weight",
    "mlp.fc_out.weight": "ffn_down.weight",
}  # fmt: skip
_ENDS = {
    "token_embedding.weight": "token_embd.weight",
    "final_norm.weight": "output_norm.weight",
    "output.weight": "output.weight",
}


def write_gguf(folder: Path, path: Path, single: bool = False) -> None:
    """The model of a Hugging Face folder, its matrices in 16 bits or in float32 (`single`)."""
    gguf = import_module("gguf")
    config = read_config(folder)
    if config.norm != "rmsnorm" or config.activation != "swiglu" or config.positions != "rotary" or config.biases:
        raise RunError("a GGUF file is written for Llama's kind of model only")
    writer: Any = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("random")
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.mlp_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_epsilon)
    writer.add_rope_dimension_count(config.head_width)
    writer.add_rope_freq_base(config.rotary_base)
    writer.add_vocab_size(config.vocabulary)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if single else gguf.LlamaFileType.MOSTLY_F16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([f"t{number}" for number in range(config.vocabulary)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocabulary)
    writer.add_token_merges(["t 0", "t 1"])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    for name, tensor in huggingface.read_parameters(folder):
        target = _ENDS.get(name)
        if target is None:
            _, number, rest = name.split(".", 2)
            target = f"blk.{number}.{_NAMES[rest]}"
            if rest.startswith(("attention.fc_q", "attention.fc_k")):
                heads = config.heads if "fc_q" in rest else config.kv_heads
                halves = tensor.view(heads, 2, config.head_width // 2, config.width)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        wanted = torch.float32 if single or tensor.dim() == 1 else torch.float16
        writer.add_tensor(target, tensor.to(wanted).contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
