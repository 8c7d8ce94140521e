"""How a command ends: a person's mistake is one sentence and an exit code, never a traceback."""

from __future__ import annotations

import errno
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from ..errors import AedflError, UserError

P = ParamSpec("P")
R = TypeVar("R")

OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False, soft_wrap=True)


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; the message says how to go on."""


def tidy(command: Callable[P, R]) -> Callable[P, R]:
    """The command, with errors turned into a sentence on stderr and an exit code."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except UserError as error:
            raise _end(str(error), MISTAKE) from None
        except AedflError as error:
            raise _end(str(error), FAILED) from None
        except (KeyboardInterrupt, Interrupted) as error:
            raise _end(str(error) or "interrupted", INTERRUPTED, "interrupted") from None
        except OSError as error:
            raise _end(_disk(error), FAILED) from None

    return wrapped


@contextmanager
def stoppable() -> Iterator[None]:
    """While it lasts, SIGTERM to this process does what Ctrl-C does, which a shell has ignored for what runs in its
    background."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(sentence: str, code: int, kind: str = "error") -> typer.Exit:
    errors.print(f"[bold red]{kind}:[/] {escape(sentence)}" if sentence != kind else f"[bold red]{kind}[/]")
    return typer.Exit(code)


def _disk(error: OSError) -> str:
    """What went wrong outside, or the error itself again when it is no such thing."""
    if error.errno == errno.ENOSPC:
        where = f" while writing '{error.filename}'" if error.filename else ""
        return f"no space left on the disk{where}; free some and go on with --resume"
    if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
        return f"no permission to use '{error.filename}'"
    if error.filename is not None and error.strerror:
        return f"'{error.filename}' cannot be used: {error.strerror[:1].lower()}{error.strerror[1:]}"
    raise error
