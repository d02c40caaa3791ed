"""Rewards on CLIP networks, on tiny random ones, against transformers and plain torch alone."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

from flowrun.config import ConfigError, Failure
from flowrun.rewards import choose
from tests.rewards import clips

PROMPTS = ["a red apple", "star", "a house beside a wide and very deep blue sea"]  # the last one is too long


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    return folder, *clips.save(folder)


def images(rows=3, seed=0):
    return torch.rand(rows, 3, 20, 24, generator=torch.Generator().manual_seed(seed))


def pictures(tensors):
    return [Image.fromarray(np.uint8(np.rint(x.permute(1, 2, 0).numpy() * 255))) for x in tensors]


def made(kind, **fields):
    reward = choose({"x": {"kind": kind, "weight": 1.0, "batch_size": 4, **fields}}, None)["x"].reward
    reward.prepare(torch.device("cpu"), None)
    return reward


@torch.no_grad()
def scores(reward, batch, prompts):
    return reward.score(batch, prompts, [None] * len(prompts))


@torch.no_grad()
def logits(saved, batch, prompts):
    """transformers' own number of each picture and its prompt, one pair at a time: cosine times scale."""
    _, network, tokenizer, processor = saved
    found = []
    for picture, prompt in zip(pictures(batch), prompts, strict=True):
        texts = tokenizer([prompt], truncation=True, max_length=20, return_tensors="pt")
        found.append(network(**texts, **processor(images=[picture], return_tensors="pt")).logits_per_image[0, 0])
    return torch.stack(found)


@pytest.mark.parametrize("scaled", [True, False])
def test_clip_is_the_cosine_or_what_the_network_itself_says(saved, scaled):
    found = scores(made("clip", weights=str(saved[0]), processor=None, scaled=scaled), images(), PROMPTS)
    expected = logits(saved, images(), PROMPTS) / (1 if scaled else torch.tensor(2.0).exp())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.std() > 0.01 * found.abs().max() and found.dtype == torch.float32


def test_a_videos_score_is_the_mean_of_its_frames(saved):
    reward = made("clip", weights=str(saved[0]), processor=None, scaled=True)
    frames = images(4)
    found = scores(reward, frames.reshape(2, 2, 3, 20, 24), PROMPTS[:2])
    expected = logits(saved, frames, [PROMPTS[0]] * 2 + [PROMPTS[1]] * 2).reshape(2, 2).mean(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_tokenizer_and_processor_may_lie_elsewhere(saved, tmp_path):
    saved[1].save_pretrained(tmp_path)
    found = scores(made("clip", weights=str(tmp_path), processor=str(saved[0]), scaled=True), images(), PROMPTS)
    torch.testing.assert_close(found, logits(saved, images(), PROMPTS), rtol=1e-4, atol=1e-5)


def test_a_network_that_lacks_tensors_is_refused(saved, tmp_path):
    clips.save(tmp_path)
    half = {name: tensor for name, tensor in saved[1].state_dict().items() if "text_projection" not in name}
    save_file(half, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Failure, match="lacks 1 tensors of a CLIPModel, e.g. text_projection.weight"):
        made("clip", weights=str(tmp_path), processor=None, scaled=True)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(Failure, match=f"the CLIPModel of {tmp_path} cannot be loaded"):
        made("clip", weights=str(tmp_path), processor=None, scaled=True)


def head(wide=clips.EMBEDDED):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(wide, 12), nn.Dropout(0.2), nn.Linear(12, 8), nn.Dropout(0.2), nn.Linear(8, 1)).eval()


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_aesthetic_is_its_layers_on_the_embedding(saved, tmp_path, suffix):
    layers, file = head(), tmp_path / f"head{suffix}"
    state = {f"layers.{name}": tensor for name, tensor in layers.state_dict().items()}
    torch.save(state, file) if suffix == ".pth" else save_file(state, file)
    found = scores(made("aesthetic", weights=str(saved[0]), head=str(file)), images(), PROMPTS)
    with torch.no_grad():
        points = saved[1].get_image_features(saved[3](images=pictures(images()), return_tensors="pt")["pixel_values"])
        points = getattr(points, "pooler_output", points)
        expected = layers(points / points.norm(dim=-1, keepdim=True))[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert found.std() > 0


def test_a_head_that_does_not_fit_is_refused(saved, tmp_path):
    torch.save({f"layers.{name}": t for name, t in head(wide=7).state_dict().items()}, tmp_path / "head.pth")
    with pytest.raises(Failure, match="reads 7 numbers, .* gives 16; take the CLIP that it was trained on"):
        made("aesthetic", weights=str(saved[0]), head=str(tmp_path / "head.pth"))
    (tmp_path / "text.pth").write_text("no tensors")
    with pytest.raises(Failure, match="text.pth cannot be read"):
        made("aesthetic", weights=str(saved[0]), head=str(tmp_path / "text.pth"))


@pytest.mark.parametrize(("kind", "fields", "words"), [
    ("clip", {"weights": "no folder", "processor": None, "scaled": True}, "x.weights: is 'no folder', which is no folder"),
    ("clip", {"weights": "a/b", "processor": "/absent", "scaled": True}, "x.processor: is '/absent'"),
    ("aesthetic", {"weights": "a/b", "head": None}, "x.head: is null; give sac"),
    ("aesthetic", {"weights": "a/b", "head": "/absent.pth"}, "x.head: /absent.pth is no file"),
    ("hpsv2", {"weights": "a/b", "file": "x.pt", "clip": "c d"}, "x.clip: is 'c d'"),
])  # fmt: skip
def test_places_are_checked_before_anything_loads(kind, fields, words):
    with pytest.raises(ConfigError, match=words):
        choose({"x": {"kind": kind, "weight": 1.0, "batch_size": 4, **fields}}, None)


class Block(nn.Module):
    """A residual block as OpenCLIP's, by torch's own attention."""

    def __init__(self, width):
        super().__init__()
        self.ln_1, self.ln_2, self.attn = nn.LayerNorm(width), nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 4 * width))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(4 * width, width))

    def forward(self, x, mask=None):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        return x + self.mlp(self.ln_2(x))


