"""The files beside a tokenizer.json: special tokens, chat templates, and how transformers builds the tokenizer.

The one idea: a folder means what `AutoTokenizer` of transformers 5 makes of it. tokenizer_config.json names the special
tokens; special_tokens_map.json only where that does not list the added tokens. For a few classes transformers takes no
more than vocabulary, merges and added tokens from tokenizer.json and has a normalizer and a pre-tokenizer of its own:
`as_built` puts these in. No tokenizer is loaded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilemesh.core.errors import UsageError
from tilemesh.core.files import read_json_object
from tilemesh.core.ranges import shown

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of chat templates where a folder has several: for conversations, and for those with tools."""
_SPECIAL_TOKENS_MAP = "special_tokens_map.json"
_TEMPLATE_FILE, _TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
_MODEL_CONFIG = "config.json"
_ADDED = "added_tokens_decoder"
_PLAIN_CLASSES = ("PreTrainedTokenizer", "TokenizersBackend")
"""Of which a tokenizer.json is taken as it is; in full or with `Fast` behind."""
_FAMILY_CLASSES = {
    "gpt2": "GPT2Tokenizer", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer", "gemma3_text": "GemmaTokenizer",
    "gpt_neox": "GPTNeoXTokenizer", **dict.fromkeys(("mistral", "phi3", "olmo2"), "TokenizersBackend"),
}  # fmt: skip
"""A config.json's `model_type`: the class that transformers has for it."""


@dataclass(frozen=True)
class TokenizerFiles:
    """What lies beside a tokenizer.json."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)
    """By name, such as `eos_token`: templates use them."""
    implied: frozenset[str] = frozenset()
    """Names of those that no file names, but the class."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name; where there is one alone it is the default."""
    added_tokens: tuple[Mapping[str, Any], ...] = ()
    """Those that tokenizer_config.json describes, by their ids."""
    tokenizer_class: str = ""
    """As transformers chooses it, without `Fast`; empty: tokenizer.json as it is."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """tokenizer_config.json as it stands."""
    end: int | None = None
    """The first end token of the model's config.json: it counts where no file names one."""


def _first_end(ends: Any) -> int | None:
    first = ends[0] if isinstance(ends, list) and ends else ends
    return first if type(first) is int else None


def read_beside(path: Path) -> TokenizerFiles:
    """What the folder of a tokenizer.json says of it."""
    folder = path.parent
    settings = _optional(folder / TOKENIZER_CONFIG)
    described = dict(settings)
    if _ADDED not in settings:
        described |= _optional(folder / _SPECIAL_TOKENS_MAP)
    model = _optional(folder / _MODEL_CONFIG)
    tokenizer_class = _class_of(settings, model)
    named: dict[str, str | None] = dict(_DEFAULT_TOKENS.get(tokenizer_class, {}))
    for name, value in described.items():
        if name.endswith("_token") and (value is None or _content(value) is not None):
            named[name] = _content(value)
    added = described.get(_ADDED) or {}
    if not isinstance(added, Mapping) or not all(
        str(token).isdecimal() and isinstance(entry, Mapping) and isinstance(entry.get("content"), str)
        for token, entry in added.items()
    ):
        raise UsageError(f"{folder / TOKENIZER_CONFIG}: {_ADDED} is {shown(added)}: expected tokens by their ids")
    return TokenizerFiles(
        {name: text for name, text in named.items() if text is not None},
        frozenset(named) - set(described),
        _templates(folder, settings.get("chat_template")),
        tuple(dict(added[token]) for token in sorted(added, key=int)),
        tokenizer_class,
        settings,
        _first_end(model.get("eos_token_id")),
    )


