"""Tokenizers made in memory, for random text encoders: letters are the tokens. Nothing is read."""

from __future__ import annotations

from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTokenizer, PreTrainedTokenizerBase, T5Tokenizer

CLIP_TOKENS, T5_TOKENS = 77, 512  # the longest text each takes, as the real ones do
WORD = "\u2581"  # how T5 writes the space before a word


def tokenizer(cls: type) -> PreTrainedTokenizerBase:
    """Raises KeyError for a class that is not known here."""
    return {CLIPTokenizer: _clip, T5Tokenizer: _t5}[cls]()


def _clip() -> CLIPTokenizer:
    """Every byte is a token, and another one at the end of a word."""
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[], model_max_length=CLIP_TOKENS)


def _t5() -> T5Tokenizer:
    """Every printable ASCII letter is a token; others are unknown."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), (WORD, -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_TOKENS)
