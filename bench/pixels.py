"""How long each pass of a convolution takes in each choice of tiles, beside the library and the kernels for channels
that lie apart; and a whole training step of 20 models in both ways. On a GPU; prints JSON.

    python bench/pixels.py --precision bf16 --out pixels.json

Times are medians of replayed CUDA graphs, in microseconds. Kernels are compiled by several processes first.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import steps
import torch

from aedfl.bench.stamp import stamp
from aedfl.training.choice import PixelTiles, Shape, choose, pixel_tiles

MODELS, BATCH = steps.MODELS, steps.BATCH
LAYERS = {  # channels, size, filters, kernel, stride
    "3 to 16 at 32": (3, 32, 16, 3, 1),
    "16 to 16 at 32": (16, 32, 16, 3, 1),
    "16 to 32 at 32": (16, 32, 32, 3, 1),
    "16 to 32 at 32, stride 2": (16, 32, 32, 3, 2),
    "16 to 32 at 32, 1x1, stride 2": (16, 32, 32, 1, 2),
    "32 to 32 at 16": (32, 16, 32, 3, 1),
    "32 to 64 at 16": (32, 16, 64, 3, 1),
    "32 to 64 at 16, stride 2": (32, 16, 64, 3, 2),
    "32 to 64 at 16, 1x1, stride 2": (32, 16, 64, 1, 2),
    "64 to 64 at 16": (64, 16, 64, 3, 1),
    "64 to 64 at 8": (64, 8, 64, 3, 1),
    "64 to 128 at 8": (64, 8, 128, 3, 1),
    "128 to 128 at 8": (128, 8, 128, 3, 1),
}
ALONG = [
    (128, 64, 64, 4, 3), (128, 64, 64, 4, 2), (128, 64, 64, 4, 1), (64, 64, 64, 4, 3), (256, 64, 64, 8, 2),
    (128, 64, 128, 8, 3), (128, 64, 128, 4, 3), (128, 64, 64, 4, 3, 1), (128, 64, 64, 4, 2, 1), (128, 64, 64, 4, 1, 1),
    (64, 64, 64, 4, 2, 1), (256, 64, 64, 8, 2, 1),
]  # fmt: skip
ACROSS = [
    (64, 64, 64, 4, 3), (64, 64, 64, 4, 2), (64, 64, 64, 8, 3), (128, 64, 64, 8, 2), (64, 64, 128, 8, 3),
    (64, 64, 128, 8, 2), (128, 64, 64, 4, 2), (64, 64, 64, 4, 3, 3), (64, 64, 64, 4, 2, 3), (128, 64, 64, 4, 2, 3),
    (32, 64, 64, 4, 3, 3), (64, 64, 64, 8, 2, 3), (64, 64, 64, 4, 3, 1), (128, 64, 64, 8, 2, 1), (128, 64, 64, 4, 2, 1),
]  # fmt: skip
TILES = {"forward": ALONG, "by_input": ALONG, "by_weight": ACROSS}
WIDEST = 128
"""Numbers of a row of the kernel that are one operand, at most."""


def shape_of(layer: str) -> Shape:
    channels, size, filters, kernel, stride = LAYERS[layer]
    return Shape(MODELS, BATCH, channels, size, size, filters, (kernel,) * 2, (stride,) * 2, (kernel // 2,) * 2)


def effective(which: str, shape: Shape, tiles: PixelTiles) -> tuple[int, ...]:
    """What the tiles come to in a layer that is narrower than they are."""
    few = shape.channels < 16
    row = 0 if few or shape.kernel[1] == 1 else tiles.rows
    row = min(row, shape.kernel[0]) if which == "by_weight" else min(row, 1)
    patch = shape.channels * shape.kernel[0] * shape.kernel[1] if few else shape.channels
    inner, others = {
        "forward": (shape.channels, shape.filters),
        "by_input": (shape.filters, shape.channels),
        "by_weight": (patch, shape.filters),
    }[which]
    inner = 0 if row else min(inner, tiles.inner)
    return tiles.positions, inner, min(others, tiles.others), tiles.warps, tiles.stages, row


def fits(which: str, shape: Shape, tiles: PixelTiles) -> bool:
    if which == "by_input" and shape.channels < 16:
        return False
    read = shape.filters if which == "by_input" else shape.channels
    strided = which == "by_input" and shape.stride != (1, 1)
    rows = not strided and shape.kernel[1] > 1 and read >= 16 and 4 * read <= WIDEST
    return rows or not tiles.rows


def cases(wanted: list[str]) -> list[tuple[str, str, PixelTiles]]:
    found = {}
    for layer in LAYERS:
        shape = shape_of(layer)
        for which in wanted:
            for tiles in (PixelTiles(*some) for some in TILES[which]):
                if fits(which, shape, tiles):
                    found.setdefault((layer, which, effective(which, shape, tiles)), (layer, which, tiles))
    return list(found.values())


def work(layer: str, which: str, tiles: PixelTiles, dtype: torch.dtype) -> Any:
    """The call of one pass with inputs drawn at random."""
    from aedfl.training import pixels

    shape, drawn = shape_of(layer), torch.Generator(device="cuda").manual_seed(0)
    x, g, weight = tensors(shape, drawn, dtype)
    along, back = pixels.laid(shape, weight, dtype, back=True)
    if which == "forward":
        return lambda: pixels.forward(shape, x, along, None, tiles)
    if which == "by_input":
        assert back is not None
        return lambda: pixels.by_input(shape, g, back, tiles)
    return lambda: pixels.by_weight(shape, x, g, False, tiles)[0]


def tensors(
    shape: Shape, drawn: torch.Generator, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def some(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=drawn)

    n, b = shape.models, shape.batch
    x = some(n, b, shape.height, shape.width, shape.channels).to(dtype)
    return x, some(n, b, *shape.out, shape.filters).to(dtype), some(n, shape.filters, shape.channels, *shape.kernel)


def before(layer: str, which: str, dtype: torch.dtype) -> Any:
    """The call that is made where channels lie apart."""
    from aedfl.training import convolution

    shape, drawn = shape_of(layer), torch.Generator(device="cuda").manual_seed(0)
    x, g, weight = tensors(shape, drawn, dtype)
    x, g = (part.permute(1, 0, 4, 2, 3).flatten(1, 2).contiguous() for part in (x, g))
    tiles = choose(which, shape, "bf16" if dtype is torch.bfloat16 else "tf32")  # type: ignore[arg-type]
    if tiles is None:
        wanted = which == "by_input", which == "by_weight", False
        if which == "forward":
            return lambda: convolution.library_forward(shape, x, weight, None)
        return lambda: convolution.library_gradients(shape, x, g, weight, wanted)
    if which == "forward":
        return lambda: convolution.forward(shape, x, weight, None, tiles)
    if which == "by_input":
        return lambda: convolution.by_input(shape, g, weight, tiles)
    return lambda: convolution.by_weight(shape, x, g, False, tiles)  # type: ignore[arg-type]


def reference(layer: str, which: str) -> torch.Tensor:
    """What the library finds in TF32, in double precision and with channels side by side."""
    from aedfl.training import convolution

    shape, drawn = shape_of(layer), torch.Generator(device="cuda").manual_seed(0)
    x, g, weight = tensors(shape, drawn, torch.float32)
    x, g = (part.permute(1, 0, 4, 2, 3).flatten(1, 2).contiguous() for part in (x, g))
    if which == "by_weight":
        found = convolution.library_gradients(shape, x, g, weight, (False, True, False))[1]
        assert found is not None
        return found.view_as(weight).double()
    if which == "by_input":
        found = convolution.library_gradients(shape, x, g, weight, (True, False, False))[0]
    else:
        found = convolution.library_forward(shape, x, weight, None)
    assert found is not None
    return found.unflatten(1, (shape.models, -1)).permute(1, 0, 3, 4, 2).double()


def compile_some(job: tuple[list[tuple[str, str, PixelTiles]], torch.dtype]) -> list[str]:
    allow()
    failed = []
    for layer, which, tiles in job[0]:
        try:
            work(layer, which, tiles, job[1])()
            torch.cuda.synchronize()
        except Exception as error:  # a tile that does not fit into a multiprocessor
            failed.append(f"{layer}, {which}, {tuple(tiles)}: {str(error)[:80]}")
    return failed


def allow() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True


def timed(call: Any) -> float:
    from triton.testing import do_bench_cudagraph

    return round(1e3 * do_bench_cudagraph(call, rep=8, return_mode="median"), 1)


def passes(dtype: torch.dtype, processes: int, wanted: list[str]) -> Iterator[dict[str, Any]]:
    all_cases = cases(wanted)
    shares = [(all_cases[i::processes], dtype) for i in range(processes)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        failed = [line for lines in pool.map(compile_some, shares) for line in lines]
    print(f"compiled {len(all_cases)}, {len(failed)} failed", *failed[:3], file=sys.stderr, sep="\n")
    for layer in LAYERS:
        for which in wanted:
            here = [tiles for name, kind, tiles in all_cases if (name, kind) == (layer, which)]
            here = [tiles for tiles in here if not any(f"{layer}, {which}, {tuple(tiles)}:" in line for line in failed)]
            if here:
                expected = reference(layer, which)
                row: dict[str, Any] = {
                    "layer": layer,
                    "pass": which,
                    "before": timed(before(layer, which, dtype)),
                    "chosen": pixel_tiles(which, shape_of(layer)),
                    "us": {},
                }
                for tiles in here:
                    call = work(layer, which, tiles, dtype)
                    wrong = float((call().double() - expected).norm() / expected.norm())
                    row["us"][",".join(map(str, tiles))] = timed(call) if wrong < 2e-2 else f"wrong by {wrong}"
                yield row


def use_best(rows: list[dict[str, Any]]) -> None:
    """From now on each layer's passes run in the tiles that were fastest."""
    from aedfl.training import pixels

    best = {}
    for row in rows:
        times = {tiles: us for tiles, us in row["us"].items() if isinstance(us, float)}
        shape = shape_of(row["layer"])
        key = row["pass"], shape.channels, shape.filters, shape.height, shape.kernel, shape.stride
        best[key] = PixelTiles(*map(int, min(times, key=times.__getitem__).split(",")))
    usual = pixels.pixel_tiles

    def chosen(which: Any, shape: Shape) -> PixelTiles:
        return best.get((which, shape.channels, shape.filters, shape.height, shape.kernel, shape.stride)) or usual(
            which, shape
        )

    pixels.pixel_tiles = chosen


