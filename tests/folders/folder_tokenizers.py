"""Changed tokenizer folders: thirteen layouts as real families have them, and changes that a folder may legally have.

The oracle is transformers' `AutoTokenizer`: encodings, and conversations by `apply_chat_template` with the mask of what
the assistant says. Its templates mark answers (`{% generation %}`); tilemesh reads them with and without the marks.
What it makes of the folder are the same tokens, targets and end token; or one of the two refuses.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_WORDS = (
    "the quick brown fox says hello to you and me and then the user asks more of it while the assistant answers yes or "
    "no hi there what is this [INST] [/INST] café naïve 12 345 user assistant model system tool call name arguments "
)
TEXTS = (
    "hello", "the quick brown fox", " leading and  double spaces ", "café 😀 naïve", "12 345 a1", "line\nbreaks\n\n  x",
    "<s>[INST] hello </s>", "<|im_start|>user\nhi<|im_end|>", "\ttab", "Ünknown ﬁ ① zürich", "",
)  # fmt: skip
_ASK, _SAY = {"role": "user", "content": "hi there"}, {"role": "assistant", "content": "hello to you"}
_CALL = {"type": "function", "function": {"name": "name", "arguments": {"user": "fox"}}}
_TOOL = {"type": "function", "function": {"name": "name", "description": "café", "parameters": {"type": "object"}}}
CHATS: Mapping[str, dict[str, Any]] = {
    "one turn": {"messages": [_ASK, _SAY]},
    "two turns": {"messages": [_ASK, _SAY, {"role": "user", "content": "more"},
                               {"role": "assistant", "content": "yes café 12"}]},
    "spaces": {"messages": [_ASK, {"role": "assistant", "content": "the  fox\n says "},
                            {"role": "user", "content": " you "}, _SAY]},
    "the same words": {"messages": [{"role": "user", "content": "hello to you"}, _SAY,
                                    {"role": "user", "content": "assistant"},
                                    {"role": "assistant", "content": "assistant"}]},
    "words of an end": {"messages": [_ASK, {"role": "assistant", "content": "e"}, {"role": "user", "content": "more"},
                                     {"role": "assistant", "content": "end"}]},
    "an end inside": {"messages": [_ASK, {"role": "assistant", "content": "a </s> b <|im_end|> c"}]},
    "a system": {"messages": [{"role": "system", "content": "the user asks"}, _ASK, _SAY]},
    "a call": {"messages": [_ASK, {"role": "assistant", "content": "", "tool_calls": [_CALL]},
                            {"role": "tool", "content": "345"}, _SAY]},
    "tools": {"messages": [_ASK, _SAY], "tools": [_TOOL]},
}  # fmt: skip
_MUST = ("one turn", "two turns")
"""Which tilemesh may not refuse where a folder is as its family has it."""
_OPEN, _CLOSE = "{% generation %}", "{% endgeneration %}"


def _template(prompt: str, answer: str, *, begin: str = "", system: str = "", asks: str = "", last: str = "") -> str:
    """A family's template from its parts: expressions over the message `m`; `asks` is what an answer follows."""
    answer = answer.replace("«", _OPEN).replace("»", _CLOSE)
    system = system or "{{ raise_exception('no system message') }}"
    follows = f"{{% if add_generation_prompt %}}{asks}{{% endif %}}" if asks else ""
    return (
        f"{begin}{{% for m in messages %}}{{% if m['role'] == 'system' %}}{system}"
        f"{{% elif m['role'] == 'assistant' %}}{answer}{{% else %}}{prompt}{{% endif %}}{{% endfor %}}{follows}{last}"
    )


