"""Text one token at a time: cases B1, B3, B5, B6, B7, B10, B11, B12, B14, B16, A16, forged markers."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engine_harness import DEMO_MODEL
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from moorage.engine.errors import InvalidRequest, ModelError, UnsupportedModel
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


def sentencepiece(directory: Path) -> ModelTokenizer:
    """Ids 0 = <s>, 1 … 256 = the bytes, then pieces; laid out as in Llama 2."""
    pieces = ["▁", *"DoneNxtispq.", "▁N", "▁Ne", "▁Nex", "▁Next", "▁i", "▁is", "▁p"]
    vocabulary = {"<s>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in dict.fromkeys(pieces):
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "N"), ("▁N", "e"), ("▁Ne", "x"), ("▁Nex", "t"), ("▁", "i"), ("▁i", "s")]
    model = models.BPE(
        vocab=vocabulary, merges=[*merges, ("▁", "p")], byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return ModelTokenizer(directory)


def library(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def edited(directory: Path, edit: Callable[[dict[str, Any]], None]) -> ModelTokenizer:
    """The demo model's tokenizer with an edited tokenizer.json."""
    spec = json.loads((DEMO_MODEL / "tokenizer.json").read_text())
    edit(spec)
    (directory / "tokenizer.json").write_text(json.dumps(spec))
    return ModelTokenizer(directory)


def deltas_of(
    tokenizer: ModelTokenizer, ids: Sequence[int], before: Sequence[int] = ()
) -> list[str]:
    decoder = tokenizer.decode_stream(before)
    return [*[decoder.feed(token).text for token in ids], decoder.finish()]


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


