"""Writes what is published: tables, figures and an overview, all from records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from . import figures, tables
from .overview import overview
from .plan import Target, Wish, targets
from .records import Store
from .standing import standing


def shown(base: Target, wish: Wish) -> Target:
    """What of a target is written: all of it, but for a small or a changed version what was asked for."""
    aim = wish.narrow(base)
    if wish.changes(()) or not set(aim.settings) <= set(base.settings):
        return aim
    return replace(base, methods=(*base.methods, *(one for one in aim.methods if one not in base.methods)))


def of_target(base: Target, store: Store, wish: Wish) -> dict[str, str]:
    """Files of one target: name and content."""
    aim = shown(base, wish)
    stands = [standing(aim, name, store, wish) for name in aim.settings]
    drawn = {f"{aim.name}-{stand.setting}.svg": figures.draw(aim, stand, store, wish) for stand in stands}
    images = [name if text else "" for name, text in drawn.items()]
    found = {f"figures/{name}": text for name, text in drawn.items() if text}
    if aim.is_table:
        texts = {"md": tables.page(aim, stands), "tex": tables.source(aim, stands)}
        return found | {f"tables/{aim.name}.{kind}": text for kind, text in texts.items()}
    found[f"figures/{aim.name}.md"] = figures.page(aim, stands, images, store, wish)
    return {**found, f"figures/{aim.name}.tex": tables.source(aim, stands)}


def everything(store: Store) -> dict[str, str]:
    """All files that `results/` shows, as they follow from its records."""
    found: dict[str, str] = {}
    for base in targets().values():
        found |= of_target(base, store, Wish())
    return {**found, "README.md": overview(store)}


def write(files: Mapping[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
