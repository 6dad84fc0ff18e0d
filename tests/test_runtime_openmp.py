"""Threads of a run spin at barriers for a bounded time, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slipstream.runtime.openmp import SETTINGS_OF_USERS, SPIN_COUNT, bound_spinning

COMMAND = "from slipstream.cli import main\ntry: main(['recipes'])\nexcept SystemExit: pass\nimport torch"


@pytest.mark.parametrize("chosen", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_a_user_chose_stays(chosen: dict[str, str]) -> None:
    environment = dict(chosen)
    bound_spinning(environment)
    assert environment == (chosen or {"GOMP_SPINCOUNT": str(SPIN_COUNT)})


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch has another OpenMP library")
@pytest.mark.parametrize("spin_count", [None, "7"])
def test_the_library_that_torch_loads_after_a_command_has_read_it(spin_count: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS_OF_USERS}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE"} | ({"GOMP_SPINCOUNT": spin_count} if spin_count else {})
    done = subprocess.run([sys.executable, "-c", COMMAND], env=environment, capture_output=True, text=True, check=True)
    assert f"GOMP_SPINCOUNT = '{spin_count or SPIN_COUNT}'" in done.stderr
