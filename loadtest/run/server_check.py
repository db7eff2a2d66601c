"""The server before the load: its model, and whether it is ready."""

from __future__ import annotations

import time
from collections.abc import Mapping

import httpx

from tessera.loadtest.workload.jobs import Job
from tessera.options.errors import OptionError

INTERVAL = 0.5  # seconds between two tries
TIMEOUT = 30.0  # seconds for one


def first_model(url: str, headers: Mapping[str, str], *, insecure: bool) -> str:
    """The first model that the server lists.

    Raises:
        httpx.HTTPError: the server cannot be reached, or refuses.
        OptionError: it lists none.
    """
    response = httpx.get(f"{url}/v1/models", headers=dict(headers), timeout=TIMEOUT, verify=not insecure)
    response.raise_for_status()
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise OptionError(f"{url}/v1/models lists no model: name one with --model") from error


def wait_until_ready(url: str, headers: Mapping[str, str], job: Job | None, seconds: float, *, insecure: bool) -> None:
    """Try a request, or the list of models without one, until the server answers it with status 200.

    Raises: OptionError after `seconds`, with the last failure.
    """
    deadline = time.monotonic() + seconds
    with httpx.Client(headers=dict(headers), verify=not insecure) as client:
        while True:
            left = deadline - time.monotonic()
            try:
                if job is None:
                    response = client.get(url, timeout=max(left, 0.1))
                else:
                    json = {"content-type": "application/json"}
                    response = client.post(url, content=job.body, headers=json, timeout=max(left, 0.1))
                if response.status_code == httpx.codes.OK:
                    return
                failure = f"status {response.status_code}: {response.text[:200].strip()}"
            except httpx.HTTPError as error:
                failure = str(error) or type(error).__name__
            if time.monotonic() + INTERVAL > deadline:
                raise OptionError(f"the server is not ready after {seconds:g} s: {failure}")
            time.sleep(INTERVAL)
