"""Measure ours beside what you would use instead. `bench --plan FILE` is short for the command of that kind of plan."""

from collections.abc import Sequence


def redirect(words: Sequence[str]) -> list[str]:
    """The words after `bench`: `--plan FILE …` is `train --plan FILE …`, of a plan to serve `serve --plan FILE …`."""
    from tilemesh.core.config import read_toml
    from tilemesh.core.plan_file import KIND, SERVE, TRAIN

    flag, _, file = words[0].partition("=") if words else ("", "", "")
    keys = read_toml(file, "plan") if flag == "--plan" and (file := file or "".join(words[1:2])) else {}
    return [SERVE if keys.get(KIND) == SERVE else TRAIN] * (flag == "--plan") + list(words)
