"""Who is at the other end of a gRPC call, as far as its transport can prove it."""

from __future__ import annotations

from typing import Any

import grpc.aio

from kvtierd.rights import Anonymous, Certificate, Identity


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> Identity | None:
    """Who is calling, as the transport proves it; None over the unix socket, where it proves nothing."""
    if context.peer().startswith("unix:"):
        return None
    proof = context.auth_context()
    if b"ssl" not in proof.get("transport_security_type", ()):
        return Anonymous()
    names = [*proof.get("x509_common_name", ()), *proof.get("x509_subject_alternative_name", ())]
    return Certificate(frozenset(name.decode(errors="replace") for name in names if name))