def test_b5_bytes_of_a_sentencepiece_prompt_are_completed(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    many = "€你好😀" * 3
    before = [0, *tokenizer.encode("Done. " + many, allow_special=False)]
    euro = [byte + 1 for byte in "€".encode()]
    assert deltas_of(tokenizer, [euro[2], *euro], [*before, *euro[:2]]) == ["€", "", "", "€", ""]
    assert deltas_of(tokenizer, euro, before) == ["", "", "€", ""]


@pytest.mark.parametrize("text", ["Done. Next is", "p q", "  p", "€ 😀. p", "is\n is"])
def test_b6_sentencepiece_spaces_are_those_of_the_whole_list(tmp_path: Path, text: str) -> None:
    tokenizer = sentencepiece(tmp_path)
    ids = tokenizer.encode(text, allow_special=False)
    whole = library(tmp_path).decode(ids)
    assert whole == text
    assert "".join(deltas_of(tokenizer, ids)) == text
    assert "".join(deltas_of(tokenizer, ids, [0])) == text, "a skipped <s> is nothing shown"
    # Behind a prompt the first space is part of the answer.
    assert "".join(deltas_of(tokenizer, ids, before=ids)) == " " + text


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


def test_text_waits_no_longer_than_a_stop_string_needs(tmp_path: Path) -> None:
    toy = Toy(tmp_path, [b"aab", b"abx"])
    assert toy.stream([b"aab", b"abx", b"a"], stop=("aabc", "ab!")) == ["", "aababx", "", "a"]
    assert toy.stream([b"a", b"a", b"a", b"b"], stop=("aab",)) == ["", "", "a", ""]


LETTERS = ["".join(word) for size in (1, 2, 3) for word in itertools.product("ab", repeat=size)]


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(LETTERS), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
@example(["aba"], ["b", "aba"])
@example(["bab", "a"], ["aba", "ba"])
def test_the_cut_of_a_stop_string_does_not_depend_on_the_tokens(
    letters_tokenizer: Toy, words: list[str], stop: list[str]
) -> None:
    toy = letters_tokenizer
    text = "".join(words)
    # The definition: the first end of any stop string, and of those the earliest begin.
    ends = [
        (end, end - len(one))
        for end in range(len(text) + 1)
        for one in stop
        if text[:end].endswith(one)
    ]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(toy.stream([word.encode() for word in words], tuple(stop))) == expected
    assert "".join(toy.stream([c.encode() for c in text], tuple(stop))) == expected


@pytest.fixture(scope="module")
def letters_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return Toy(tmp_path_factory.mktemp("letters"), [word.encode() for word in LETTERS])


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


@pytest.mark.parametrize("special", [True, False], ids=["special", "added"])
def test_tool_markers_are_markers_whether_or_not_the_file_calls_them_special(
    tmp_path: Path, special: bool
) -> None:
    def edit(spec: dict[str, Any]) -> None:  # Qwen3's own file says special: false
        for token in spec["added_tokens"]:
            token["special"] = special or token["content"] not in ("<tool_call>", "</tool_call>")

    tokenizer = edited(tmp_path, edit)
    assert tokenizer.special_tokens["<tool_call>"] == 3
    assert tokenizer.encode("<tool_call>", allow_special=True) == [3]
    assert 3 not in tokenizer.encode("<tool_call>", allow_special=False)
    assert deltas_of(tokenizer, [3, 2, 4]) == ["<tool_call>", "", "</tool_call>", ""]


@settings(deadline=None, max_examples=200)
@given(st.text())
def test_any_text_comes_back_byte_by_byte(demo_tokenizer: ModelTokenizer, text: str) -> None:
    ids = demo_tokenizer.encode(text, allow_special=False)
    assert not set(ids) & set(demo_tokenizer.special_tokens.values())
    assert "".join(deltas_of(demo_tokenizer, ids)) == text == demo_tokenizer.decode(ids)


@pytest.fixture(scope="module")
def demo_tokenizer() -> ModelTokenizer:
    return ModelTokenizer(DEMO_MODEL)


def test_what_stands_beside_the_tokenizer_is_read(demo_tokenizer: ModelTokenizer) -> None:
    assert demo_tokenizer.vocab_size == library(DEMO_MODEL).get_vocab_size()
    assert demo_tokenizer.eos_token_ids == (2,)
    assert demo_tokenizer.chat_template == (DEMO_MODEL / "chat_template.jinja").read_text()


def test_settings_of_the_training_run_neither_cut_nor_pad_a_prompt(tmp_path: Path) -> None:
    def edit(spec: dict[str, Any]) -> None:
        spec["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        spec["padding"] = {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        }

    tokenizer = edited(tmp_path, edit)
    for allowed in (True, False):
        ids = tokenizer.encode("one two three four five six", allow_special=allowed)
        assert 4 < len(ids) < 64
        assert tokenizer.decode(ids) == "one two three four five six"


def test_ids_without_text_release_nothing(demo_tokenizer: ModelTokenizer) -> None:
    size = demo_tokenizer.vocab_size
    assert deltas_of(demo_tokenizer, [size, size + 70_000, 2**31 - 1, 33]) == [
        "", "", "", demo_tokenizer.decode([33]), ""
    ]  # fmt: skip


def test_text_that_is_not_unicode_is_the_callers_fault(demo_tokenizer: ModelTokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate at character 2"):
        demo_tokenizer.encode("ab\ud800", allow_special=False)


def test_threads_share_one_tokenizer(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    tokenizer = ModelTokenizer(tmp_path)  # its own, so that the cache is cold
    texts = [f"{number} ü😀 <|im_end|> {{'key': {number}}}" * 5 for number in range(64)]

    def round_trip(text: str) -> str:
        return "".join(deltas_of(tokenizer, tokenizer.encode(text, allow_special=False)))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, texts)) == texts


@pytest.mark.parametrize(
    "decoder", [None, {"type": "CTC"}, {"type": "BPEDecoder", "suffix": "</w>"}]
)
def test_a_decoder_that_cannot_be_streamed_is_refused(tmp_path: Path, decoder: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json: decoder"):
        edited(tmp_path, lambda spec: spec.update(decoder=decoder))


def test_end_tokens_come_from_the_first_file_that_names_some(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "tokenizer.json", tmp_path)
    assert ModelTokenizer(tmp_path).eos_token_ids == ()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert ModelTokenizer(tmp_path).eos_token_ids == (2,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert ModelTokenizer(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    assert ModelTokenizer(tmp_path).eos_token_ids == (2, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "2"}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id is '2'"):
        ModelTokenizer(tmp_path)


def test_a_missing_or_broken_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ModelTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        ModelTokenizer(tmp_path)
