"""The demo model's long dialogues, and its evaluation over Moorage's own engine."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "demo_model"
sys.path.append(str(FOLDER))

import chat  # noqa: E402
import corpus  # noqa: E402
import evaluate  # noqa: E402
import generate  # noqa: E402
import long  # noqa: E402
import runtimes  # noqa: E402

TOKENIZER = Tokenizer.from_file(str(FOLDER / "weights" / "tokenizer.json"))


def test_long_dialogues_fit_the_context_and_ask_only_for_what_was_said() -> None:
    lengths = []
    for seed in range(60):
        talk = long.dialogue(random.Random(seed))
        said = ""
        for turn in talk.turns:
            calls = [call for calls in turn.rounds for call in calls]
            known = said + turn.text + "".join(call.response for call in calls)
            if "Remind me" in turn.text or "again?" in turn.text or "What is my" in turn.text:
                assert not calls
                assert turn.facts[0] in known, (seed, turn.text)
            said = known + turn.answer
        lengths.append(len(chat.encode(TOKENIZER, corpus.wide_chat(talk))[0]))
    assert max(lengths) <= 4096
    assert sum(length > 2048 for length in lengths) >= 10


@pytest.mark.parametrize("distance", [1500, 3500])
def test_a_far_fact_is_said_once_and_asked_for_after_the_distance(distance: int) -> None:
    for number in range(5):
        talk, own, fact = evaluate.far_recall(TOKENIZER, distance, 1, number)
        texts = [message["content"] for message in talk.messages]
        after = next(i for i, text in enumerate(texts) if fact in text)
        while talk.messages[after]["role"] != "user" or fact in texts[after]:
            after += 1  # the first turn is over
        own_texts = [m["content"] for m in talk.messages[after:] if m["role"] == "assistant"]
        assert not any(fact in text for text in own_texts)
        assert fact in own["content"]
        between = chat.message_pieces(talk.messages[after:-1])
        assert len(chat.encode_pieces(TOKENIZER, between)) >= distance
        whole = chat.Chat([*talk.messages, own], talk.tools)
        assert len(chat.encode(TOKENIZER, whole)[0]) <= 4096


def test_the_engine_and_the_training_model_write_the_same_answers() -> None:
    weights = FOLDER / "weights"
    engine = runtimes.EngineGenerator(weights, num_threads=1)
    speaker = evaluate.Speaker(
        TOKENIZER, engine, runtimes.open_runtime("plain", weights, num_threads=1)
    )
    tally = evaluate.Tally(3)
    try:
        for number in range(2):
            dialogue, facts = evaluate.held_out("narrow", 7, number)
            speaker.begin()
            evaluate.run_dialogue(speaker, dialogue, facts, tally)
    finally:
        engine.close()
    assert tally.counts["equal"] >= 4
    assert tally.hits["equal"] == tally.counts["equal"]
    assert generate.common_len([1, 2, 3], [1, 2, 4]) == 2
