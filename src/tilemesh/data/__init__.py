"""Text on its way to a model: documents, tokenizers, token shards on disk, and the order in which samples are taken.

    config.py      where the text comes from, as a value        corpus.py    a source opened: train and held-out tokens
    documents.py   files and records as documents               shards.py    token shards on disk: read
    records.py     JSONL and Parquet                            prepare.py   token shards written, some at a time
    chat.py        conversations as text, answers marked        samples.py   sequences: packing, targets, mixtures
    tokenizer.py   text to tokens and back                      order.py     which sample stands where in which epoch
    stream.py      tokens one after the other

numpy, no torch, and nothing of training: serving and compression read text through the same files.
"""
