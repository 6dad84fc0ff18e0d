"""The report's pictures: from {metric: {step: value}} to plotly figures as HTML, one function a picture.

Owns colours and chart types, not the page around them. Every function answers None when the run has none of its
metrics, and the page then says so. A figure is a plain dict; plotly is imported only for its JavaScript.
Text and grid take their colours from the page's style sheet, so one figure serves light and dark.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.observe.buckets import Series, bad_steps, stacked, width_of
from slipstream.observe.ledger import ACCOUNTS, Entry
from slipstream.observe.metrics import draft_share_name, percentile
from slipstream.types import ORIGIN_NAMES

Metrics = Mapping[str, Series]
Figure = dict[str, Any]

BLUE, AQUA, YELLOW, GREEN = "#2a78d6", "#1baf7a", "#eda100", "#3a8a1f"
VIOLET, RED, ORANGE, GREY, PINK = "#6a5acd", "#e34948", "#d9730d", "#9aa0a6", "#d65db1"
CYCLE = (BLUE, AQUA, YELLOW, VIOLET, RED, GREEN)
PHASES = {
    "timing_s/warmup": ("warm start", ORANGE),
    "timing_s/gen": ("rollout", BLUE),
    "timing_s/reward": ("reward", AQUA),
    "timing_s/sleep": ("engine to sleep", GREY),
    "timing_s/update_actor": ("training", YELLOW),
    "timing_s/update_drafter": ("drafter's training", PINK),
    "timing_s/update_weights": ("weight update", GREEN),
    "timing_s/eval": ("evaluation", VIOLET),
    "timing_s/save": ("checkpoint", RED),
}
BETWEEN_STEPS = ("timing_s/warmup", "timing_s/save")
"""Phases that timing_s/step does not cover: the warm start is before all steps (its row is 0), and a checkpoint comes
after a step is recorded, so its seconds are in the row of the following step."""
HEALTH = {
    "actor/pg_loss": "Policy loss",
    "actor/entropy": "Entropy (nats per token)",
    "actor/grad_norm": "Gradient norm",
    "actor/clipfrac": "Clipped tokens (share)",
    "mismatch_kl": "Engine-trainer mismatch (KL)",
    "reward/zero_spread_groups": "Groups of equal reward (share)",
    "response_length/clip_ratio": "Responses cut by length (share)",
    "reward/unscored": "Samples not scored",
}
_SMOOTH_STEPS = 5
MOST_SINGLE = 120
"""Points or bars that are drawn so that each can be told from the next."""


def reward_curve(metrics: Metrics) -> Figure | None:
    """Mean reward of each step, its running mean, and the reward functions when there are several."""
    if not metrics.get("reward/mean"):
        return None
    reward = metrics["reward/mean"]
    width = width_of(reward)
    traces = [
        _line("each step" if width == 1 else f"mean of {width} steps", reward, BLUE, width=1.5, opacity=0.4),
        _line(f"mean of {_SMOOTH_STEPS * width} steps", _running_mean(reward), BLUE, width=3),
    ]
    names = [name for name in metrics if re.fullmatch(r"reward/.+/mean", name)]
    parts = {name.removeprefix("reward/").removesuffix("/mean"): metrics[name] for name in names}
    if len(parts) > 1:
        traces += [
            _line(name, _running_mean(series), CYCLE[1 + i % (len(CYCLE) - 1)], width=1.5, dash="dot")
            for i, (name, series) in enumerate(sorted(parts.items()))
        ]
    return _figure(traces, "reward")


def evaluation_curve(metrics: Metrics) -> Figure | None:
    """avg@k (full lines) and, where k > 1, pass@k (dashed) of every evaluation set; step 0 is before training."""
    names = [name for name in metrics if re.fullmatch(r"eval/.+/avg@\d+", name)]
    if not names:
        return None
    traces = []
    for i, name in enumerate(sorted(names)):
        label, colour = name.removeprefix("eval/"), CYCLE[i % len(CYCLE)]
        mode = "lines+markers" if len(metrics[name]) <= MOST_SINGLE else "lines"
        traces.append(_line(label, metrics[name], colour, mode=mode))
        passed = name.replace("/avg@", "/pass@")
        if passed in metrics and not name.endswith("@1"):
            label = passed.removeprefix("eval/")
            traces.append(_line(label, metrics[passed], colour, width=1.5, dash="dash", mode=mode))
    figure = _figure(traces, "score")
    if any(0 in metrics[name] for name in names):
        figure["layout"]["shapes"] = [
            {"type": "line", "x0": 0, "x1": 0, "yref": "paper", "y0": 0, "y1": 1}
            | {"line": {"color": GREY, "width": 1, "dash": "dot"}}
        ]
        figure["layout"]["annotations"] = [
            {"x": 0, "yref": "paper", "y": 1, "text": "before RL", "showarrow": False}
            | {"xanchor": "left", "yanchor": "top", "font": {"size": 11, "color": GREY}}
        ]
    return figure


def length_bands(lengths_by_step: Mapping[int, Sequence[int]]) -> Figure | None:
    """Median, p90, p99 and longest response of each step, the space between them filled."""
    if not lengths_by_step:
        return None
    traces: list[Figure] = []
    for label, q, opacity in (("median", 50, 0.30), ("p90", 90, 0.20), ("p99", 99, 0.12), ("longest", 100, 0.0)):
        series = {step: percentile(lengths, q) for step, lengths in lengths_by_step.items()}
        trace = _line(label, series, BLUE if q < 100 else GREY, width=3 if q == 50 else 1)
        if opacity:
            trace |= {"fill": "tozeroy" if not traces else "tonexty", "fillcolor": f"rgba(42,120,214,{opacity})"}
        traces.append(trace)
    return _figure(traces, "tokens")


def time_stack(metrics: Metrics) -> Figure | None:
    """Seconds of each phase, stacked by step; what timing_s/step has beyond the phases it covers is "other"."""
    timed = {name: stacked(metrics[name]) for name in PHASES if metrics.get(name)}
    if not timed:
        return None
    traces = [_bars(*PHASES[name], series) for name, series in timed.items()]
    covered = [series for name, series in timed.items() if name not in BETWEEN_STEPS]
    whole = stacked(metrics.get("timing_s/step", {}))
    other = {
        step: max(0.0, step_s - sum(series.get(step, 0.0) for series in covered)) for step, step_s in whole.items()
    }
    if sum(other.values()) > 0.01 * sum(whole.values()):
        traces.append(_bars("other", GREY, other))
    figure = _figure(traces, "seconds")
    figure["layout"] |= _stacking(traces)
    return figure


LEDGER_COLOURS = {
    "start": "#a9825a",
    "prefill": "#7fb2ea",
    "decode": BLUE,
    "accepted drafts": AQUA,
    "rejected drafts": RED,
    "graphs": "#b8860b",
    "tail wait": "#c9cdd2",
    "rollout wait": "#b4b9c0",
    "reward wait": "#8fa3ad",
    "training wait": "#d8d3c4",
    "weight sync": GREEN,
    "training": YELLOW,
    "drafter training": PINK,
    "evaluation": VIOLET,
    "checkpoint": ORANGE,
    "idle": "#e6e8eb",
}


def ledger_stack(entries: Sequence[Entry]) -> Figure | None:
    """Device-seconds of each step by account, all devices together."""
    if not entries:
        return None
    by_account: dict[str, dict[int, float]] = {name: {} for name in ACCOUNTS}
    for entry in entries:
        series = by_account[entry.account]
        series[entry.step] = series.get(entry.step, 0.0) + entry.seconds
    traces = [_bars(name, LEDGER_COLOURS[name], series) for name, series in by_account.items() if any(series.values())]
    figure = _figure(traces, "device-seconds")
    figure["layout"] |= _stacking(traces)
    return figure


def throughput_curve(metrics: Metrics) -> Figure | None:
    if not metrics.get("perf/throughput"):
        return None
    return _figure([_line("tokens/s", metrics["perf/throughput"], BLUE)], "tokens per second", legend=False)


ORIGIN_COLOURS = {0: GREY, 1: AQUA, 2: BLUE, 3: YELLOW, 4: VIOLET}


def draft_shares(metrics: Metrics) -> Figure | None:
    """Of the tokens of each step, those that were drafts, by where the drafts came from."""
    shares = {origin: metrics.get(draft_share_name(origin), {}) for origin in ORIGIN_NAMES if origin}
    if not any(shares.values()):
        return None
    traces = [
        _bars(ORIGIN_NAMES[origin], ORIGIN_COLOURS[origin], stacked(series)) | {"hovertemplate": "%{y:.1%}"}
        for origin, series in shares.items()
        if series
    ]
    figure = _figure(traces, "share of tokens")
    figure["layout"] |= _stacking(traces)
    figure["layout"]["yaxis"] |= {"range": [0, 1], "tickformat": ".0%"}
    return figure


def draft_yield(metrics: Metrics) -> Figure | None:
    """Tokens that a sequence got a forward pass, and the share of drafts that were right."""
    if not metrics.get("rollout/spec_accept_length"):
        return None
    traces = [_line("tokens a forward pass", metrics["rollout/spec_accept_length"], BLUE)]
    figure = _figure(traces, "tokens a forward pass")
    if metrics.get("rollout/spec_accept_rate"):
        rate = _line("drafts that were right", metrics["rollout/spec_accept_rate"], AQUA)
        figure["data"].append(rate | {"yaxis": "y2", "hovertemplate": "%{y:.0%}"})
        figure["layout"]["yaxis2"] = {
            "overlaying": "y",
            "side": "right",
            "range": [0, 1],
            "tickformat": ".0%",
            "tickmode": "auto",
        }
        figure["layout"]["yaxis2"] |= {"showgrid": False, "zeroline": False}
        figure["layout"]["margin"]["r"] = 48
    return figure


def drafter_lessons(metrics: Metrics) -> Figure | None:
    """Of what a drafter was taught, the share that it had right, by how many tokens ahead."""
    names = {f"{place} ahead": metrics.get(f"drafter/right_at_{place}") for place in range(1, 5)}
    traces = [
        _line(name, series, colour) | {"hovertemplate": "%{y:.0%}"}
        for (name, series), colour in zip(names.items(), CYCLE, strict=False)
        if series
    ]
    if not traces:
        return None
    figure = _figure(traces, "right")
    figure["layout"]["yaxis"] |= {"range": [0, 1], "tickformat": ".0%"}
    return figure


def health_curve(metrics: Metrics, name: str) -> Figure | None:
    """One small picture of one metric; a step with NaN or infinity is marked at the bottom, not skipped in silence."""
    if not metrics.get(name):
        return None
    series = metrics[name]
    traces = [_line(name, series, BLUE)]
    finite = [value for value in series.values() if math.isfinite(value)]
    if steps := bad_steps(series):
        floor = min(finite, default=0.0)
        bad = dict.fromkeys(sorted(steps), floor)
        marker = {"symbol": "x", "size": 9, "color": RED}
        traces.append(_line("not a number", bad, RED, mode="markers") | {"marker": marker})
    figure = _figure(traces, "", legend=False)
    figure["layout"] |= {"height": 190, "margin": {"l": 52, "r": 12, "t": 8, "b": 34}}
    return figure


def lines(series: Mapping[str, Mapping[Any, float]], unit: str, along: str = "step", height: int = 420) -> Figure:
    """One line for each name; numbers of GPUs grow by factors along it."""
    traces = [
        _line(name, points, CYCLE[place % len(CYCLE)], dash=("solid", "dash")[place // len(CYCLE) % 2])
        for place, (name, points) in enumerate(series.items())
    ]
    figure = _figure(traces, unit, legend=len(series) > 1)
    layout = figure["layout"]
    layout["xaxis"]["title"]["text"] = along
    layout["height"] = height
    layout["hovermode"] = "closest"
    layout["legend"] = {"orientation": "v", "x": 1.02, "y": 1}
    for trace in traces:
        trace["hovertemplate"] = "%{fullData.name}: %{y:.4~g}<extra></extra>"
    if along == "GPUs":
        sizes = sorted({x for points in series.values() for x in points})
        layout["xaxis"] |= {"type": "log", "tickvals": sizes, "ticktext": [f"{size:,}" for size in sizes]}
    return figure


def ranking(values: Mapping[str, float], unit: str) -> Figure:
    """A bar for each name, from the top down."""
    names = list(values)
    bar = {
        "type": "bar",
        "orientation": "h",
        "y": names,
        "x": list(values.values()),
        "text": [f"{value:.3g}" for value in values.values()],
        "textposition": "auto",
        "marker": {"color": BLUE, "line": {"width": 0}},
        "hovertemplate": "%{y}: %{x:.3g}<extra></extra>",
    }
    figure = _figure([bar | {"x": [0, 1]}], unit, legend=False)
    figure["data"] = [bar]
    layout = figure["layout"]
    layout["height"] = 60 + 30 * len(names)
    layout["hovermode"] = "closest"
    layout["margin"] |= {"l": 160}
    axis = {"zeroline": False, "automargin": True, "gridcolor": "rgba(128,128,128,0.18)"}
    layout["xaxis"] = axis | {"title": {"text": unit}, "rangemode": "tozero"}
    layout["yaxis"] = {"automargin": True, "autorange": "reversed", "showgrid": False}
    return figure


def figure_html(figure: Figure) -> str:
    """An empty <div> and its figure as JSON; `drawing_script` at the end of the page draws them all."""
    # "<" is escaped so that a metric named "</script>" cannot end the element.
    text = json.dumps(figure, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    height = figure["layout"]["height"]
    return f'<div class="plot" style="height:{height}px"></div><script type="application/json">{text}</script>'


def drawing_script() -> str:
    """plotly.js and the call that draws: at the end of the body, when the cards have their final widths."""
    from plotly.offline import get_plotlyjs

    draw = (
        "for (const place of document.querySelectorAll('.plot')) {"
        " const figure = JSON.parse(place.nextElementSibling.textContent);"
        " Plotly.newPlot(place, figure.data, figure.layout, {displayModeBar: false, responsive: true}); }"
    )
    return f"<script>{get_plotlyjs()}</script>\n<script>{draw}</script>"


def _line(
    name: str,
    series: Series,
    colour: str,
    width: float = 2,
    opacity: float = 1.0,
    dash: str = "solid",
    mode: str = "lines",
) -> Figure:
    if len(series) == 1:
        mode = "markers"  # a line through one point would be invisible
    # plotly writes a gap for None, and NaN or infinities are not JSON.
    values = [value if math.isfinite(value) else None for value in series.values()]
    return {
        "type": "scatter",
        "name": name,
        "x": list(series),
        "y": values,
        "mode": mode,
        "opacity": opacity,
        "line": {"color": colour, "width": width, "dash": dash},
        "hovertemplate": "%{y:.4~g}",
    }


def _stacking(traces: Sequence[Figure]) -> Figure:
    """Gaps between bars, unless these are as thin as the gaps would be."""
    is_dense = any(len(trace["x"]) > MOST_SINGLE for trace in traces)
    return {"barmode": "stack", "bargap": 0 if is_dense else 0.15}


def _bars(name: str, colour: str, series: Series) -> Figure:
    return {
        "type": "bar",
        "name": name,
        "x": list(series),
        "y": list(series.values()),
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": "%{y:.2f} s",
    }


def _figure(traces: list[Figure], unit: str, legend: bool = True) -> Figure:
    axis = {"zeroline": False, "automargin": True, "gridcolor": "rgba(128,128,128,0.18)", "exponentformat": "e"}
    axis["separatethousands"] = True
    steps = {step for trace in traces for step in trace["x"]}
    ticks = {"dtick": 1} if len(steps) < 8 and max(steps) - min(steps) < 10 else {"nticks": 10}
    layout = {
        "autosize": True,
        "height": 320,
        "margin": {"l": 64, "r": 16, "t": 36 if legend else 12, "b": 40},
        "hovermode": "x unified",
        "font": {"family": "system-ui, -apple-system, Segoe UI, Roboto, sans-serif", "size": 12, "color": "#6b7280"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {**axis, **ticks, "showgrid": False, "title": {"text": "step"}, "tickformat": "d"},
        "yaxis": {**axis, "title": {"text": unit, "standoff": 10}, "rangemode": "tozero" if unit else "normal"},
        "showlegend": legend,
        "legend": {"orientation": "h", "x": 0, "y": 1.03, "yanchor": "bottom", "traceorder": "normal"},
        "hoverlabel": {"bgcolor": "#ffffff", "font": {"color": "#111827"}},
    }
    return {"data": traces, "layout": layout}


def _running_mean(series: Series) -> dict[int, float]:
    """Mean of each step and the up to four before it; values that are not numbers are left out."""
    steps, means = list(series), {}
    for i, step in enumerate(steps):
        window = [series[s] for s in steps[max(0, i - _SMOOTH_STEPS + 1) : i + 1] if math.isfinite(series[s])]
        if window:
            means[step] = sum(window) / len(window)
    return means
