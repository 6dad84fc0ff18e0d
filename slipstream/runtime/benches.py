"""What `slipstream bench` runs: a table on the screen, and the same numbers as JSON for the simulator and records."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from slipstream.engine.engine import Engine
from slipstream.engine.measure import PROMPT_TOKENS, read_bandwidth, time_decoding
from slipstream.files import check_output_file
from slipstream.models.loading import check_model, load_model, width_of
from slipstream.models.model_folder import BUILT_IN, is_folder
from slipstream.models.precision import Precision, resolve_precision
from slipstream.models.shapes import SHAPES, random_model
from slipstream.runtime.capacity import check_sequences
from slipstream.runtime.engines import choose_device
from slipstream.runtime.heap import still_heap
from slipstream.runtime.machine import installed_version

COLUMNS = ("shape", "batch", "tok/s", "ms/step", "p90", "bandwidth", "graphs", "MB", "start s")


def bench_engines(
    shapes: Sequence[str],
    batches: Sequence[int],
    *,
    new_tokens: int,
    dtype: str,
    exact: bool,
    plain: bool,
    json_file: Path | None,
) -> dict[str, Any]:
    """Time decoding of every shape at every batch size; the record that is also written to `json_file`."""
    check_output_file(json_file, "--json")
    if dtype not in ("auto", "float32", "bfloat16"):
        raise ValueError(f"--dtype is auto, float32 or bfloat16, not '{dtype}'")
    check_sequences(max(batches), PROMPT_TOKENS + new_tokens, "--batches and --new-tokens")
    for shape in shapes:
        check_shape(shape)
    device = choose_device("auto")
    precision: Precision = dtype  # type: ignore[assignment]
    dtypes = {shape: resolve_precision(precision, device, shape_width(shape)) for shape in shapes}
    console = Console()
    bandwidth = read_bandwidth(device)
    rows: list[dict[str, Any]] = []
    title = f"{_device_name(device)}, {_named(*dtypes.values())}, copy {bandwidth / 1e12:.2f} TB/s"
    table = new_table(title, COLUMNS, words=("shape",))
    for shape in shapes:
        started = time.perf_counter()
        model = load_shape(shape, dtypes[shape], device)
        check_positions(model, shape, PROMPT_TOKENS + new_tokens)
        engine = Engine(
            model,
            max_sequences=max(batches),
            max_length=PROMPT_TOKENS + new_tokens,
            exact=exact,
            fused=not plain,
            graphs=not plain,
        )
        load_s = time.perf_counter() - started
        for batch in batches:
            with console.status(f"{shape}, batch {batch}"), still_heap():
                timing = time_decoding(engine, batch, new_tokens, bandwidth)
            rows.append({"shape": shape, "load_s": load_s, **asdict(timing)})
            table.add_row(
                shape,
                str(batch),
                f"{timing.tokens_per_s:,.0f}",
                f"{timing.step_ms:.2f}",
                f"{timing.step_ms_p90:.2f}",
                f"{timing.bandwidth_share:.0%}",
                str(timing.num_graphs),
                f"{timing.graph_bytes / 1e6:.0f}",
                f"{timing.start_s:.1f}",
            )
        del engine
    console.print(table)
    record = describe_machine(device, *dtypes.values()) | {
        "what": "slipstream bench engine",
        "exact": exact,
        "plain": plain,
        "copy_bytes_per_s": bandwidth,
        "rows": rows,
    }
    write_record(record, json_file, console)
    return record


def new_table(title: str, columns: Sequence[str], words: Sequence[str]) -> Table:
    """Numbers to the right, columns of `words` to the left; narrow enough for a terminal of 80 columns."""
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    return table


def write_record(record: dict[str, Any], json_file: Path | None, console: Console) -> None:
    if json_file is not None:
        json_file.write_text(json.dumps(record, indent=1) + "\n")
        console.print(f"written to {json_file}")


def describe_machine(device: torch.device, *dtypes: torch.dtype) -> dict[str, Any]:
    """What every record of a measurement begins with."""
    return {
        "slipstream": installed_version("slipstream-rl"),
        "torch": torch.__version__,
        "device": _device_name(device),
        "dtype": _named(*dtypes),
    }


def _named(*dtypes: torch.dtype) -> str:
    return ", ".join(dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in dtypes))


def check_shape(shape: str) -> None:
    """Before anything is measured, and without asking the hub for what is only misspelt."""
    if shape not in (*SHAPES, *BUILT_IN) and "/" not in shape and not Path(shape).is_dir():
        known = ", ".join((*SHAPES, *BUILT_IN))
        raise ValueError(f"unknown shape '{shape}'; known: {known}, or a model folder, or owner/name on the hub")
    if is_folder(shape):
        check_model(shape)


def check_positions(model: PreTrainedModel, shape: str, num_tokens: int) -> None:
    """ValueError if texts of this length have positions that the model does not know."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and num_tokens > limit:
        raise ValueError(f"{num_tokens:,} tokens are more than {shape} takes ({limit:,}): lower --new-tokens")


def shape_width(shape: str) -> int:
    return int(SHAPES[shape]["hidden_size"]) if shape in SHAPES else width_of(shape)


def load_shape(shape: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Random weights of a known shape, or a model."""
    if shape in SHAPES:
        return random_model(shape, dtype=dtype, device=device)
    return load_model(shape, dtype=dtype, device=device)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
