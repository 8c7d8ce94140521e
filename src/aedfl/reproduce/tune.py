"""Tuning: every method tries the same number of settings on validation data; the best is frozen for the tables.

Validation data are a share of the training data, taken out before the devices get theirs. The test set is not
looked at, and the seed is none of the tables'.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..errors import UserError
from .curves import LAST, final
from .plan import QUICK, Cell, Key, Tuned, Wish, assignments, configure, settings
from .records import Record, Store

TARGET = "tune"
RULE = f"highest validation accuracy of the mean model, mean of the last {LAST} measurements up to the common end"

ENOUGH = 0.75
"""Share of the way that a method's trials must have gone, all of them, to be compared."""


@cache
def _grid() -> dict[str, Any]:
    return tomllib.loads((files("aedfl.reproduce") / "tuning.toml").read_text())


def methods() -> list[str]:
    return list(_grid()["methods"])


def number(name: str) -> int:
    """How many trials each method has in a setting."""
    return int(_group(name).get("trials", _grid()["trials"]))


def _group(name: str) -> dict[str, Any]:
    """What several settings have in common, if it is one of them."""
    return next((group for group in _grid()["groups"] if name in group["settings"]), {})


def trials(name: str, method: str, count: int) -> list[dict[str, Any]]:
    """The keys that each trial changes; the first changes none."""
    own = _grid()["settings"].get(name, {})
    lists: Mapping[str, Any] = {**_grid()["methods"], **_group(name).get("methods", {}), **own}
    if method not in lists:
        raise UserError(f"method '{method}' has no trials to tune; those that have: {', '.join(lists)}")
    if not 1 <= count <= len(lists[method]):
        raise UserError(f"--trials {count}: {method} has {len(lists[method])}, and there must be at least one")
    return list(lists[method][:count])


def aim(name: str, wish: Wish) -> Wish:
    """How far trials go unless a person says it: often less far than the setting's table."""
    end = None if wish.quick else _grid()["until"].get(name)
    return wish if wish.until or end is None else replace(wish, until=float(end))


def terms(name: str, folder: Path, wish: Wish, count: int | None) -> tuple[float, int]:
    """Where trials are compared, and how many there are. A file that is there keeps its own, so that tuning one method
    leaves what was chosen for others as it is."""
    path = folder / f"{name}.json"
    old = json.loads(path.read_text()) if path.exists() else {"methods": {}}
    if all(one["chosen"] is None for one in old["methods"].values()):
        return wish.end(name), count or number(name)
    if count not in (None, old["trials"]):
        raise UserError(f"--trials {count}: {path} has {old['trials']} of each method; name another folder by --out")
    before, now = (", ".join(changes) or "nothing" for changes in (old.get("changes", []), wish.changes(())))
    if before != now:
        raise UserError(f"{path} holds choices with {before} changed, now it is {now}; name another folder by --out")
    return float(old["until"]), int(old["trials"])


def seed() -> int:
    """The seed of all trials but those of the last stage; tables have others."""
    return int(_grid()["seed"])


def seeds() -> set[int]:
    """All that tuning ever uses."""
    return {seed(), *(int(late["seed"]) for late in _grid()["late"].values())}


def plan(name: str, chosen: Sequence[str], count: int, wish: Wish) -> list[Cell]:
    """All trials of a setting, measured on a share of the training data."""
    return [_cell(name, method, keys, wish) for method in chosen for keys in trials(name, method, count)]


def plan_further(name: str, chosen: Sequence[str], content: Mapping[str, Any], wish: Wish) -> list[Cell]:
    """One trial more of each method whose best is known from those of `plan`, if the setting has such trials."""
    if not _has_further(name):
        return []
    known = {method: content["methods"].get(method, {}).get("best") for method in chosen}
    best = {method: keys for method, keys in known.items() if keys is not None}
    return [_cell(name, method, _further(name, method, keys), wish) for method, keys in best.items()]


def plan_late(name: str, chosen: Sequence[str], content: Mapping[str, Any], wish: Wish) -> list[Cell]:
    """What was chosen so far, and it with the keys of the setting's last stage, for longer and on another seed."""
    late = _late(name, wish)
    if late is None:
        return []
    found = content["methods"]
    pairs = [(method, one["changes"]) for method in chosen for one in found.get(method, {}).get("late", [])]
    return [_cell(name, method, keys, wish, late) for method, keys in pairs]


def _late(name: str, wish: Wish) -> Mapping[str, Any] | None:
    """Seed, end and keys of a setting's last stage, if it has one; a small version has none."""
    found: Mapping[str, Any] | None = _grid()["late"].get(name)
    return None if wish.quick else found


