"""The architecture: who may import whom, what is pure, and what a file may look like. A new arrow is an edit here."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "slipstream"
FILES = sorted(PACKAGE.rglob("*.py"))
TOP = "__init__"

# Room -> the rooms it may import, beside itself.
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "rng": {"types"},
    "files": set(),
    "recipe": {"files"},
    "config": {"types", "files", "recipe"},
    "tasks": {"types", "config", "rng", "files"},
    "models": {"types", "config", "rng", "files"},
    "observe": {"types", "config", "rng", "files"},
    "schedule": {"types", "config", "rng"},
    "simulate": {"types", "config", "rng", "files", "schedule", "observe"},
    "history": {"types"},
    "stream": {"types", "models", "files"},
    "engine": {"types", "config", "rng", "models"},
    "draft": {"types", "config", "rng", "files", "models", "engine", "history"},
    "train": {"types", "config", "rng", "files", "models"},
    "runtime": {
        "types",
        "recipe",
        "config",
        "rng",
        "files",
        "tasks",
        "models",
        "observe",
        "schedule",
        "history",
        "stream",
        "engine",
        "draft",
        "train",
    },
    "cli": {
        *("types", "recipe", "config", "rng", "tasks", "models", "observe", "schedule", "simulate", "engine", "train"),
        *("runtime", "files", TOP),
    },
    TOP: {"types", "config", "runtime"},
}

HEAVY = ("torch", "ray", "aiohttp", "transformers", "numba")
COMPILED = "the engine's loops, with numba"
# Modules that import without any of HEAVY (COMPILED: but numba): a laptop without a GPU, a simulator and --help can use
# them.
PURE = {
    "the nouns": [
        "slipstream",
        "slipstream.types",
        "slipstream.rng",
        "slipstream.recipe",
        "slipstream.config",
        "slipstream.files",
    ],
    "schedule": [
        f"slipstream.schedule.{name}"
        for name in (
            "allocation",
            "coordinator",
            "dispatch",
            "events",
            "fleet",
            "lengths",
            "members",
            "order",
            "pipeline",
            "ranker",
            "rules",
            "scheduler",
            "speeds",
            "steps",
            "tiers",
        )
    ],
    "simulate": [
        f"slipstream.simulate.{name}"
        for name in (
            *("against", "costs", "outcome", "pace", "planning", "show", "streamed", "study"),
            *("system", "systems", "trainer", "what_if", "worker", "workloads", "world"),
        )
    ],
    "engine": [
        "slipstream.engine.pages",
        "slipstream.engine.sequences",
        "slipstream.engine.fitting",
        "slipstream.engine.strategy",
    ],
    COMPILED: ["slipstream.engine.batcher", "slipstream.engine.slots"],
    "models": ["slipstream.models.model_folder"],
    "history": [f"slipstream.history.{name}" for name in ("cache", "eviction", "format", "store", "takeover")],
    "draft": [
        f"slipstream.draft.{name}"
        for name in ("asking", "beliefs", "bucket", "selector", "shelves", "throttle", "trials", "votes", "workloads")
    ],
    "stream": [f"slipstream.stream.{name}" for name in ("editions", "fanout", "shelf")],
    "train": ["slipstream.train.algorithms", "slipstream.train.packing"],
    "tasks": [
        f"slipstream.tasks.{name}"
        for name in (
            *("columns", "grader_pool", "grader_process", "grading", "guardian", "new_recipe", "procedural"),
            *("rewards", "rows", "sources", "tables", "verifiers"),
        )
    ],
    "observe": [
        f"slipstream.observe.{name}"
        for name in (
            *(
                "advice",
                "buckets",
                "console",
                "curve",
                "figures",
                "ledger",
                "loggers",
                "metrics",
                "page",
                "report",
                "reports",
            ),
            "store",
        )
    ],
    "driver": [
        f"slipstream.runtime.{name}"
        for name in (
            *("capacity", "control", "driver", "drafter_messages", "drafter_session"),
            *("crew", "kept", "openmp", "placement", "pool", "processes", "rollout_messages", "sizing", "stopping"),
            "trainer_messages",
        )
    ],
    "cli": ["slipstream.cli"],
}
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}


def room_of(module: str) -> str:
    """slipstream.engine.pages -> engine; slipstream -> the package's own __init__."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else TOP


