"""Who may talk to whom: certificates, names, tokens, limits. Everything that is wrong fails closed."""

from __future__ import annotations

import asyncio
import stat
import time
from pathlib import Path

import grpc
import pytest

from aedfl.errors import AedflError, UserError
from aedfl.net import wire
from aedfl.net.coordinator import SERVICE
from aedfl.net.credentials import Plaintext, Tls
from aedfl.net.identity import Authority, check_name, list_number, read_list, server_name
from aedfl.net.link import CoordinatorAway, Link, Refused
from aedfl.net.places import is_loopback
from aedfl.net.post import SEND
from aedfl.net.protocol_pb2 import Ask, Beat, Receipt
from aedfl.net.rates import Bucket
from net.cluster import Cluster, cluster


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.create(tmp_path / "ca")


def test_a_certificate_binds_the_name_and_its_own_serial(authority: Authority) -> None:
    tls = Tls(authority.issue("device-3"))
    assert tls.name == "device-3"
    names = str(tls.certificate.extensions)
    assert server_name("device-3", tls.serial) in names and "coordinator" not in names


def test_secret_keys_are_for_the_owner_only(authority: Authority) -> None:
    place = authority.issue("device-3")
    for path in (authority.folder / "ca.key", place / "key.pem"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["", "Device", "a b", "-a", "a" * 41, "../x", "a.b"])
def test_names_that_could_be_something_else_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="allowed are"):
        check_name(name)


def test_files_that_do_not_belong_together_are_refused(authority: Authority, tmp_path: Path) -> None:
    first, second = authority.issue("device-1"), authority.issue("device-2")
    (first / "key.pem").write_bytes((second / "key.pem").read_bytes())
    with pytest.raises(UserError, match=r"key\.pem does not belong"):
        Tls(first)
    other = Authority.create(tmp_path / "other").issue("device-2")
    (second / "ca.pem").write_bytes((other / "ca.pem").read_bytes())
    with pytest.raises(UserError, match="cannot be used"):
        Tls(second)
    with pytest.raises(UserError, match=r"TLS needs ca\.pem, cert\.pem, key\.pem"):
        Tls(tmp_path / "nowhere")


def test_an_expired_certificate_is_said_to_be_one(authority: Authority) -> None:
    with pytest.raises(UserError, match="expired on .* renew it"):
        Tls(authority.issue("device-1", days=-1))


def test_an_authority_is_never_replaced(authority: Authority) -> None:
    with pytest.raises(UserError, match="already"):
        Authority.create(authority.folder)


def test_a_revocation_list_of_a_stranger_is_ignored(authority: Authority, tmp_path: Path) -> None:
    tls = Tls(authority.issue("device-1"))
    stranger = Authority.create(tmp_path / "stranger")
    stranger.issue("device-1")
    stranger.revoke("device-1")
    stranger.revoke("device-1")
    before = tls.revocations
    tls.learn((stranger.folder / "crl.pem").read_bytes())
    assert tls.revocations == before
    authority.revoke("device-1")
    tls.learn((authority.folder / "crl.pem").read_bytes())
    assert tls.revocations[0] == before[0] + 1


def test_an_older_revocation_list_does_not_undo_a_newer_one(authority: Authority) -> None:
    tls = Tls(authority.issue("device-1"))
    old = (authority.folder / "crl.pem").read_bytes()
    authority.revoke("device-1")
    tls.learn((authority.folder / "crl.pem").read_bytes())
    newest = tls.revocations
    tls.learn(old)
    assert tls.revocations == newest
    assert list_number(read_list(newest[1], (authority.folder / "ca.pem").read_bytes())) == newest[0]


@pytest.mark.parametrize("address", ["0.0.0.0:1", "192.0.2.1:1", "example.org:1", "[::]:1"])
def test_plaintext_never_leaves_this_machine(address: str) -> None:
    assert not is_loopback(address)
    plain = Plaintext("device-1")
    with pytest.raises(UserError, match=r"allowed on 127\.0\.0\.1 only"):
        plain.connect(address, "x", "", [])
    with pytest.raises(UserError, match=r"allowed on 127\.0\.0\.1 only"):
        plain.listen(None, address)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "127.3.4.5:80"])
def test_this_machine_has_several_names(address: str) -> None:
    assert is_loopback(address)


def together(test: object) -> None:
    asyncio.run(test)  # type: ignore[arg-type]


async def undisturbed(made: Cluster) -> None:
    """The devices that were there go on, and go on talking to each other."""
    updates, received = made.updates(0), made.received(1)
    await made.until(lambda: made.updates(0) > updates + 1 and made.received(1) > received + 1)