_CHATML = _template(
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n",
    "<|im_start|>assistant\n«{{ m['content'] }}<|im_end|>»{{ '\n' }}",
    system="<|im_start|>system\n{{ m['content'] }}<|im_end|>\n",
    asks="<|im_start|>assistant\n",
)
_TOOLS = _template(
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n",
    "<|im_start|>assistant\n«{{ m['content'] }}{% if m.tool_calls %}{% for c in m.tool_calls %}<tool_call>"
    "{{ c.function | tojson }}</tool_call>{% endfor %}{% endif %}<|im_end|>»{{ '\n' }}",
    begin="{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}",
    system="<|im_start|>system\n{{ m['content'] }}<|im_end|>\n",
    asks="<|im_start|>assistant\n",
)
_INST = _template("[INST] {{ m['content'] }} [/INST]", "« {{ m['content'] }} {{ eos_token }}»", begin="{{ bos_token }}")
_MISTRAL = _template(
    "[INST] {{ m['content'] }} [/INST]", "«{{ m['content'] }}{{ eos_token }}»", begin="{{ bos_token }}"
)
_HEADERS = _template(
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>",
    "<|start_header_id|>assistant<|end_header_id|>\n\n«{{ m['content'] | trim }}<|eot_id|>»",
    begin="{{ bos_token }}",
    system="<|start_header_id|>system<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>",
    asks="<|start_header_id|>assistant<|end_header_id|>\n\n",
)
_TURNS = _template(
    "<start_of_turn>user\n{{ m['content'] | trim }}<end_of_turn>\n",
    "<start_of_turn>model\n«{{ m['content'] | trim }}<end_of_turn>»{{ '\n' }}",
    begin="{{ bos_token }}",
    asks="<start_of_turn>model\n",
)
_PHI = _template(
    "<|user|>\n{{ m['content'] }}<|end|>\n",
    "<|assistant|>\n«{{ m['content'] }}<|end|>»{{ '\n' }}",
    system="<|system|>\n{{ m['content'] }}<|end|>\n",
    asks="<|assistant|>\n",
    last="{% if not add_generation_prompt %}{{ eos_token }}{% endif %}",
)
_OLMO = _template(
    "<|user|>\n{{ m['content'] }}\n",
    "<|assistant|>\n«{{ m['content'] }}{{ eos_token }}»{% if not loop.last %}\n{% endif %}",
    begin="{{ bos_token }}",
    system="<|system|>\n{{ m['content'] }}\n",
    asks="<|assistant|>\n",
)
_USER = _template("User: {{ m['content'] }}\n", "Falcon:« {{ m['content'] }}{{ eos_token }}»{{ '\n' }}", asks="Falcon:")
_PLAIN = _template("user: {{ m['content'] }}\n", "assistant:« {{ m['content'] }}{{ eos_token }}»", asks="assistant:")


class Layout(NamedTuple):
    """How a family's tokenizer is made; `special` tokens are added ones, `words` plain added ones."""

    kind: str
    settings: dict[str, Any]
    template: str
    special: tuple[str, ...]
    model_type: str = "llama"
    words: tuple[str, ...] = ()


_LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_END = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
_FAST = "PreTrainedTokenizerFast"
_IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HEADER_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
LAYOUTS: Mapping[str, Layout] = {
    "llama2": Layout("prepend", {"tokenizer_class": "LlamaTokenizer", "legacy": False, **_LLAMA_TOKENS}, _INST,
                     ("<unk>", "<s>", "</s>")),
    "mistral-v1": Layout("prepend", {"tokenizer_class": "LlamaTokenizer", "legacy": False, **_LLAMA_TOKENS}, _MISTRAL,
                         ("<unk>", "<s>", "</s>"), "mistral"),
    "mistral-tekken": Layout("split", {"tokenizer_class": _FAST, **_LLAMA_TOKENS}, _MISTRAL,
                             ("<unk>", "<s>", "</s>", "[INST]", "[/INST]"), "mistral"),
    "llama3": Layout("split", {"tokenizer_class": _FAST, "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
                     _HEADERS, _HEADER_TOKENS),
    "qwen2": Layout("qwen", {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>",
                             "pad_token": "<|endoftext|>", "unk_token": None}, _CHATML, _IM, "qwen2"),
    "qwen3": Layout("qwen", {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "eos_token": "<|im_end|>",
                             "pad_token": "<|endoftext|>", "unk_token": None}, _TOOLS, _IM, "qwen3",
                    ("<think>", "</think>", "<tool_call>", "</tool_call>")),
    "gemma": Layout("gemma", {"tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>",
                              "pad_token": "<pad>", "unk_token": "<unk>"}, _TURNS,
                    ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"), "gemma3_text"),
    "phi3": Layout("prepend", {"tokenizer_class": "LlamaTokenizer", "legacy": False, **_LLAMA_TOKENS,
                               "eos_token": "<|endoftext|>"}, _PHI,
                   ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
                   "phi3"),
    "gpt2": Layout("bytes", {"tokenizer_class": "GPT2Tokenizer", **_END}, _PLAIN, ("<|endoftext|>",), "gpt2"),
    "smollm": Layout("digits", {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|im_start|>",
                                "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}, _CHATML, _IM),
    "olmo2": Layout("bytes", {"tokenizer_class": "GPT2Tokenizer", **_END}, _OLMO, ("<|endoftext|>",), "olmo2"),
    "pythia": Layout("neox", {"tokenizer_class": "GPTNeoXTokenizer", **_END}, _OLMO,
                     ("<|endoftext|>", "<|padding|>"), "gpt_neox"),
    "falcon": Layout("punctuation", {"tokenizer_class": _FAST, "eos_token": "<|endoftext|>"}, _USER,
                     ("<|endoftext|>",)),
    "t5": Layout("unigram", {"tokenizer_class": _FAST, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
                 _PLAIN, ("<pad>", "</s>", "<unk>")),
}  # fmt: skip


class Folder(NamedTuple):
    """The files of a tokenizer, before they are written: JSON by name, and templates."""

    tokenizer: dict[str, Any]
    settings: dict[str, Any]
    files: dict[str, Any]
    """Others: a JSON value or a text."""

    def write(self, folder: Path, is_marked: bool) -> None:
        folder.mkdir()
        files = {"tokenizer.json": self.tokenizer, "tokenizer_config.json": self.settings, **self.files}
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
            if not is_marked and name != "tokenizer.json":
                text = text.replace(_OPEN, "").replace(_CLOSE, "")
            if content != {} or name == "tokenizer.json":
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(text, encoding="utf-8")


@functools.cache
def _described(name: str) -> str:
    """The tokenizer.json of a layout: small, in the family's shape."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    layout = LAYOUTS[name]
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    is_bytes = layout.kind in ("split", "qwen", "bytes", "digits", "neox", "punctuation")
    special = list(layout.special)
    if layout.kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        trainer: Any = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    elif is_bytes:
        tokenizer = Tokenizer(models.BPE(ignore_merges=layout.kind == "split"))
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    else:
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*special, *fallback])
    tokenizer.normalizer = {
        "prepend": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        "gemma": normalizers.Replace(" ", "▁"), "qwen": normalizers.NFC(), "neox": normalizers.NFC(),
        "unigram": normalizers.NFKC(),
    }.get(layout.kind)  # fmt: skip
    tokenizer.pre_tokenizer = {
        "gemma": pre_tokenizers.Split(" ", "merged_with_previous"),
        "split": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_pieces(digits=3)), "isolated"), level]),
        "qwen": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_pieces(digits=1)), "isolated"), level]),
        "bytes": whole, "neox": whole, "digits": pre_tokenizers.Sequence([pre_tokenizers.Digits(True), whole]),
        "punctuation": pre_tokenizers.Sequence([
            pre_tokenizers.Punctuation("contiguous"), whole, pre_tokenizers.Digits(False)]),
        "unigram": pre_tokenizers.Metaspace(prepend_scheme="always"),
    }.get(layout.kind)  # fmt: skip
    tokenizer.train_from_iterator(_WORDS.split(" ") + [f" {word}" for word in _WORDS.split(" ")], trainer)
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [entry for entry in described["added_tokens"] if entry["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(described))
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in layout.words])
    if name == "phi3":  # whose tokens take the space behind them along
        tokenizer.add_tokens([AddedToken(word, special=True, rstrip=True) for word in special[3:]])
    words = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = {
        "unigram": decoders.Metaspace(), "gemma": decoders.Sequence(words),
        "prepend": decoders.Sequence([*words, decoders.Strip(" ", 1, 0)]),
    }.get(layout.kind, decoders.ByteLevel())  # fmt: skip
    begin = layout.settings.get("bos_token")
    if name in ("llama2", "mistral-v1", "mistral-tekken", "llama3", "gemma"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    elif is_bytes:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return str(tokenizer.to_str())


def _pieces(digits: int) -> str:
    """As the folders of Llama 3 and of Qwen have them, with so many digits at a time."""
    numbers = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    begin, rest = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|", r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    return rf"{begin}{numbers}{rest}|\s+(?!\S)|\s+"


def folder_of(name: str) -> Folder:
    layout = LAYOUTS[name]
    settings = {**layout.settings, "chat_template": layout.template}
    return Folder(json.loads(_described(name)), settings, {"config.json": {"model_type": layout.model_type}})


# ---- changes ---------------------------------------------------------------------------------------------------


def _set(**values: Any) -> Callable[[Folder], None]:
    return lambda folder: folder.settings.update(values)


def _tokenizer(**values: Any) -> Callable[[Folder], None]:
    return lambda folder: folder.tokenizer.update(values)


def _rename_end(folder: Folder) -> None:
    """The end token has a name that is in nobody's list."""
    old = str(folder.settings["eos_token"])
    text = json.dumps([folder.tokenizer, folder.settings]).replace(json.dumps(old)[1:-1], "<|finis|>")
    tokenizer, settings = json.loads(text)
    folder.tokenizer.update(tokenizer)
    folder.settings.update(settings)


def _only_in_map(folder: Folder) -> None:
    names = [name for name in folder.settings if name.endswith("_token")]
    folder.files["special_tokens_map.json"] = {name: folder.settings.pop(name) for name in names}


def _other_map(folder: Folder) -> None:
    folder.files["special_tokens_map.json"] = {"eos_token": folder.tokenizer["added_tokens"][0]["content"]}


def _decoder(folder: Folder) -> None:
    added = folder.tokenizer["added_tokens"]
    folder.settings["added_tokens_decoder"] = {
        str(entry["id"]): {key: value for key, value in entry.items() if key != "id"} for entry in added
    }


def _described_end(folder: Folder) -> None:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    folder.settings["eos_token"] = {"__type": "AddedToken", "content": folder.settings["eos_token"], **flags}


def _not_added(folder: Folder) -> None:
    """The end token is a word of the vocabulary, and nothing in tokenizer.json says that it is special."""
    added = folder.tokenizer["added_tokens"]
    folder.tokenizer["added_tokens"] = [entry for entry in added if entry["content"] != folder.settings["eos_token"]]


def _holes(folder: Folder) -> None:
    """The vocabulary's last word has an id far above the others."""
    vocabulary = folder.tokenizer["model"]["vocab"]
    if isinstance(vocabulary, dict):
        taken = {entry["content"] for entry in folder.tokenizer["added_tokens"]}
        last = max((word for word in vocabulary if word not in taken), key=vocabulary.get)
        vocabulary[last] = 70_000


def _templates(*names: str) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        template = folder.settings["chat_template"]
        folder.settings["chat_template"] = [
            {"name": name, "template": template if name == "default" else "other"} for name in names
        ]

    return change


def _template_file(name: str, drops: bool) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        folder.files[name] = folder.settings["chat_template"]
        if drops:
            del folder.settings["chat_template"]
        else:
            folder.settings["chat_template"] = "{% for m in messages %}other{% endfor %}"

    return change


def _drop(*names: str) -> Callable[[Folder], None]:
    def change(folder: Folder) -> None:
        for name in names:
            folder.settings.pop(name, None)

    return change


def _no_model(folder: Folder) -> None:
    folder.files["config.json"] = {}


_CUT = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}


def _pads(folder: Folder) -> None:
    pad = folder.tokenizer["added_tokens"][0]
    folder.tokenizer["padding"] = {
        "strategy": {"Fixed": 32}, "direction": "Right", "pad_to_multiple_of": None, "pad_type_id": 0,
        "pad_id": pad["id"], "pad_token": pad["content"],
    }  # fmt: skip


CHANGES: Mapping[str, Callable[[Folder], None]] = {
    "as it is": lambda folder: None,
    "eos_token has another name": _rename_end,
    "eos_token is described": _described_end,
    "eos_token is missing": _drop("eos_token"),
    "eos_token is null": _set(eos_token=None),
    "eos_token is not in the vocabulary": _set(eos_token="<|new|>"),
    "eos_token is a plain word": _not_added,
    "special tokens only in special_tokens_map.json": _only_in_map,
    "special_tokens_map.json says otherwise": _other_map,
    "added_tokens_decoder": _decoder,
    "added_tokens_decoder and another map": lambda folder: (_decoder(folder), _other_map(folder))[0],
    "a token of its own": _set(image_token="<image>"),
    "chat_template is a list": _templates("default", "tool_use"),
    "chat_template is a list of one": _templates("default"),
    "chat_template is a list without default": _templates("tool_use", "rag"),
    "chat_template.jinja": _template_file("chat_template.jinja", drops=True),
    "chat_template.jinja beside another": _template_file("chat_template.jinja", drops=False),
    "additional_chat_templates": _template_file("additional_chat_templates/rag.jinja", drops=True),
    "no config.json": _no_model,
    "a vocabulary with holes": _holes,
    "tokenizer.json truncates": _tokenizer(truncation=_CUT),
    "tokenizer.json pads": _pads,
    "no normalizer": _tokenizer(normalizer=None),
    "a lower-case normalizer": _tokenizer(normalizer={"type": "Lowercase"}),
    "no post-processor": _tokenizer(post_processor=None),
    "tokenizer_class is missing": _drop("tokenizer_class"),
    "tokenizer_class is unknown": _set(tokenizer_class="OtherTokenizer"),
    "tokenizer_class ends in Fast": lambda folder: folder.settings.update(
        tokenizer_class=folder.settings["tokenizer_class"].removesuffix("Fast") + "Fast"
    ),
    **{f"legacy = {value}": _set(legacy=value) for value in (True, False)},
    **{f"add_prefix_space = {value}": _set(add_prefix_space=value) for value in (True, False)},
    **{f"add_eos_token = {value}": _set(add_eos_token=value, add_bos_token=value) for value in (True, False)},
    "split_special_tokens": _set(split_special_tokens=True),
    "clean_up_tokenization_spaces": _set(clean_up_tokenization_spaces=True),
    "padding_side": _set(padding_side="left", truncation_side="left", model_max_length=4),
}  # fmt: skip


class TokenizerCase(NamedTuple):
    layout: str
    change: str
    is_marked: bool = False
    """Whether tilemesh, too, reads the template with marks around its answers."""

    @property
    def name(self) -> str:
        return f"{self.layout}; {self.change}{'; marked answers' if self.is_marked else ''}"


def tokenizer_cases() -> Iterator[TokenizerCase]:
    for layout in LAYOUTS:
        yield TokenizerCase(layout, "as it is", is_marked=True)
        yield from (TokenizerCase(layout, change) for change in CHANGES)


def judge_tokenizer(case: TokenizerCase) -> tuple[str, str]:
    """(verdict, words): equal, refused by transformers, refused by tilemesh, or wrong."""
    with tempfile.TemporaryDirectory() as root:
        return _judge(case, Path(root))


def _judge(case: TokenizerCase, root: Path) -> tuple[str, str]:
    import transformers

    from tilemesh.core.errors import UsageError
    from tilemesh.data.tokenizer import FileTokenizer

    transformers.logging.set_verbosity_error()
    folder = copy.deepcopy(folder_of(case.layout))
    CHANGES[case.change](folder)
    folder.write(root / "theirs", is_marked=True)
    folder.write(root / "ours", case.is_marked)
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(root / "theirs", local_files_only=True)
    except Exception as error:
        return "refused by transformers", _line(error)
    try:
        lines = [_compare_texts(FileTokenizer(root / "ours" / "tokenizer.json"), theirs)]
    except UsageError as error:
        return "refused by tilemesh", _line(error)
    for name in CHATS:
        try:
            lines.append(_compare_chat(name, root, theirs, case.is_marked))
        except UsageError as error:
            is_due = case.change == "as it is" and name in _MUST
            lines.append(f"{name} is refused: {_line(error)}" if is_due else "")
    wrong = " | ".join(filter(None, lines))
    return ("wrong", wrong) if wrong else ("equal", "")


def _compare_texts(ours: Any, theirs: Any) -> str:
    for text in TEXTS:
        for special in (False, True):
            expected = theirs(text, add_special_tokens=special)["input_ids"]
            tokens = ours.encode(text.encode(), special).tolist()
            if tokens != expected:
                return f"{text!r}{' with special tokens' * special}: {tokens}, transformers {expected}"
    try:
        tokens = ours.encode("café".encode("latin-1")).tolist()
        return f"bytes that are not UTF-8: {tokens}"
    except ValueError:  # a refusal: transformers takes text alone
        pass
    if theirs.eos_token_id is not None and ours.end != theirs.eos_token_id:
        return f"ends with {ours.end}, transformers {theirs.eos_token_id}"
    largest = max(theirs.get_vocab().values())
    return "" if ours.vocabulary > largest else f"{ours.vocabulary} tokens, transformers has one of id {largest}"


def _compare_chat(name: str, root: Path, theirs: Any, is_marked: bool) -> str:
    """A conversation's tokens and targets; nothing to compare where transformers refuses it."""
    from tilemesh.data.config import DataConfig
    from tilemesh.data.corpus import open_corpus

    source, path = root / "chat.jsonl", root / "ours" / "tokenizer.json"
    source.write_text(json.dumps(CHATS[name]) + "\n")
    try:
        encoded = theirs.apply_chat_template(
            CHATS[name]["messages"], CHATS[name].get("tools"), return_assistant_tokens_mask=True, return_dict=True
        )
    except Exception:
        return ""
    stream = open_corpus(DataConfig(source=str(source), chat=True, tokenizer=path, held_out=0.0)).train
    tokens, counted = stream.parts[0].tolist(), [int(value) for value in stream.counted[0]]
    expected, mask = encoded["input_ids"], encoded["assistant_masks"]
    more = tokens[len(expected) :]
    if tokens[: len(expected)] != expected or (more and more != [theirs.eos_token_id or more[0]]):
        return f"{name}: {tokens}, transformers {expected}"
    # Where a template marks nothing and no special token ends an answer, all that it writes there counts.
    special = set(theirs.all_special_ids)
    is_ended = any(value and token in special for token, value in zip(expected, mask, strict=True))
    same = counted[: len(mask)] == mask
    covered = all(ours >= value for ours, value in zip(counted, mask, strict=False))
    return (
        "" if same or (covered and not is_ended and not is_marked) else f"{name}: targets {counted} of {tokens}, {mask}"
    )


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
