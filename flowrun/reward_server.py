"""A reward behind HTTP, for `reward=[remote]` of runs elsewhere; one request at a time.

    python -m flowrun.reward_server --reward red --port 8100 which=blue
    python -m flowrun.reward_server --reward pkg.module:Class --port 8100 field=value

What is sent and answered stands in flowrun/rewards/remote.py. It listens on this machine alone unless told otherwise.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import torch
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor

from flowrun.compose import compose
from flowrun.config import ConfigError, UserError
from flowrun.data import Row
from flowrun.data._picture import to_tensor
from flowrun.rewards import Reward, choose
from flowrun.utf8 import speak_utf8


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m flowrun.reward_server", description=__doc__.partition("\n")[0])
    parser.add_argument("--reward", required=True, metavar="NAME", help="an option of conf/reward, or pkg.module:Class")
    parser.add_argument("--host", default="127.0.0.1", help="whom it listens to: 0.0.0.0 for everybody (default: this machine)")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE", help="the reward's settings")
    given = parser.parse_args(arguments)
    try:
        reward = made(given.reward, given.fields, torch.device(given.device))
        with server(reward, given.host, given.port) as serving:
            sys.stderr.write(f"{given.reward} at http://{given.host}:{serving.server_port}\n")
            serving.serve_forever()
    except UserError as error:
        sys.stderr.write(f"flowrun: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        pass
    return 0


def made(name: str, fields: Sequence[str], device: torch.device) -> Reward:
    """The reward, ready to score. fields: FIELD=VALUE. Raises ConfigError, Failure."""
    own = OmegaConf.to_container(OmegaConf.from_dotlist(list(fields)))
    node = {"kind": name, "weight": 1.0, "batch_size": 1} if ":" in name else compose([f"reward=[{name}]"]).reward[name]
    reward = choose({name: {**node, **own}}, None)[name].reward
    if reward.groupwise:
        raise ConfigError("--reward", f"{name} scores whole groups", "serve one that scores pictures")
    reward.prepare(device, None)
    return reward


def server(reward: Reward, host: str, port: int) -> HTTPServer:
    """Bound, not yet serving. port 0: a free one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                images, prompts, rows = _samples(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            except Exception as error:  # whatever is wrong with it, the sender is told and the server goes on
                return self._answer(400, {"error": f"{type(error).__name__}: {error}"})
            try:
                with torch.no_grad():
                    scores = reward.score(images, prompts, rows).tolist()
            except Exception as error:  # a reward's own; likewise
                return self._answer(500, {"error": f"{type(error).__name__}: {error}"})
            return self._answer(200, {"scores": [score if score == score else None for score in scores]})

        def _answer(self, status: int, content: Mapping[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return HTTPServer((host, port), Handler)


def _samples(request: Mapping[str, Any]) -> tuple[Tensor, list[str], list[Row]]:
    """What `Reward.score` takes: [B, 3, H, W], or [B, F, 3, H, W] when samples have several frames, in [0, 1]."""
    frames = torch.stack([torch.stack([_decoded(png) for png in sample]) for sample in request["images"]])  # uint8 [B, F, 3, H, W]
    images = (frames if frames.shape[1] > 1 else frames[:, 0]).float() / 255
    size = (images.shape[-2], images.shape[-1])
    prompts = [str(prompt) for prompt in request["prompts"]]
    rows = [Row(id=str(name), prompt=prompt, size=size) for name, prompt in zip(request["ids"], prompts, strict=True)]
    if len(rows) != len(images):
        raise ValueError(f"{len(images)} images with {len(rows)} prompts")
    return images, prompts, rows


def _decoded(png: str) -> Tensor:
    with Image.open(io.BytesIO(base64.b64decode(png)), formats=["PNG"]) as picture:
        return to_tensor(picture.convert("RGB"))


if __name__ == "__main__":
    speak_utf8()
    sys.exit(main())
