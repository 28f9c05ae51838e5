"""The commands of `tilemesh`: a file is a command, a folder a group of them, and nothing else has to name it.

NAME.py has a docstring, which is the command's help and begins with the sentence that a list of commands shows; a
frozen dataclass of options (`core/options.py`); and a function NAME of that one value, which returns the exit code or
None. Whatever takes long to import, torch above all, is imported inside of functions: `--help` and refusals need none.
"""

ORDER = (
    *("doctor", "calibrate", "config", "launch", "plan", "tune", "train", "align", "generate", "export", "serve"),
    *("compress", "data", "verify", "report", "watch", "bench", "graph", "guide"),
)
"""In a list; a command that is not named here comes after these."""
