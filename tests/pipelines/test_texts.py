"""Texts that are longer than a text encoder takes are counted as its tokenizer counts them."""

import re

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer, CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

from flowrun.pipelines._texts import long_texts
from flowrun.pipelines._tokenizers import tokenizer

TEXTS = ["", "a", "one two three four", "ＡＢＣ ﷺ é̂", "🙂🙂", "x" * 40, "<|endoftext|> </s>", "a  b\n\nc\t d"]


@pytest.mark.parametrize("kind", [CLIPTokenizer, T5Tokenizer, Qwen2Tokenizer, ByT5Tokenizer, AutoTokenizer])
def test_as_many_tokens_are_counted_as_the_tokenizer_gives(kind):
    made = tokenizer(kind)
    made("cut", truncation=True, max_length=3, padding="max_length")  # what an earlier call has set does not stay
    counts = {text: len(tokenizer(kind)(text)["input_ids"]) for text in TEXTS}
    assert all(count <= len(text.encode()) + 2 for text, count in counts.items()), "why short texts need no counting"
    for most in range(2, max(counts.values()) + 1):
        over = {text for text, count in counts.items() if count > most}
        warnings = long_texts("it", lambda: made, most, TEXTS)
        said = [int(warning.split(" and ")[1].split()[0]) for warning in warnings]
        assert said == ([len(over)] if over else [])
        named = re.findall(r" has (\d+)", "".join(warnings))
        assert set(map(int, named)) <= {counts[text] for text in over} and (named != []) == bool(over)
