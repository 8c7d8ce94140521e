"""What is done, what is missing, and who leads: for `results/README.md` and for the terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..report.comparison import Column
from .plan import FIRST_SEED, Cell, Target, Tuned, Wish, cells, setting, target, targets, title
from .records import Store, key_of
from .standing import COLUMNS, TIME95, Row, Standing, seeds_done, seeds_in_words, standing
from .tables import NOT_REACHED, NOT_RUN, Grid, Text, markdown

HEAD = """\
# Results

The paper's tables and figures, computed by `aedfl reproduce`. Every number follows from the records in
[records/](records) (seed, command, config, code version, curve of each run); `aedfl reproduce tables` writes all
files here anew from them, and a test checks that they do not differ. What matches the paper and what does not is
discussed in [docs/reproduction.md](../docs/reproduction.md), ideas and failures in the [lab book](lab-book.md).
"""

@dataclass(frozen=True)
class Gap:
    """Cells of a target in one setting that are not there, and the command that runs them."""

    target: str
    setting: str
    methods: tuple[str, ...]
    seeds: int
    missing: int
    of: int

    @property
    def command(self) -> str:
        some = [] if self.methods == target(self.target).methods else ["--methods", ",".join(self.methods)]
        asked = ["--settings", self.setting, *some, "--seeds", str(self.seeds)]
        return shlex.join(["aedfl", "reproduce", self.target, *asked])


def gap(base: Target, name: str, store: Store) -> Gap:
    """What a setting of a target lacks: runs that went to its end."""
    wanted, rows = set(range(FIRST_SEED, FIRST_SEED + base.seeds)), list(base.values.values())
    absent = {
        method: sum(len(wanted - seeds_done(base, store, name, method, swept)) for swept in rows)
        for method in base.methods
    }
    lacking = tuple(method for method, count in absent.items() if count)
    return Gap(base.name, name, lacking, base.seeds, sum(absent.values()), len(absent) * len(rows) * base.seeds)


def gaps(store: Store) -> list[Gap]:
    return [gap(aim, name, store) for aim in targets().values() for name in aim.settings]


def overview(store: Store) -> str:
    """`results/README.md`."""
    found = gaps(store)
    return "".join(
        (
            HEAD,
            "\n## Who leads\n\n",
            "The best of the methods run so far; AEDFL's own figure and rank where another leads. "
            f"`{NOT_REACHED}`: reached by none with all seeds, `{NOT_RUN}`: not run yet (the time to 95 % of FedAvg "
            "needs FedAvg). "
            "A row with one seed says little about differences of a point or two.\n\n",
            markdown(_leaders([standing(aim, name, store, Wish()) for aim, name in _tables()])),
            "\n## What is done\n\nSeeds of each cell that went to the end.\n\n",
            markdown(_matrix(store)),
            "\n",
            markdown(_progress(found)),
            "\n## What is missing\n\n",
            _missing(found),
            "\n## Runs cut short or failed\n\n",
            _unfinished(store),
        )
    )


def report(store: Store, tuned: Mapping[str, Tuned]) -> list[str]:
    """For the terminal: how much of each target is there, and how to get the rest."""
    lines = []
    for base in targets().values():
        lines.append(base.title)
        for name in base.settings:
            planned = cells(base, Wish(settings=(name,)), tuned)
            left = [cell for cell in planned if not _is_there(cell, store)]
            old = sum(_is_there_otherwise(cell, store) for cell in left)
            stale = f", {old} more of another config" if old else ""
            lines.append(f"  {setting(name).title}: {len(planned) - len(left)} of {len(planned)} cells done{stale}")
            lacking = {cell.key.method for cell in left}
            methods = tuple(method for method in base.methods if method in lacking)
            one = Gap(base.name, name, methods, base.seeds, len(left), len(planned))
            lines += [f"    {one.command}"] if left else []
    return lines


def _is_there(cell: Cell, store: Store) -> bool:
    """Whether the cell need not be run: it was, or another one that is the same run."""
    end = cell.config.stop.virtual_seconds or 0.0
    return store.reached(cell.key, cell.identity) >= end or store.like(cell.identity, end) is not None


def _is_there_otherwise(cell: Cell, store: Store) -> bool:
    """Whether it was run to the end with another config than it has now: before tuning, for one thing."""
    found = (store.get(replace(cell.key, tuned=tuned)) for tuned in (True, False))
    end = cell.config.stop.virtual_seconds or 0.0
    return any(record is not None and record["reached"] >= end and "error" not in record for record in found)


def _leaders(stands: Sequence[Standing]) -> Grid:
    words = ("setting", "end (s)", "methods", "seeds", *(column.title for column in COLUMNS))
    rows = []
    for stand in stands:
        run = [row for row in stand.rows if row.seeds]
        counts = (str(len(run)), _seeds_of(run)) if run else (NOT_RUN, NOT_RUN)
        names = setting(stand.setting).title, f"{stand.until:,.0f}", *counts
        rows.append([*map(Text, names), *(_leader(stand, c) for c in COLUMNS)])
    return [[*map(Text, words)], *rows]


def _tables() -> list[tuple[Target, str]]:
    return [(aim, name) for aim in targets().values() if aim.is_table for name in aim.settings]


def _seeds_of(run: Sequence[Row]) -> str:
    """The methods' number of seeds, and a word where they are not the same ones."""
    least, most = min(row.seeds for row in run), max(row.seeds for row in run)
    number = str(most) if least == most else f"{least} to {most}"
    return number if least < most or len({row.which for row in run}) == 1 else f"{number}, not the same for all"


