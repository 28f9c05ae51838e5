"""Collectives as data: what each rank does with which chunk, in rounds. Pure Python; nothing here moves a byte.

`book.build` makes a schedule by name; `check` proves one, `cost` counts one, `simulate` times one, `draw` draws one.
"""
