"""How many rollout workers a run shall have from now on: a file in its folder, written by `slipstream scale`."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

from slipstream.config import load_config
from slipstream.files import read_json, replacing
from slipstream.runtime.capacity import check_capacity, this_machine

CONTROL_FILE = "control.json"


def ask_for_workers(run_dir: Path, num_workers: int) -> str | None:
    """Asks the run for this many workers; returns a sentence on what its mode cannot do with them, or None.

    ValueError if no run would read it."""
    if not (run_dir / "config.yaml").is_file():
        raise ValueError(f"{run_dir} is not the folder of a run")
    config = load_config(run_dir / "config.yaml")
    if config.mode == "colocated":
        raise ValueError(f"{run_dir} samples in the process that trains (mode=colocated): there are no workers to add")
    if config.mode == "rhyme" and num_workers < 2:
        raise ValueError("mode=rhyme shares rollouts out among workers by length: it needs 2 or more (4: two groups)")
    wanted = config.rollout.model_copy(update={"workers": num_workers, "scale": None})
    check_capacity(config.model_copy(update={"rollout": wanted}), this_machine())
    if not _is_running(run_dir):
        raise ValueError(f"no run is going on in {run_dir}; start it with rollout.workers={num_workers}")
    with replacing(run_dir / CONTROL_FILE) as partial:
        partial.write_text(json.dumps({"rollout_workers": num_workers}))
    if config.mode == "rhyme" and num_workers < 4:
        return "with 2 or 3 rollout workers mode=rhyme shares nothing out by length: ask for 4 or more"
    return None


def workers_asked_for(run_dir: Path) -> int | None:
    """None if nobody has asked."""
    if not (run_dir / CONTROL_FILE).exists():
        return None
    instead = "remove it, and ask again with `slipstream scale`"
    wish = read_json(run_dir / CONTROL_FILE, instead)
    wanted = wish.get("rollout_workers") if isinstance(wish, dict) else None
    if not isinstance(wanted, int) or wanted < 1:
        raise ValueError(f"{run_dir / CONTROL_FILE} has no rollout_workers of 1 or more: {instead}")
    return wanted


def _is_running(run_dir: Path) -> bool:
    """Whether somebody holds the folder's lock."""
    try:
        with (run_dir / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
