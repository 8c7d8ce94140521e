"""A progress bar on the terminal; silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yields `advance(steps)`; draws a bar on stderr if that is a terminal and Rich is installed."""
    bar = None
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True)
        except ImportError:
            pass
    if bar is None:
        yield lambda steps: None
        return
    with bar:
        task = bar.add_task(label, total=total)
        yield lambda steps: bar.advance(task, steps)
