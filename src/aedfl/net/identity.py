"""A small certificate authority: who a device is. Certificates of devices, their renewal and their revocation.

A certificate names its owner twice: by the plain name, which the coordinator maps to an index, and by a name
that holds its serial number. Whoever connects to a device asks for the latter, so a certificate that
was replaced or revoked is of no use to a stranger who has stolen its key, even before it expires.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import UserError

COORDINATOR = "coordinator"
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_SUFFIX = "aedfl"
_SKEW = timedelta(minutes=5)
Key = ec.EllipticCurvePrivateKey


def check_name(name: str) -> str:
    """Names stand in certificates and addresses: lower-case letters, digits and hyphens, 40 at most."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"name {name!r}: allowed are 1 to 40 lower-case letters, digits and hyphens, no hyphen at the ends"
        )
    return name


def server_name(name: str, serial: str) -> str:
    """What a client demands of the certificate that it finds behind an address."""
    return f"{COORDINATOR}.{_SUFFIX}" if name == COORDINATOR else f"s{serial}.{name}.{_SUFFIX}"


class Authority:
    """The authority's folder: `ca.pem`, `ca.key` (secret), `crl.pem`, and one folder per certificate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} holds no certificate authority ({error}); make one: aedfl certs init") from None
        assert isinstance(key, Key)
        self._key = key

    @classmethod
    def create(cls, folder: Path, days: float = 3650) -> Authority:
        """A new authority; never replaces one."""
        if (folder / "ca.key").exists():
            raise UserError(f"{folder} holds a certificate authority already")
        folder.mkdir(parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _subject("aedfl authority")
        builder = _builder(name, name, key, days)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(authority=True), critical=True)
        _write_secret(folder / "ca.key", _key_bytes(key))
        _write(folder / "ca.pem", _pem(builder.sign(key, hashes.SHA256())))
        authority = cls(folder)
        authority._publish([])
        return authority

    def issue(self, name: str, hosts: Sequence[str] = (), days: float = 90) -> Path:
        """A new key and certificate for `name`, in a folder of its own that can be given to the device."""
        check_name(name)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_subject(name), self.certificate.subject, key, days)
        serial = f"{builder._serial_number:x}"
        names = [server_name(name, serial), f"{name}.{_SUFFIX}"]
        general = [x509.DNSName(each) for each in names] + [_general(host) for host in hosts]
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
        builder = (
            builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName(general), critical=False)
        )
        place = self.folder / name
        place.mkdir(exist_ok=True)
        certificate = builder.sign(self._key, hashes.SHA256())
        _write_secret(place / "key.pem", _key_bytes(key))
        _write(place / "ca.pem", (self.folder / "ca.pem").read_bytes())
        _write(place / "crl.pem", (self.folder / "crl.pem").read_bytes())
        _write(place / "cert.pem", _pem(certificate))
        _write(self.folder / "issued" / f"{serial}.pem", _pem(certificate))
        return place

    def revoke(self, name: str) -> int:
        """Revokes every certificate that was ever issued to `name`; how many of them were valid until now."""
        gone = set(revoked_serials(self._list()))
        mine = [serial for serial, owner in self._issued() if owner == name]
        if not mine:
            raise UserError(f"no certificate was issued to {name!r} by the authority in {self.folder}")
        fresh = [serial for serial in mine if serial not in gone]
        self._publish(sorted(gone | set(fresh)))
        return len(fresh)

    def _issued(self) -> list[tuple[int, str]]:
        found = [x509.load_pem_x509_certificate(path.read_bytes()) for path in self.folder.glob("issued/*.pem")]
        return [(certificate.serial_number, common_name(certificate)) for certificate in found]

    def _list(self) -> x509.CertificateRevocationList:
        return x509.load_pem_x509_crl((self.folder / "crl.pem").read_bytes())

    def _publish(self, serials: Sequence[int]) -> None:
        number = 1 + (list_number(self._list()) if (self.folder / "crl.pem").exists() else 0)
        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        builder = builder.last_update(now - _SKEW).next_update(now + timedelta(days=3650))
        builder = builder.add_extension(x509.CRLNumber(number), critical=False)
        for serial in serials:
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now).build()
            builder = builder.add_revoked_certificate(entry)
        _write(self.folder / "crl.pem", builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM))


def read_list(data: bytes, authority: bytes) -> x509.CertificateRevocationList:
    """A revocation list, if that authority has signed it; `ValueError` otherwise."""
    found = x509.load_pem_x509_crl(data)
    key = x509.load_pem_x509_certificate(authority).public_key()
    try:
        valid = isinstance(key, ec.EllipticCurvePublicKey) and found.is_signature_valid(key)
    except InvalidSignature:
        valid = False
    if not valid:
        raise ValueError("the revocation list is not signed by the run's authority")
    return found


def revoked_serials(found: x509.CertificateRevocationList) -> list[int]:
    return [entry.serial_number for entry in found]


def list_number(found: x509.CertificateRevocationList) -> int:
    return found.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


_PEM = serialization.Encoding.PEM


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(_PEM)


def _key_bytes(key: Key) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: Key, days: float) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(int.from_bytes(os.urandom(12), "big") >> 1)
        .not_valid_before(now - _SKEW - timedelta(days=max(0.0, -days)))
        .not_valid_after(now + timedelta(days=days))
    )


def _usage(authority: bool) -> x509.KeyUsage:
    signs = {"key_cert_sign": authority, "crl_sign": authority, "digital_signature": not authority}
    never = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    return x509.KeyUsage(**signs, **dict.fromkeys(never, False), encipher_only=False, decipher_only=False)


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Whole or not at all, so that a running device that looks never finds half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(partial, path)


def _write_secret(path: Path, data: bytes) -> None:
    _write(path, data, 0o600)
