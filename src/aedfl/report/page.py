"""One self-contained HTML page: style, script and drawings inline, nothing fetched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from .panels import Card


def page(title: str, heading: str, *body: str) -> str:
    """The whole document. `heading` and `body` are HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_asset('report.css')}</style></head><body><main>"
        f'<header><div>{heading}</div><button id="theme" type="button">Light / dark</button></header>'
        f'{"".join(body)}</main><div id="tip" hidden></div><script>{_asset("report.js")}</script></body></html>\n'
    )


def heading(title: str, subtitle: str, finished: bool = True) -> str:
    pill = "" if finished else '<span class="pill">not finished</span>'
    return f'<h1>{escape(title)}{pill}</h1><p class="sub">{escape(subtitle)}</p>'


def tiles(figures: Iterable[tuple[str, str, str]]) -> str:
    return "<dl class=tiles>" + "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>'
        for name, value, more in figures
    ) + "</dl>"


def cards(shown: Iterable[Card | None]) -> str:
    return f'<div class="cards">{"".join(_card(card) for card in shown if card is not None)}</div>'


def folded(title: str, body: str) -> Card:
    """A card that opens on a click."""
    return Card("", "", f"<details><summary>{escape(title)}</summary>{body}</details>", wide=True)


def config_table(config: Mapping[str, Any]) -> str:
    """The config, section by section."""
    top = {key: value for key, value in config.items() if not isinstance(value, dict) or key == "hyper"}
    sections = {key: value for key, value in config.items() if key not in top}
    return f'<div class="config">{"".join(_section(*item) for item in ({"run": top} | sections).items())}</div>'


def plain_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    def cells(kind: str, words: Iterable[str]) -> str:
        return "".join(f"<{kind}>{escape(word)}</{kind}>" for word in words)

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"


def _section(name: str, table: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escape(str(key))}</td><td>{escape(_shown(value))}</td></tr>" for key, value in table.items()
    )
    return f"<section><h3>{escape(name)}</h3><table><tbody>{rows}</tbody></table></section>"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value in ("none", None) else f"{value:,g}" if isinstance(value, float) else str(value)


def _card(card: Card) -> str:
    title = f"<h2>{escape(card.title)}</h2>" if card.title else ""
    note = f'<p class="note">{escape(card.note)}</p>' if card.note else ""
    legend, chart = _split(card.body)
    return f'<section class="card{" wide" if card.wide else ""}">{title}{note}{legend}{chart}</section>'


def _split(body: str) -> tuple[str, str]:
    """The legend, and the drawing in a box that scrolls on a narrow screen."""
    if body.startswith("<details"):
        return "", body
    start = body.find("<svg viewBox") if body.startswith("<svg") else body.find("</div>") + 6
    return body[:start], f'<div class="scroll">{body[start:]}</div>'


def _asset(name: str) -> str:
    return (files("aedfl.report") / "assets" / name).read_text()
