"""Plots of curves and of what is varied, and what the paper's text says about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..report.charts import Series, time_axis
from ..report.comparison import Column
from ..report.scale import Axis, exact, fitted, logarithmic
from ..report.standalone import chart
from . import paper
from .curves import cut
from .plan import Target, Wish, setting, title
from .records import Record, Store
from .standing import ACCURACY, TIME, TIME95, Standing, records_of
from .tables import LEGEND, NOT_RUN, Grid, Text, grid, markdown

BASE = "aedfl-0"

Pair = tuple[str, str, str]
"""A method, another one that is compared with it, and the value of what is varied."""


def curves(aim: Target, stand: Standing, store: Store, wish: Wish) -> str:
    """Accuracy of the mean model over virtual time, a line per method and value; empty when there is nothing yet."""
    lines = [line for method in aim.methods for line in _lines(aim, method, stand, store, wish)]
    if not lines:
        return ""
    y = fitted(np.concatenate([line.y for line in lines]), "Accuracy of the mean model", zero=True)
    return chart(lines, time_axis(stand.until), y, _title(aim, stand), stand.target)


def _lines(aim: Target, method: str, stand: Standing, store: Store, wish: Wish) -> list[Series]:
    """A method's lines; one only where what is varied does not concern it."""
    found = {value: records_of(aim, store, stand.setting, method, swept, wish) for value, swept in aim.values.items()}
    distinct: dict[tuple[str, ...], tuple[str, list[Record]]] = {}
    for value, records in found.items():
        if records:
            distinct.setdefault(tuple(record["config"] for record in records), (value, records))
    alone = len(aim.values) == 1 or (len(distinct) == 1 and all(found.values()))
    return [
        _line(title(method) if alone else f"{title(method)}, {value}", records, stand.until)
        for value, records in distinct.values()
    ]


def _line(name: str, records: Sequence[Record], until: float) -> Series:
    """Mean over seeds at the times that all of them were measured at, with the range as a band."""
    pairs = [
        dict(zip(cut(r["curve"], until, "time"), cut(r["curve"], until, "accuracy"), strict=True)) for r in records
    ]
    times = sorted(set.intersection(*(set(pair) for pair in pairs)))
    values = np.array([[pair[time] for time in times] for pair in pairs])
    band = (values.min(0), values.max(0)) if len(pairs) > 1 else (None, None)
    return Series(name, np.array(times), values.mean(0), *band)


def over_values(aim: Target, stand: Standing) -> str:
    """A figure of each method over what is varied; empty when there is nothing yet.

    Of the two times, the one that more points have: a target that few reach hides the others.
    """
    columns = (TIME, TIME95) if aim.measure == "time" else (ACCURACY,)
    drawn = {column: _over_values(aim, stand, column) for column in columns}
    column, lines = max(drawn.items(), key=lambda item: sum(len(line.x) for line in item[1]))
    if not lines:
        return ""
    goal = stand.target if column is TIME else stand.second or 0.0
    words = "Accuracy of the mean model" if column is ACCURACY else f"Time to {goal:.3g} (virtual s)"
    y = fitted(np.concatenate([line.y for line in lines]), words)
    return chart(lines, _values_axis(aim), y, _title(aim, stand))


def _over_values(aim: Target, stand: Standing, column: Column) -> list[Series]:
    lines = []
    for method in aim.methods:
        points = [(float(value), stand.mean(column, method, value)) for value in aim.values]
        known = [(x, y) for x, y in points if y is not None]
        if known:
            lines.append(Series(title(method), *(np.array(part, dtype=float) for part in zip(*known, strict=True))))
    return lines


def _values_axis(aim: Target) -> Axis:
    values = [float(value) for value in aim.values]
    low, high = min(values), max(values)
    return logarithmic(low, high, aim.axis) if high >= 20 * low else exact(low, high, aim.axis)


def _title(aim: Target, stand: Standing) -> str:
    return f"{aim.title}: {setting(stand.setting).title}"


def draw(aim: Target, stand: Standing, store: Store, wish: Wish) -> str:
    """The figure of a target in one setting."""
    if aim.measure in ("accuracy", "time"):
        return over_values(aim, stand)
    return curves(aim, stand, store, wish)


def compared(aim: Target, stand: Standing) -> Grid:
    """What the paper says about the figure, beside what came out here."""
    said = paper.claims(aim.name)
    rows = [*_leads(aim, stand, said), *_gains(aim, stand, said), *_best_value(aim, stand, said)]
    return [[Text(words) for words in ("", "here", "paper")], *rows] if rows else []


