"""Who is who in the test cluster: certificates made with openssl, one token a role, kubeconfigs."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

API = "10.88.0.1:6443"  # inside the cluster's network
SERVICE = "10.96.0.1"  # of the service "kubernetes", for pods

#: user name and groups of each token. What a role may do is in objects.py; "nobody" may do nothing.
ROLES: dict[str, tuple[str, tuple[str, ...]]] = {
    "admin": ("admin", ("system:masters",)),
    "kube-controller-manager": ("system:kube-controller-manager", ()),
    "kube-scheduler": ("system:kube-scheduler", ()),
    "agent-sandbox": ("agent-sandbox", ()),
    "kwok": ("kwok", ()),
    "pool": ("pool", ()),  # has the rights that a test grants it
    "other": ("other", ()),
    "nobody": ("nobody", ()),
}


def node_role(node: str) -> tuple[str, tuple[str, ...]]:
    return f"system:node:{node}", ("system:nodes",)


class Identity:
    """The files in *place* (0700): ``ca.crt``, ``server.{crt,key}``, ``client.{crt,key}``, ``accounts.{pub,key}``."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def file(self, name: str) -> str:
        return str(self.place / name)

    def make(self, addresses: Iterable[str], nodes: Iterable[str]) -> None:
        """Everything anew."""
        self.place.mkdir(mode=0o700)
        self._key("ca")
        self._openssl(
            ["req", "-x509", "-key", "ca.key", "-out", "ca.crt", "-subj", "/CN=rlsandbox-test", "-days", "30"]
        )
        names = ["DNS:localhost", "DNS:kubernetes.default.svc", *(f"IP:{address}" for address in addresses)]
        self._certificate("server", "/CN=kube-apiserver", f"subjectAltName={','.join(names)}")
        self._certificate(
            "client", "/O=system:masters/CN=kube-apiserver-kubelet-client", "extendedKeyUsage=clientAuth"
        )
        self._key("accounts")
        self._openssl(["pkey", "-in", "accounts.key", "-pubout", "-out", "accounts.pub"])
        roles = ROLES | {f"node-{node}": node_role(node) for node in nodes}
        tokens = {role: secrets.token_hex(16) for role in roles}
        (self.place / "tokens.json").write_text(json.dumps(tokens))
        lines = [
            f'{tokens[role]},{user},{user},"{",".join(groups)}"' for role, (user, groups) in roles.items()
        ]
        (self.place / "tokens.csv").write_text("\n".join(lines) + "\n")
        for role in roles:
            self.kubeconfig(role, f"https://{API}", self.place / f"{role}.inside")

    def tokens(self) -> Mapping[str, str]:
        tokens: Mapping[str, str] = json.loads((self.place / "tokens.json").read_text())
        return tokens

    def kubeconfig(self, role: str, server: str, path: Path, namespace: str = "default") -> Path:
        """Write a kubeconfig for *role*; JSON is YAML."""
        authority = base64.b64encode((self.place / "ca.crt").read_bytes()).decode()
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "rlsandbox", "cluster": {"server": server, "certificate-authority-data": authority}}
            ],
            "users": [{"name": role, "user": {"token": self.tokens()[role]}}],
            "contexts": [
                {"name": role, "context": {"cluster": "rlsandbox", "user": role, "namespace": namespace}}
            ],
            "current-context": role,
        }
        path.touch(0o600)
        path.write_text(json.dumps(text, indent=1))
        return path

    def _key(self, name: str) -> None:
        self._openssl(
            ["genpkey", "-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256", "-out", f"{name}.key"]
        )

    def _certificate(self, name: str, subject: str, extension: str) -> None:
        self._key(name)
        self._openssl(["req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr"])
        (self.place / f"{name}.ext").write_text(f"{extension}\nbasicConstraints=CA:FALSE\n")
        signer = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30"]
        self._openssl(
            ["x509", "-req", "-in", f"{name}.csr", *signer, "-extfile", f"{name}.ext", "-out", f"{name}.crt"]
        )

    def _openssl(self, arguments: list[str]) -> None:
        done = subprocess.run(["openssl", *arguments], cwd=self.place, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"openssl {arguments[0]} failed: {done.stderr.strip()}")