async def refused(made: Cluster, index: int, match: str, **options: object) -> None:
    with pytest.raises(AedflError, match=match):
        await made.node(index, **options).run()


def test_strangers_are_refused_and_nobody_is_disturbed(tmp_path: Path) -> None:
    """Another authority's certificate, plaintext, no certificate at all, a device's port for the coordinator's."""

    async def test() -> None:
        stranger = Authority.create(tmp_path / "stranger")
        async with cluster(tmp_path / "run") as made:
            foreign = Tls(stranger.issue("device-2"))
            await refused(made, 2, "not made by this device's authority", security=foreign)
            plain = Plaintext("device-2")
            await refused(made, 2, "cannot reach the coordinator", security=plain, folder=tmp_path / "p")
            root = (tmp_path / "run" / "tls" / "ca.pem").read_bytes()
            channel = grpc.aio.secure_channel(
                f"127.0.0.1:{made.port}", grpc.ssl_channel_credentials(root),
                [("grpc.ssl_target_name_override", "coordinator.aedfl")],
            )  # fmt: skip
            call = channel.unary_unary(f"/{SERVICE}/Settings", lambda m: m.SerializeToString(), Receipt.FromString)
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(Ask(protocol=2), timeout=60)
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
            await channel.close()
            link = Link(f"127.0.0.1:{made.nodes[0].transport.port}", made.security("device-2"))
            with pytest.raises(CoordinatorAway, match="not the coordinator"):
                await link.settings()
            await link.close()
            await undisturbed(made)
            assert {index: task.done() for index, task in made.tasks.items()} == {0: False, 1: False}

    together(test())


def test_tokens_let_in_whom_they_should(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, start=False) as made:
            ledger = made.coordinator.ledger
            once, late = ledger.new_token(1.0, 1), ledger.new_token(-0.01, 5)
            for token, match in (("", "token is needed"), ("guess", "not one of this run"), (late, r"expired \d+ s")):
                async with made.link("device-0") as link:
                    with pytest.raises(Refused, match=match):
                        await link.join(made.join_request("device-0", token=token))
            async with made.link("device-0") as link:
                assert (await link.join(made.join_request("device-0", token=once))).index == 0
                again = await link.join(made.join_request("device-0", token=""))
                assert again.index == 0, "a member that comes back needs no token"
            async with made.link("device-1") as link:
                with pytest.raises(Refused, match="used up"):
                    await link.join(made.join_request("device-1", token=once))

    together(test())


