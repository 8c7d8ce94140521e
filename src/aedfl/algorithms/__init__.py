"""The methods, one file each, and the table of their names."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from pathlib import Path

from ..context import Method
from ..errors import UserError
from . import (
    ad_psgd,
    aedfl,
    aso_fed,
    dispfl,
    fedap,
    fedavg,
    fedbuff,
    fednova,
    fedprox,
    fedsa,
    hap,
    hrank,
    port,
    safa,
    sageflow,
)

_BASELINES = (
    fedavg, fedprox, fednova, safa, sageflow, fedsa, aso_fed, port, fedbuff, ad_psgd, dispfl, hrank, fedap, hap,
)  # fmt: skip

METHODS: dict[str, Method] = {
    method.name: method for method in (*aedfl.VARIANTS, *(module.METHOD for module in _BASELINES))
}


def get(name: str) -> Method:
    """The method of that name, or the `METHOD` of a user's Python file."""
    if name in METHODS:
        return METHODS[name]
    if name.endswith(".py"):
        return _from_file(Path(name))
    near = difflib.get_close_matches(name, METHODS, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f"method is {name!r}; allowed are {', '.join(METHODS)} or a Python file{hint}")


def _from_file(path: Path) -> Method:
    spec = importlib.util.spec_from_file_location(f"aedfl_method_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"method file {path} does not exist")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    method = getattr(module, "METHOD", None)
    if not isinstance(method, Method):
        raise UserError(f"method file {path} defines no METHOD of type aedfl.Method")
    return method
