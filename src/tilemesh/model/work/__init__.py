"""What a Transformer does, described once as plain values, for one microbatch on one rank. No torch.

`weights.py` lists its matrices, `task.py` says what decides the rest, `operations.py` has the operations of a layer,
the embedding and the head with their FLOPs and bytes, `passes.py` those that only move bytes, `kept.py` what the
backward pass needs, `exchanges.py` what ranks exchange. Counts, memory and time of a step (`plan/`), the split of a
model (`parallel/apply.py`) and the bytes on the wire (`step_exchanges.py`) follow from these.
"""
