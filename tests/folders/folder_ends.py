"""Which tokens end an answer: config.json and generation_config.json in every combination, against transformers."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MISSING = "(missing)"
_CONFIG = {
    "model_type": "llama", "vocab_size": 31, "max_position_embeddings": 16, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
_IDS = (MISSING, None, 5, [5, 6])


class EndsCase(NamedTuple):
    configured: Any
    generated: Any
    """Of generation_config.json; "no file": there is none."""

    @property
    def name(self) -> str:
        return f"ends; config.json {json.dumps(self.configured)}; generation_config.json {json.dumps(self.generated)}"


def ends_cases() -> Iterator[EndsCase]:
    yield from (EndsCase(*ids) for ids in itertools.product(_IDS, ("no file", MISSING, None, 7, [7, 8, 5])))


def judge_ends(case: EndsCase) -> tuple[str, str]:
    """(verdict, words). Where transformers would never stop, a folder says nothing that could be followed."""
    import transformers

    from tilemesh.core.errors import UsageError
    from tilemesh.serve.load import load_served

    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        told = _CONFIG | {"eos_token_id": case.configured}
        told = {key: value for key, value in told.items() if value != MISSING}
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**_CONFIG)).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(told))
        (folder / "generation_config.json").unlink(missing_ok=True)
        if case.generated != "no file":
            generated = {} if case.generated == MISSING else {"eos_token_id": case.generated}
            (folder / "generation_config.json").write_text(json.dumps(generated))
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
        ends = model.generation_config.eos_token_id
        expected = set(ends if isinstance(ends, list) else [ends]) - {None}
        try:
            ours = set(load_served(folder).ends)
        except UsageError as error:
            return "refused by tilemesh", str(error)
    same = ours == expected or not expected
    return ("equal", "") if same else ("wrong", f"stops at {sorted(ours)}, transformers at {sorted(expected)}")
