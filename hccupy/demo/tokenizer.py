"""Text to token ids and back, with the vocabulary, merges and special tokens that the GGUF file holds."""

from __future__ import annotations

from typing import Any

from .missing import need
from .weights import field

CONTROL = 3  # GGUF's token type of special tokens such as <|im_end|>
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Byte-level BPE as SmolLM2 was trained with: every digit a token of its own, no space put in front."""

    def __init__(self, reader: Any) -> None:
        self._library = need("tokenizers", '"hccupy[demo]"')
        words = field(reader, "tokenizer.ggml.tokens")
        kinds = field(reader, "tokenizer.ggml.token_type")
        merges = [tuple(pair.split(" ")) for pair in field(reader, "tokenizer.ggml.merges")]
        special = [word for word, kind in zip(words, kinds, strict=True) if kind == CONTROL]
        lib = self._library
        self._bpe = lib.Tokenizer(lib.models.BPE({word: i for i, word in enumerate(words)}, merges))
        self._bpe.pre_tokenizer = lib.pre_tokenizers.Sequence(
            [lib.pre_tokenizers.Digits(individual_digits=True), lib.pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = lib.decoders.ByteLevel()
        self._bpe.add_special_tokens(special)
        end = field(reader, "tokenizer.ggml.eos_token_id")
        self.stop = {end, field(reader, "tokenizer.ggml.unknown_token_id")}  # <|im_end|> and <|endoftext|>

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        return list(self._bpe.encode(text).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return str(self._bpe.decode(ids))

    def stream(self) -> Stream:
        """A decoder that takes one token at a time."""
        return Stream(self, self._bpe, self._library.decoders.DecodeStream(skip_special_tokens=True))


class Stream:
    """Text as its tokens come. A character of several tokens (an emoji) is held back until it is whole."""

    def __init__(self, tokenizer: Tokenizer, bpe: Any, decoder: Any) -> None:
        self._tokenizer, self._bpe, self._decoder = tokenizer, bpe, decoder
        self._ids: list[int] = []
        self._shown = 0

    def step(self, token: int) -> str:
        """The text that `token` completes, often one word, sometimes none."""
        self._ids.append(token)
        text = self._decoder.step(self._bpe, token) or ""
        self._shown += len(text)
        return text

    def rest(self) -> str:
        """What is still held back at the end: a character cut short shows as U+FFFD."""
        return self._tokenizer.decode(self._ids)[self._shown :]


def chat_prompt(message: str) -> str:
    """SmolLM2-Instruct's chat template for one user message (the file has it in Jinja, for any number of them)."""
    return f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
