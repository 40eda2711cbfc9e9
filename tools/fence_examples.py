"""Show the `>>>` examples of docstrings as code in the documentation's site. mkdocs.yml loads this extension of griffe.

Markdown takes `>>>` for a quotation in a quotation. So each example, up to the next empty line, gets a fence.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n[ \t]*\n|\Z)", re.MULTILINE | re.DOTALL)


class FenceExamples(griffe.Extension):
    """Called by griffe for each module, class, function and attribute that it reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"\n```pycon\n\g<0>\n```\n", obj.docstring.value)
