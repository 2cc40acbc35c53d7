import string

import pytest

from api.auth import Principal, bearer_key, key_digest, new_key, well_formed
from common.domain.errors import LatentmillError
from common.domain.ids import new_id


def test_a_new_key_is_well_formed_and_never_the_same() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(well_formed(key) for key in keys)


def test_a_key_can_be_a_websocket_subprotocol() -> None:
    assert set(new_key()) <= set(string.ascii_letters + string.digits + "_")


def test_every_mistyped_character_is_noticed() -> None:
    key = new_key()
    for place in range(len(key)):
        wrong = "a" if key[place] != "a" else "b"
        assert not well_formed(key[:place] + wrong + key[place + 1 :])


@pytest.mark.parametrize("text", ["", "lm_", "lm_abc", "sk-" + "a" * 49, "lm_" + "ä" * 49, "lm_" + "0" * 10_000])
def test_what_cannot_be_a_key_is_told_without_asking(text: str) -> None:
    assert not well_formed(text)


def test_the_stored_digest_is_32_bytes() -> None:
    assert len(key_digest(new_key())) == 32


@pytest.mark.parametrize(
    ("header", "key"), [(None, None), ("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("Basic abc", ""), ("", "")]
)
def test_the_key_is_what_follows_bearer(header: str | None, key: str | None) -> None:
    assert bearer_key(header) == key


def test_a_missing_scope_is_refused() -> None:
    reader = Principal(new_id(), new_id(), frozenset({"jobs:read"}))
    reader.require("jobs:read")
    with pytest.raises(LatentmillError, match="jobs:write"):
        reader.require("jobs:write")


def test_admin_may_do_everything() -> None:
    assert Principal(new_id(), new_id(), frozenset({"admin"})).allows("jobs:write")
