"""Texts that are longer than a text encoder takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MARKS, TEMPLATE = 2, 128  # most tokens that a tokenizer here adds to a text, and that a template puts around it
AT_ONCE = 1000  # texts that are counted; what a tokenizer returns for all of 100,000 takes much memory
SHOWN, NAMED = 60, 5  # letters of a long text, and long texts, in a warning


def readers_of(network: str) -> tuple[str, ...]:
    """Parts of a pipeline that may make a network's inputs: of a text encoder its tokenizer, or a processor of texts and
    pictures; of an image encoder what scales pictures."""
    if network == "image_encoder":
        return ("image_processor",)
    if not network.startswith("text_encoder"):
        return ()
    return tuple(network.replace("text_encoder", kind) for kind in ("tokenizer", "processor"))


def turn(tokenizer: Any, enable_thinking: bool) -> int:
    """Tokens that a chat's template puts around what the user says."""
    said = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False, add_generation_prompt=True,
                                         enable_thinking=enable_thinking)  # fmt: skip
    return len(tokenizer(said)["input_ids"])


def no_template(tokenizer: Any) -> int:
    return 0


def long_texts(name: str, tokenizer: Callable[[], Any], most: int, texts: Sequence[str],
               around: Callable[[Any], int] = no_template, rest: str = "is cut off") -> list[str]:  # fmt: skip
    """One warning that counts and names the texts of more than `most` tokens, or none. name: the tokenizer's. rest: what
    becomes of what is too much.

    around: how many of them a tokenizer's template takes. A token is at least one byte, so most texts need no counting, and
    without long ones the tokenizer is not asked for."""
    different = list(dict.fromkeys(texts))
    added = MARKS if around is no_template else MARKS + TEMPLATE
    long = [text for text in different if len(text.encode()) > most - added]
    if not long:
        return []
    most -= around(tokenizer())
    counts = _counts(tokenizer(), long)
    cut = [f"{text[:SHOWN]!r} has {n}" for text, n in zip(long, counts, strict=True) if n > most]
    if not cut:
        return []
    more = f" and {len(cut) - NAMED} more" if len(cut) > NAMED else ""
    what = f"{name} takes {most} tokens and {len(cut)} of {len(different)} texts have more: the rest {rest}"
    return [f"{what} ({'; '.join(cut[:NAMED])}{more})"]


def _counts(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """Tokens of each text. A tokenizer of `tokenizers` is asked without what it also gives through transformers: offsets, lists."""
    parts = [texts[start : start + AT_ONCE] for start in range(0, len(texts), AT_ONCE)]
    if not getattr(tokenizer, "is_fast", False):
        ids = (tokenizer(part, verbose=False, return_attention_mask=False)["input_ids"] for part in parts)
        return [len(of_text) for of_part in ids for of_text in of_part]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # as transformers sets both anew in each call
    backend.no_padding()
    return [len(encoded) for part in parts for encoded in backend.encode_batch_fast(part)]
