"""Which addresses only this machine reaches, and which requests come from other sites."""

import ipaddress
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def why_foreign(host: str | None, origin: str | None) -> str | None:
    """Return why a request may come from another site in a browser of this machine; None if it does not.

    A page can send requests to any address without reading the answers, and read them if the name of its own host is
    resolved to this machine (DNS rebinding).

    Args:
        host: The header Host; None without one.
        origin: The header Origin, which browsers send; None without one.
    """
    if host is not None and not is_loopback(urlsplit(f"//{host}").hostname or ""):
        return "the header Host names another machine; ask 127.0.0.1, or start the server with --token"
    if origin is not None and urlsplit(origin).netloc != host:
        return "the request comes from a page of another site; start the server with --token, and send the token"
    return None
