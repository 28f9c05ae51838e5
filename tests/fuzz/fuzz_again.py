"""Run cases by name, or all whose name contains a word: `python tests/fuzz/fuzz_again.py 'plan: --batch is zero'`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_client import Server


def main() -> int:
    wanted = sys.argv[1:]
    failed = 0
    with Server() as server:
        names = [name for name, _ in server.cases]
        chosen = [name for name in names if name in wanted] or [n for n in names if any(w in n for w in wanted)]
        for number, name in enumerate(chosen):
            outcome = server.run(name)
            failed += bool(outcome["wrong"])
            if len(chosen) < 20 or outcome["wrong"]:
                print(
                    f"{number}/{len(chosen)} {name}: {outcome['code']} in {outcome['seconds']} s",
                    outcome["wrong"] or "",
                    flush=True,
                )
            if len(chosen) < 20:
                print(outcome["out"][-600:] + outcome["err"] + outcome["began_work"])
            elif outcome["wrong"]:
                print("    " + (outcome["err"].strip().split("\n") or [""])[-1][:300], flush=True)
    print(f"{len(chosen)} cases, {failed} violations")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
