"""Names of the Hugging Face hub on a machine without network. Imports no torch."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 3.0
PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def is_hub_name(model: str) -> bool:
    """Whether a model's name is none of a folder here: `org/name`."""
    return "/" in model and not model.startswith((".", "/", "~")) and not Path(model).exists()


def use_cache_without_network(models: Iterable[str]) -> None:
    """Keep to cached files, in this process and those that it starts, if a name needs the hub and it does not answer.

    The libraries would ask for each file five times before they look into their cache: half a minute for each name.
    """
    asked = os.environ.get("HF_HUB_OFFLINE") or any(os.environ.get(name) for name in PROXIES)
    if asked or not any(is_hub_name(model) for model in models):
        return
    from huggingface_hub import constants

    if (problem := _unreachable(constants.ENDPOINT)) is not None:
        log.warning("%s cannot be reached (%s): only cached files are used", constants.ENDPOINT, problem)
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True  # it was read from the environment when the library was imported


def _unreachable(endpoint: str) -> OSError | None:
    """Why no connection can be made to the address; None if one can."""
    address = urlsplit(endpoint)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error
    return None
