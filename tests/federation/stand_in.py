"""A page's side of the endpoint in Python: what the browser's page does over HTTPS, for tests.

A handler (`transport.Handler`) answers the messages: a Python client, or a page's session in node.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
import threading
import time
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from keyfed.errors import KeyfedError
from keyfed.wire.messages import Rejected
from keyfed.wire.pages import request_text


class Refusal(Exception):
    """What the endpoint answered in place of what was wanted."""

    def __init__(self, status, error, reason):
        super().__init__(f"{status} {error}: {reason}")
        self.status, self.error, self.reason = status, error, reason


class Caller:
    """Signed requests of one identity."""

    def __init__(self, address, ca, private=None, name=""):
        self.host, self.tls = urlsplit(address).netloc, ssl.create_default_context(cafile=str(ca))
        self.private = private or Ed25519PrivateKey.generate()
        self.name, self._last = name, 0

    @property
    def identity(self):
        return self.private.public_key().public_bytes_raw()

    def proof(self, path, message="", body=b"", when=None):
        self._last = max(self._last + 1, round(time.time() * 1000)) if when is None else when
        text = request_text(path, self.name, self._last, message, hashlib.sha256(body).hexdigest())
        return f"Keyfed {self.name}.{self._last}.{self.private.sign(text).hex()}"

    def send(self, method, path, body=b"", headers=None, seconds=60.0):
        """Send one request on a connection of its own; return status, headers (lower case) and body."""
        link = http.client.HTTPSConnection(self.host, timeout=seconds, context=self.tls)
        try:
            link.request(method, path, body, headers or {})
            answer = link.getresponse()
            data = answer.read()
        finally:
            link.close()
        found = {key.lower(): value for key, value in answer.getheaders()}
        if answer.status >= 400:
            said = json.loads(data)
            raise Refusal(answer.status, said["error"], said["reason"])
        return answer.status, found, data

    def post(self, what, body=b"", message="", **headers):
        path = f"/federation/{what}"
        signed = {"authorization": self.proof(path, message, body), "keyfed-sum": hashlib.sha256(body).hexdigest()}
        signed |= {"keyfed-id": message} if message else {}
        return self.send("POST", path, body, signed | {k.replace("_", "-"): v for k, v in headers.items()})

    def enrol(self, token, name=""):
        """Enrol with a link's token; return the name to go by."""
        said = {"format": "keyfed-web-enrol-1", "token": token, "name": name, "identity": self.identity.hex()}
        text = json.dumps(said, sort_keys=True, separators=(",", ":")).encode()
        body = json.dumps(said | {"signature": self.private.sign(text).hex()}).encode()
        _, _, told = self.send("POST", "/federation/enrol", body)
        self.name = json.loads(told)["name"]
        return self.name


class StandIn(threading.Thread):
    """An open page: it polls and answers until it is closed.

    Args:
      handler: answers messages.
      close_at: kind of message at which the page is closed, as a tab is.
    """

    def __init__(self, caller, handler, close_at=None):
        super().__init__(daemon=True)
        self.caller, self.handler, self.close_at = caller, handler, close_at
        self.kinds, self.failed, self._closed = [], None, threading.Event()

    def run(self):
        try:
            while not self._closed.is_set():
                status, headers, body = self.caller.post("next")
                if status == 200:
                    self._answer(headers, body)
        except Exception as e:  # the test looks at it
            has_left = self._closed.is_set() and isinstance(e, Refusal) and e.error == "not enrolled"
            self.failed = None if has_left else e  # its poll came after it had left

    def _answer(self, headers, body):
        kind, message = headers["keyfed-kind"], headers["keyfed-id"]
        self.kinds.append(kind)
        if kind == self.close_at:
            self._closed.set()
            return
        try:
            answer, error = self.handler.handle(kind, body), {}
        except Rejected as e:
            answer, error = b"", {"keyfed_error": e.reason, "keyfed_reason": e.detail}
        except KeyfedError as e:
            answer, error = b"", {"keyfed_error": "client error", "keyfed_reason": str(e)}
        try:
            self.caller.post("answer", answer, message, **error)
        except Refusal as e:
            if e.error != "late":
                raise

    def close(self):
        self._closed.set()
