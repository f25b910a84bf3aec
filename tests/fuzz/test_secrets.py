"""Who may speak, who may own a folder, and that names of tenants reach no path."""

import ast
import hmac
import os
import re
import zlib
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvlift.core.ids import Attempt, Rid
from kvlift.core.keys import Namespace
from kvlift.core.policy import Switch
from kvlift.core.prompt import Prompt, token_bytes
from kvlift.effects import wire
from kvlift.effects.keyring import KeyRing
from kvlift.effects.stores.folder import Folder, StoreRefusedError
from kvlift.effects.wire_security import SharedSecret, expected_proof, proof_holds
from kvlift.runtime.prefill_sessions import Greeter, Terms
from tests.fuzz.wire_surface import LIFE, SECRET, hear_as_decode, hear_as_prefill
from tests.source import modules

HELLO = wire.Hello(1, "l", "m", "", 0, 1, 16, 20.0, LIFE, bytes(32))


# -- secrets --------------------------------------------------------------------------------------


def test_proofs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    monkeypatch.setattr("kvlift.effects.wire_security.hmac.compare_digest", compare)
    assert proof_holds(b"one", b"one")
    assert not proof_holds(b"one", b"two")
    assert compared == [(b"one", b"one"), (b"one", b"two")]


def compares_a_proof(node: ast.AST) -> bool:
    """Whether this is `... == x.proof` or the like, which ends at the first byte that differs."""
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    names = [side.attr if isinstance(side, ast.Attribute) else "" for side in sides]
    names += [side.id if isinstance(side, ast.Name) else "" for side in sides]
    return any(re.search("proof|secret|digest_given", name) for name in names) and any(
        isinstance(each, ast.Eq | ast.NotEq) for each in node.ops
    )


def test_nobody_compares_a_proof_or_a_secret_by_an_equals_sign() -> None:
    found = [
        f"{module.path}:{node.lineno}"
        for module in modules("kvlift")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Compare) and compares_a_proof(node)
    ]
    assert not found
    assert compares_a_proof(ast.parse("expected == proof.proof").body[0].value)  # type: ignore[attr-defined]


def test_a_proof_is_an_hmac_over_both_ends_words_and_differs_by_role() -> None:
    challenge = wire.Challenge(LIFE, bytes(32), b"")
    ours = expected_proof(SECRET, "decode", HELLO, challenge)
    assert len(ours) == 32
    assert ours != expected_proof(SECRET, "prefill", HELLO, challenge), "nobody's can be reflected"
    other = wire.Challenge(LIFE, b"\x01" + bytes(31), b"")
    assert ours != expected_proof(SECRET, "decode", HELLO, other), "nor used again"
    assert not hmac.compare_digest(
        ours, expected_proof(SharedSecret(b"another of sixteen"), "decode", HELLO, challenge)
    )


def test_before_the_proof_nothing_is_answered_but_a_challenge_or_a_refusal() -> None:
    """Whatever is said in whatever order; `hear_as_prefill` asserts that nothing is kept."""
    draw = Random(3)
    rid, attempt = Rid("a"), Attempt(1)
    said: list[list[bytes]] = [
        [wire.encoded(message), *payload]
        for message, *payload in (
            (HELLO,),
            (wire.Proof(bytes(32)),),
            (wire.Proof(b""),),
            (wire.Hold(rid, attempt, bytes(32), 4), token_bytes(range(8))),
            (wire.Want(rid, attempt, 0, 2, 0),),
            (wire.Committed(rid, attempt),),
            (wire.Aborted(rid, attempt),),
            (wire.Renew(),),
        )
    ]
    for _ in range(300):
        order = [draw.choice(said) for _ in range(draw.randint(1, 12))]
        assert hear_as_prefill(order, SECRET, draw.randrange(99)) == "not greeted by prefill"


