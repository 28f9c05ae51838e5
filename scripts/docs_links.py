"""A hook of mkdocs: what documents say of files outside of docs/ (examples, source code) becomes their path.

Read in a clone the same lines are links.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs with the text of each page."""
    documents = Path(config["docs_dir"]).resolve()
    here = documents / page.file.src_uri

    def shown(match: re.Match[str]) -> str:
        target = (here.parent / match[2]).resolve()
        if target.is_relative_to(documents) or not target.is_relative_to(ROOT):
            return match[0]
        return f"{match[1]} (`{target.relative_to(ROOT).as_posix()}` in the repository)"

    return _LINK.sub(shown, markdown)