def _leads(aim: Target, stand: Standing, said: Mapping[str, Any]) -> Grid:
    """AEDFL's largest lead over a baseline, at each value; and over all values where the paper says it so.

    The latter only when AEDFL was run with all of them: the largest lead may lie where it was not.
    """
    others = [method for method in aim.methods if not method.startswith("aedfl")]
    rows = []
    for kind, lead in (("advantage", _points), ("faster", _saved)):
        numbers = said.get(kind, {})
        for value in [*aim.values, *([""] if "" in numbers and "" not in aim.values else [])] if others else ():
            inside = [value] if value else list(aim.values)
            whole = all(stand.mean(ACCURACY, "aedfl", one) is not None for one in inside)
            words, found = lead(stand, [(other, "aedfl", one) for other in others for one in inside] if whole else [])
            where = f" ({value})" if value else ""
            rows.append(_compared(f"AEDFL's largest lead in {words}{where}", found, numbers.get(value)))
    return rows


def _gains(aim: Target, stand: Standing, said: Mapping[str, Any]) -> Grid:
    """What each variant gains over AEDFL without its modules."""
    rows = []
    for kind, lead in (("gain", _points), ("sooner", _saved)):
        for method in (one for one in aim.methods if BASE in aim.methods and one != BASE):
            words, found = lead(stand, [(BASE, method, "")])
            rows.append(_compared(f"{title(method)} over AEDFL-0: {words}", found, said.get(kind, {}).get(method)))
    return rows


def _best_value(aim: Target, stand: Standing, said: Mapping[str, Any]) -> Grid:
    if "best" not in said:
        return []
    means = {value: stand.mean(ACCURACY, "aedfl", value) for value in aim.values}
    known = {value: mean for value, mean in means.items() if mean is not None}
    whole = len(known) == len(means)
    best = max(known, key=lambda value: known[value]) if whole else NOT_RUN
    spread = [100 * (max(known.values()) - min(known.values()))] if whole else []
    return [
        [Text(f"best {aim.axis}"), Text(best), Text(said["best"])],
        _compared("best against worst, points of accuracy", spread, said["spread"]),
    ]


def _compared(words: str, found: Sequence[float], said: float | None) -> list[Text]:
    return [
        Text(words),
        Text(f"{max(found):+.1f}" if found else NOT_RUN),
        Text("–" if said is None else f"{said:+.1f}"),
    ]


def _points(stand: Standing, pairs: Sequence[Pair]) -> tuple[str, list[float]]:
    found = _both(stand, ACCURACY, pairs)
    return "accuracy, points", [100 * (ours - theirs) for theirs, ours in found]


def _saved(stand: Standing, pairs: Sequence[Pair]) -> tuple[str, list[float]]:
    """Per cent of the other's time; by the second target where more of the pairs have that."""
    found, second = (_both(stand, column, pairs) for column in (TIME, TIME95))
    words = "time to target, %"
    if stand.second is not None and len(second) > len(found):
        found, words = second, f"time to {stand.second:.3f}, %"
    return words, [100 * (1 - ours / theirs) for theirs, ours in found if theirs]


def _both(stand: Standing, column: Column, pairs: Sequence[Pair]) -> list[tuple[float, float]]:
    """Where both have a figure: the other's, and the method's."""
    means = [[stand.mean(column, one, value) for one in (other, method)] for other, method, value in pairs]
    return [(theirs, ours) for theirs, ours in means if theirs is not None and ours is not None]


def _how(aim: Target, stand: Standing, store: Store, wish: Wish) -> str:
    """A sentence on whether methods are shown as they were tuned."""
    shown = {
        (title(method), record["tuned"])
        for method in aim.methods
        for swept in aim.values.values()
        for record in records_of(aim, store, stand.setting, method, swept, wish)
    }
    plain = [title(method) for method in aim.methods if (title(method), False) in shown]
    if len(plain) == len(shown):
        return "Methods have the setting's values, without tuning."
    exceptions = f", but for {', '.join(plain)}" if plain else ""
    return f"Methods are as they were tuned{exceptions}."


def page(aim: Target, stands: Sequence[Standing], drawn: Sequence[str], store: Store, wish: Wish) -> str:
    """The figure's page: plot, what the paper says, and the numbers; Markdown."""
    parts = [f"# {aim.title}\n\n{LEGEND}\n"]
    for stand, image in zip(stands, drawn, strict=True):
        parts.append(f"\n## {setting(stand.setting).title}, {stand.until:,.0f} virtual seconds\n\n")
        parts.append(f"![{_title(aim, stand)}]({image})\n\n" if image else "Nothing to draw yet.\n\n")
        parts.append(f"{_how(aim, stand, store, wish)}\n\n" if image else "")
        said = compared(aim, stand)
        parts.append(f"{markdown(said)}\n" if said else "")
        parts.append(markdown(grid(aim, stand)))
    return "".join(parts)
