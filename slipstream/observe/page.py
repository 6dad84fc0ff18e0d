"""The report's HTML: style sheet, tiles, cards, and the table of sample rollouts.

Owns escaping: every function that takes text from a run (prompts, responses, faults, names) escapes it here, and only
arguments called `*_html` are put into the page as they are. No script but plotly's; no address outside the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from slipstream.observe.store import StoredRollout

_OPEN_CHARACTERS = 320
"""Longer text is folded: its beginning shows, a click opens the rest."""
_SHOWN_CHARACTERS = 100_000
"""Of a text in all: a page with a dozen samples stays small enough for a browser."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --ink: #16191d; --soft: #667080; --edge: #e2e6ea;
  --code: #f3f5f7; --good: #14804a; --bad: #c0392b; --accent: #2a78d6; }
@media (prefers-color-scheme: dark) { :root { --page: #101317; --card: #181c22; --ink: #e8ebef; --soft: #98a2b0;
  --edge: #2a3038; --code: #11151a; --good: #4ccb8a; --bad: #ff7b6e; --accent: #6aa9f4; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; letter-spacing: -.01em; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 10px; }
h3 { font-size: 14px; font-weight: 600; margin: 0 0 2px; }
p { margin: 4px 0; } .soft { color: var(--soft); } small { color: var(--soft); font-size: 12.5px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin: 20px 0 12px; }
.tile, .card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; }
.tile { padding: 12px 16px; } .tile b { display: block; font-size: 20px; font-weight: 650; line-height: 1.3;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
.card { padding: 14px 16px; min-width: 0; margin-bottom: 14px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; margin: 0; font-size: 14px; }
.two, .many { display: grid; grid-template-columns: minmax(0, 1fr); gap: 14px; margin-bottom: 14px; }
@media (min-width: 600px) { .many { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (min-width: 900px) { .two { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .many { grid-template-columns: repeat(4, minmax(0, 1fr)); }
  dl { grid-template-columns: max-content 1fr max-content 1fr; } }
.two .card, .many .card { margin-bottom: 0; } .many h3 { font-size: 13px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.5 ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace; }
pre.box { background: var(--code); border-radius: 6px; padding: 8px 10px; }
details > summary { cursor: pointer; list-style: none; } summary::-webkit-details-marker { display: none; }
summary .more { color: var(--accent); font-size: 12.5px; }
details[open] > summary .short { display: none; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; }
th, td { padding: 8px 10px 8px 0; border-top: 1px solid var(--edge); vertical-align: top; }
thead th { border-top: 0; } .number { font-variant-numeric: tabular-nums; }
table.samples { table-layout: fixed; } .samples .facts { width: 170px; } .samples .prompt { width: 34%; }
.pill { display: inline-block; font-size: 12px; font-weight: 600; padding: 1px 8px; border-radius: 9px;
  border: 1px solid var(--edge); color: var(--soft); }
.best { color: var(--good); } .worst, .unscored { color: var(--bad); }
.from1, .from2, .from3, .from4 { border-radius: 3px; padding: 0 1px; } .from1 { background: rgba(27,175,122,.28); }
.from2 { background: rgba(42,120,214,.28); } .from3 { background: rgba(237,161,0,.32); }
.from4 { background: rgba(106,90,205,.28); }
.xtick text, .ytick text, .legendtext, .xtitle, .ytitle { fill: var(--soft) !important; }
@media (max-width: 700px) { main { padding: 18px 12px 40px; } dl { grid-template-columns: 1fr; }
  dd { margin-bottom: 6px; }
  .tiles { grid-template-columns: 1fr 1fr; } .tile b { font-size: 17px; }
  .samples thead { display: none; } .samples tr, .samples td { display: block; width: auto !important; }
  .samples td { border-top: 0; padding: 4px 0; } .samples tr { border-top: 1px solid var(--edge); padding: 8px 0; } }
"""


def page(title: str, body_html: str, script_html: str) -> str:
    """The whole file; scripts come last, so the text is there before plotly is read."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{body_html}</main>\n{script_html}</body></html>\n"
    )


def tiles(values: Mapping[str, str]) -> str:
    """Big numbers with their names."""
    cells = [f'<div class="tile"><small>{escape(name)}</small><b>{escape(v)}</b></div>' for name, v in values.items()]
    return f'<div class="tiles">{"".join(cells)}</div>'


def card(heading: str, body_html: str, note: str = "") -> str:
    words = f"<small>{escape(note)}</small>" if note else ""
    return f'<section class="card"><h3>{escape(heading)}</h3>{words}{body_html}</section>'


def headline(text: str) -> str:
    return f"<h1>{escape(text)}</h1>"


def sentence(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>'


def facts(values: Mapping[str, str]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in values.items())
    return f"<dl>{rows}</dl>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in the first column, numbers in the others."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ""
    for row in rows:
        lines += "<tr>" + "".join(f'<td class="number">{escape(cell)}</td>' for cell in row) + "</tr>"
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def folded(text: str, limit: int = _OPEN_CHARACTERS) -> str:
    """Text as it is, in a <details> when it is long."""
    if not text.strip():
        return '<pre class="box"><span class="soft">(empty)</span></pre>'
    if len(text) <= limit:
        return f'<pre class="box">{escape(text)}</pre>'
    short = f'<pre class="box short">{escape(text[:limit])}…</pre><span class="more short">'
    how_much = f"all {len(text):,} characters"
    if len(text) > _SHOWN_CHARACTERS:
        how_much = f"{_SHOWN_CHARACTERS:,} of {len(text):,} characters; the others are in run.db only"
    return (
        f"<details><summary>{short}show {how_much}</span></summary>"
        f'<pre class="box">{escape(text[:_SHOWN_CHARACTERS])}</pre></details>'
    )


def coloured(spans: Sequence[tuple[str, int]]) -> str:
    """Text in pieces, each with the number of where it came from."""
    body = "".join(
        f'<span class="from{origin}">{escape(text)}</span>' if origin else escape(text) for text, origin in spans
    )
    return f'<pre class="box">{body}</pre>'


def legend(names: Mapping[int, str]) -> str:
    marks = " ".join(f'<span class="from{number}">{escape(name)}</span>' for number, name in names.items())
    return f'<p class="soft">{marks}</p>'


def config_section(text: str) -> str:
    summary = '<summary><b>config.yaml</b> <span class="more">show or hide</span></summary>'
    return f'<details class="card">{summary}<pre>{escape(text)}</pre></details>'


def sample_table(
    picks: Sequence[tuple[str, StoredRollout]], extras_of: Callable[[str], Mapping[str, object]] = lambda _: {}
) -> str:
    """Rollouts of one step, each with the word for why it was picked (best, median, worst, unscored).

    `extras_of`: what reward functions logged for a rollout, by its uid."""
    rows = "".join(_sample_row(why, rollout, extras_of(rollout.uid)) for why, rollout in picks)
    head = '<th class="facts">Sample</th><th class="prompt">Prompt</th><th>Response</th>'
    return f'<table class="samples"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _sample_row(why: str, rollout: StoredRollout, extras: Mapping[str, object]) -> str:
    worth = "no reward" if rollout.reward is None else f"reward {rollout.reward:.4g}"
    parts = "".join(f"<br><small>{escape(name)} {value:.4g}</small>" for name, value in rollout.parts.items())
    ended = "cut at the length limit" if rollout.finish_reason == "length" else rollout.finish_reason
    fault = f'<p class="unscored">Not scored:</p>{folded(rollout.fault)}' if rollout.fault is not None else ""
    logged = "".join(f"<p><small>{escape(column)}</small></p>{folded(str(value))}" for column, value in extras.items())
    return (
        f'<tr><td class="facts"><span class="pill {escape(why)}">{escape(why)}</span><br><b>{worth}</b>{parts}'
        f"<br><small>{rollout.length:,} tokens, {escape(ended)}<br>{escape(rollout.uid)}</small></td>"
        f'<td class="prompt">{folded(rollout.prompt_text)}</td><td>{folded(rollout.text)}{fault}{logged}</td></tr>'
    )
