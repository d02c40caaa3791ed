"""Scores keep their order through batches, groups and threads; a failing reward costs the samples concerned."""

import logging
import math
import threading

import pytest
import torch

from flowrun.config import ConfigError, Failure
from flowrun.data import Row
from flowrun.rewards import Chosen, Reward, Unscored
from flowrun.scoring import Scoring


class Told(Reward):
    """Scores a picture by its first pixel; `act` may do something else with a batch's scores, which it is given."""

    def __init__(self, act=lambda scores: scores):
        self.act, self.batches, self.threads, self.grad = act, [], set(), []

    def score(self, images, prompts, rows):
        assert [row.prompt for row in rows] == list(prompts)
        scores = images.flatten(1)[:, 0]
        self.batches.append(scores.tolist())
        self.threads.add(threading.get_ident())
        self.grad.append(torch.is_grad_enabled())
        return self.act(scores)


class Grouped(Told):
    groupwise = True


def submitted(scoring, values, groups=None, size=4):
    images = torch.tensor(values, dtype=torch.float32)[:, None, None, None].expand(-1, 3, size, size)
    rows = [Row(id=str(value), prompt=f"p{value}", size=(size, size)) for value in values]
    scoring.submit(images, [row.prompt for row in rows], rows, [0] * len(values) if groups is None else groups)


@pytest.fixture
def opened():
    made = []

    def make(group_size=4, batch_size=3, **rewards):
        made.append(Scoring({name: Chosen(reward, 1.0, batch_size) for name, reward in rewards.items()}, group_size))
        return made[-1]

    yield make
    for scoring in made:
        scoring.close()


def test_order_is_kept_and_batches_are_filled_across_submissions(opened):
    reward = Told()
    scoring = opened(a=reward, b=Told(lambda scores: -scores))
    for values in ([0, 1], [2, 3, 4], [5, 6]):
        submitted(scoring, values)
    found = scoring.result()
    assert found["a"].tolist() == [0, 1, 2, 3, 4, 5, 6] and found["a"].dtype == torch.float32
    assert found["b"].tolist() == [0, -1, -2, -3, -4, -5, -6]
    assert reward.batches == [[0, 1, 2], [3, 4, 5], [6]]
    assert scoring.failures == {"a": 0, "b": 0} and all(seconds > 0 for seconds in scoring.seconds.values())


def test_each_reward_has_one_thread_of_its_own_without_gradients(opened):
    a, b = Told(), Told()
    scoring = opened(a=a, b=b)
    submitted(scoring, range(7))
    scoring.result()
    submitted(scoring, range(7))
    scoring.result()
    assert len(a.threads) == len(b.threads) == 1
    assert len({*a.threads, *b.threads, threading.get_ident()}) == 3
    assert not any(a.grad)


def test_submitting_does_not_wait(opened):
    go = threading.Event()

    def wait(scores):
        assert go.wait(60)
        return scores

    scoring = opened(a=Told(wait))
    submitted(scoring, range(9))  # three batches begin, none can end
    go.set()
    assert scoring.result()["a"].tolist() == list(range(9))


def test_pictures_of_another_size_are_another_batch(opened):
    reward = Told()
    scoring = opened(a=reward)
    submitted(scoring, [0, 1], size=4)
    submitted(scoring, [2, 3], size=8)
    submitted(scoring, [4], size=4)
    assert scoring.result()["a"].tolist() == [0, 1, 2, 3, 4]
    assert reward.batches == [[0, 1, 4], [2, 3]]


def test_groupwise_rewards_get_whole_groups_however_samples_come(opened):
    reward = Grouped(lambda scores: scores - scores.mean())
    scoring = opened(group_size=3, batch_size=1, a=reward)
    submitted(scoring, [0, 10, 1, 11], [7, 8, 7, 8])
    submitted(scoring, [2, 15], [7, 8])
    assert scoring.result()["a"].tolist() == [-1, -2, 0, -1, 1, 3]
    assert sorted(reward.batches) == [[0, 1, 2], [10, 11, 15]]


