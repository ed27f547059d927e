"""The regular expressions of published tokenizers.

The `tokenizers` library matches them with Oniguruma, which backtracks. A few texts can make some other expressions take forever, so a
tokenizer with an expression that is not listed here is served only with the setting `any_tokenizer_pattern`.
"""

_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDS_WITH_MARKS = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDS_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_1, _WORD_2 = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CLIP = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_DEEPSEEK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"

PUBLISHED = frozenset(
    {
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
        rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_ENDS}",  # GPT-4, Llama 3
        rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_ENDS}",  # Qwen 2 and 3
        rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{_ENDS_WITH_MARKS}",  # Qwen 3.5
        rf"{_WORD_1}{_CASELESS}?|{_WORD_2}{_CASELESS}?|\p{{N}}{{1,3}}|{_ENDS_WITH_SLASH}",  # GPT-4o
        rf"{_WORD_1}|{_WORD_2}|\p{{N}}|{_ENDS_WITH_SLASH}",  # Mistral (tekken)
        rf"{_DEEPSEEK}|\s*[\r\n]+|\s+(?!\S)|\s+",  # DeepSeek V3, with the next two
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",  # BLOOM
        _CLIP,
        rf"<\|startoftext\|>|<\|endoftext\|>|{_CLIP}",
        r"\d{1,3}(?=(?:\d{3})*\b)",  # OLMo 2
        # Parts of normalizers and decoders: SentencePiece's models, Albert, T5, DeBERTa, Whisper
        *(r" {2,}", r"\s+", r"\A +| +\z", r"\A▁", r" +▁", r"^▁+$", r"\s", r"\n", r"[\r\n]", r"\d", r"\p{N}", r"[0-9]", r"[0-9][0-9][0-9]"),
        # This repository's decoders, and its encoder-decoders, whose tokens are characters
        r"[^\S\n]*\n+|(?<=\n)[^\S\n]+| ?[\p{L}\p{M}_]+| ?\p{N}| ?[^\s\p{L}\p{M}\p{N}_]+|[^\S\n]+(?!\S)|[^\S\n]+",
        r"[\s\S]",
    }
)
