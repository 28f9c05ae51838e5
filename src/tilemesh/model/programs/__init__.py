"""Programs: faster functions that compute what the model's definition does. See `prepare.py`."""
