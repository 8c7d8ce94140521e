"""Makes pytest explain failed assertions of the suite, whose files are no test files."""

import pytest

pytest.register_assert_rewrite("contract")
