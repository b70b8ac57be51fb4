"""Signatures of requests, by the clouds' published specifications: AWS Signature Version 4 and Alibaba's V3.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html and
https://www.alibabacloud.com/help/en/sdk/product-overview/v3-request-structure-and-signature.
Keys are read from the environment, and their ``repr`` shows none.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from rollart.errors import ConfigError

__all__ = ["AlibabaKeys", "AwsKeys", "sign_alibaba", "sign_aws"]


class _Keys:
    """An access key that tells nobody what it is."""

    VARIABLES: tuple[str, str, str] = ("", "", "")
    CLOUD = ""

    def __init__(self, key_id: str, secret: str, session_token: str = "") -> None:
        self.key_id = key_id
        self.secret = secret
        self.session_token = session_token

    @classmethod
    def from_environment(cls) -> _Keys:
        """``ConfigError`` when the variables are not set."""
        key_id, secret, token = (os.environ.get(name, "") for name in cls.VARIABLES)
        if not key_id or not secret:
            raise ConfigError(
                f"reward: calls to {cls.CLOUD} need the environment variables {cls.VARIABLES[0]} and {cls.VARIABLES[1]}"
            )
        return cls(key_id, secret, token)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(…)"


class AwsKeys(_Keys):
    """Of Amazon."""

    VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    CLOUD = "AWS Lambda"


class AlibabaKeys(_Keys):
    """Of Alibaba Cloud."""

    VARIABLES = (
        "ALIBABA_CLOUD_ACCESS_KEY_ID",
        "ALIBABA_CLOUD_ACCESS_KEY_SECRET",
        "ALIBABA_CLOUD_SECURITY_TOKEN",
    )
    CLOUD = "Alibaba Function Compute"


def sign_aws(
    keys: _Keys,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    region: str,
    service: str,
    now: datetime | None = None,
) -> dict[str, str]:
    """``headers`` with the date, the session's token and the signature."""
    stamp = (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ")
    signed = {**headers, "X-Amz-Date": stamp}
    if keys.session_token:
        signed["X-Amz-Security-Token"] = keys.session_token
    # Each part of the path is encoded twice, for every service but S3.
    path = quote(urlsplit(url).path or "/", safe="/~")
    request, names = _canonical(method, url, path, signed, _sha256(body))
    scope = f"{stamp[:8]}/{region}/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{_sha256(request.encode())}"
    key = f"AWS4{keys.secret}".encode()
    for part in (stamp[:8], region, service, "aws4_request"):
        key = _hmac(key, part)
    signature = _hmac(key, text).hex()
    signed["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.key_id}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return signed


def sign_alibaba(
    keys: _Keys,
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    now: datetime | None = None,
    nonce: str | None = None,
) -> dict[str, str]:
    """``headers`` with the date, a nonce, the body's hash, the session's token and the signature."""
    signed = {
        **headers,
        "x-acs-date": (now or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "x-acs-signature-nonce": nonce or secrets.token_hex(16),
        "x-acs-content-sha256": _sha256(body),
    }
    if keys.session_token:
        signed["x-acs-security-token"] = keys.session_token
    path = quote(unquote(urlsplit(url).path) or "/", safe="/~")
    request, names = _canonical(method, url, path, signed, signed["x-acs-content-sha256"])
    text = f"ACS3-HMAC-SHA256\n{_sha256(request.encode())}"
    signature = _hmac(keys.secret.encode(), text).hex()
    signed["Authorization"] = (
        f"ACS3-HMAC-SHA256 Credential={keys.key_id},SignedHeaders={names},Signature={signature}"
    )
    return signed


def _canonical(method: str, url: str, path: str, headers: Mapping[str, str], payload: str) -> tuple[str, str]:
    """The canonical request and the names of its headers; the two specifications agree on it."""
    parts = urlsplit(url)
    query = "&".join(
        f"{name}={value}"
        for name, value in sorted(
            (quote(name, safe="~"), quote(value, safe="~"))
            for name, value in parse_qsl(parts.query, keep_blank_values=True)
        )
    )
    all_headers = {
        "host": parts.netloc,
        **{name.lower(): " ".join(value.split()) for name, value in headers.items()},
    }
    names = ";".join(sorted(all_headers))
    lines = "".join(f"{name}:{all_headers[name]}\n" for name in sorted(all_headers))
    return f"{method}\n{path}\n{query}\n{lines}\n{names}\n{payload}", names


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()
