"""Rows of files: found without parsing them, and each the same as a parser of the whole file gives."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import TaskSet
from slipstream.rng import keyed_random
from slipstream.tasks import tables
from slipstream.tasks.sources import open_problems
from slipstream.tasks.tables import read_file

ROWS: list[dict[str, Any]] = [
    {"prompt": "plain", "answer": "1"},
    {"prompt": 'brackets ]}{[ and "quotes" \\', "answer": None, "deep": {"list": [1, [2, {"x": "]"}]]}},
    {"prompt": "漢字 🧿 é\u2028\u00a0", "number": -1.5e3},
    {"prompt": "line\nbreak\ttab", "empty": {}, "none": []},
]


@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("window", [16, 1 << 20])
def test_a_json_list_is_cut_into_its_elements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, indent: int | None, ascii_only: bool
) -> None:
    monkeypatch.setattr(tables, "WINDOW_BYTES", window)
    file = tmp_path / "rows.json"
    for rows in (ROWS, ROWS[:1], 30 * ROWS):
        file.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii_only) + "\n \n", encoding="utf-8")
        assert list(read_file(file)) == rows
    file.write_text("  [ ]\n")
    assert len(read_file(file)) == 0


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_are_rows_but_for_blank_ones(tmp_path: Path, newline: str) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    file.write_bytes(newline.join(["", lines[0], "  ", " " + lines[1] + " ", "", *lines[2:]]).encode())
    rows = read_file(file)
    assert list(rows) == ROWS and len(rows) == len(ROWS)
    assert [rows[place] for place in (3, 0, -1)] == [ROWS[3], ROWS[0], ROWS[3]] and rows[1:3] == ROWS[1:3]
    with pytest.raises(IndexError):
        rows[4]


def test_rows_of_a_columnar_file_are_the_same_in_any_order(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    wanted = [{"prompt": f"question {number}", "answer": str(number)} for number in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(wanted), tmp_path / "rows.parquet", row_group_size=70)
    rows = read_file(tmp_path / "rows.parquet")
    assert list(rows) == wanted
    places = list(range(200))
    random.Random(0).shuffle(places)
    assert [rows[place] for place in places] == [wanted[place] for place in places]


def test_rows_are_parsed_when_they_are_asked_for_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, parsed = tmp_path / "rows.jsonl", []
    file.write_text("".join(json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(1000)))
    scan = tables._scan
    monkeypatch.setattr(tables, "_scan", lambda text, at=0: parsed.append(text) or scan(text, at))
    problems = open_problems(TaskSet(source=str(file)), "train/0")
    assert len(problems) == 1000 and not parsed
    assert [problems[place].index for place in (700, 3)] == [700, 3] and len(parsed) == 2
    assert len(list(open_problems(TaskSet(source=str(file), size=5), "train/0"))) == 5 and len(parsed) == 7


def test_a_file_that_changes_later_does_not_reach_the_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "first"}\n{"prompt": "second"}\n')
    rows = read_file(file)
    file.write_text("gone")
    assert [row["prompt"] for row in rows] == ["first", "second"]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("rows.jsonl", '{"prompt": "a"}\n\n{"prompt": \n{"prompt": "b"}\n', "rows.jsonl:3: not valid JSON"),
        ("rows.jsonl", '{"prompt": "a"} {"prompt": "b"}\n', "rows.jsonl:1: not valid JSON: Extra data"),
        ("rows.jsonl", '{"prompt": "a"}\n[1]\n', "row 1 is list; every row must be an object"),
        ("rows.json", '[{"prompt": "a"}, 12]', "row 1 is int; every row must be an object"),
        ("rows.json", '[{"prompt": "a"},\n {"prompt": }]', "rows.json: not valid JSON: .* line 2 column 13"),
        ("rows.json", '[{"prompt": "a"},]', "not valid JSON"),
        ("rows.json", '[{"prompt": "a"}] x', "not valid JSON: Extra data"),
        ("rows.json", '[{"prompt": "a"}', "not valid JSON"),
        ("rows.json", '{"prompt": "a"}', "must hold a list of objects"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, name: str, text: str, words: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words):
        list(read_file(tmp_path / name))


def test_random_lists_are_cut_as_a_parser_of_the_whole_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    letters = 'ab{}[],:"\\ é漢🧿\n'
    for case in range(60):
        dice = keyed_random("random lists", case)
        monkeypatch.setattr(tables, "WINDOW_BYTES", dice.randint(4, 60))
        rows = [
            {"".join(dice.choices(letters, k=dice.randint(0, 9))): dice.choice([1, 0.5, None, [True], {"a": letters}])}
            for _ in range(dice.randint(1, 12))
        ]
        file.write_text(json.dumps(rows, ensure_ascii=dice.random() < 0.5), encoding="utf-8")
        assert list(read_file(file)) == rows
