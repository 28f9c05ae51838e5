"""Others' engines: a plan in their terms (`tables.py`, `write.py`), their logs beside it (`logs.py`)."""
