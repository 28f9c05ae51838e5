"""The differential gate for folders: every family, every change of config.json, of tokenizer files and of end tokens.

    python tests/folders/folder_gate.py -n 16                # all of it, 16 processes
    python tests/folders/folder_gate.py 'gemma3; rope' -v    # cases whose names begin so, with every verdict

Each case is judged by transformers, which must be installed; tilemesh need not be (PYTHONPATH=src). Ends with a line of
counts and, if a case is wrong, code 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from folder_configs import ConfigCase, config_cases, judge_config
from folder_ends import EndsCase, ends_cases, judge_ends
from folder_tokenizers import TokenizerCase, judge_tokenizer, tokenizer_cases

Case = ConfigCase | TokenizerCase | EndsCase
_JUDGES: dict[type[Any], Any] = {ConfigCase: judge_config, TokenizerCase: judge_tokenizer, EndsCase: judge_ends}


def all_cases() -> list[Case]:
    return [*config_cases(), *tokenizer_cases(), *ends_cases()]


def sampled(cases: Sequence[Case], count: int) -> list[Case]:
    """So many of them, the same in every run."""
    return random.Random(0).sample(list(cases), count)


def judge(case: Case) -> tuple[str, str]:
    """(verdict, words); a failure of tilemesh that is no refusal is wrong, too."""
    os.environ["TQDM_DISABLE"] = "1"
    try:
        verdict, words = _JUDGES[type(case)](case)
    except Exception as error:
        verdict, words = "wrong", f"{type(error).__name__}: {error}"
    return verdict, words


def wrong_lines(cases: Iterable[Case]) -> list[str]:
    """One for each case that is wrong."""
    verdicts = ((case, *judge(case)) for case in cases)
    return [f"{case.name}: {words}" for case, verdict, words in verdicts if verdict == "wrong"]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare folders with transformers.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="the beginning of cases' names; none: all")
    parser.add_argument("-n", type=int, default=1, metavar="N", help="processes")
    parser.add_argument("-v", action="store_true", help="a line for every case, not only for wrong ones")
    options = parser.parse_args(argv)
    cases = [case for case in all_cases() if not options.names or case.name.startswith(tuple(options.names))]
    began, counts = time.monotonic(), Counter[str]()
    with ProcessPoolExecutor(options.n) as processes:
        for case, (verdict, words) in zip(cases, processes.map(judge, cases, chunksize=8), strict=True):
            counts[verdict] += 1
            if options.v or verdict == "wrong":
                print(f"{verdict} | {case.name} | {words}", flush=True)
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    print(f"{len(cases)} cases in {time.monotonic() - began:.0f} s: {told}")
    return 1 if counts["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