def test_a_certificate_cannot_speak_for_another_name(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as made:
            async with made.link("device-2") as link:
                with pytest.raises(Refused, match="says it is 'device-0', but its certificate is that of 'device-2'"):
                    await link.join(made.join_request("device-0"))
                with pytest.raises(Refused, match="cannot take device-0 out"):
                    await link.leave("device-0")
            node = made.nodes[0]
            serial = next(m.serial for m in node.member.view.members if m.index == 1)
            place = f"127.0.0.1:{made.nodes[1].transport.port}"
            channel = made.security("device-0").connect(place, "device-1", serial, [])
            packed = wire.pack("model", node.context.model, node.transport.checker.digest, {"samples": 1})
            for source in (1, 7):
                call = channel.stream_unary(SEND, None, Receipt.FromString)()
                for frame in wire.frames(packed, wire.Stamp(node.member.run, source, 5, 1)):
                    await call.write(frame)
                await call.done_writing()
                receipt = await call
                assert not receipt.taken
                assert receipt.reason == f"device-0 says it is device {source}, but it is device 0"
            await channel.close()
            await undisturbed(made)

    together(test())


def test_a_replaced_certificate_is_no_use_to_whoever_has_its_key(tmp_path: Path) -> None:
    """Those who send ask for the certificate that the coordinator has seen last, by its serial number."""

    async def test() -> None:
        async with cluster(tmp_path) as made:
            channel = made.security("device-0").connect(
                f"127.0.0.1:{made.nodes[1].transport.port}", "device-1", "123abc", []
            )
            call = channel.stream_unary(SEND, None, Receipt.FromString)
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await call(iter([b"x"]), timeout=60)
            await channel.close()

    together(test())


def test_renewing_and_revoking_while_the_run_goes_on(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as made:
            assert made.authority is not None
            old = made.nodes[1].security.serial  # type: ignore[attr-defined]
            made.authority.issue("device-1")
            await made.until(lambda: made.nodes[1].security.serial != old)  # type: ignore[attr-defined]
            await made.until(lambda: any(m.serial not in ("", old) for m in made.nodes[0].member.view.members))
            await undisturbed(made)
            made.authority.revoke("device-1")
            crl = (tmp_path / "tls" / "crl.pem").read_bytes()
            (tmp_path / "tls" / "coordinator" / "crl.pem").write_bytes(crl)
            await made.until(lambda: "revoked" in made.nodes[1].member.trouble)
            await made.until(lambda: made.nodes[0].transport.counters.refused > 0)
            await made.until(lambda: made.nodes[0].security.revocations[0] > 1)
            counts, updates = [made.received(0), made.received(1)], [made.updates(0), made.updates(1)]
            await made.until(lambda: made.updates(0) > updates[0] + 2 and made.updates(1) > updates[1] + 2)
            assert made.received(0) == counts[0], "nothing is taken from it"
            assert made.received(1) <= counts[1] + 1, "and nothing is sent to it, but what was on its way"
            made.authority.issue("device-1")
            await made.until(lambda: made.nodes[1].member.trouble == "")
            await undisturbed(made)

    together(test())


def test_files_that_change_while_they_are_read_are_read_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new key is there, its certificate comes while the device looks: it must look again."""
    place = authority.issue("device-1")
    tls = Tls(place)
    old = (place / "cert.pem").read_bytes()
    authority.issue("device-1")
    new = (place / "cert.pem").read_bytes()
    (place / "cert.pem").write_bytes(old)
    load = Tls._load

    def late(self: Tls) -> None:
        try:
            load(self)
        finally:
            (place / "cert.pem").write_bytes(new)

    monkeypatch.setattr(Tls, "_load", late)
    before = tls.serial
    assert not tls.refresh() and tls.serial == before
    monkeypatch.setattr(Tls, "_load", load)
    assert tls.refresh() and tls.serial != before


def test_without_a_token_nobody_says_what_the_run_s_model_is(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, start=False) as made:
            async with made.link("device-1") as link:
                with pytest.raises(Refused, match="not one of this run"):
                    await link.join(made.join_request("device-1", token="guess", layout=b"mine", parameters=3))
            made.start(0)
            await made.until(lambda: made.listening(0))

    together(test())


def test_one_device_cannot_move_the_clock_of_all(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, devices=3) as made:
            for now in (1e9, float("inf"), float("nan")):
                async with made.link("device-1") as link:
                    instance = made.nodes[1].store.instance
                    beat = Beat(name="device-1", instance=instance, address=made.nodes[1].member.address)
                    beat.report.now = now
                    assert (await link.beat(beat)).elapsed < 1e6
            assert made.coordinator.clock.now < 1e6 and made.nodes[0].clock.now < 1e6

    together(test())


def test_a_wish_for_an_index_far_away_is_not_granted(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, start=False) as made, made.link("device-0") as link:
            joined = await link.join(made.join_request("device-0", wish=1_000_000))
            assert joined.index == 0 and joined.view.devices == 2

    together(test())


@pytest.mark.parametrize("address", ["unix:/run/x:1", "dns://192.0.2.1/host:1", "a b:1", "h:1:2x", "x" * 300 + ":1"])
def test_an_address_that_is_no_host_is_refused(tmp_path: Path, address: str) -> None:
    async def test() -> None:
        async with cluster(tmp_path, tls=False, start=False) as made, made.link("device-0") as link:
            await link.join(made.join_request("device-0"))
            with pytest.raises(Refused, match="is not HOST:PORT"):
                await link.beat(Beat(name="device-0", instance=1, address=address))

    together(test())


def test_who_asks_too_often_is_told_so_and_others_are_not(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as made:
            async with made.link("device-2") as link:
                answers = await asyncio.gather(*(link.status() for _ in range(200)), return_exceptions=True)
            said = {str(answer) for answer in answers if isinstance(answer, Refused)}
            assert said == {"device-2 asks more than 50 times a second"}
            await undisturbed(made)
            assert not made.nodes[0].member.trouble

    together(test())


def test_the_coordinator_takes_nothing_as_large_as_a_model(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, start=False) as made, made.link("device-0") as link:
            with pytest.raises(UserError, match="larger than max"):
                await link.join(made.join_request("device-0", token="x" * (1 << 20)))

    together(test())


def test_a_rate_has_a_burst_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    bucket = Bucket(10.0)
    assert sum(bucket.take(1) for _ in range(100)) == 10
    now = 0.5
    assert sum(bucket.take(1) for _ in range(100)) == 5
    whole = Bucket(10.0)
    assert whole.take(1000), "what is larger than a burst passes when nothing else did"
    assert not whole.take(1)