def _class_of(settings: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    named = str(settings.get("tokenizer_class") or model.get("tokenizer_class") or "").removesuffix("Fast")
    own = _FAMILY_CLASSES.get(str(model.get("model_type")), named)
    # Folders of qwen2 are known to name other classes.
    is_own = own in _PLAIN_CLASSES or not named or model.get("model_type") == "qwen2"
    chosen = own if is_own else named
    return chosen if chosen in _DEFAULT_TOKENS else ""


def _templates(folder: Path, configured: object) -> dict[str, str]:
    """Files before tokenizer_config.json, as transformers has it."""
    paths = {DEFAULT: folder / _TEMPLATE_FILE}
    paths |= {path.stem: path for path in sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))}
    if files := {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}:
        return files
    if configured is None:
        return {}
    if isinstance(configured, str):
        return {DEFAULT: configured}
    entries = configured if isinstance(configured, list) else [configured]
    pairs = [(entry.get("name"), entry.get("template")) for entry in entries if isinstance(entry, Mapping)]
    templates = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if not templates or len(templates) < len(entries):
        raise UsageError(
            f"{folder / TOKENIZER_CONFIG}: chat_template is {shown(configured)}: expected a text, or a list of objects "
            "with name and template"
        )
    return templates


def _content(value: object) -> str | None:
    """A special token's text: itself, or in older files an object that describes it."""
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) else None


def _optional(path: Path) -> Mapping[str, Any]:
    return read_json_object(path) if path.is_file() else {}


# ---- the classes of transformers 5 that build a tokenizer of their own ---------------------------------------------


def as_built(described: Mapping[str, Any], files: TokenizerFiles) -> dict[str, Any]:
    """The content of a tokenizer.json with the normalizer and the pre-tokenizer of its class in transformers."""
    kind = files.tokenizer_class
    is_bytes = "ByteLevel" in str(described.get("pre_tokenizer"))
    if not kind or described["model"].get("type") != "BPE" or (kind == "LlamaTokenizer" and is_bytes):
        return dict(described)
    model = {**described["model"], "dropout": None, "ignore_merges": False}
    if kind in _WORD_CLASSES:
        unknown = files.special_tokens.get("unk_token") if kind == "GemmaTokenizer" else None
        model |= {"fuse_unk": True, "byte_fallback": True, "unk_token": unknown}
    else:
        model |= {"fuse_unk": False, "byte_fallback": False, "unk_token": None}
    added = [] if files.added_tokens else described["added_tokens"]
    return {**described, "model": model, "added_tokens": added, **_BUILDERS[kind](files.settings)}


_WORD_CLASSES = ("LlamaTokenizer", "GemmaTokenizer")
_END_OF_TEXT = "<|endoftext|>"
_DEFAULT_TOKENS: Mapping[str, Mapping[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END_OF_TEXT),
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END_OF_TEXT), "pad_token": "<|padding|>",
    },
}  # fmt: skip
"""The special tokens of a class where no file names them."""
_QWEN_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _llama(settings: Mapping[str, Any]) -> dict[str, Any]:
    prefix = settings.get("add_prefix_space")
    prefix = True if prefix is None else bool(prefix)
    scheme = "never" if not prefix else "always" if settings.get("legacy", False) else "first"
    pre = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return {"normalizer": None, "pre_tokenizer": pre, "decoder": _words_decoder(strips=prefix)}


def _gemma(settings: Mapping[str, Any]) -> dict[str, Any]:
    normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    pre = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return {"normalizer": normalizer, "pre_tokenizer": pre, "decoder": _words_decoder(strips=False)}


def _qwen2(settings: Mapping[str, Any]) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": _QWEN_PIECES}, "behavior": "Isolated", "invert": False}
    pre = {"type": "Sequence", "pretokenizers": [split, _bytes(settings, use_regex=False)]}
    return {"normalizer": {"type": "NFC"}, "pre_tokenizer": pre, "decoder": _bytes({}, use_regex=True)}


def _gpt2(settings: Mapping[str, Any]) -> dict[str, Any]:
    pre = _bytes(settings, use_regex=True)
    return {"normalizer": None, "pre_tokenizer": pre, "decoder": _bytes({}, use_regex=True)}


def _neox(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**_gpt2(settings), "normalizer": {"type": "NFC"}}


def _bytes(settings: Mapping[str, Any], use_regex: bool) -> dict[str, Any]:
    prefix = bool(settings.get("add_prefix_space"))
    return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": use_regex}


def _words_decoder(strips: bool) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {"type": "Sequence", "decoders": [*steps, strip] if strips else steps}


_BUILDERS = {
    "LlamaTokenizer": _llama, "GemmaTokenizer": _gemma, "Qwen2Tokenizer": _qwen2, "GPT2Tokenizer": _gpt2,
    "GPTNeoXTokenizer": _neox,
}  # fmt: skip