def test_a_node_without_the_secret_gets_no_page_into_the_memory_of_a_rank() -> None:
    """`hear_as_decode` asserts that nothing is written and nothing opens."""
    data = bytes(range(16))
    page = wire.Page(Rid("a"), Attempt(1), 1, zlib.crc32(data))
    frames = [
        [wire.encoded(wire.Challenge(LIFE, bytes(32), bytes(32)))],
        [wire.encoded(wire.Welcome(30.0))],
        [wire.encoded(page), data],
    ]
    assert hear_as_decode(frames, SECRET) == "not open at decode"
    frames[0] = [wire.encoded(wire.Challenge(LIFE, bytes(32), b""))]
    assert hear_as_decode(frames, None) == "open at decode", "the same serves where none is asked"


def test_what_strangers_can_make_a_node_keep_and_send_is_bounded() -> None:
    terms = Terms(
        layout_fingerprint="l" * wire.NAME_CHARS_MAX,
        model="m",
        secret=SECRET,
        lease_s=30.0,
        heartbeat_s=1.0,
        n_ranks_max=4,
        sessions_max=8,
        incarnation=LIFE,
    )
    greeter = Greeter(terms)
    longest = msgspec.structs.replace(
        HELLO, layout="\U0001f600" * wire.NAME_CHARS_MAX, model="m" * wire.NAME_CHARS_MAX
    )
    for number in range(100):
        answer = greeter.challenge(str(number).encode(), longest, 0.0)
        assert len(wire.encoded(answer)) < len(wire.encoded(HELLO)) * 2, "no amplifier"
    assert len(greeter._greetings) == 8
    refused = greeter.proved(b"99", wire.Proof(bytes(32)), (), 1.0)
    assert isinstance(refused, wire.Refused)
    assert refused.cause == "auth"
    assert "l" * 10 not in refused.reason, "not even the layout is told"
    late = greeter.challenge(b"late", HELLO, 0.0)
    assert isinstance(greeter.proved(b"late", wire.Proof(b""), (), 60.0), wire.Refused)
    assert late.nonce != greeter.challenge(b"late", HELLO, 0.0).nonce


# -- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["", "v1", "v1/pages", "v1/unfinished"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o702])
def test_a_folder_that_others_may_write_to_is_refused_unless_it_is_trusted(
    tmp_path: Path, place: str, mode: int
) -> None:
    folder = Folder(tmp_path / "kv")
    folder.create(Switch.OFF)
    (folder.root / place).chmod(mode)
    with pytest.raises(StoreRefusedError, match="chmod 700"):
        folder.create(Switch.OFF)
    folder.create(Switch.ON)


@pytest.mark.parametrize("place", ["", "v1/pages"])
def test_a_folder_of_somebody_else_is_refused_unless_it_is_trusted(
    tmp_path: Path, place: str
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    folder = Folder(tmp_path / "kv")
    folder.create(Switch.OFF)
    os.chown(folder.root / place, 12_345, -1)
    with pytest.raises(StoreRefusedError, match="belongs to user 12345"):
        folder.create(Switch.OFF)
    folder.create(Switch.ON)


# -- paths ----------------------------------------------------------------------------------------

TRICKS = ("../../../../etc/cron.d/x", "/etc/passwd", "a\0b", "..", ".", "~root", "C:\\x", "%2e%2e")


@given(tenant=st.text(max_size=80), lora=st.text(max_size=80), salt=st.text(max_size=80))
@example(tenant=TRICKS[0], lora=TRICKS[1], salt=TRICKS[2])
@example(tenant=TRICKS[3], lora=TRICKS[4], salt=TRICKS[5])
@example(tenant=TRICKS[6], lora=TRICKS[7], salt="\ud7ff")
def test_no_name_of_a_tenant_or_an_adapter_is_ever_part_of_a_path(
    tenant: str, lora: str, salt: str
) -> None:
    namespace = Namespace(tenant=tenant, lora=lora, salt=salt, page_tokens=4)
    prompt = Prompt(namespace.digest(), token_bytes(range(8)), 4)
    folder = Folder(Path("/var/kv"))
    for key in KeyRing().keys(prompt, range(2)):
        path = folder.page_path(key)
        assert re.fullmatch(r"/var/kv/v1/pages/([0-9a-f]{2})/\1[0-9a-f]{62}\.page", path)
    assert re.fullmatch(r"/var/kv/v1/unfinished/[0-9a-f-]+\.tmp", folder.new_temporary())
