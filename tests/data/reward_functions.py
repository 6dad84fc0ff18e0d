"""Reward functions as users write them, good and bad, for tests of slipstream.tasks; loaded as `file.py:name`."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NOT_A_FUNCTION = 3


class NotAFunction:
    pass


def length(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def everything(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str], **columns: Any
) -> list[float]:
    assert columns["task"] == ["collatz"] * len(completions)
    return [float(len(p) + len(ids) + int(a)) for p, ids, a in zip(prompts, completion_ids, answer, strict=True)]


def always_half(completions: list[str]) -> list[float]:
    return [0.5] * len(completions)


def half_unless_short(completion_ids: list[list[int]]) -> list[float]:
    return [0.5 if len(ids) > 20 else 1.0 for ids in completion_ids]


async def slow_is_fine(completions: list[str], answer: list[str]) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(text == expected) for text, expected in zip(completions, answer, strict=True)]


def only_b(completions: list[str]) -> list[float | None]:
    return [1.0 if text == "b" else None for text in completions]


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    if solution_str == "bad":
        raise RuntimeError("cannot judge bad")
    return {"score": solution_str == ground_truth and data_source == "mine", "extra": extra_info}


def plain_score(solution_str: str, ground_truth: Any) -> float:
    return 0.5 if solution_str == ground_truth else 0.0


def by_text(completions: list[str]) -> Any:
    """Does to its process what the samples say."""
    values: list[Any] = []
    for text in completions:
        if text == "raise":
            raise RuntimeError("planted error")
        if text == "hang":
            time.sleep(60)
        if text == "exit":
            os._exit(0)
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "sys.exit":
            sys.exit(3)
        if text == "print":
            print("printed by a reward")
        if text == "memory":
            bytes(5 * 2**30)
        values.append(
            {"nan": float("nan"), "inf": float("inf"), "text": "1.0", "true": True, "none": None}.get(text, 1)
        )
    return values[:-1] if "short" in completions else values


def num_torch_modules(completions: list[str]) -> list[float]:
    heavy = [name for name in sys.modules if name.split(".")[0] in ("torch", "transformers", "ray", "datasets")]
    return [float(len(heavy))] * len(completions)


def verifiers_imported(completions: list[str]) -> list[float]:
    return [float({"math_verify", "reasoning_gym"} <= sys.modules.keys())] * len(completions)


def strange(x: int, y: int) -> int:
    return x + y


def shorter_is_better(completions: list[str], **_: object) -> list[float]:
    return [1.0 / (1 + len(completion)) for completion in completions]


def raises(completions: list[str]) -> list[float]:
    raise RuntimeError("this grader is broken")


def hangs(completions: list[str]) -> list[float]:
    time.sleep(60)
    return [0.0] * len(completions)


def hangs_with_a_child(completions: list[str]) -> list[float]:
    """The completion says where it waits, in Python or in C code that keeps the GIL, and which file gets the pids."""
    where, path = completions[0].split()
    child = subprocess.Popen(["sleep", "60"])
    Path(f"{path}.part").write_text(f"{os.getpid()} {child.pid}")
    Path(f"{path}.part").rename(path)
    if where == "python":
        child.wait()
    else:
        re.match(r"(a+)+$", "a" * 60 + "b")
    return [0.0]


def returns_nan(completions: list[str]) -> list[float]:
    return [float("nan")] * len(completions)
