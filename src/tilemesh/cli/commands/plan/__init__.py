"""Predict step time and memory; choose a layout for a cluster. `plan MODEL` is short for `plan train MODEL`."""

from __future__ import annotations

from collections.abc import Sequence

from tilemesh.core.errors import UsageError

_OLD = {"--draw": "draw", "--serve": "serve", "--grade": "grade", "--fit": "fit"}
"""Options that once chose what `plan` does, and the commands that do it now."""


def redirect(words: Sequence[str]) -> list[str]:
    """The words after `plan` as its commands take them: `MODEL …` is `train MODEL …`, with `--align …` it is
    `align MODEL …`, and `--draw X …` is `draw X …`."""
    if any(word.partition("=")[0] == "--save" for word in words):
        raise UsageError("--save is called --out: tilemesh plan … --out plan.toml")
    if words[:1] in ([], ["--help"]) or words[0] in (*_OLD.values(), "train", "align"):
        return list(words) or ["train"]
    if any(word.partition("=")[0] == "--align" for word in words):
        return ["align", *words]
    values: list[str] = []
    rest: list[str] = []
    chosen, place = "train", 0
    while place < len(words):
        flag, equals, value = words[place].partition("=")
        if flag not in _OLD or (chosen != "train" and chosen != _OLD[flag]):
            rest.append(words[place])
        else:
            chosen = _OLD[flag]
            if flag != "--serve":
                place += not equals
                values += [value] if equals else words[place : place + 1]
        place += 1
    if chosen == "train" and _engine(rest) == "vllm":
        chosen = "serve"
    return [chosen, *values, *rest]


def _engine(words: Sequence[str]) -> str:
    """What `--for` names."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "--for" or word.startswith("--for="):
            return word.partition("=")[2] or following
    return ""
