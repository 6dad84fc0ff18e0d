"""Forecasts of lengths: the past, drift, progress, prompts never seen; and how well a tail is told."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest

from slipstream.schedule.lengths import BEYOND, LengthForecaster, calibration, forecast_metrics, tail_recall
from slipstream.schedule.ranker import LengthRanker, token_features


def test_a_prompt_is_as_long_as_it_was_and_fresh_lengths_count_more() -> None:
    forecaster = LengthForecaster()
    forecaster.learn_step({"a": [100, 100], "b": [10, 10]})
    assert forecaster.forecast("a") == 100 and forecaster.forecast("b") == 10
    forecaster.learn_step({"a": [200, 200], "b": [5, 5]})  # one doubled, one halved: nothing drifts
    share = 0.5**0.5 / (1 + 0.5**0.5)
    assert forecaster.forecast("a") == pytest.approx(200 - 100 * share)
    assert forecaster.forecast("a", limit=120) == 120


def test_a_prompt_never_seen_is_like_the_others() -> None:
    forecaster = LengthForecaster()
    assert forecaster.forecast("new") == 1.0 and forecaster.forecast("new", num_sampled=50) == BEYOND * 50
    forecaster.learn_step({"a": [100], "b": [300]})
    assert forecaster.forecast("new") == 200


def test_all_lengths_that_drift_carry_those_along_that_were_not_seen_since() -> None:
    forecaster = LengthForecaster()
    forecaster.learn_step({"a": [100], "b": [40], "rare": [1000]})
    for times in (1.5, 2.0, 3.0):
        forecaster.learn_step({"a": [100 * times], "b": [40 * times]})
    assert forecaster.forecast("rare") == pytest.approx(3000) and forecaster.forecast("a") == pytest.approx(300)


def test_lengths_that_only_scatter_do_not_drift() -> None:
    forecaster, dice = LengthForecaster(), random.Random(0)
    for _ in range(40):
        forecaster.learn_step({str(p): [dice.lognormvariate(4, 1) for _ in range(8)] for p in range(32)})
    forecaster.learn_step({"rare": [500.0]})
    for _ in range(20):
        forecaster.learn_step({str(p): [dice.lognormvariate(4, 1) for _ in range(8)] for p in range(32)})
    assert forecaster.forecast("rare") == pytest.approx(500, rel=0.25)


def test_progress_leaves_only_what_is_longer() -> None:
    forecaster = LengthForecaster()
    forecaster.learn_step({"a": [100, 200, 900]})
    assert forecaster.forecast("a", num_sampled=150) == 550 and forecaster.forecast("a", num_sampled=899) == 900
    assert forecaster.forecast("a", num_sampled=1000) == 1300, "longer than ever"
    assert forecaster.forecast("a", num_sampled=950, ended_siblings=[1000, 30]) == 1000
    assert forecaster.forecast("a", ended_siblings=[500]) == pytest.approx((1200 + 2 * 500) / 5)


def test_recall_by_hand() -> None:
    actual = {str(number): float(number) for number in range(20)}
    assert tail_recall(actual, actual, 0.2) == 1.0
    assert tail_recall({uid: -length for uid, length in actual.items()}, actual, 0.2) == 0.0
    assert tail_recall(actual | {"19": 0.0}, actual, 0.1) == 0.5


def test_of_those_cut_at_the_limit_any_will_do() -> None:
    actual = {str(number): 256.0 if number < 8 else float(number) for number in range(20)}
    told_apart = {uid: length + (int(uid) if int(uid) < 8 else 0) for uid, length in actual.items()}
    assert tail_recall(told_apart, actual, 0.2) == 1.0, "the last four of eight that are equally long"
    assert tail_recall(told_apart | {"7": 1.0, "6": 1.0, "5": 1.0, "4": 1.0, "3": 1.0}, actual, 0.2) == 0.75


def test_calibration_by_hand() -> None:
    """Ten rollouts forecast as 1 to 10: the shorter half came out twice as long, the longer half by a half."""
    forecast = {str(number): float(number) for number in range(1, 11)}
    actual = {uid: length * (2.0 if length <= 5 else 0.5) for uid, length in forecast.items()}
    halves = calibration(forecast, actual, bins=2)
    assert halves.ratios == (2.0, 0.5) and halves.error == pytest.approx(math.log(2))
    assert calibration(forecast, actual, bins=1).ratios == ((30 + 20) / 55,)
    assert len(calibration(forecast, actual, bins=99).ratios) == 10, "never more groups than rollouts"
    assert [round(ratio, 9) for ratio in calibration(forecast, forecast, bins=3).ratios] == [1, 1, 1]
    assert calibration(forecast, forecast).error == 0


def test_calibration_asks_of_means_what_single_rollouts_scatter_around() -> None:
    dice = random.Random(0)
    forecast = {str(number): dice.lognormvariate(6, 1) for number in range(20_000)}
    actual = {uid: mean * dice.choice((0.2, 1.8)) for uid, mean in forecast.items()}
    assert calibration(forecast, actual).error < 0.05 < calibration(forecast, forecast | {"0": 1e8}).error


def test_metrics_of_forecasts() -> None:
    actual = {str(number): float(number) for number in range(1, 21)}
    found = forecast_metrics({uid: length / 2 for uid, length in actual.items()}, actual)
    assert found == {
        "length_forecast/recall_top20": 1.0,
        "length_forecast/recall_top10": 1.0,
        "length_forecast/recall_top5": 1.0,
        "length_forecast/actual_ratio": 2.0,
        "length_forecast/calibration_error": pytest.approx(math.log(2)),
    }
    assert (
        forecast_metrics({uid: -length + 30 for uid, length in actual.items()}, actual)["length_forecast/recall_top20"]
        == 0
    )
    assert forecast_metrics({}, {}) == {}


def test_where_prompts_keep_their_ranks_the_tail_is_found() -> None:
    """Lengths of a prompt scatter by a fifth, prompts among themselves by a factor of e."""
    dice = random.Random(1)
    typical = {str(number): dice.lognormvariate(6, 1) for number in range(256)}

    def step() -> dict[str, list[float]]:
        return {prompt: [length * math.exp(dice.gauss(0, 0.2)) for _ in range(8)] for prompt, length in typical.items()}

    forecaster = LengthForecaster()
    for _ in range(2):
        forecaster.learn_step(step())
    actual = {f"{prompt}/{n}": length for prompt, group in step().items() for n, length in enumerate(group)}
    forecast = {uid: forecaster.forecast(uid.split("/")[0]) for uid in actual}
    assert [
        tail_recall(forecast, actual, share) > least for share, least in ((0.2, 0.85), (0.1, 0.8), (0.05, 0.7))
    ] == [True] * 3


# Prompts never seen.


def described(number: int) -> np.ndarray:
    """Ten numbers, of which the third decides the length and the others say nothing."""
    return np.random.default_rng(number).normal(size=10)


def length_of(number: int, growth: float = 1.0) -> list[float]:
    return [growth * 300 * math.exp(described(number)[2] + dice.gauss(0, 0.2)) for dice in [random.Random(number)] * 4]


def test_new_prompts_are_ranked_by_what_is_known_of_them() -> None:
    forecaster = LengthForecaster(lambda prompt: described(int(prompt)))
    blind = LengthForecaster()
    for one in (forecaster, blind):
        one.learn_step({str(number): length_of(number) for number in range(60)})
    new = {str(number): math.fsum(length_of(number)) / 4 for number in range(100, 160)}
    foreseen = {prompt: forecaster.forecast(prompt) for prompt in new}
    assert tail_recall(foreseen, new, 0.2) >= 0.8
    assert len({blind.forecast(prompt) for prompt in new}) == 1, "without it all are alike"
    assert all(0.4 < foreseen[prompt] / new[prompt] < 2.5 for prompt in new)
    assert forecaster.forecast("100", num_sampled=10**6) > 10**6, "what was sampled already counts more"
    wild = LengthForecaster(
        lambda prompt: 50.0 * described(int(prompt)) if len(prompt) == 3 else described(int(prompt))
    )
    wild.learn_step({str(number): length_of(number) for number in range(60)})
    bounds = [length for number in range(60) for length in length_of(number)]
    told = {wild.forecast(str(number)) for number in range(100, 160)}
    assert {min(bounds), max(bounds)} <= told and min(told) == min(bounds), "unlike anything it has seen"
    assert forecaster.forecast("5") != pytest.approx(foreseen["100"]), "one with a past has that"


def test_the_ranker_follows_when_all_lengths_grow() -> None:
    ranker = LengthRanker()
    assert not ranker.has_learned
    for growth in (1.0, 1.0, 4.0, 4.0, 4.0, 4.0):
        numbers = range(60)
        features = {str(number): described(number) for number in numbers}
        ranker.learn_step(features, {str(number): length_of(number, growth) for number in numbers})
    typical = [ranker.forecast(described(number)) / (1200 * math.exp(described(number)[2])) for number in range(60)]
    assert 0.7 < statistics.median(typical) < 1.2
    newest = math.fsum(statistics.fmean(length_of(number, 4.0)) for number in range(60))
    assert math.fsum(ranker.forecast(described(number)) for number in range(60)) == pytest.approx(newest)
    ranker.learn_step({}, {"unknown": [3.0]})
    ranker.learn_step({"empty": described(1)}, {"empty": []})
    assert ranker.has_learned


def test_token_features_tell_prompts_apart() -> None:
    one, same, other, turned = (token_features(ids) for ids in ([5, 6, 7], [5, 6, 7], [5, 6, 8], [7, 6, 5]))
    assert np.array_equal(one, same) and not np.array_equal(one, other) and not np.array_equal(one, turned)
    assert np.isfinite(token_features([])).all() and len(one) == len(token_features([]))


def test_where_prompts_tell_nothing_of_lengths_all_are_forecast_nearly_alike() -> None:
    """Also if some come again in every step, whose lengths it knows by heart."""

    def spread(knows: bool, num_again: int = 0) -> float:
        ranker, dice = LengthRanker(), random.Random(0)
        chance = {str(number): dice.gauss(0.0, 1.0) for number in range(num_again)}
        for step in range(8):
            prompts = {f"{step}/{number}": described(dice.randrange(10**6)) for number in range(32)}
            told = {prompt: found[2] if knows else dice.gauss(0.0, 1.0) for prompt, found in prompts.items()} | chance
            prompts |= {prompt: described(int(prompt)) for prompt in chance}
            lengths = {prompt: [math.exp(told[prompt] + dice.gauss(5.0, 0.1))] for prompt in prompts}
            ranker.learn_step(prompts, lengths, chance if step else ())
        return statistics.pstdev(math.log(ranker.forecast(described(dice.randrange(10**6)))) for _ in range(100))

    assert max(spread(knows=False), spread(knows=False, num_again=20)) < 0.1 * spread(knows=True)
