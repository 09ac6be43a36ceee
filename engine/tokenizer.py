"""The model's tokenizer: encode, and decode one token at a time with stop strings.

Live text and replayed text come from the same class fed the same ids, so they are equal by construction.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from moorage.engine.config import read_json
from moorage.engine.errors import ModelError

KEPT_MARKERS = frozenset({"<tool_call>", "</tool_call>", "<think>", "</think>"})
"""Special tokens that stay in the text, because the tool-call and reasoning parsers need them."""
_WINDOW = 8
"""Tokens of context for decoders that are not byte-level: enough for any merge of spaces or byte runs."""


@dataclass(frozen=True)
class DecodedText:
    """What one token released."""

    text: str
    stopped: bool
    """A stop string was completed; the text is cut before it."""


class _Pieces(Protocol):
    """Token ids → text pieces that may be joined."""

    def feed(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class OutputDecoder:
    """Incremental text of one generation. Cost per token is bounded, whatever the length.

    Never gives half a character: bytes wait until the character is complete (case B1), and a character that is cut off
    by the end of the generation becomes one U+FFFD in `finish` (case B3). Text that could begin a stop string waits too.
    """

    def __init__(self, pieces: _Pieces, stop: tuple[str, ...]) -> None:
        self._pieces = pieces
        self._stop = stop
        self._held = ""
        self._stopped = False

    def feed(self, token_id: int) -> DecodedText:
        """Text released by the next token. After a stop string nothing more comes."""
        if self._stopped:
            return DecodedText("", True)
        return self._release(self._pieces.feed(token_id))

    def finish(self) -> str:
        """What was held back, at the end of a generation that no stop string ended."""
        if self._stopped:
            return ""
        last = self._release(self._pieces.flush())
        held, self._held = self._held, ""
        return last.text if last.stopped else last.text + held

    def _release(self, text: str) -> DecodedText:
        if not self._stop:
            return DecodedText(text, False)
        buffer = self._held + text
        found = [at for stop in self._stop if (at := buffer.find(stop)) >= 0]
        if found:
            self._stopped, self._held = True, ""
            return DecodedText(buffer[: min(found)], True)
        keep = max(_overlap(buffer, stop) for stop in self._stop)
        cut = len(buffer) - keep
        self._held = buffer[cut:]
        return DecodedText(buffer[:cut], False)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class ModelTokenizer:
    """`tokenizer.json` of a model folder. Thread-safe: nothing here changes after construction."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ModelError that names the file."""
        path = model_dir / "tokenizer.json"
        spec = read_json(path)
        try:
            # Two objects, because whether markers are read as text is a property of the whole tokenizer.
            self._marked = Tokenizer.from_file(str(path))
            self._plain = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{path} is not a tokenizer: {error}") from error
        self._plain.encode_special_tokens = True
        self.vocab_size: int = self._marked.get_vocab_size(with_added_tokens=True)
        added = {int(token["id"]): token for token in spec.get("added_tokens", [])}
        self.special_tokens: dict[str, int] = {
            token["content"]: index for index, token in added.items() if token["special"]
        }
        self._skipped = frozenset(
            index for text, index in self.special_tokens.items() if text not in KEPT_MARKERS
        )
        self._added_text = {index: str(token["content"]) for index, token in added.items()}
        self._byte_level = _is_byte_level(spec.get("decoder"))
        self.eos_token_ids = _eos_ids(model_dir, self.special_tokens)
        self.chat_template = _chat_template(model_dir)
        self._bytes_of = lru_cache(maxsize=1 << 16)(self._token_bytes)

    def encode(self, text: str, *, allow_special: bool) -> list[int]:
        """Token ids. Without `allow_special` the strings of special tokens are plain text, so that nobody's words can
        forge a turn."""
        tokenizer = self._marked if allow_special else self._plain
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode_stream(
        self, token_ids_before: Sequence[int], stop: tuple[str, ...] = ()
    ) -> OutputDecoder:
        """A decoder for what follows `token_ids_before`; never emits any of their text (case B5)."""
        before = token_ids_before[-_WINDOW:]
        pieces: _Pieces = (
            _BytePieces(self, before) if self._byte_level else _WindowPieces(self, before)
        )
        return OutputDecoder(pieces, stop)

    def is_skipped(self, token_id: int) -> bool:
        """Whether the token never shows in text."""
        return token_id in self._skipped

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token of a byte-level vocabulary; unknown ids have none."""
        return self._bytes_of(token_id)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids without the skipped ones."""
        shown = [token for token in token_ids if token not in self._skipped]
        text: str = self._marked.decode(shown, skip_special_tokens=False)
        return text

    def _token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added_text:
            return self._added_text[token_id].encode()
        token = self._marked.id_to_token(token_id)
        if token is None:
            return b""
        table = _byte_alphabet()
        return bytes(table[character] for character in token)


class _BytePieces:
    """Byte-level vocabularies: exact, each token is some bytes."""

    def __init__(self, tokenizer: ModelTokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        last = b"".join(
            b"" if tokenizer.is_skipped(token) else tokenizer.token_bytes(token) for token in before
        )
        self._decoder.decode(_open_character(last))

    def feed(self, token_id: int) -> str:
        if self._tokenizer.is_skipped(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


def _open_character(data: bytes) -> bytes:
    """The bytes at the end that begin a character and do not complete it."""
    for length in range(1, min(3, len(data)) + 1):
        lead = data[-length]
        if lead >= 0xC0:
            needed = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return data[-length:] if needed > length else b""
        if lead < 0x80:
            return b""
    return b""


class _WindowPieces:
    """Other vocabularies (sentencepiece and its like): decode a short window, give what the last token added."""

    def __init__(self, tokenizer: ModelTokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = [token for token in before if not tokenizer.is_skipped(token)]
        self._shown = len(self._window)
        """Leading tokens of the window whose text is out."""

    def feed(self, token_id: int) -> str:
        if self._tokenizer.is_skipped(token_id):
            return ""
        self._window.append(token_id)
        before = self._tokenizer.decode(self._window[: self._shown])
        now = self._tokenizer.decode(self._window)
        # An open byte run shows as U+FFFD; it is shown once it is complete or clearly never will be.
        if now.endswith("\ufffd") and len(self._window) - self._shown < 4:
            return ""
        self._window = self._window[-_WINDOW:]
        self._shown = len(self._window)
        return now[len(before) :]

    def flush(self) -> str:
        before = self._tokenizer.decode(self._window[: self._shown])
        rest = self._tokenizer.decode(self._window)[len(before) :]
        return rest.rstrip("\ufffd") + "\ufffd" if rest.endswith("\ufffd") else rest


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019, `bytes_to_unicode`)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    parts = decoder.get("decoders", [decoder])
    return any(part.get("type") == "ByteLevel" for part in parts)


def _eos_ids(model_dir: Path, special: dict[str, int]) -> tuple[int, ...]:
    """End tokens: of generation_config.json, else of the tokenizer's config, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        if (model_dir / name).exists():
            value = read_json(model_dir / name).get("eos_token_id")
            ids = value if isinstance(value, list) else [value]
            if all(isinstance(item, int) for item in ids):
                return tuple(ids)
    config = _tokenizer_config(model_dir)
    token = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return (special[text],) if isinstance(text, str) and text in special else ()


def _chat_template(model_dir: Path) -> str:
    path = model_dir / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = _tokenizer_config(model_dir).get("chat_template")
    return template if isinstance(template, str) else ""


def _tokenizer_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}
