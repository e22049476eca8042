"""Reads an HTML page strictly, for tests of what is in it."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "input"}


class Page(HTMLParser):
    """What a page holds; raises AssertionError where an element is closed that is not open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.append((tag, ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.texts[-1][0] == self.open[-1]:
            self.texts[-1] = (self.open[-1], self.texts[-1][1] + data)

    def texts_in(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]

    def classes(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if name in (attributes.get("class") or "").split()]

    @property
    def data(self) -> Any:
        (place,) = (i for i, (tag, a) in enumerate(self.elements) if tag == "script" and a.get("id") == "data")
        return json.loads(self.texts_in("script")[[t for t, _ in self.elements[:place]].count("script")])