def _pair(chosen: Mapping[str, Any], keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was chosen, and it with some keys; without them where it has them already."""
    without = {key: value for key, value in chosen.items() if key not in keys}
    return [dict(chosen), without if chosen == {**chosen, **keys} else {**chosen, **keys}]


def _further(name: str, method: str, best: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the trial that comes after the others."""
    grid = _grid()
    return {**best, **grid["further"], **grid["further_of"].get(method, {})}


def _cell(name: str, method: str, keys: Mapping[str, Any], wish: Wish, late: Mapping[str, Any] | None = None) -> Cell:
    key = _key(name, method, keys, wish, late)
    aim = wish if late is None else replace(wish, until=float(late["until"]))
    config = configure(name, method, key.seed, keys, _set_aside(wish), aim)
    command = shlex.join(["aedfl", "reproduce", TARGET, name, "--methods", method, *wish.options])
    return Cell(key, config, TARGET, command)


def _set_aside(wish: Wish) -> tuple[str, ...]:
    return (*wish.changes(()), f"data.validation={_grid()['validation']}")


def _key(name: str, method: str, keys: Mapping[str, Any], wish: Wish, late: Mapping[str, Any] | None = None) -> Key:
    where = seed() if late is None else int(late["seed"])
    return Key(name, method, where, (*assignments(keys), *_set_aside(wish)))


def freeze(name: str, store: Store, until: float, count: int, wish: Wish) -> dict[str, Any]:
    """Chooses for each method where its shortest trial got to, if not much is missing to `until`; writes
    `SETTING.json` with every outcome."""
    found: dict[str, Any] = {}
    for method in methods():
        tried = [(keys, _key(name, method, keys, wish)) for keys in trials(name, method, count)]
        reached = min(_reached(store.get(key)) for _, key in tried)
        end = until if reached < ENOUGH * until else reached
        outcomes = [_outcome(keys, store, key, end) for keys, key in tried]
        if any(one["reached"] for one in outcomes):
            best = choose(outcomes)
            found[method] = {"until": end, "chosen": best, "best": best, "trials": outcomes}
    _go_further(name, found, store, wish)
    _go_late(name, found, store, wish)
    head = {"setting": name, "rule": RULE, "seed": seed(), "validation": _grid()["validation"]}
    if changes := wish.changes(()):
        head["changes"] = list(changes)
    if late := _late(name, wish):
        head["late"] = dict(late)
    content = {**head, "until": until, "trials": count, "methods": found}
    store.folder.mkdir(parents=True, exist_ok=True)
    partial = store.folder / f"{name}.partial"
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(store.folder / f"{name}.json")
    return content


def _go_further(name: str, found: dict[str, Any], store: Store, wish: Wish) -> None:
    """Adds the trial after the others; it may be chosen once all methods here have theirs, so that nobody has more."""
    if not _has_further(name):
        return
    for method, one in found.items():
        if one["best"] is not None:
            keys = _further(name, method, one["best"])
            one["further"] = _outcome(keys, store, _key(name, method, keys, wish), one["until"])
    if all(_tried_further(one) for one in found.values()):
        for one in found.values():
            one["chosen"] = choose([*one["trials"], one["further"]])


def _go_late(name: str, found: dict[str, Any], store: Store, wish: Wish) -> None:
    """Adds the last stage, in which what came out of the others is compared anew; all methods here must have had them,
    and this one, before it decides.

    What was chosen so far stays unless the other is better by about a standard error: the two differ in one key.
    """
    late = _late(name, wish)
    tried_before = _tried_further if _has_further(name) else _tried
    if late is None or not all(map(tried_before, found.values())):
        return
    for method, one in found.items():
        tried = [(keys, _key(name, method, keys, wish, late)) for keys in _pair(one["chosen"], late["keys"])]
        one["late"] = [_outcome(keys, store, key, float(late["until"])) for keys, key in tried]
    if all(trial["accuracy"] is not None for one in found.values() for trial in one["late"]):
        for one in found.values():
            so_far, other = one["late"]
            better = other["accuracy"] >= so_far["accuracy"] + late["margin"]
            one["chosen"] = (other if better else so_far)["changes"]


def _has_further(name: str) -> bool:
    return name not in _grid()["no_further"]["settings"]


def _tried(one: Mapping[str, Any]) -> bool:
    return one["best"] is not None


def _tried_further(one: Mapping[str, Any]) -> bool:
    return one.get("further", {}).get("accuracy") is not None


def freeze_again(name: str, store: Store) -> dict[str, Any]:
    """Chooses anew after records came in: by the rule of the file that is there, else at the trials' common end."""
    path = store.folder / f"{name}.json"
    if path.exists():
        old = json.loads(path.read_text())
        changes = old.get("changes", [])
        wish = Wish(quick=QUICK in changes, overrides=tuple(change for change in changes if change != QUICK))
        return freeze(name, store, old["until"], old["trials"], wish)
    until = min(float(record["until"]) for record in store if record["setting"] == name)
    return freeze(name, store, until, number(name), Wish())


def _reached(record: Record | None) -> float:
    return float(record["reached"]) if record is not None and "curve" in record else 0.0


def _outcome(keys: Mapping[str, Any], store: Store, key: Key, until: float) -> dict[str, Any]:
    record = store.get(key)
    if record is None or not _reached(record):
        return {"changes": dict(keys), "reached": 0.0, "accuracy": None}
    whole = record["reached"] >= until
    figures = {name: final(record["curve"], until, name) if whole else None for name in ("accuracy", "local_accuracy")}
    return {"changes": dict(keys), "config": record["config"], "reached": record["reached"], **figures}


def choose(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The changes of the best trial; the first of equals; none before all are there."""
    if any(one["accuracy"] is None for one in outcomes):
        return None
    return dict(max(outcomes, key=lambda one: float(one["accuracy"]))["changes"])


def frozen(folder: Path) -> dict[str, Tuned]:
    """What was chosen in each setting so far."""
    found: dict[str, Tuned] = {}
    for name in settings():
        path = folder / f"{name}.json"
        if path.exists():
            chosen = {method: one["chosen"] for method, one in json.loads(path.read_text())["methods"].items()}
            found[name] = {method: keys for method, keys in chosen.items() if keys is not None}
    return found
