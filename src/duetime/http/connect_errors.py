"""Why a connection could not be made: the text for users, and whether this machine is the reason."""

from __future__ import annotations

import errno
import os
import socket
import ssl
from typing import Final

from duetime.http.urls import Target

__all__ = ["connect_reason", "is_shortage", "is_shortage_of_connecting", "system_text"]

_SHORTAGES: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def is_shortage(error: OSError) -> bool:
    """Is this process or machine the reason: too many open files, or no memory for a socket?"""
    if isinstance(error, socket.gaierror):
        return error.errno == socket.EAI_MEMORY
    return error.errno in _SHORTAGES


def is_shortage_of_connecting(error: OSError, address: str) -> bool:
    """EADDRNOTAVAIL has two reasons: all local ports towards the address are in use, or this machine has no address of
    that kind (IPv6 is disabled). A datagram socket needs an address too, but none of these ports. Nothing is sent."""
    if error.errno != errno.EADDRNOTAVAIL:
        return not isinstance(error, ssl.SSLError) and is_shortage(error)
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
    except OSError as refused:
        return is_shortage(refused)
    return True


def connect_reason(error: OSError, target: Target) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: certificate of {target.host} not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, socket.gaierror):
        return f"cannot resolve {target.host}: {error.strerror}"
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused by {target.host_header}"
    if target.tls and isinstance(error, ConnectionError):
        return f"TLS: connection closed during the handshake with {target.host_header}"
    return f"cannot connect to {target.host_header}: {system_text(error)}"


def system_text(error: OSError) -> str:
    """The text differs between event loops; the error number does not."""
    return os.strerror(error.errno) if error.errno else str(error)
