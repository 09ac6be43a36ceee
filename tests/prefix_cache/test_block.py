from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moorage.prefix_cache.block import (
    BlockHash,
    Lineage,
    Namespace,
    digest_tokens,
    hash_block,
    hash_chain,
    num_tokens_in,
    pack_tokens,
    unpack_tokens,
)
from moorage.prefix_cache.errors import InvalidInput

ROOT = Path(__file__).parents[2]


def test_tokens_are_packed_little_endian() -> None:
    assert pack_tokens([1, 258, 2**31 - 1]) == b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\x7f"
    assert unpack_tokens(pack_tokens([7, 0, 151_643])) == [7, 0, 151_643]
    assert pack_tokens([]) == b"" and unpack_tokens(b"") == []
    assert unpack_tokens(memoryview(pack_tokens([5, 6]))) == [5, 6]


@pytest.mark.parametrize("bad", [[-1], [2**31], [1.5], ["7"]])
def test_what_is_no_token_id_is_refused(bad: list[int]) -> None:
    with pytest.raises(InvalidInput):
        pack_tokens(bad)


def test_cut_tokens_are_refused() -> None:
    with pytest.raises(InvalidInput, match="7 bytes are not whole tokens"):
        num_tokens_in(b"\0" * 7)


def test_a_hash_names_parent_and_tokens() -> None:
    root = Lineage(Namespace("acme", "prod"), b"model-1").root
    a = hash_block(root, pack_tokens([1, 2, 3, 4]))
    assert a != hash_block(root, pack_tokens([1, 2, 3, 5]))
    assert hash_block(a, pack_tokens([1, 2, 3, 4])) != a
    assert list(hash_chain(root, pack_tokens([1, 2, 3, 4, 1, 2, 3, 4, 9]), 4)) == [
        a,
        hash_block(a, pack_tokens([1, 2, 3, 4])),
    ]
    assert digest_tokens(pack_tokens([1, 2, 3, 4])) != a


def test_hashes_are_these_for_ever() -> None:
    """Frames outlive a release: a change of these values orphans every stored frame."""
    root = Lineage(Namespace("acme", "prod"), b"model-1", b"lora-a").root
    assert root.hex() == "1fb4e3de1a7364c0171d1ae3d87f2fa4"
    assert hash_block(root, pack_tokens([1, 2, 3, 4])).hex() == "6dd9d079cf2fa3dba4857431df3dabbb"


def test_c13_keys_do_not_depend_on_the_process() -> None:
    script = (
        "from moorage.prefix_cache.block import *\n"
        "root = Lineage(Namespace('acme', 'prod'), b'model-1').root\n"
        "print([h.hex() for h in hash_chain(root, pack_tokens(range(256)), 16)])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT / ".src")},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    here = [
        h.hex()
        for h in hash_chain(
            Lineage(Namespace("acme", "prod"), b"model-1").root, pack_tokens(range(256)), 16
        )
    ]
    assert outputs == {(str(here) + "\n").encode()}


def test_c11_the_whole_extra_key_counts() -> None:
    space = Namespace("acme", "prod")
    image_1 = Lineage(space, b"model-1", bytes.fromhex("11112222ABCD"))
    image_2 = Lineage(space, b"model-1", bytes.fromhex("99998888ABCD"))
    assert image_1.root != image_2.root
    placeholders = pack_tokens([9] * 4)
    assert hash_block(image_1.root, placeholders) != hash_block(image_2.root, placeholders)


def test_fields_of_a_root_cannot_run_together() -> None:
    roots: set[BlockHash] = {
        Lineage(Namespace("ab", "c"), b"d", b"").root,
        Lineage(Namespace("a", "bc"), b"d", b"").root,
        Lineage(Namespace("ab", "cd"), b"", b"").root,
        Lineage(Namespace("ab", "c"), b"", b"d").root,
    }
    assert len(roots) == 4
    assert Namespace("ab", "c").digest != Namespace("a", "bc").digest
