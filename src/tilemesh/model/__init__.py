"""The Transformer: it knows nothing of ranks. `config.py` is plain Python; the layers load torch when they are used."""