def _leader(stand: Standing, column: Column) -> Text:
    """The best method and its figure; AEDFL's beside it when that is another one."""
    order = ranking(stand, column)
    run = {row.method for row in stand.rows if row.seeds}
    if not order:
        return Text(NOT_REACHED if run and (column is not TIME95 or stand.second is not None) else NOT_RUN)
    value = order[0][1]
    first = [method for method, other in order if other == value]
    words = f"{_names(first, len(run))} {value:{column.form}}"
    if "aedfl" in first:
        return Text(words, best=len(first) == 1)
    if "aedfl" not in run:
        return Text(words, "(AEDFL not run)")
    ours = next((other for method, other in order if method == "aedfl"), None)
    if ours is None:
        return Text(words, f"(AEDFL {NOT_REACHED})")
    rank = 1 + sum(other > ours if column.higher else other < ours for _, other in order)
    return Text(words, f"(AEDFL {ours:{column.form}}, {rank} of {len(order)})")


def _names(methods: Sequence[str], run: int) -> str:
    """Who shares the first place."""
    if len(methods) == run > 1:
        return "all methods"
    return " and ".join(map(title, methods)) if len(methods) < 3 else f"{len(methods)} methods"


def ranking(stand: Standing, column: Column) -> list[tuple[str, float]]:
    """Methods that have a figure for every seed, best first."""
    means = [(row.method, stand.mean(column, row.method)) for row in stand.rows]
    known = [(method, value) for method, value in means if value is not None]
    return sorted(known, key=lambda pair: -pair[1] if column.higher else pair[1])


def _matrix(store: Store) -> Grid:
    """Methods by settings: how many seeds there are."""
    tables = [aim for aim in targets().values() if aim.is_table]
    stands = [standing(aim, name, store, Wish()) for aim in tables for name in aim.settings]
    methods = list(dict.fromkeys(row.method for stand in stands for row in stand.rows))
    head = [Text("method"), *(Text(setting(stand.setting).title) for stand in stands)]
    return [head, *([Text(title(one)), *(Text(_seeds(stand, one)) for stand in stands)] for one in methods)]


def _seeds(stand: Standing, method: str) -> str:
    row = stand.row(method)
    return seeds_in_words(row) if row is not None and row.seeds else NOT_RUN


def _progress(found: Sequence[Gap]) -> Grid:
    head = [Text(words) for words in ("target", "setting", "cells done", "of")]
    return [
        head,
        *(
            [Text(one.target), Text(setting(one.setting).title), Text(str(one.of - one.missing)), Text(str(one.of))]
            for one in found
        ),
    ]


def _missing(found: Sequence[Gap]) -> str:
    lines = [f"{one.command}  # {one.missing} cells\n" for one in found if one.missing]
    return f"```sh\n{''.join(lines)}```\n" if lines else "Nothing.\n"


def _unfinished(store: Store) -> str:
    lines = []
    for record in sorted(store, key=lambda r: (r["setting"], r["method"], r["seed"], r["changes"])):
        label, end = key_of(record), Wish().end(record["setting"], targets().get(record["target"]))
        if "error" in record:
            lines.append(f"- {label}: {record['error']}\n")
        elif not record["complete"] and record["reached"] < end:
            lines.append(f"- {label}: {record['reached']:,.0f} of {record['until']:,.0f} s\n")
    return "".join(lines) or "None among the records.\n"
