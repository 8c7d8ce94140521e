"""`aedfl device` and `aedfl server`: taking part in a run on real machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UserError
from .joining import Membership, joins

Model = Annotated[
    str | None, typer.Option("--model", metavar="MODULE:CLASS", help="The model; the run's own by default.")
]
Classes = Annotated[int | None, typer.Option("--classes", help="Number of labels, if the data do not show them all.")]
Target = Annotated[str | None, typer.Option("--target", help="Column of the labels.")]
Features = Annotated[list[str] | None, typer.Option("--feature", help="Column of inputs; may be repeated.")]


@joins
def device(
    member: Membership,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Own data as a Parquet file; or a public set, dealt out by index."),
    ] = None,
    model: Model = None,
    test: Annotated[Path | None, typer.Option("--test", metavar="FILE", help="Own test data.")] = None,
    classes: Classes = None,
    target: Target = None,
    features: Features = None,
    index: Annotated[int | None, typer.Option("--index", min=0, help="The index to ask for, if it is free.")] = None,
    cosine: Annotated[
        float | None, typer.Option(help="Keep out models that moved in another direction than the own: least cosine.")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="Pull models nearer than this many times the own norm.")] = None,
    robust: Annotated[str, typer.Option(help="none, trimmed or median over the neighbours' newest models.")] = "none",
    trim: Annotated[float, typer.Option(help="With trimmed: the share left out at either end.")] = 0.34,
    threads: Annotated[int, typer.Option(min=1, help="Threads of one training.")] = 1,
) -> None:
    """Take part in a run with this machine's data; leaves [bold]model.safetensors[/] and a record in --out.

    [bold]Example[/]

      aedfl device --coordinator 192.0.2.7:7700 --tls tls/device-3 --token-file token --data mine.parquet
      --model models/net.py:Net --listen 0.0.0.0:7701 --advertise 192.0.2.13:7701
    """
    from ..net.gate import Robust
    from ..net.kit import gather

    _check_robust(robust, trim, cosine, clip)
    member.take_part(
        "device", lambda config: gather(config, data, test, model, classes, features, target, threads),
        wish=index, robust=Robust(cosine, clip, robust, trim),  # type: ignore[arg-type]
    )  # fmt: skip


@joins
def server(
    member: Membership,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Public samples as a Parquet file, for methods that need some."),
    ] = None,
    model: Model = None,
    shape: Annotated[str, typer.Option("--shape", help="Shape of one sample, such as 1,8,8.")] = "",
    classes: Classes = None,
    target: Target = None,
    features: Features = None,
) -> None:
    """Play the server's part in a run whose method has one. It has no private data, but it sees the models.

    [bold]Example[/]

      aedfl server --coordinator 192.0.2.7:7700 --tls tls/server --token-file token --shape 1,8,8 --classes 10
    """
    from ..net.kit import serve

    sides = _shape(shape)
    member.take_part(
        "server", lambda config: serve(config, data, model, sides, classes, features, target, member.method),
        server=True,
    )  # fmt: skip


def _check_robust(robust: str, trim: float, cosine: float | None, clip: float | None) -> None:
    if robust not in ("none", "trimmed", "median"):
        raise UserError(f"--robust is {robust!r}; allowed are none, trimmed, median")
    if not 0.0 <= trim < 0.5:
        raise UserError(f"--trim is {trim:g}; allowed is a share from 0 to below 0.5")
    if cosine is not None and not -1.0 <= cosine <= 1.0:
        raise UserError(f"--cosine is {cosine:g}; allowed is a number from -1 to 1")
    if clip is not None and not clip > 0.0:
        raise UserError(f"--clip is {clip:g}; allowed is a number above 0")


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--shape is {text!r}; expected sizes with commas between, such as 1,8,8")
    return tuple(int(part) for part in parts)
