"""A run's folder: one contract for its names, its files and its checkpoints, whatever kind of run wrote it.

    names.py       what the files are called, and the schema
    kind.py        what kind of run a folder is of
    folder.py      making a folder; its small files
    journal.py     metrics, appended while the run goes on
    metrics.py     lines of metrics as steps and events
    contents.py    everything a folder holds, whatever its state
    files.py       reading and writing single files safely
    jsontext.py    values as strict JSON and back
    values.py      JSON values as what they should be
    manifest.py    a checkpoint as data: files, digests, boxes
    checkpoint.py  writing checkpoints in the background
    reader.py      reading a checkpoint box by box
    tensors.py     safetensors files: the only file here that imports torch

Training, serving and compression write through it; the report and the planner's grading read through it.
"""
