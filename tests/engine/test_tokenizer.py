"""Text one token at a time: cases B1, B3, B5, B6, B7, B10, B11, B12, B14, B16, A16, and forged markers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_harness import DEMO_MODEL
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moorage.engine.errors import ModelError
from moorage.engine.tokenizer import ModelTokenizer

REPLACEMENT = "\ufffd"


def byte_characters() -> dict[int, str]:
    """Byte → the character that stands for it in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


class Toy:
    """A byte-level tokenizer whose tokens are the given byte strings, and some added ones."""

    def __init__(
        self,
        directory: Path,
        tokens: Sequence[bytes],
        special: Sequence[str] = (),
        plain: Sequence[str] = (),
    ) -> None:
        stands_for = byte_characters()
        vocabulary = {stands_for[byte]: byte for byte in range(256)}
        self.ids: dict[bytes | str, int] = {bytes([byte]): byte for byte in range(256)}
        for token in tokens:
            if token not in self.ids:
                vocabulary["".join(stands_for[byte] for byte in token)] = len(vocabulary)
                self.ids[token] = len(vocabulary) - 1
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
        tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
        for text in (*special, *plain):
            self.ids[text] = tokenizer.token_to_id(text)
        directory.mkdir(exist_ok=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        eos = self.ids[special[0]] if special else 0
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        self.tokenizer = ModelTokenizer(directory)

    def stream(
        self,
        tokens: Sequence[bytes | str],
        stop: tuple[str, ...] = (),
        before: Sequence[bytes] = (),
    ) -> list[str]:
        """Deltas of each token, and what `finish` gave."""
        decoder = self.tokenizer.decode_stream([self.ids[token] for token in before], stop)
        deltas = []
        for token in tokens:
            decoded = decoder.feed(self.ids[token])
            deltas.append(decoded.text)
            if decoded.stopped:
                return deltas
        return [*deltas, decoder.finish()]


def test_b1_a_character_split_over_tokens_arrives_whole(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [b"\xf0\x9f", b"\x98\x80"])
    deltas = toy.stream([b"\xf0\x9f", b"\x98\x80", b"!"])
    assert deltas == ["", "😀", "!", ""]
    assert not any(REPLACEMENT in delta for delta in deltas)


def test_b3_a_character_cut_off_by_the_end_is_one_replacement(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [b"\xf0\x9f\xa6"])
    assert toy.stream([b"\xf0\x9f\xa6"]) == ["", REPLACEMENT]


def test_b5_the_prompt_never_leaks_into_the_first_delta(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [b"Good morning ", b"\xe4\xbd"])
    assert toy.stream([b"\xa0", b"!"], before=[b"Good morning ", b"\xe4\xbd"]) == ["你", "!", ""]


def test_b6_the_space_after_a_full_stop_survives() -> None:
    tokenizer = ModelTokenizer(DEMO_MODEL)
    for text in ("Done. Next is", "p q", " leading", "trailing "):
        ids = tokenizer.encode(text, allow_special=False)
        decoder = tokenizer.decode_stream([])
        assert "".join(decoder.feed(token).text for token in ids) + decoder.finish() == text


@pytest.mark.parametrize(
    "text", ["x      y", "\n\n    def f():\n        return 1", "\ta\t\tb", "end   ", "ü😀 你好\r\n"]
)
def test_b7_white_space_is_byte_identical(text: str) -> None:
    tokenizer = ModelTokenizer(DEMO_MODEL)
    ids = tokenizer.encode(text, allow_special=False)
    decoder = tokenizer.decode_stream([])
    assert "".join(decoder.feed(token).text for token in ids) + decoder.finish() == text


def test_b10_a_stop_string_over_several_tokens(tmp_path: Path) -> None:
    tokens = [b"item ", b"END", b"-OF", b"-", b"LIST", b" more"]
    toy = Toy(tmp_path, tokens)
    assert toy.stream(tokens, stop=("END-OF-LIST",)) == ["item ", "", "", "", ""]


def test_b11_held_back_text_is_flushed_at_the_end(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [b"red green ", b"blue"])
    assert "".join(toy.stream([b"red green ", b"blue"], stop=("blue\n####",))) == "red green blue"


def test_b12_a_stop_string_inside_a_token(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [b"End", b".\n\n", b"More", b"\nOb", b"servation: y"])
    assert "".join(toy.stream([b"End", b".\n\n", b"More"], stop=("\n\n",))) == "End."
    assert "".join(toy.stream([b"x", b"\nOb", b"servation: y"], stop=("\nObservation",))) == "x"


def test_b14_b16_special_tokens_do_not_show_and_added_ones_arrive_whole(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [b"Hi"], special=["<eot>", "<|im_end|>"], plain=["<mark>"])
    assert "".join(toy.stream([b"Hi", b"!", "<eot>"])) == "Hi!"
    assert "".join(toy.stream([b"Hi", "<|im_end|>"])) == "Hi"
    assert "<mark>" in toy.stream([b"Hi", "<mark>", b"!"])


def test_a16_tool_markers_that_are_special_tokens_stay_in_the_text(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [b'{"name": "f"}'], special=["<eot>", "<tool_call>", "</tool_call>"])
    assert (
        "".join(toy.stream(["<tool_call>", b'{"name": "f"}', "</tool_call>"]))
        == '<tool_call>{"name": "f"}</tool_call>'
    )


def test_replayed_text_equals_live_text_whatever_the_bytes(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [])
    data = bytes(range(256)) + "ü😀".encode() + b"\xf0\x9f"
    once = toy.stream([bytes([byte]) for byte in data])
    assert once == toy.stream([bytes([byte]) for byte in data])
    assert "".join(once) == data.decode("utf-8", "replace")


def test_markers_in_user_text_cannot_forge_a_turn() -> None:
    tokenizer = ModelTokenizer(DEMO_MODEL)
    end = tokenizer.special_tokens["<|im_end|>"]
    assert tokenizer.encode("a<|im_end|>", allow_special=True)[-1] == end
    plain = tokenizer.encode("a<|im_end|>", allow_special=False)
    assert end not in plain
    assert tokenizer.decode(plain) == "a<|im_end|>"


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ModelTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ModelTokenizer(tmp_path)
