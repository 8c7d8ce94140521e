"""One self-contained HTML page: style, script and drawings inline, nothing fetched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from .panels import Card

_BOX = re.compile(r'viewBox="([^"]+)"')


def page(title: str, heading: str, *body: str) -> str:
    """The whole document. `heading` and `body` are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_asset('report.css')}</style></head><body><main>"
        f'<header><div>{heading}</div><button id="theme" type="button">Light / dark</button></header>'
        f'{"".join(body)}</main><div id="tip" hidden></div>'
        f"<script>{_asset('report.js')}</script></body></html>\n"
    )


def heading(title: str, subtitle: str, finished: bool = True) -> str:
    pill = "" if finished else '<span class="pill">not finished</span>'
    return f'<h1>{escape(title)}{pill}</h1><p class="sub">{escape(subtitle)}</p>'


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    return f"<dl class=tiles>{''.join(_tile(*figure) for figure in figures)}</dl>"


def _tile(name: str, value: str, more: str) -> str:
    inner = f"<dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd>"
    return f'<div class="tile">{inner}</div>'


def cards(shown: Iterable[Card | None]) -> str:
    """Cards in two columns of about the same height; a wide one goes over both."""
    html, columns = "", _Columns()
    for card in shown:
        if card is not None and card.wide:
            html += columns.close() + _card(card)
            columns = _Columns()
        elif card is not None:
            columns.add(card)
    return f'<div class="cards">{html}{columns.close()}</div>'


class _Columns:
    """Two columns being filled, the shorter one first."""

    def __init__(self) -> None:
        self._html = ["", ""]
        self._height = [0.0, 0.0]

    def add(self, card: Card) -> None:
        column = 0 if self._height[0] <= self._height[1] else 1
        self._html[column] += _card(card)
        self._height[column] += 90 + sum(float(box.split()[3]) for box in _BOX.findall(card.body))

    def close(self) -> str:
        return "".join(f"<div class=column>{html}</div>" for html in self._html if html)


def folded(title: str, body: str) -> Card:
    """A card that opens on a click."""
    return Card("", "", f"<details><summary>{escape(title)}</summary>{body}</details>", wide=True)


def config_table(config: Mapping[str, Any]) -> str:
    """The config, section by section."""
    top = {key: value for key, value in config.items() if not isinstance(value, dict) or key == "hyper"}
    sections = {key: value for key, value in config.items() if key not in top}
    shown = "".join(_section(name, table) for name, table in ({"run": top} | sections).items())
    return f'<div class="config">{shown}</div>'


def plain_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def cells(kind: str, words: Iterable[str]) -> str:
        return "".join(f"<{kind}>{escape(word)}</{kind}>" for word in words)

    top = f"<thead><tr>{cells('th', head)}</tr></thead>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=scroll><table>{top}<tbody>{body}</tbody></table></div>"


def _section(name: str, table: Mapping[str, Any]) -> str:
    cells = ((escape(str(key)), escape(_shown(value))) for key, value in table.items())
    rows = "".join(f"<tr><td>{key}</td><td>{value}</td></tr>" for key, value in cells)
    return f"<section><h3>{escape(name)}</h3><table><tbody>{rows}</tbody></table></section>"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value in ("none", None) else f"{value:,g}" if isinstance(value, float) else str(value)


def _card(card: Card) -> str:
    title = f"<h2>{escape(card.title)}</h2>" if card.title else ""
    note = f'<p class="note">{escape(card.note)}</p>' if card.note else ""
    return f'<section class="card{" wide" if card.wide else ""}">{title}{note}{card.body}</section>'


def _asset(name: str) -> str:
    return (files("aedfl.report") / "assets" / name).read_text()