class Stack(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.resblocks = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x, mask=None):
        for block in self.resblocks:
            x = block(x, mask)
        return x


class Eyes(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.class_embedding, self.positional_embedding = nn.Parameter(torch.empty(width)), nn.Parameter(torch.empty(5, width))
        self.conv1, self.proj = nn.Conv2d(3, width, 8, 8, bias=False), nn.Parameter(torch.empty(width, clips.EMBEDDED))
        self.ln_pre, self.ln_post, self.transformer = nn.LayerNorm(width), nn.LayerNorm(width), Stack(width)

    def forward(self, x):
        x = self.conv1(x).flatten(2).mT  # [B, 4, width]
        x = torch.cat([self.class_embedding.expand(len(x), 1, -1), x], 1) + self.positional_embedding
        return self.ln_post(self.transformer(self.ln_pre(x))[:, 0]) @ self.proj


class OpenClip(nn.Module):
    """OpenCLIP's network in plain torch, under OpenCLIP's names."""

    def __init__(self, width=clips.WIDTH, length=20):
        super().__init__()
        self.visual, self.transformer, self.token_embedding = Eyes(width), Stack(width), nn.Embedding(54, width)
        self.positional_embedding, self.ln_final = nn.Parameter(torch.empty(length, width)), nn.LayerNorm(width)
        self.text_projection, self.logit_scale = nn.Parameter(torch.empty(width, clips.EMBEDDED)), nn.Parameter(torch.empty(()))

    def read(self, ids):
        """ids: [1, L], the last one ends the text."""
        length = ids.shape[1]
        mask = torch.full((length, length), -torch.inf).triu(1)
        x = self.transformer(self.token_embedding(ids) + self.positional_embedding[:length], mask)
        return self.ln_final(x)[:, -1] @ self.text_projection


def test_hpsv2_reads_openclips_weights(saved, tmp_path):
    torch.manual_seed(2)
    network = OpenClip().eval()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    torch.save({"state_dict": network.state_dict(), "epoch": 1}, tmp_path / "hps.pt")
    found = scores(made("hpsv2", weights=str(tmp_path), file="hps.pt", clip=str(saved[0])), images(), PROMPTS)
    with torch.no_grad():
        seen = network.visual(saved[3](images=pictures(images()), return_tensors="pt")["pixel_values"])
        read = torch.cat([network.read(saved[2]([p], truncation=True, max_length=20, return_tensors="pt")["input_ids"]) for p in PROMPTS])
    torch.testing.assert_close(found, torch.cosine_similarity(seen, read), rtol=1e-4, atol=1e-5)


def test_hpsv2_refuses_another_networks_file(saved, tmp_path):
    torch.save({"state_dict": {"visual.proj": torch.zeros(2, 2)}}, tmp_path / "hps.pt")
    with pytest.raises(Failure, match="hps.pt does not fit"):
        made("hpsv2", weights=str(tmp_path), file="hps.pt", clip=str(saved[0]))
