"""The folders of a deployment: one for the server and one for each node, written before a run.

Place in the flow: first; `serving` and `node_program` read them. They hold the recipe, the plan, the roster, keys to
sign with, and a certificate authority for TLS. Whoever prepares makes all keys, so it is trusted not to keep copies.
"""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpllm.config import RECIPE_FILE, ConfigError, Recipe, save_recipe
from dpllm.config.extras import require
from dpllm.methods.federated.roster import Member, Roster
from dpllm.methods.federated.run import check_federated
from dpllm.methods.federated.wire import Signer
from dpllm.models.start_files import start_files
from dpllm.privacy.plan import PLAN_FILE, PrivacyPlan, make_plan

SERVER = "server"
ROSTER_FILE, WEIGHTS_FILE = "roster.json", "starting_weights.txt"
SIGNING_KEY, SERVER_KEY = "signing.key", "server.pub"
AUTHORITY, CERTIFICATE, TLS_KEY = "authority.pem", "tls.pem", "tls.key"
RECORDS_ELSEWHERE = "the records are at the nodes"
"""``data.path`` in these folders' recipes: the server has no records, and a node gets its file by an option."""
_DAYS = 90
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}")


def prepare(recipe: Recipe, folder: Path, nodes: Mapping[str, int], hosts: Sequence[str]) -> PrivacyPlan:
    """Write the folders of the server and of all nodes; return the plan that they agree to.

    Args:
        recipe: of the run, with ``model.name``, the base model that server and nodes have.
        folder: for the folders; new or empty.
        nodes: name of each node to the number of its clients.
        hosts: names and IP addresses of the server, for its certificate.

    Raises:
        ConfigError: the recipe is not one of a deployment, a name is no name of a machine, or the folder is used.
    """
    require("federated", "a federated run over several machines")
    args = check_deployed(recipe)
    if not nodes or any(not _NAME.fullmatch(name) or name == SERVER for name in nodes):
        raise ConfigError(
            f"the nodes {', '.join(nodes) or '(none)'}: give each a name of small letters, digits and -, other than "
            f"{SERVER!r}, and its number of clients (--node oslo=1)"
        )
    for host in hosts:
        if not _HOST.fullmatch(host) and not _is_address(host):
            raise ConfigError(
                f"--host {host!r}: give a name of at most 64 letters, digits, dots and hyphens, or an IP address, "
                "without a port (an international name in its form of ASCII, xn--…)"
            )
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty, and its keys may be in use: give a new folder")
    signers = {name: Signer.new() for name in (SERVER, *nodes)}
    members, first = [], 0
    for name, count in nodes.items():
        members.append(Member(name, signers[name].public, first, count))
        first += count
    roster = Roster(tuple(members))
    plan = make_plan(recipe.privacy, roster.num_clients, args.max_steps)
    weights = start_files(str(recipe.model.name)) or ""
    authority = Authority.new()
    for name, signer in signers.items():
        own = folder / name
        own.mkdir(parents=True, mode=0o700)
        signer.save(own / SIGNING_KEY)
        plan.save(own / PLAN_FILE)
        roster.save(own / ROSTER_FILE)
        save_recipe(_recipe_of(recipe, name == SERVER), own / RECIPE_FILE)
        (own / WEIGHTS_FILE).write_text(weights + "\n", encoding="utf-8")
        (own / SERVER_KEY).write_text(signers[SERVER].public + "\n", encoding="ascii")
        (own / AUTHORITY).write_bytes(authority.certificate)
    authority.certify(hosts, folder / SERVER / CERTIFICATE, folder / SERVER / TLS_KEY)
    return plan


def check_deployed(recipe: Recipe) -> Any:
    """Check that a recipe can be run over several machines; return the arguments of ``train``.

    Raises:
        ConfigError: it needs all records, or other weights, in one place.
    """
    if recipe.public_pretrain is not None or recipe.model.name is None:
        raise ConfigError(
            "server and nodes begin with the same weights, and this recipe makes them: train on public text first "
            "(dpllm train, or any tool), and set model.name to the folder, without public_pretrain"
        )
    if recipe.data.eval_fraction > 0 or recipe.data.eval_split is not None:
        raise ConfigError(
            "no machine has the records of all clients, so none can be held out of them: leave data.eval_fraction and "
            "data.eval_split out, and give the server other records as data.eval_path"
        )
    federate = recipe.beside.get("federate")
    if federate is not None and federate.simulated_dropouts:
        raise ConfigError("federate.simulated_dropouts is for simulations only: leave it out")
    return check_federated(recipe)


