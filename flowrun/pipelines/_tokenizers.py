"""Tokenizers made in memory, for random text encoders: letters are the tokens. Nothing is read."""

from __future__ import annotations

import json

from diffusers.modular_pipelines.qwenimage import prompt_templates
from tokenizers import Tokenizer, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    ByT5Tokenizer,
    CLIPTokenizer,
    GemmaTokenizer,
    PreTrainedTokenizerBase,
    Qwen2Tokenizer,
    T5Tokenizer,
)

CLIP_TOKENS, T5_TOKENS, QWEN_TOKENS, GEMMA_TOKENS = 77, 512, 1024, 1024  # the longest text each takes, as the real ones do
WORD = "\u2581"  # how T5 writes the space before a word
MARKS = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
TEMPLATES = [prompt_templates.QWENIMAGE_PROMPT_TEMPLATE, prompt_templates.QWENIMAGE_EDIT_PROMPT_TEMPLATE,
             prompt_templates.QWENIMAGE_EDIT_PLUS_IMG_TEMPLATE]  # fmt: skip

# A turn is its role and its content, which is a text or a list of texts and pictures.
CHAT = """
{%- for turn in messages -%}
<|im_start|>{{ turn.role }}
{% if turn.content is string %}{{ turn.content }}{% else %}{% for part in turn.content %}
{%- if part.type == "image" %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor -%}
{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


def tokenizer(cls: type) -> PreTrainedTokenizerBase:
    """Raises KeyError for a class that is not known here."""
    makers = {CLIPTokenizer: _clip, T5Tokenizer: _t5, AutoTokenizer: _t5, ByT5Tokenizer: ByT5Tokenizer, Qwen2Tokenizer: _qwen,
              AutoProcessor: _qwen, GemmaTokenizer: _gemma}  # fmt: skip
    return makers[cls]()


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


def _gemma() -> GemmaTokenizer:
    """Every printable ASCII letter is a token, and every byte for all others."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", WORD]
    pieces += [*(chr(code) for code in range(33, 127)), *(f"<0x{byte:02X}>" for byte in range(256))]
    return GemmaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=GEMMA_TOKENS)


def _qwen() -> Qwen2Tokenizer:
    """Every byte is a token, and every word of Qwen-Image's prompt templates: diffusers cuts those off by counting tokens,
    and would cut off the caption where a template has more of them than with the real tokenizer."""
    letters = sorted(ByteLevel.alphabet())
    words = Tokenizer(models.BPE())
    words.pre_tokenizer = Qwen2Tokenizer(vocab={c: i for i, c in enumerate(letters)}, merges=[]).backend_tokenizer.pre_tokenizer
    everything = trainers.BpeTrainer(vocab_size=10**6, min_frequency=1, initial_alphabet=letters, show_progress=False)
    words.train_from_iterator(TEMPLATES, everything)
    learned = json.loads(words.to_str())["model"]
    vocab = {**learned["vocab"], "<|endoftext|>": len(learned["vocab"])}
    return Qwen2Tokenizer(vocab=vocab, merges=[tuple(pair) for pair in learned["merges"]], model_max_length=QWEN_TOKENS,
                          additional_special_tokens=MARKS, chat_template=CHAT)  # fmt: skip
