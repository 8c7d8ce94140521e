"""The codec: what goes in comes out; what is damaged is refused, however well it is wrapped."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from aedfl import forms
from aedfl.context import Model, Size
from aedfl.errors import PeerError
from aedfl.graph import Value
from aedfl.layout import Layout
from aedfl.net import fields, tensors, wire
from aedfl.net.check import Checker, layout_digest
from aedfl.net.protocol_pb2 import Header, Item, Items
from net.damage import damaged, sealed

LAYOUT = Layout.of(nn.Linear(9, 4))
CHECKER = Checker(LAYOUT, 36.0)
STAMP = wire.Stamp("run", 3, 77, 1)


def model(seed: int = 0, mask: bool = False) -> Model:
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(LAYOUT.size, generator=generator)
    if not mask:
        return Model(Value(vector), Size(LAYOUT.size, 36.0))
    kept = torch.rand(LAYOUT.size, generator=generator) > 0.4
    kept[0] = True
    return Model(Value(vector), Size(int(kept.sum()), 20.0), Value(kept))


def frames(given: Model | None, **named: Any) -> list[bytes]:
    return list(wire.frames(wire.pack("model", given, CHECKER.digest, named), STAMP))


def decode(parts: list[bytes], checker: Checker = CHECKER) -> Any:
    decoder = wire.Decoder(checker.bytes_allowed)
    for part in parts:
        decoder.feed(part)
    return checker.message(decoder.finish(), 3)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_a_model_arrives_as_it_was_sent(seed: int, mask: bool) -> None:
    sent = model(seed, mask)
    message = decode(frames(sent, loss=Value(torch.tensor(0.5)), samples=12, rate=0.25, word="yes"))
    kept = torch.ones(LAYOUT.size, dtype=torch.bool) if sent.mask is None else sent.mask.get()
    assert torch.equal(message.model.vector.get(), torch.where(kept, sent.vector.get(), 0.0))
    assert (message.model.mask is None) == (sent.mask is None) and message.model.size == sent.size
    assert sent.mask is None or torch.equal(message.model.mask.get(), kept)
    assert message.fields["loss"].get().item() == 0.5
    assert {key: message.fields[key] for key in ("samples", "rate", "word")} == dict(samples=12, rate=0.25, word="yes")
    assert (message.source, message.kind) == (3, "model")


nested = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**62), 2**62), st.floats(allow_nan=False, allow_infinity=False),
              st.text(max_size=30)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True), nested, max_size=5))
def test_fields_arrive_as_they_were_sent(named: dict[str, Any]) -> None:
    try:
        sent = frames(None, **named)
    except fields.Unsendable:
        return
    assert decode(sent).fields == named


def test_only_the_kept_values_and_the_packed_mask_travel() -> None:
    sparse = model(1, mask=True)
    size = sum(len(frame) for frame in frames(sparse))
    assert size < 4 * sparse.size.parameters + LAYOUT.size // 8 + 1 + 400


@pytest.mark.parametrize("thing", [float("nan"), 1 << 70, object(), {"a": 1}, "x" * 5000, (((((1,),),),),)])
def test_what_messages_do_not_carry_is_the_senders_own_mistake(thing: Any) -> None:
    with pytest.raises(fields.Unsendable, match="field 'thing'"):
        fields.pack({"thing": thing})


def test_fields_that_no_header_has_room_for_are_not_packed() -> None:
    many = {f"part{number}": "x" * 1000 for number in range(60)}
    with pytest.raises(fields.Unsendable, match=r"the fields of a message take 6\d{4} bytes; allowed are 49152"):
        fields.pack(many)
    packed, _ = fields.pack(dict(list(many.items())[:40]))
    assert sum(field.ByteSize() for field in packed) < wire.HEADER


def test_the_safetensors_library_reads_ours_and_we_read_its() -> None:
    given = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.tensor([True, False]), "d": torch.tensor(2.0)}
    ours = b"".join(tensors.dump(given))
    assert all(torch.equal(part, given[name]) for name, part in safetensors.torch.load(ours).items())
    theirs = tensors.load(bytearray(safetensors.torch.save(given)))
    assert theirs.keys() == given.keys() and all(torch.equal(part, given[name]) for name, part in theirs.items())


def test_received_tensors_are_views_of_the_one_buffer() -> None:
    data = bytearray(b"".join(tensors.dump({"values": torch.ones(1000)})))
    (values,) = tensors.load(data).values()
    before = values.data_ptr()
    struct.pack_into("<f", data, len(data) - 4, 5.0)
    assert values[-1] == 5.0 and values.data_ptr() == before


def test_sending_copies_one_chunk_at_a_time() -> None:
    big = torch.zeros(3 * wire.CHUNK // 4 + 11)
    packed = wire.pack("model", Model(Value(big), Size(len(big), 1.0)), b"", {})
    assert np.shares_memory(np.frombuffer(packed.buffers[1], dtype=np.float32), big.numpy())
    sizes = [len(frame) - 4 for frame in wire.frames(packed, STAMP)][1:]
    assert sizes[:-1] == [wire.CHUNK] * (len(sizes) - 1) and sum(sizes) == packed.length


def reseal(parts: list[bytes]) -> list[bytes]:
    return sealed([part[4:] for part in parts])


def header_of(parts: list[bytes]) -> Header:
    return Header.FromString(parts[0][4:])


def with_header(change: Any, given: Model | None = None) -> list[bytes]:
    parts = frames(given or model(), number=1)
    header = header_of(parts)
    change(header)
    return sealed([header.SerializeToString(), *(part[4:] for part in parts[1:])])


def payload(change: Any, given: Model | None = None) -> list[bytes]:
    """The message with its tensors replaced, announced with the right length."""
    parts = frames(given or model())
    header = header_of(parts)
    data = change(tensors.load(bytearray(b"".join(part[4:] for part in parts[1:]))))
    body = data if isinstance(data, bytes) else b"".join(tensors.dump(data))
    header.length = len(body)
    return sealed([header.SerializeToString(), body])


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        (with_header(lambda h: setattr(h, "protocol", 1)), "speaks protocol 1, this device 2"),
        (with_header(lambda h: setattr(h, "kind", "")), "message kind"),
        (with_header(lambda h: setattr(h, "length", h.length + 8)), "middle of a message|announced length"),
        (with_header(lambda h: setattr(h, "length", 1 << 40)), "announced with"),
        (with_header(lambda h: setattr(h.model, "parameters", 39)), "claims 39 values"),
        (with_header(lambda h: setattr(h.model, "layout", b"x" * 16)), "another layout"),
        (with_header(lambda h: setattr(h.model, "macs", float("nan"))), "operations per sample"),
        (with_header(lambda h: setattr(h.model, "macs", 1e9)), "operations per sample"),
        (with_header(lambda h: setattr(h.model, "masked", True)), "mask is announced"),
        (with_header(lambda h: h.fields.add(name="number")), "not allowed, or comes twice"),
        (with_header(lambda h: h.fields.add(name="x", item=Item(tensor=4))), "did not come"),
        (with_header(lambda h: h.fields.add(name="x", item=Item(real=float("inf")))), "not allowed"),
        (with_header(lambda h: h.fields.add(name="a b", item=Item(integer=1))), "not allowed"),
        (with_header(lambda h: h.fields.extend([fields.Field(name=f"f{i}") for i in range(99)])), "fields"),
        (payload(lambda t: {**t, "values": torch.full((LAYOUT.size,), torch.nan)}), "not finite"),
        (payload(lambda t: {**t, "values": torch.full((LAYOUT.size,), -3e38)}), r"not finite, or beyond 1e\+15"),
        (payload(lambda t: {**t, "values": t["values"].double()}), "float32"),
        (payload(lambda t: {**t, "values": t["values"][:-1]}), "float32"),
        (payload(lambda t: {**t, "extra": torch.zeros(1)}), "belongs to no field"),
        (payload(lambda t: {}), "float32"),
        (payload(lambda t: b"".join(tensors.dump(t)) + b"12345678"), "follow the last tensor"),
        (payload(lambda t: b"\xff" * 64), "header claims"),
        (payload(lambda t: b"\x02\0\0\0\0\0\0\0{]"), "not JSON"),
        (payload(lambda t: b"\x02\0\0\0\0\0\0\0[]"), "not a table"),
        (payload(lambda t: {**t, "mask": torch.zeros(5, dtype=torch.uint8)}, model(1, True)), "does not keep"),
        (payload(lambda t: {**t, "mask": torch.full((5,), 255, dtype=torch.uint8)}, model(1, True)), "does not keep"),
        (payload(lambda t: {**t, "mask": torch.zeros(6, dtype=torch.uint8)}, model(1, True)), "packed bits"),
    ],
)  # fmt: skip
def test_well_wrapped_nonsense_is_refused_in_a_sentence(parts: list[bytes], match: str) -> None:
    with pytest.raises(PeerError, match=match):
        decode(parts)


def test_tuples_nested_without_end_are_refused() -> None:
    item = Item(integer=1)
    for _ in range(50):
        item = Item(items=Items(items=[item]))
    parts = with_header(lambda h: h.fields.add(name="deep", item=item))
    with pytest.raises(PeerError, match="not allowed|cannot be read"):
        decode(parts)


def test_frames_of_two_messages_cannot_be_mixed() -> None:
    """Same lengths, same shapes, each frame valid by itself; the running checksum tells them apart."""
    size = wire.CHUNK // 2
    first, second = (
        list(wire.frames(wire.pack("model", Model(Value(torch.full((size,), float(number))), Size(size, 1.0)), b"", {}),
                         wire.Stamp("run", 3, 77, number)))
        for number in (1, 2)
    )  # fmt: skip
    for position in range(1, len(first)):
        decoder = wire.Decoder(lambda header: 1 << 30)
        with pytest.raises(PeerError, match="checksum"):
            for frame in [*first[:position], *second[position:]]:
                decoder.feed(frame)


def test_nothing_is_reserved_before_the_header_was_looked_at() -> None:
    asked: list[int] = []

    def look(header: Header) -> int:
        asked.append(header.length)
        raise PeerError("no")

    decoder = wire.Decoder(look)
    with pytest.raises(PeerError, match="no"):
        decoder.feed(with_header(lambda h: setattr(h, "length", 1 << 62))[0])
    assert asked == [1 << 62] and len(decoder._data) == 0


@pytest.mark.parametrize("cut", range(1, 3))
def test_a_stream_that_ends_early_is_no_message(cut: int) -> None:
    parts = frames(Model(Value(torch.zeros(LAYOUT.size)), Size(LAYOUT.size, 36.0)))
    with pytest.raises(PeerError, match="middle of a message"):
        decode(parts[:-1] if cut == 1 else [])


def test_frames_behind_the_end_are_refused() -> None:
    parts = frames(model())
    extra = sealed([*(part[4:] for part in parts), b"more"])
    with pytest.raises(PeerError, match="announced length"):
        decode(extra)


@pytest.mark.parametrize("frame", [b"", b"1234", b"x" * (wire.CHUNK + wire.HEADER + 5), b"\0\0\0\0hello"])
def test_frames_that_are_none_are_refused(frame: bytes) -> None:
    with pytest.raises(PeerError):
        decode([frame])


def test_a_header_of_random_bytes_is_refused() -> None:
    with pytest.raises(PeerError):
        decode(sealed([b"\xff" * 50]))


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32))
def test_damage_with_valid_checksums_is_refused_or_harmless(seed: int) -> None:
    """Anything may come back but an error of another kind; a message that passes is one that fits the model."""
    rng = np.random.default_rng(seed)
    sent = frames(model(seed % 7, mask=bool(seed % 2)), loss=Value(torch.tensor(1.0)), samples=3, pair=(1, 2.0))
    try:
        message = decode(damaged(sent, rng))
    except PeerError:
        return
    if message.model is not None:
        vector = message.model.vector.get()
        assert vector.shape == (LAYOUT.size,) and vector.dtype == torch.float32 and bool(vector.isfinite().all())


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (forms.positive, (1, 0.5, 1e15), (0, -1.0, 1e-9, 1e16, Value(torch.tensor(0.5)), True)),
        (forms.counts, ((), (3, 0.0)), (3, (-1,), (Value(torch.tensor(1.0)),), ((1,),), ("3",))),
    ],
)
def test_a_program_that_reckons_with_plain_numbers_gets_no_others(
    check: forms.Check, right: tuple[Any, ...], wrong: tuple[Any, ...]
) -> None:
    checker = Checker(LAYOUT, 36.0, {"model": forms.Form({"thing": check}, model=None)})
    assert [decode(frames(None, thing=thing), checker).fields["thing"] for thing in right] == list(right)
    for thing in wrong:
        with pytest.raises(PeerError, match="field 'thing' holds what it must not"):
            decode(frames(None, thing=thing), checker)


def test_the_layout_digest_sees_names_shapes_and_types() -> None:
    digests = {
        layout_digest(Layout.of(module))
        for module in (nn.Linear(9, 4), nn.Linear(4, 9), nn.Sequential(nn.Linear(9, 4)), nn.Linear(9, 4).double())
    }
    assert len(digests) == 4 and layout_digest(LAYOUT) == layout_digest(Layout.of(nn.Linear(9, 4)))


def test_a_checksum_runs_over_everything_so_far() -> None:
    parts = frames(model())
    assert int.from_bytes(parts[1][:4], "little") == zlib.crc32(parts[1][4:], zlib.crc32(parts[0][4:]))
