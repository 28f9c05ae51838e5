"""The reference of `align` settings: `python -m tilemesh.align.reference > docs/align/settings.md`; a test compares."""

from __future__ import annotations

import sys

from tilemesh.align.config import FeedbackFile
from tilemesh.core.reference import describe, markdown
from tilemesh.runs.names import FEEDBACK

_PAGE = """# Settings of `tilemesh align`

`--set align.KEY=VALUE`, beside those of training ([configuration.md](../configuration.md)). A run keeps them in
`{file}`. This page is generated: `python -m tilemesh.align.reference > docs/align/settings.md`.
"""


def reference_page() -> str:
    """The Markdown page."""
    return f"{_PAGE.format(file=FEEDBACK)}\n{markdown(describe(FeedbackFile))}\n"


if __name__ == "__main__":
    sys.stdout.write(reference_page())
