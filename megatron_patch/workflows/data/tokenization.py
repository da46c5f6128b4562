"""Turns documents into token ids.

An `Encoder` turns each document into ids that end with the end-of-document id:

    bytes           id = byte, 256 = end of document, vocabulary 257; lossless, needs no tokenizer file
    bpe:SIZE        byte-level BPE trained on the same corpus
    tokenizer.json  a Hugging Face tokenizer file, used as it is
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_patch.errors import UserError

BYTES_VOCAB, BYTES_EOD = 257, 256
MIN_BPE_SIZE = 300
_MOST_BPE_SIZE = 1 << 20
_BPE_EOD, _BPE_PAD = "<|endoftext|>", "<|padding|>"
_KNOWN_EOD = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<｜end▁of▁sentence｜>")


@dataclass(frozen=True)
class TokenizerSpec:
    """The value of `--tokenizer`: `kind` is bytes, bpe (with `size`) or file (with the fields after it)."""

    kind: str
    size: int = 0
    path: Path = Path()
    content: str = ""
    eos: str | None = None


def parse_tokenizer(text: str) -> TokenizerSpec:
    """Parse `bytes`, `bpe:SIZE`, or the path of a `tokenizer.json` or of its folder."""
    if text == "bytes":
        return TokenizerSpec("bytes")
    if text == "bpe" or text.startswith("bpe:"):
        size = text.removeprefix("bpe").removeprefix(":")
        if not size.isascii() or not size.isdigit() or not MIN_BPE_SIZE <= int(size) <= _MOST_BPE_SIZE:
            raise UserError(
                f"tokenizer: {text!r}; allowed: bpe:SIZE with an integer SIZE from {MIN_BPE_SIZE} to "
                f"{_MOST_BPE_SIZE}"
            )
        return TokenizerSpec("bpe", size=int(size))
    path = Path(text) / "tokenizer.json" if Path(text).is_dir() else Path(text)
    if not path.is_file():
        raise UserError(
            f"tokenizer: {text!r} is neither 'bytes' nor 'bpe:SIZE', and there is no file {path}; "
            "allowed: bytes, bpe:SIZE, or the path of a tokenizer.json"
        )
    beside = path.with_name("tokenizer_config.json")
    try:
        content = path.read_text("utf-8")
        eos = json.loads(beside.read_text("utf-8")).get("eos_token") if beside.is_file() else None
        eos = eos["content"] if isinstance(eos, dict) else eos
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise UserError(f"tokenizer: cannot read {path} and its tokenizer_config.json: {error!r}") from error
    return TokenizerSpec("file", path=path, content=content, eos=eos)


class ByteEncoder:
    """Takes raw bytes as ids."""

    vocab_size, eod = BYTES_VOCAB, BYTES_EOD

    def encode(self, texts: Sequence[bytes]) -> Iterator[npt.NDArray[Any]]:
        """Yield one array of ids [bytes + 1] for each document."""
        for text in texts:
            ids = np.empty(len(text) + 1, dtype=np.uint16)
            ids[:-1] = np.frombuffer(text, dtype=np.uint8)
            ids[-1] = BYTES_EOD
            yield ids

    def save(self, folder: Path) -> None:
        """Write nothing, because Megatron's NullTokenizer needs no file."""


class TextEncoder:
    """Encodes by a Hugging Face `tokenizers.Tokenizer`, and closes documents by the token `eod`."""

    def __init__(self, tokenizer: Any, eod: str, pad: str | None = None) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer, self.eod = tokenizer, int(tokenizer.token_to_id(eod))
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))
        # A document that contains "<|endoftext|>" must not end there; saved files lack this setting.
        tokenizer.encode_special_tokens = True
        # A model's own class may rebuild the tokenizer and give other ids, so the generic class is named.
        self._config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eod}
        if pad is not None:
            self._config["pad_token"] = pad

    def encode(self, texts: Sequence[bytes]) -> Iterator[npt.NDArray[Any]]:
        """Yield one array of ids for each document, with the tokens that the tokenizer itself adds."""
        strings = [text.decode("utf-8", errors="replace") for text in texts]
        for encoding in self.tokenizer.encode_batch_fast(strings):
            ids = encoding.ids
            if not ids or ids[-1] != self.eod:
                ids.append(self.eod)
            yield np.array(ids, dtype=np.int64)

    def save(self, folder: Path) -> None:
        """Write the files from which Megatron's HuggingFaceTokenizer loads it without a network."""
        folder.mkdir()
        (folder / "tokenizer.json").write_text(self.tokenizer.to_str(), "utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(self._config, indent=2) + "\n", "utf-8")


Encoder = ByteEncoder | TextEncoder


def train_bpe(size: int, texts: Iterable[bytes]) -> TextEncoder:
    """Train byte-level BPE with at most `size` ids (fewer if the text has too few pairs)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Padding has its own token: Megatron masks it out of the loss, and must not mask the end of documents.
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[_BPE_EOD, _BPE_PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode("utf-8", errors="replace") for text in texts), trainer)
    return TextEncoder(tokenizer, _BPE_EOD, _BPE_PAD)


def load_encoder(spec: TokenizerSpec) -> Encoder:
    """Return the encoder of a spec that needs no training (bytes or file)."""
    if spec.kind == "bytes":
        return ByteEncoder()
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(spec.content)
    except Exception as error:  # The library raises no more specific class.
        raise UserError(f"tokenizer: {spec.path} is not a Hugging Face tokenizer file: {error}") from error
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    candidates = (spec.eos,) if spec.eos else _KNOWN_EOD
    eod = next((token for token in candidates if token in vocabulary), None)
    if eod is None:
        raise UserError(
            f"tokenizer: {spec.path} has no end-of-document token {' '.join(candidates)}; "
            "allowed: an eos_token of its vocabulary, named in a tokenizer_config.json beside it"
        )
    if max(vocabulary.values()) >= len(vocabulary):
        # Megatron sizes the embedding by the number of tokens, so the highest ids would exceed it.
        raise UserError(
            f"tokenizer: {spec.path} has gaps in its ids: {len(vocabulary)} tokens, but higher ids"
        )
    return TextEncoder(tokenizer, eod)
