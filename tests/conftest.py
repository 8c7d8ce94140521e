"""For all tests: examples take as long as a busy machine makes them; one Ray cluster for those that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """The address of a real Ray cluster of two workers on this machine; this process is part of it."""
    ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    # A machine that forbids what Ray's own processes need (shared memory, sockets) cannot run these tests.
    try:
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        ray.shutdown()
        pytest.skip(f"Ray cannot start a cluster on this machine: {type(error).__name__}: {error}")
    yield str(ray.get_runtime_context().gcs_address)
    ray.shutdown()
