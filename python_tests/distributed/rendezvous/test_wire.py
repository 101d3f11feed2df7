"""Messages between workers and the rendezvous' host: nobody without the secret can send one."""

import pytest

from cpr_ext.distributed.rendezvous import wire
from cpr_ext.distributed.rendezvous.wire import LENGTH_BYTES, ForeignMessageError, Handshake

NONCES = (b"h" * 32, b"w" * 32)


def conversation(secret=b"ours", nonces=NONCES):
    return Handshake(secret, *nonces)


def sealed(direction, message):
    return direction.seal(message)[LENGTH_BYTES:]


def test_what_one_side_seals_the_other_opens_in_order():
    worker, host = conversation().to_host(), conversation().to_host()
    for message in ({"ask": "read", "key": "é"}, [], None):
        text = worker.seal(message)
        assert wire.body_bytes(text[:LENGTH_BYTES]) == len(text) - LENGTH_BYTES
        assert host.open(text[LENGTH_BYTES:]) == message


def test_a_message_of_somebody_else_or_one_that_was_accepted_is_refused():
    worker, host = conversation().to_host(), conversation().to_host()
    first = sealed(worker, 1)
    assert host.open(first) == 1
    with pytest.raises(ForeignMessageError):
        host.open(first)
    for sender in (
        conversation(secret=b"theirs").to_host(),
        conversation(nonces=NONCES[::-1]).to_host(),
        conversation().to_worker(),  # what the host said itself, sent back to it
    ):
        with pytest.raises(ForeignMessageError):
            conversation().to_host().open(sealed(sender, {"ask": "write"}))


def test_a_message_with_any_byte_changed_or_missing_is_refused():
    text = sealed(conversation().to_host(), {"key": 1})
    for place in range(len(text)):
        changed = bytearray(text)
        changed[place] ^= 1
        for wrong in (bytes(changed), text[:place]):
            with pytest.raises(ForeignMessageError):
                conversation().to_host().open(wrong)


def test_a_length_that_no_message_has_is_refused_before_anything_is_read():
    with pytest.raises(ForeignMessageError, match="none has over"):
        wire.body_bytes((wire.MAX_MESSAGE_BYTES + 1).to_bytes(LENGTH_BYTES, "big"))
    with pytest.raises(ValueError):
        conversation().to_host().seal("x" * wire.MAX_MESSAGE_BYTES)


def test_proofs_differ_by_side_secret_and_conversation():
    others = [conversation(b"theirs"), conversation(nonces=NONCES[::-1])]
    proofs = [
        proof for c in (conversation(), *others) for proof in (c.worker_proof(), c.host_proof())
    ]
    assert len(set(proofs)) == 6
