"""`fit` from Python with a plan of several ranks: it starts them, and the process that waits loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from warm import warm_start

from tilemesh.runs import names
from tilemesh.runs.files import read_object
from tilemesh.runs.metrics import RESUMED, STEP, latest

SETS = (
    "model.layers=1,model.width=16,model.heads=2,model.kv_heads=2,model.mlp_width=32,model.context=16,train.steps=4,"
    "train.batch=4,checkpoint.every=2,evaluate.every=0,sample.tokens=0,optimizer.warmup=2,train.device=cpu"
)
SCRIPT = """
import json, sys
import tilemesh as tm

source, folder, sets, sys.executable = sys.argv[1:]
heard = []
first = tm.train.fit(
    tm.train.load_config(sets=[sets, f"data.source={source}"], mesh="dp=2"), run=folder, on_event=heard.append
)
longer = tm.train.load_config(sets=[sets, f"data.source={source}", "train.steps=8"], mesh="tp=2")
second = tm.train.fit(longer, resume=folder, stop_after=6)
print(json.dumps({
    "first": [first.step, first.interrupted, len(first.rows)], "second": [second.step, second.interrupted],
    "heard": [event["kind"] for event in heard], "heavy": sorted({"torch", "mpi4py", "numpy"} & set(sys.modules)),
}))
"""


def test_ranks_are_started_heard_and_resumed_on_another_mesh(tmp_path: Path) -> None:
    source, folder = tmp_path / "text.txt", tmp_path / "run"
    source.write_text("to be or not to be, that is the question\n" * 200)
    words = [sys.executable, "-c", SCRIPT, str(source), str(folder), SETS]
    with warm_start():
        words.append(sys.executable)  # by which the script starts ranks
    done = subprocess.run(words, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)  # `fit` itself prints nothing
    assert told["first"] == [4, False, 8]
    assert told["second"] == [6, True]
    assert told["heard"] == ["run", "say", *[STEP] * 4, "end"]
    assert told["heavy"] == []
    summary = read_object(folder / names.SUMMARY)
    assert (summary["world"], summary["plan"]["tp"], summary["kind"]) == (2, 2, "train")
    assert [line["step"] for line in latest(folder) if line["kind"] == RESUMED] == [4]
    assert {path.name for path in folder.iterdir()} >= {
        names.PREDICTED, names.ENVIRONMENT, names.ROWS, names.earlier_config(4), names.ABOUT
    }  # fmt: skip
    assert len(read_object(folder / names.ENVIRONMENT)["commands"]) == 2
