"""Tables as Markdown and LaTeX: what came out, with the paper's numbers beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..report.comparison import Column, written
from ..report.tables import LATEX
from . import paper
from .plan import Target, setting, title
from .standing import ACCURACY, COLUMNS, MMACS, TIME, TIME95, Row, Standing, seeds_in_words

NOT_RUN, NOT_REACHED = "·", "/"


@dataclass(frozen=True)
class Text:
    """What stands in one field of a table."""

    words: str
    more: str = ""
    best: bool = False

    def write(self, bold: str) -> str:
        return f"{bold.format(self.words) if self.best else self.words} {self.more}".strip()


Grid = list[list[Text]]


def grid(aim: Target, stand: Standing) -> Grid:
    """Head and rows of one setting's table."""
    varied, comparable = len(aim.values) > 1, "" in aim.values
    head = ["method", *([aim.axis.partition(" (")[0]] if varied else []), "seeds"]
    columns = [column for column in COLUMNS if column is not TIME95 or stand.second is not None]
    for column in columns:
        head.append(_heading(column, stand))
        if _printed(column) and comparable:
            head.append("paper")
    rows = [_fields(row, columns, stand, varied, comparable) for row in stand.rows]
    return [[Text(words) for words in head], *rows]


def _printed(column: Column) -> bool:
    return column in (ACCURACY, TIME, MMACS)


def _heading(column: Column, stand: Standing) -> str:
    if column is TIME:
        return f"time to {stand.target:g} (s)"
    if column is TIME95:
        return f"time to {stand.second:.3f} (s)"
    return column.title


def _fields(row: Row, columns: Sequence[Column], stand: Standing, varied: bool, comparable: bool) -> list[Text]:
    seeds = seeds_in_words(row) if row.seeds else NOT_RUN
    fields = [Text(title(row.method)), *([Text(row.value)] if varied else []), Text(seeds)]
    for column in columns:
        fields.append(_figure(row, column))
        if _printed(column) and comparable:
            fields.append(Text(paper.shown(stand.setting, row.method, column) or "–"))
    return fields


def _figure(row: Row, column: Column) -> Text:
    cell = row.cells[column.key]
    if not row.seeds:
        return Text(NOT_RUN)
    if cell.mean is None:
        return Text(NOT_REACHED)
    return Text(*written(cell, column), best=cell.best)


def markdown(table: Grid) -> str:
    head, *rows = [[field.write("**{}**").replace("|", "\\|") for field in line] for line in table]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def latex(table: Grid) -> str:
    """A `tabular` for the booktabs package."""
    head, *rows = [[_latex(field) for field in line] for line in table]
    body = "".join(" & ".join(line) + " \\\\\n" for line in rows)
    top = f"\\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}\n\\toprule\n{' & '.join(head)} \\\\\n\\midrule\n"
    return f"{top}{body}\\bottomrule\n\\end{{tabular}}\n"


def _latex(field: Text) -> str:
    plain = Text(field.words.translate(LATEX), field.more.translate(LATEX), field.best)
    words = plain.write(r"\textbf{{{}}}")
    return words.replace("±", r"$\pm$").replace("–", "--").replace("·", r"$\cdot$")


LEGEND = (
    "Mean ± standard deviation over seeds; best in bold. Accuracy is that of the mean (or the server's) model, "
    "beside it the mean of the devices' own models, both on test data and as the mean of the last three measurements. "
    "A device's own model is the last it published: with AEDFL, HRank, FedAP, HAP and AD-PSGD after merging, "
    "with DisPFL and where a server merges after training. "
    "Times are to the paper's target and, once FedAvg was run, to 95 % of its accuracy. "
    "MMACs: multiply-accumulates of a forward pass, mean of the devices. "
    f"`{NOT_REACHED}`: target not reached, `{NOT_RUN}`: not run yet."
)


def page(aim: Target, stands: Sequence[Standing]) -> str:
    """The target's tables, one per setting, as Markdown."""
    return "".join([f"# {aim.title}\n\n{LEGEND}\n", *(_section(aim, stand) for stand in stands)])


def _section(aim: Target, stand: Standing) -> str:
    heading = f"\n## {setting(stand.setting).title}, {stand.until:,.0f} virtual seconds\n\n"
    return heading + markdown(grid(aim, stand))


def source(aim: Target, stands: Sequence[Standing]) -> str:
    """The same for LaTeX."""
    parts = [f"% {aim.title}\n% {LEGEND.translate(LATEX)}\n"]
    for stand in stands:
        parts.append(f"\n% {setting(stand.setting).title}, {stand.until:,.0f} virtual seconds\n")
        parts.append(latex(grid(aim, stand)))
    return "".join(parts)