def agreed(folder: Path, recipe: Recipe) -> tuple[PrivacyPlan, Roster]:
    """Return plan and roster of a folder, which must be those of its recipe.

    Args:
        folder: of the server or a node.
        recipe: with the changes of its user.

    Raises:
        ConfigError: the recipe has another plan.
    """
    args = check_deployed(recipe)
    plan, roster = PrivacyPlan.load(folder / PLAN_FILE), Roster.load(folder / ROSTER_FILE)
    if make_plan(recipe.privacy, roster.num_clients, args.max_steps).hash != plan.hash:
        raise ConfigError(
            f"{folder / RECIPE_FILE} with its changes has another plan than {folder / PLAN_FILE}: the plan was agreed "
            "on, so prepare a new deployment for other settings"
        )
    weights = (folder / WEIGHTS_FILE).read_text(encoding="utf-8").strip()
    found = start_files(str(recipe.model.name)) or ""
    if weights and found and weights != found:
        raise ConfigError(
            f"model.name={recipe.model.name} has other weights ({found}) than the deployment was prepared with "
            f"({weights}): copy that model"
        )
    return plan, roster


def _recipe_of(recipe: Recipe, server: bool) -> Recipe:
    """Return the recipe of the server's folder, or of a node's, without what only the other one needs."""
    data = dataclasses.replace(recipe.data, path=RECORDS_ELSEWHERE)
    if server:
        return dataclasses.replace(recipe, data=data)
    data = dataclasses.replace(data, eval_path=None, eval_is_public=False, metrics=[])
    privacy = dataclasses.replace(recipe.privacy, budget_file=None)
    return dataclasses.replace(recipe, data=data, privacy=privacy)


class Authority:
    """A certificate authority for one deployment.

    Attributes:
        certificate: PEM, which every node trusts for this server only.

    Args:
        key: private key.
        certificate: of the key, self-signed.
    """

    def __init__(self, key: Any, certificate: Any) -> None:
        """Keep both; the key is not written anywhere."""
        from cryptography.hazmat.primitives.serialization import Encoding

        self._key, self._own = key, certificate
        self.certificate: bytes = certificate.public_bytes(Encoding.PEM)

    @classmethod
    def new(cls) -> Authority:
        """Return a new authority."""
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.x509 import KeyUsage

        key = ec.generate_private_key(ec.SECP256R1())
        unsigned = _certificate("dpllm deployment", "dpllm deployment", key.public_key(), True)
        others = dict.fromkeys(
            (
                *("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
                *("crl_sign", "encipher_only", "decipher_only"),
            ),
            False,
        )
        usage = KeyUsage(digital_signature=True, key_cert_sign=True, **others)
        return cls(key, unsigned.add_extension(usage, critical=True).sign(key, SHA256()))

    def certify(self, hosts: Sequence[str], certificate: Path, key: Path) -> None:
        """Write a certificate for a server and its key.

        Args:
            hosts: its names and IP addresses.
            certificate: file, PEM.
            key: file, PEM, that only its owner reads.
        """
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509 import AuthorityKeyIdentifier, SubjectAlternativeName

        private = ec.generate_private_key(ec.SECP256R1())
        signed = (
            _certificate(hosts[0], "dpllm deployment", private.public_key(), False)
            .add_extension(SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
            .add_extension(AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, SHA256())
        )
        certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        key.touch(mode=0o600)
        key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _certificate(subject: str, issuer: str, public: Any, authority: bool) -> Any:
    from cryptography import x509

    def name(text: str) -> Any:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    return (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _name(host: str) -> Any:
    from cryptography import x509

    return x509.IPAddress(ipaddress.ip_address(host)) if _is_address(host) else x509.DNSName(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def private(folder: Path) -> None:
    """Refuse a folder whose keys others can read.

    Raises:
        ConfigError: its mode lets them.
    """
    key = folder / SIGNING_KEY
    if not key.is_file():
        raise ConfigError(f"{folder} has no {SIGNING_KEY}: give a folder that dpllm federation prepare wrote")
    if os.name == "posix" and key.stat().st_mode & 0o077:
        raise ConfigError(f"{key} can be read by others: chmod 600 {key}")