def imported_modules(source: str, module: str) -> list[tuple[int, str]]:
    """(line, dotted name) of every import of ours, wherever it stands: inside functions and TYPE_CHECKING too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *([base] if base else [])])
            if base == "slipstream":  # `from slipstream import engine` names a room, `import Config` the public API
                names = [alias.name for alias in node.names]
                found += [(node.lineno, f"{base}.{name}" if name in MAY_IMPORT else base) for name in names]
            else:
                found.append((node.lineno, base))
    return [(line, name) for line, name in found if name.split(".")[0] == "slipstream"]


def violations(source: str, module: str) -> list[str]:
    room = room_of(module)
    if room not in MAY_IMPORT:
        return [f"{module}: {room!r} is not in the table of rooms"]
    allowed = MAY_IMPORT[room] | {room}
    return [
        f"{module}:{line} imports {name}: {room} may not import {room_of(name)}"
        for line, name in imported_modules(source, module)
        if room_of(name) not in allowed
    ]


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_import_is_in_the_table() -> None:
    found = [line for file in FILES for line in violations(file.read_text(), module_name(file))]
    assert not found, "\n".join(found)


def test_every_room_exists() -> None:
    rooms = {room_of(module_name(file)) for file in FILES}
    assert rooms == set(MAY_IMPORT), "a room without files, or files without a room"


def test_the_table_has_no_circle() -> None:
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {room for room, allowed in MAY_IMPORT.items() if allowed <= done} - done
        assert ready, f"a circle among {set(MAY_IMPORT) - done}"
        done |= ready


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("slipstream.train.trainer", "from slipstream.engine.engine import Engine"),
        ("slipstream.engine.engine", "import slipstream.schedule.events"),
        ("slipstream.engine.engine", "def f():\n    from slipstream.train import loss"),
        ("slipstream.engine.engine", "from slipstream import train"),
        ("slipstream.engine.engine", "from ..train import loss"),
        ("slipstream.types", "if TYPE_CHECKING:\n    from slipstream.config import Config"),
        ("slipstream.schedule.scheduler", "from slipstream.models.weights import fingerprint"),
        ("slipstream.observe.metrics", "from slipstream import Config"),
        ("slipstream.attic.old", "import math"),
        ("slipstream.tasks.rows", "from slipstream.attic import old"),
    ],
)
def test_the_checker_flags_a_planted_import(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("slipstream.train.trainer", "from slipstream.models.packed import head_logits\nimport torch"),
        (
            "slipstream.engine.engine",
            "from slipstream.engine import batcher\nfrom . import pages\nfrom .pages import PagePool",
        ),
        ("slipstream.cli", "from slipstream import load_config\nfrom slipstream.runtime.local import run_training"),
    ],
)
def test_the_checker_passes_what_is_allowed(module: str, source: str) -> None:
    assert not violations(source, module)


def import_without_heavy(statements: str, allowed: str = "") -> subprocess.CompletedProcess[str]:
    block = f"import sys; sys.modules.update(dict.fromkeys({[name for name in HEAVY if name != allowed]!r}))\n"
    return subprocess.run([sys.executable, "-c", block + statements], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("group", PURE)
def test_pure_modules_import_without_heavy_libraries(group: str) -> None:
    statements = "\n".join(f"import {module}" for module in PURE[group])
    done = import_without_heavy(statements, allowed="numba" if group == COMPILED else "")
    assert done.returncode == 0, done.stderr


def test_the_purity_check_flags_a_module_that_needs_torch() -> None:
    done = import_without_heavy("import slipstream.models.packed")
    assert done.returncode != 0 and "torch" in done.stderr


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_a_file_has_a_name_and_a_head_that_say_what_it_owns(file: Path) -> None:
    assert file.stem not in BANNED_NAMES and file.parent.name not in BANNED_NAMES
    if file.name == "__init__.py" and file.parent != PACKAGE:
        assert file.read_text() == "", "the public API is in slipstream/__init__.py"
    elif file.name != "__init__.py":
        assert ast.get_docstring(ast.parse(file.read_text())), "a module says in its head what it owns"


def test_packages_are_two_levels_deep() -> None:
    assert all(len(file.relative_to(PACKAGE).parts) <= 2 for file in FILES)
