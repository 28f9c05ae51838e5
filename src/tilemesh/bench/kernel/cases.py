"""What `tilemesh bench kernel` is to measure: operators, shapes and settings, read and refused without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilemesh.core.errors import unknown
from tilemesh.kernels import registry

ALL = "all"


@dataclass(frozen=True)
class KernelCase:
    """One problem of one operator, in the words of the command line."""

    operator: str
    shape: str
    settings: Mapping[str, str]

    @property
    def words(self) -> str:
        return " ".join([self.operator, self.shape, *self.settings.values()])


def cases_of(
    operators: Sequence[str], shapes: Sequence[str] = (), settings: Mapping[str, str] | None = None, dtypes: str = ""
) -> list[KernelCase]:
    """Every problem asked for. shapes: each operator's suite where none is given. dtypes: names with commas between.

    `all` stands for every operator, each forward and, where it has one, with its backward pass. Where several are
    asked for, a setting is for those that have it.
    """
    names = registry.names() if ALL in operators else list(operators)
    asked, made = dict(settings or {}), []
    known = {name: registry.find(name).load("form") for name in names}
    for setting in asked if len(names) > 1 else ():
        if not any(setting in form.settings for form in known.values()):
            raise unknown(
                "setting of these operators", setting, {name: 0 for f in known.values() for name in f.settings}
            )
    for name, form in known.items():
        own = {key: value for key, value in asked.items() if len(names) == 1 or key in form.settings}
        each = [{**own, "dtype": dtype.strip()} for dtype in dtypes.split(",")] if dtypes else [own]
        if ALL in operators and "passes" in form.settings and "passes" not in own:
            each = [{**given, "passes": passes} for given in each for passes in form.settings["passes"].known]
        for given in each:
            for shape in shapes or form.suite:
                form.problem(shape, given)
                made.append(KernelCase(name, shape, given))
    return made
