"""A progress bar on the terminal; silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(steps)`; draws a bar on stderr if that is a terminal and Rich is installed."""
    if not (sys.stderr.isatty() and find_spec("rich")):
        yield lambda steps: None
        return
    from rich.console import Console
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda steps: bar.advance(task, steps)
