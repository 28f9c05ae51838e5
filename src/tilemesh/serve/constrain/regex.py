"""Regular expressions to patterns. The whole text must match; what is no regular language is refused by name.

Classes such as \\d and \\w are those of ASCII, as in JSON schemas and in Python's `re.ASCII`.
"""

from __future__ import annotations

from tilemesh.core.errors import UsageError
from tilemesh.serve.constrain.pattern import Chars, OneOf, Pattern, Ranges, Repeat, Sequel, chars, merged, others

_MOST_TIMES = 10_000
_MOST_DEPTH = 64
_DIGITS: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = ((9, 13), (32, 32))
_CLASSES = {"d": _DIGITS, "w": _WORD, "s": _SPACE, "D": others(_DIGITS), "W": others(_WORD), "S": others(_SPACE)}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_HEX = {"x": 2, "u": 4, "U": 8}
ANY_LINE = others(((10, 10),))
"""What a dot stands for."""
_GROUPS = {"=": "looking ahead", "!": "looking ahead", "<": "looking behind", "#": "a comment", "(": "a condition",
           ">": "an atomic group", "P": "a reference back"}  # fmt: skip


def parse_regex(source: str, search: bool = False) -> Pattern:
    """A pattern that matches what the expression matches as a whole; `search`: texts that have a match anywhere."""
    return _Parser(source).whole(search)


class _Parser:
    def __init__(self, source: str) -> None:
        self.source, self.at, self.depth = source, 0, 0

    def whole(self, search: bool) -> Pattern:
        any_text = Repeat(Chars(others(())), 0, None)
        branches = []
        while True:
            begins = self._taken("^") or self._taken("\\A")
            part = self._row()
            ends = self._taken("$") or self._taken("\\Z")
            loose = [*([] if begins else [any_text]), part, *([] if ends else [any_text])]
            branches.append(Sequel(tuple(loose)) if search else part)
            if not self._taken("|"):
                break
        if self.at < len(self.source):
            self._refuse("a group that nobody opened ends" if self._next() == ")" else "an end in the middle")
        return branches[0] if len(branches) == 1 else OneOf(tuple(branches))

    def _refuse(self, what: str) -> None:
        raise UsageError(
            f"regex: {what} at character {self.at} of '{self.source[:100]}': expected a regular expression "
            "without references, looking around, anchors inside, or flags"
        )

    def _next(self) -> str:
        return self.source[self.at] if self.at < len(self.source) else ""

    def _taken(self, word: str) -> bool:
        if not self.source.startswith(word, self.at):
            return False
        self.at += len(word)
        return True

    def _choice(self) -> Pattern:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            self._refuse(f"more than {_MOST_DEPTH} groups in one another")
        parts = [self._row()]
        while self._taken("|"):
            parts.append(self._row())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else OneOf(tuple(parts))

    def _row(self) -> Pattern:
        parts: list[Pattern] = []
        while self._next() not in ("", "|", ")"):
            if self._next() == "$" or self.source.startswith("\\Z", self.at):
                break  # an end, if this is one: whoever called looks
            parts.append(self._repeated(self._one()))
        return parts[0] if len(parts) == 1 else Sequel(tuple(parts))

    def _one(self) -> Pattern:
        char = self._next()
        if char in "*+?":
            self._refuse("nothing to repeat")
        if char == "^":
            self._refuse("a beginning that is not at the beginning")
        self.at += 1
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._class())
        if char == ".":
            return Chars(ANY_LINE)
        return Chars(self._escaped(False)) if char == "\\" else chars(char)

    def _group(self) -> Pattern:
        if self._taken("?"):
            if self._taken("P<") or (self._next() == "<" and self.source[self.at + 1 : self.at + 2] not in ("=", "!")):
                self._taken("<")
                end = self.source.find(">", self.at)
                if end < 0 or not self.source[self.at : end].isidentifier():
                    self._refuse("a group's name that does not end")
                self.at = end + 1
            elif not self._taken(":"):
                self._refuse(_GROUPS.get(self._next(), "a flag"))
        part = self._choice()
        if not self._taken(")"):
            self._refuse("an end in the middle" if self._next() in ("$", "\\") else "a group that does not end")
        return part

    def _repeated(self, part: Pattern) -> Pattern:
        times = self._times()
        if times is None:
            return part
        self._taken("?")  # as few as possible: the same texts match
        if self._next() == "+":
            self._refuse("a possessive repetition")
        if self._next() in ("*", "?") or self._times() is not None:
            self._refuse("a repetition of a repetition")
        return Repeat(part, *times)

    def _times(self) -> tuple[int, int | None] | None:
        for sign, times in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._taken(sign):
                return times
        end = self.source.find("}", self.at)
        if self._next() != "{" or end < 0:
            return None
        low, comma, high = self.source[self.at + 1 : end].partition(",")
        numbers = [number for number in (low, high) if number]
        if not numbers or not all(number.isascii() and number.isdigit() for number in numbers):
            return None  # a brace that stands for itself, as in `re`
        if any(len(number) > 8 or int(number) > _MOST_TIMES for number in numbers):
            self._refuse(f"more than {_MOST_TIMES:,} times")
        least = int(low) if low else 0
        most = least if not comma else int(high) if high else None
        if most is not None and most < least:
            self._refuse("at most fewer than at least")
        self.at = end + 1
        return least, most

    def _escaped(self, in_class: bool) -> Ranges:
        char = self._next()
        self.at += 1
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS and not (char == "0" and self._next().isdigit()):
            return chars(_CONTROLS[char]).ranges
        if char in _HEX:
            digits = self.source[self.at : self.at + _HEX[char]]
            self.at += len(digits)
            try:
                number = int(digits, 16) if len(digits) == _HEX[char] and digits.isalnum() else -1
            except ValueError:
                number = -1
            ranges = merged([(number, number)]) if 0 <= number <= 0x10FFFF else ()
            if not ranges:
                self._refuse(f"\\{char}, which is not followed by the {_HEX[char]} digits of a character")
            return ranges
        if char == "b" and in_class:
            return chars("\b").ranges
        if not char or (char.isascii() and char.isalnum()):
            self.at -= 1
            self._refuse(f"\\{char}")
        return chars(char).ranges

    def _class(self) -> Ranges:
        negated = self._taken("^")
        ranges: list[tuple[int, int]] = []
        first = True
        while first or self._next() != "]":
            first = False
            low = self._member()
            if self._next() == "-" and self.source[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                high = self._member()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                    self._refuse("a range between what are no characters")
                if low[0][0] > high[0][0]:
                    self._refuse("a range that ends before it begins")
                low = ((low[0][0], high[0][0]),)
            ranges += low
        self.at += 1
        return others(ranges) if negated else merged(ranges)

    def _member(self) -> Ranges:
        char = self._next()
        if not char:
            self._refuse("a class of characters that does not end")
        self.at += 1
        return self._escaped(True) if char == "\\" else ((ord(char), ord(char)),)