def step_us(name: str, dtype: torch.dtype, apart: bool) -> float:
    """Microseconds of a training step of 20 models, 50 samples each."""
    from aedfl.training.plan import Plan
    from aedfl.training.stacked import Stacked

    trainer, jobs = steps.prepared(name, 32, 10, bf16=dtype is torch.bfloat16)
    stacked = Stacked.of(trainer.task.module.train(), side_by_side=not apart)
    assert stacked is not None
    trainer.forward = stacked
    train = partial(trainer.train, Plan(batch_size=BATCH), jobs)
    seconds = [steps.timed(train) for _ in range(4)]
    assert bool(torch.isfinite(train()[0].vector).all())
    return round(1e6 * median(seconds[1:]) / steps.STEPS, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", choices=["bf16", "tf32"], default="bf16")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--passes", default=",".join(TILES), help="which to measure; none: steps alone")
    asked = parser.parse_args()
    allow()
    dtype = torch.bfloat16 if asked.precision == "bf16" else torch.float32
    found: dict[str, Any] = stamp("cuda") | {"precision": asked.precision, "models": MODELS, "batch": BATCH}
    wanted = [which for which in asked.passes.split(",") if which in TILES]
    if wanted:
        found["passes"] = []
        for row in passes(dtype, asked.processes, wanted):
            found["passes"].append(row)
            best = sorted((us, tiles) for tiles, us in row["us"].items() if isinstance(us, float))[:3]
            chosen = row["us"].get(",".join(map(str, row["chosen"])))
            line = row["layer"], row["pass"], "apart", row["before"], "chosen", chosen, best
            print(*line, file=sys.stderr, flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(found))
    ways = {"side by side": False, "apart": True}
    names = ("resnet8", "vgg9")
    found["step_us"] = {name: {way: step_us(name, dtype, apart) for way, apart in ways.items()} for name in names}
    if found.get("passes"):
        use_best(found["passes"])
        for name in names:
            found["step_us"][name]["side by side, best tiles"] = step_us(name, dtype, False)
    text = json.dumps(found)
    if asked.out:
        asked.out.write_text(text)
    print(json.dumps(found["step_us"]))


if __name__ == "__main__":
    main()