def test_part_of_a_group_is_refused(opened):
    scoring = opened(group_size=3, a=Grouped())
    submitted(scoring, [0, 1], [7, 7])
    with pytest.raises(ValueError, match="reward a: group 7 has 2 samples and not 3"):
        scoring.result()


def fails_on(bad, error=ValueError):
    def act(scores):
        if bad in scores.tolist():
            raise error(f"cannot see {bad}")
        return scores

    return act


def test_a_failing_batch_is_asked_for_one_by_one(opened, caplog):
    reward = Told(fails_on(4))
    scoring = opened(a=reward, b=Told())
    submitted(scoring, range(9))
    found = scoring.result()
    assert math.isnan(found["a"][4]) and scoring.failures == {"a": 1, "b": 0}
    assert [v for v in found["a"].tolist() if not math.isnan(v)] == [0, 1, 2, 3, 5, 6, 7, 8]
    assert found["b"].tolist() == list(range(9))
    assert reward.batches == [[0, 1, 2], [3, 4, 5], [3], [4], [5], [6, 7, 8]]
    submitted(scoring, range(9))
    scoring.result()
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warned) == 1 and "reward a failed on 3 samples (ValueError: cannot see 4" in warned[0].getMessage()


@pytest.mark.parametrize("act", [
    fails_on(4, Unscored), lambda s: torch.where(s == 4, math.inf, s), lambda s: torch.where(s == 4, math.nan, s)
])  # fmt: skip
def test_what_says_itself_that_there_is_no_score_is_not_asked_again(opened, act):
    reward = Told(act)
    scoring = opened(a=reward)
    submitted(scoring, range(6))
    found = scoring.result()["a"]
    assert len(reward.batches) == 2 and torch.equal(found[:3], torch.tensor([0.0, 1.0, 2.0])) and math.isnan(found[4])


def test_a_failing_group_has_no_scores(opened):
    scoring = opened(group_size=2, a=Grouped(fails_on(1)))
    submitted(scoring, range(4), [0, 0, 1, 1])
    found = scoring.result()["a"].tolist()
    assert math.isnan(found[0]) and math.isnan(found[1]) and found[2:] == [2, 3]
    assert scoring.failures == {"a": 2}


@pytest.mark.parametrize("act", [lambda s: s[:-1], lambda s: s[:, None], lambda s: s.tolist()])
def test_a_wrong_answer_is_a_failure(opened, act):
    scoring = opened(batch_size=2, a=Told(lambda s: s if s[0] else act(s)))
    submitted(scoring, [0, 5, 6, 7])
    found = scoring.result()["a"].tolist()
    assert math.isnan(found[0]) and found[1:] == [5, 6, 7]


def test_a_reward_that_fails_for_all_ends_the_run_with_its_reason(opened):
    def act(scores):
        raise RuntimeError("no such layer")

    scoring = opened(a=Told(act))
    submitted(scoring, range(5))
    with pytest.raises(Failure, match="the reward a failed for all 5 samples: RuntimeError: no such layer; mend it, or leave out reward.a"):
        scoring.result()


def test_a_users_error_is_told_as_it_is(opened):
    def act(scores):
        raise ConfigError("data", "has no picture", "give some")

    scoring = opened(a=Told(act))
    submitted(scoring, range(5))
    with pytest.raises(ConfigError, match="data: has no picture; give some"):
        scoring.result()


def test_nothing_submitted_gives_nothing(opened):
    assert [len(score) for score in opened(a=Told()).result().values()] == [0]


@pytest.mark.parametrize("images", [torch.zeros(1, 3, 4, 4).double(), torch.zeros(3, 4, 4), torch.zeros(1, 3, 4, 4, requires_grad=True)])
def test_images_of_another_kind_are_refused(opened, images):
    with pytest.raises(ValueError, match="give fp32 pictures on the CPU"):
        opened(a=Told()).submit(images, [""], [Row(id="a", prompt="", size=(4, 4))], [0])
