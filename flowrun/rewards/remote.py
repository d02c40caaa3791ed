"""Scores from a server, for rewards that need another environment or another machine: HTTP POST, JSON both ways.

    {"images": [[PNG in base64, one per frame], ...], "prompts": [...], "ids": [...]}   ->   {"scores": [0.5, null, ...]}

null is a sample without a score. `python -m flowrun.reward_server` serves any reward of flowrun's in this way.
"""

from __future__ import annotations

import base64
import io
import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from flowrun.config import ConfigError, Failure
from flowrun.data import Row, Source
from flowrun.rewards import Reward, Unscored
from flowrun.rewards._frames import to_pil

PORTS = {"http": 80, "https": 443}
MOST = 300  # bytes shown of a refusal


class Remote(Reward):
    @dataclass(kw_only=True, slots=True)
    class Config:
        url: str | None
        timeout_s: float
        retries: int
        backoff_s: float

    def check(self, key: str, source: Source | None) -> None:
        parts = urlsplit(self.config.url or "")
        if parts.scheme not in PORTS or not parts.hostname:
            raise ConfigError(f"{key}.url", f"is {self.config.url!r}", "give the server's address, http://HOST:PORT")
        for name, least in (("timeout_s", 0.001), ("retries", 0), ("backoff_s", 0)):
            if not getattr(self.config, name) >= least:
                raise ConfigError(f"{key}.{name}", f"is {getattr(self.config, name)}", f"must be at least {least}")

    def prepare(self, device: torch.device, source: Source | None) -> None:
        """Raises Failure when nobody listens there."""
        parts = urlsplit(self.config.url)
        try:
            socket.create_connection((parts.hostname, parts.port or PORTS[parts.scheme]), self.config.timeout_s).close()
        except OSError as error:
            raise Failure(f"no reward server answers at {self.config.url}: {error}", "start it, python -m flowrun.reward_server") from error

    def score(self, images: Tensor, prompts: Sequence[str], rows: Sequence[Row]) -> Tensor:
        frames = images if images.ndim == 5 else images[:, None]             # [B, F, 3, H, W]
        body = {"images": [_pngs(one) for one in frames], "prompts": list(prompts), "ids": [row.id for row in rows]}
        request = Request(self.config.url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        for attempt in range(self.config.retries + 1):
            try:
                with urlopen(request, timeout=self.config.timeout_s) as answer:
                    return _scores(answer.read(), len(images))
            except (OSError, HTTPException, ValueError) as error:  # no connection, another status, a wrong answer
                reason = f"{self.config.url}: {error}{_said(error)}"
            if attempt < self.config.retries:
                time.sleep(self.config.backoff_s * 2**attempt)
        raise Unscored(reason)


def _said(error: Exception) -> str:
    """What the server says about its refusal."""
    return f" {error.read(MOST).decode(errors='replace')}" if isinstance(error, HTTPError) else ""


def _pngs(frames: Tensor) -> list[str]:
    found = []
    for picture in to_pil(frames):
        file = io.BytesIO()
        picture.save(file, format="PNG")
        found.append(base64.b64encode(file.getvalue()).decode())
    return found


def _scores(answer: bytes, count: int) -> Tensor:
    """[count]. Raises ValueError for anything but a list of so many numbers or nulls."""
    found = json.loads(answer)
    scores = found.get("scores") if isinstance(found, dict) else None
    if not isinstance(scores, list) or len(scores) != count:
        raise ValueError(f"the answer has no list of {count} scores")
    if wrong := [score for score in scores if score is not None and type(score) not in (int, float)]:
        raise ValueError(f"{wrong[0]!r} is no score")
    return torch.tensor([torch.nan if score is None else score for score in scores], dtype=torch.float32)
