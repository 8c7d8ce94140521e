"""How fast devices are and when they are there: files and distributions."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from aedfl.errors import UserError
from aedfl.sim.fleet import Fleet, read_speeds, read_trace, uniform_seconds


def write(folder: Path, text: str) -> Path:
    path = folder / "table.csv"
    path.write_text(text)
    return path


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = write(tmp_path, "device,time,event\n# a comment\n\n1, 7.5, join\n1,3,crash\n0,4,join\n")
    assert read_trace(path, 3) == {1: ((0.0, "join"), (3.0, "crash"), (7.5, "join")), 0: ((4.0, "join"),)}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("1,2", "line 3 is '1,2'; expected device,time,event"),
        ("3,2,join", "line 3: device is '3'; allowed is a whole number from 0 to 2"),
        ("-1,2,join", "line 3: device is '-1'; allowed is a whole number from 0 to 2"),
        ("1.5,2,join", "line 3: device is '1.5'; allowed is a whole number from 0 to 2"),
        ("one,2,join", "line 3: device is 'one'; allowed is a whole number from 0 to 2"),
        ("1,-2,join", "line 3: time is '-2'; allowed is a number from 0 to inf"),
        ("1,nan,join", "line 3: time is 'nan'; allowed is a number from 0 to inf"),
        ("1,soon,join", "line 3: time is 'soon'; allowed is a number from 0 to inf"),
        ("1,2,explode", "line 3: event is 'explode'; allowed are join, crash, leave"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    path = write(tmp_path, f"device,time,event\n0,0,join\n{line}\n")
    with pytest.raises(UserError) as error:
        read_trace(path, 3)
    assert str(error.value) == f"{path} {complaint}"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read .*nowhere.csv"):
        read_trace(tmp_path / "nowhere.csv", 3)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"1," + b"9" * 200_000 + b",join"])
def test_a_file_that_is_no_table_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=str(path)):
        read_trace(path, 3)


def test_speeds_are_read_for_every_device(tmp_path: Path) -> None:
    assert read_speeds(write(tmp_path, "device,seconds\n1,2.5\n0,4\n"), 2) == (4.0, 2.5)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0,1\n2,1\n", "gives no seconds for device 1; one line per device is needed"),
        ("0,0\n", "line 1: seconds is '0'; allowed is a number from 1e-09 to 1e+09"),
        ("0,1\n1,2\n0,3\n", "line 3: device 0 is listed twice; one line per device is allowed"),
        ("5,1\n", "line 1: device is '5'; allowed is a whole number from 0 to 2"),
    ],
)
def test_bad_speeds_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError) as error:
        read_speeds(path, 3)
    assert str(error.value) == f"{path} {complaint}"


def test_uniform_speeds_lie_between_their_bounds() -> None:
    seconds = uniform_seconds(2000, 1.0, 15.0, seed=3)
    assert min(seconds) >= 1.0 and max(seconds) <= 15.0
    assert np.mean(seconds) == pytest.approx(8.0, abs=0.4)
    assert seconds == uniform_seconds(2000, 1.0, 15.0, seed=3) != uniform_seconds(2000, 1.0, 15.0, seed=4)


def test_devices_without_a_trace_are_always_there() -> None:
    fleet = Fleet((1.0, 1.0), {0: ((3.0, "join"),)})
    assert list(fleet.life(0)) == [(3.0, "join")] and list(fleet.life(1)) == [(0.0, "join")]


def test_drawn_lives_have_the_given_means() -> None:
    fleet = Fleet((1.0,) * 2, {}, mean_up=10.0, mean_down=2.0, seed=5)
    changes = list(islice(fleet.life(0), 6001))
    assert [event for _, event in changes[:4]] == ["join", "crash", "join", "crash"]
    gaps = np.diff([time for time, _ in changes])
    assert (gaps > 0).all()
    assert gaps[::2].mean() == pytest.approx(10.0, rel=0.1) and gaps[1::2].mean() == pytest.approx(2.0, rel=0.1)


def test_drawn_lives_follow_from_seed_and_device() -> None:
    fleet, other = (Fleet((1.0,) * 2, {}, mean_up=10.0, mean_down=2.0, seed=seed) for seed in (5, 6))
    first = list(islice(fleet.life(0), 9))
    assert first == list(islice(fleet.life(0), 9))
    assert first != list(islice(fleet.life(1), 9)) and first != list(islice(other.life(0), 9))


def test_a_trace_goes_before_the_distribution() -> None:
    fleet = Fleet((1.0,) * 2, {0: ((3.0, "join"),)}, mean_up=10.0, mean_down=2.0)
    assert list(fleet.life(0)) == [(3.0, "join")]
