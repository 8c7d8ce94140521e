"""What every `Context` must do, as functions `check_*` over a `Harness`.

To put another implementation through it, write a harness for it (its `run` starts the given programs on real
contexts of that implementation) and a test file of three lines::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_contract(check):
        check(MyHarness())

A program under test is `async def program(ctx, note)`: it looks at its context and notes plain data (numbers,
strings, lists), which a harness may bring back from another process. The suite speaks of time in units: in one
unit of its clock an implementation must be able to do several trainings and deliver several messages, so that what is
said to happen a unit later really happens later. On a virtual clock a unit may be a second, on the wall's as long as
keeps the machine's jitter below a quarter of it.
"""

from __future__ import annotations

from contract import coroutines, learning, lives, messages

CHECKS = [
    function
    for module in (messages, coroutines, learning, lives)
    for name, function in vars(module).items()
    if name.startswith("check_")
]
