"""A served reward scores as at home; what a server does wrong costs the samples that it was asked for."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from flowrun import reward_server
from flowrun.config import ConfigError, Failure
from flowrun.data import Row
from flowrun.rewards import Chosen, Reward, Unscored, choose
from flowrun.scoring import Scoring


class Ids(Reward):
    """The number in a row's id, NaN for 3; raises for the prompt "bad". groups: as if it scored whole groups."""

    def score(self, images, prompts, rows):
        if "bad" in prompts:
            raise RuntimeError("bad prompt")
        return torch.tensor([float(row.id) if row.id != "3" else torch.nan for row in rows]) + images.shape[-1] / 1000


class Groups(Ids):
    groupwise = True


@contextmanager
def running(serving):
    thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}"
    finally:
        serving.shutdown()
        serving.server_close()
        thread.join()


def served(name, *fields):
    return running(reward_server.server(reward_server.made(name, fields, torch.device("cpu")), "127.0.0.1", 0))


def answering(*answers):
    """A server that gives these (status, body) in turn, the last one for ever; `asked` counts."""

    class Handler(BaseHTTPRequestHandler):
        asked = 0

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answers[min(type(self).asked, len(answers) - 1)]
            type(self).asked += 1
            if status is None:  # not in time
                time.sleep(body)
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    serving = HTTPServer(("127.0.0.1", 0), Handler)
    serving.handler = Handler
    return serving


def remote(url, retries=2, timeout_s=30.0):
    settings = {"kind": "remote", "weight": 1.0, "batch_size": 4, "url": url, "timeout_s": timeout_s, "retries": retries, "backoff_s": 0.0}
    return choose({"remote": settings}, None)["remote"].reward


def samples(rows=3, side=8, seed=0):
    images = torch.randint(0, 256, (rows, 3, side, side), generator=torch.Generator().manual_seed(seed)) / 255
    prompts = [f"prompt {i} é" for i in range(rows)]
    return images, prompts, [Row(id=str(i), prompt=p, size=(side, side)) for i, p in enumerate(prompts)]


def test_a_served_option_scores_as_at_home():
    images, prompts, rows = samples()
    home = choose({"x": {"kind": "colour", "weight": 1.0, "batch_size": 4, "which": "blue"}}, None)["x"].reward
    with served("red", "which=blue") as url:
        reward = remote(url)
        reward.prepare(torch.device("cpu"), None)
        torch.testing.assert_close(reward.score(images, prompts, rows), home.score(images, prompts, rows))
        video = images[None].expand(2, -1, -1, -1, -1)
        torch.testing.assert_close(reward.score(video, prompts[:2], rows[:2]), home.score(video, prompts[:2], rows[:2]))


def test_a_class_of_ones_own_gets_ids_and_its_nan_comes_back():
    images, prompts, rows = samples(4)
    with served(f"{__name__}:Ids") as url:
        found = remote(url).score(images, prompts, rows)
    torch.testing.assert_close(found[:3], torch.tensor([0.008, 1.008, 2.008]))
    assert found[3].isnan()


def test_a_reward_that_raises_there_says_why_here():
    images, _, rows = samples()
    with served(f"{__name__}:Ids") as url, pytest.raises(Unscored, match="500.*bad prompt"):
        remote(url, retries=0).score(images, ["bad"] * 3, rows)


def test_what_is_no_request_is_answered_and_the_server_goes_on():
    with served(f"{__name__}:Ids") as url:
        reward = remote(url, retries=0)
        with pytest.raises(Unscored, match="400"):
            reward.score(*samples()[:2], samples()[2][:2])
        assert len(reward.score(*samples())) == 3


@pytest.mark.parametrize(("answer", "reason"), [
    ((503, "{}"), "503"),
    ((200, "no JSON"), "Expecting value"),
    ((200, "[1, 2, 3]"), "no list of 3 scores"),
    ((200, '{"scores": [1, 2]}'), "no list of 3 scores"),
    ((200, '{"scores": [1, 2, "3"]}'), "'3' is no score"),
    ((200, '{"scores": [1, 2, true]}'), "True is no score"),
])  # fmt: skip
def test_a_wrong_answer_is_asked_for_again_and_then_is_none(answer, reason):
    serving = answering(answer)
    with running(serving) as url, pytest.raises(Unscored, match=reason):
        remote(url).score(*samples())
    assert serving.handler.asked == 3


def test_a_right_answer_after_wrong_ones_counts():
    with running(answering((503, ""), (200, "?"), (200, json.dumps({"scores": [1, None, 3]})))) as url:
        found = remote(url).score(*samples())
    assert found[[0, 2]].tolist() == [1, 3] and found[1].isnan()


def test_a_late_answer_is_none():
    with running(answering((None, 0.5))) as url, pytest.raises(Unscored, match="timed out"):
        remote(url, retries=0, timeout_s=0.05).score(*samples())


def test_a_wrong_answer_costs_its_batch_alone(caplog):
    images, prompts, rows = samples(8)
    serving = answering((200, json.dumps({"scores": [0, 1, 2, 3]})), (500, ""))
    with running(serving) as url, Scoring({"far": Chosen(remote(url), 1.0, 4)}, group_size=4) as scoring:
        scoring.submit(images, prompts, rows, [0] * 8)
        found = scoring.result()["far"]
    assert found[:4].tolist() == [0, 1, 2, 3] and found[4:].isnan().all() and scoring.failures == {"far": 4}
    assert serving.handler.asked == 1 + 3  # not once more for each sample
    assert caplog.text.count("reward far failed on 4 samples (Unscored: http://127.0.0.1") == 1


def test_no_server_is_told_before_the_run():
    serving = answering((200, ""))
    serving.server_close()
    with pytest.raises(Failure, match="no reward server answers at http://127.0.0.1"):
        remote(f"http://127.0.0.1:{serving.server_port}").prepare(torch.device("cpu"), None)


@pytest.mark.parametrize("url", [None, "", "localhost:8100", "ftp://host/x", "http://"])
def test_an_address_must_be_one(url):
    with pytest.raises(ConfigError, match="reward.remote.url: is .*http://HOST:PORT"):
        remote(url)


def test_what_cannot_be_served_is_refused(capsys):
    assert reward_server.main(["--reward", f"{__name__}:Groups"]) == 2
    assert "scores whole groups" in capsys.readouterr().err
    assert reward_server.main(["--reward", "red", "which=pink"]) == 2
    assert "reward.red.which: there is no 'pink'" in capsys.readouterr().err
    assert reward_server.main(["--reward", "nearest"]) == 2
    assert "no run whose data could be compared" in capsys.readouterr().err
