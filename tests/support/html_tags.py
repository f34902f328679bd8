"""What a page is made of."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.found.append((tag, dict(attrs)))

    def with_attribute(self, name: str) -> list[dict]:
        return [attributes for _, attributes in self.found if name in attributes]


def without_scripts(page: str) -> str:
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
